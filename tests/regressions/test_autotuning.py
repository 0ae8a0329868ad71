"""Launch parameters: pinned, so ranks and runs agree, and no new length compiles another kernel."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from streamattn import attention

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# What each launcher would launch for a few calls, asked in the order of the command line; the tensors have no
# storage, so it needs no GPU.
LAUNCHES = """
import json, random, sys
import torch
from streamattn.kernels import backward, forward, launch, tiles
from streamattn.pattern import UNBOUNDED

found = {}
launch.architecture_of = lambda x: arch

def note(kernel, key, pointers, arguments, varying=()):
    programs, others = arguments()
    found[name][kernel.__name__] = programs, {key: repr(value) for key, value in others.items()}

forward.launch = backward.launch = note
random.seed(len(sys.argv[1]))
for name in sys.argv[1].split():
    arch, head_dim, length, itemsize = name.split(":")
    found[name] = {}
    dtype = torch.bfloat16 if itemsize == "2" else torch.float32
    q = torch.empty(2, 4, int(length), int(head_dim), dtype=dtype, device="meta")
    lse = torch.empty(2, 4, int(length), device="meta")
    options = (None,) * 6 + (0.1, UNBOUNDED, 0, 0.0, 0.0)
    forward.attention_forward(q, q, q, *options)
    backward.attention_backward(q, None, q, q, q, q, lse, *options)
    hopper = (int(head_dim), int(length), 8, 132, True, False, False)
    found[name]["hopper"] = repr(tiles.choose_hopper_tile(*hopper))
print(json.dumps(found, sort_keys=True))
"""


# triton-lang/triton#9368: ranks and runs timed candidates for themselves, and picked different ones
def test_nothing_is_tuned_at_run_time() -> None:
    for folder in ("streamattn", "patches"):
        for path in (ROOT / folder).rglob("*.py"):
            names = {
                node.attr if isinstance(node, ast.Attribute) else node.id
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Attribute | ast.Name)
            }
            assert not names & {"autotune", "Autotuner", "heuristics", "do_bench"} or "bench" in path.parts, (
                path
            )


# triton-lang/triton#9368: whatever a process has run before
@needs_triton
def test_processes_choose_alike_in_any_order() -> None:
    calls = [
        f"{arch}:{head_dim}:{length}:{itemsize}"
        for arch in ("sm_80", "sm_86", "sm_90")
        for head_dim in (64, 128, 256)
        for length in (128, 4096)
        for itemsize in (2, 4)
    ]
    first, second = chosen(calls, "1"), chosen(calls[::-1], "2")
    assert set(first) == set(calls)
    assert all(len(kernels) == 4 for kernels in first.values())
    assert first == second


def chosen(calls: list[str], hash_seed: str) -> dict[str, Any]:
    """What a process of its own would launch."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", LAUNCHES, " ".join(calls)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# vllm-project/vllm#14448: every new length compiled another kernel
@needs_triton
def test_generating_compiles_a_bounded_number_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamattn.kernels import forward, launch
    from streamattn.pattern import UNBOUNDED

    codes = set()

    def note(
        kernel: Any, key: Any, pointers: tuple[Any, ...], arguments: Any, varying: tuple[int, ...] = ()
    ) -> None:
        _, others = arguments()
        others = {name: x for name, x in others.items() if name not in launch.UNSPECIALIZED}
        codes.add((kernel.__name__, launch._code_key(pointers, others)))

    monkeypatch.setattr(launch, "architecture_of", lambda x: "sm_90")
    monkeypatch.setattr(forward, "launch", note)
    q = torch.empty(2, 4, 1, 64, device="meta", dtype=torch.bfloat16)
    for length in range(1000, 1065):
        k = torch.empty(2, 4, length, 64, device="meta", dtype=torch.bfloat16)  # grown by concatenation
        forward.attention_forward(q, k, k, None, None, None, None, None, None, 0.1, UNBOUNDED, 0, 0.0, 0.0)
    assert 1 <= len(codes) <= 2  # one for what is a multiple of 16


# vllm-project/vllm#14448: and so under torch.compile
def test_generating_compiles_a_bounded_number_of_graphs() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention, backend=counting, fullgraph=True)
    k = torch.randn(1, 2, 64, 16)
    q = torch.randn(1, 2, 1, 16)
    for length in range(1, 65):
        part = k[:, :, :length]
        found = compiled(q, part, part, causal=True)
        torch.testing.assert_close(found, attention(q, part, part, causal=True))
    assert len(graphs) <= 3  # one key, a first length, any length
