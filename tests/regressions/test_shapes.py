"""Odd head dimensions and lengths, and empty sequences."""

from __future__ import annotations

import pytest
import torch

from streamattn import attention
from tests.cases import Case, expected, judge, relative_errors, run
from tests.oracle import attend

PAIRS = [(1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (108, 256), (1023, 1024)]


# Dao-AILab/flash-attention#1347: head dimensions that are no power of two
@pytest.mark.parametrize("head_dim", [1, 3, 20, 40, 80, 96, 112, 160, 192, 224, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_any_head_dim(head_dim, causal, device, backend):
    inputs = Case(q_len=33, kv_len=40, head_dim=head_dim, causal=causal).build(device=device)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# Dao-AILab/flash-attention#1347: and values wider or narrower than keys
@pytest.mark.parametrize("dims", [(20, 96), (192, 128), (64, 8)], ids=str)
def test_values_of_another_width(dims, device, backend):
    inputs = Case(q_len=33, kv_len=40, head_dim=dims[0], value_dim=dims[1]).build(device=device)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# openxla/tokamax#316, triton-lang/triton#2626: lengths that are no multiple of a tile
@pytest.mark.parametrize("size", [1, 8, 300, 913])
@pytest.mark.parametrize("causal", [False, True])
def test_any_length(size, causal, device, backend):
    inputs = Case(batch=1, q_len=size, kv_len=size, causal=causal).build(device=device)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# openxla/tokamax#316: a ragged length is no less exact than the round one beside it
@pytest.mark.parametrize(("ragged", "even"), [(300, 256), (913, 1024), (4095, 4096)])
def test_ragged_lengths_are_as_exact_as_round_ones(ragged, even, device, backend):
    def error(size: int) -> float:
        inputs = Case(batch=1, q_heads=1, kv_heads=1, q_len=size, kv_len=size, causal=True).build(
            device=device
        )
        with torch.no_grad():
            out = attention(inputs.q, inputs.k, inputs.v, causal=True, backend=backend)
            return relative_errors(out, attend(inputs.q, inputs.k, inputs.v, causal=True)[0])[0]

    assert error(ragged) <= 1.5 * error(even)


# openxla/tokamax#316: and so are its gradients
def test_gradients_at_ragged_lengths_are_as_exact_as_at_round_ones(device, backend):
    def errors(size: int) -> list[float]:
        case = Case(batch=1, q_heads=1, kv_heads=1, q_len=size, kv_len=size, causal=True)
        inputs = case.build(device=device)
        leaves = (inputs.q, inputs.k, inputs.v)
        outs = (attention(*leaves, causal=True, backend=backend), attend(*leaves, causal=True)[0])
        got, want = (torch.autograd.grad(out, leaves, inputs.dout.to(out.dtype)) for out in outs)
        return [relative_errors(x, y)[0] for x, y in zip(got, want, strict=True)]

    for ragged, even in zip(errors(4095), errors(2048), strict=True):
        assert ragged <= 2 * even


# Dao-AILab/flash-attention, its own tests' sizes
@pytest.mark.parametrize("sizes", PAIRS + [pair[::-1] for pair in PAIRS], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_more_or_fewer_queries_than_keys(sizes, causal, device, backend):
    inputs = Case(batch=1, q_len=sizes[0], kv_len=sizes[1], causal=causal).build(device=device)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# Dao-AILab/flash-attention#1537, #1713: no queries, no keys, neither
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_sequences_have_zero_gradients(q_len, kv_len, causal, device, backend):
    inputs = Case(q_len=q_len, kv_len=kv_len, causal=causal).build(device=device)
    # a kernel launches nothing on nothing and says so; `auto` serves the call
    backend = "auto" if backend == "triton" else backend
    got = run(attention, inputs, return_lse=True, backend=backend)
    assert got["out"].shape == (2, 2, q_len, 16)
    for name, x in (("out", got["out"]), ("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        assert got[name].shape == x.shape
        assert not got[name].any()
    assert (got["lse"] == -torch.inf).all()
