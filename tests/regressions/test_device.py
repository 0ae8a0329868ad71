"""Devices: what imports, what serves, which device a call runs on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from streamattn import attention

FORKED = """
import os, sys
import torch
import streamattn
assert not torch.cuda.is_initialized(), "the import initialised CUDA"
child = os.fork()
if child == 0:
    x = torch.ones(1, 1, 4, 8)
    os._exit(0 if torch.equal(streamattn.attention(x, x, x), x) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


# pytorch/pytorch#77159: an import that initialises CUDA kills forked workers
def test_import_initialises_nothing_and_a_forked_worker_lives():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# AnswerDotAI/ModernBERT#152: a CPU tensor met a Triton kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_cpu_tensors_are_served_on_the_cpu(dtype):
    x = torch.ones(1, 2, 4, 8, dtype=dtype, requires_grad=True)
    out = attention(x, x, x, causal=True)
    out.sum().backward()
    assert out.device.type == "cpu"
    assert x.grad is not None
    assert torch.equal(out, torch.ones_like(out))


# AnswerDotAI/ModernBERT#152: and the kernel refuses them before a launch
def test_an_explicit_gpu_backend_refuses_cpu_tensors(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.ones(1, 2, 4, 8)
    with pytest.raises(ValueError, match="triton"):
        attention(x, x, x, backend="triton")
