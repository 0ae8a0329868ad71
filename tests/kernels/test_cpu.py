"""PyTorch's fused CPU attention: what it is called for, and with how much. Its numbers are held elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from streamattn import attention
from streamattn.kernels import cpu
from tests.cases import LAYOUTS, Case, Result, expected, judge, relative_errors

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> tuple[Calls, Calls]:
    """The arguments of the fused kernel's calls, forward and backward."""
    made: tuple[Calls, Calls] = ([], [])
    for seen, name in zip(made, ("_flash", "_flash_backward"), strict=True):
        original = getattr(cpu, name)

        def recording(*args: Any, original: Any = original, seen: Calls = seen, **options: Any) -> Any:
            seen.append((*args, options))
            return original(*args, **options)

        monkeypatch.setattr(cpu, name, recording)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_full_and_square_causal_attention_is_one_call_each_way(causal, layout, calls):
    """On the inputs as they are: the same bits as PyTorch's own function, for the same work."""
    inputs = Case(q_len=600, kv_len=600, causal=causal, layout=layout).build()
    out = attention(inputs.q, inputs.k, inputs.v, causal=causal)
    got = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    (forward,), (backward,) = calls
    assert "attn_mask" not in forward[-1]
    assert "attn_mask" not in backward[-1]
    peer = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal)
    if layout != "strided":  # a last stride that is not 1: copied here, not served by the fused kernel there
        assert torch.equal(out, peer)
        for x, given in zip((inputs.q, inputs.k, inputs.v), forward, strict=False):
            assert (given.data_ptr(), given.stride()) == (x.data_ptr(), x.stride())
    wanted = torch.autograd.grad(peer, (inputs.q, inputs.k, inputs.v), inputs.dout)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("options", "most_keys"),
    [
        ({"window_size": 30}, [256, 285, 285, 117]),
        ({"window_size": (10, 4)}, [260, 270, 270, 98]),
        ({"causal": True, "mask": "bool_keys"}, [256, 512, 768, 856]),
        ({"causal": True, "kv_len": 700}, [100, 356, 612, 700]),
        ({"mask": "additive_heads"}, [856] * 4),
    ],
    ids=str,
)
def test_a_strip_of_queries_meets_the_keys_it_can_see(options, most_keys, calls):
    """Neither all keys, where it sees few, nor ever a mask of the whole square."""
    inputs = Case(**{"q_len": 856, "kv_len": 856, **options}).build()
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    forward, backward = calls
    assert [args[1].shape[2] for args in forward] == most_keys
    assert [args[2].shape[2] for args in backward] == most_keys
    for *_, given in (*forward, *backward):
        bias = given["attn_mask"]
        assert isinstance(bias, Tensor)
        assert bias.shape[2] <= cpu.BLOCK_M


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("garbage", [False, True], ids=["finite", "garbage"])
def test_heads_that_see_different_keys_share_k_and_v(garbage, dtype, calls):
    """Finite keys are read in place; those that no head sees cost one copy for all of a group."""
    inputs = Case(q_heads=4, kv_heads=2, q_len=300, kv_len=300).build(dtype)
    shown = torch.ones(1, 4, 1, 300, dtype=torch.bool)
    shown[:, 0, :, :50] = shown[..., 290:] = False
    if garbage:
        with torch.no_grad():
            inputs.k[:, :, 290:] = torch.nan
            inputs.v[:, :, 295:] = torch.inf
    out = attention(inputs.q, inputs.k, inputs.v, attn_mask=shown)
    torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    forward, backward = calls
    pairs = [args[1:3] for args in forward] + ([] if garbage else [args[2:4] for args in backward])
    assert len(pairs) == (2 if garbage else 4)
    for pair in pairs:
        for x, given in zip(pair, (inputs.k, inputs.v), strict=True):
            assert x.shape == given.shape
            assert garbage or x.data_ptr() == given.data_ptr()


@pytest.mark.parametrize("options", [{"window_size": (30, 30)}, {"mask": "bool_keys"}], ids=str)
def test_sums_over_strips_round_no_more_than_one_strip(options, monkeypatch):
    inputs = Case(q_len=128, kv_len=128, **options).build(torch.bfloat16)
    inputs.dlse.zero_()
    want = expected(inputs)
    errors = []
    for block_m in (128, 4):
        monkeypatch.setattr(cpu, "BLOCK_M", block_m)
        out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend="sdpa")
        dk, dv = torch.autograd.grad(out, (inputs.k, inputs.v), inputs.dout)
        errors.append([relative_errors(x, want[name])[0] for x, name in ((dk, "dk"), (dv, "dv"))])
    for whole, strips in zip(*errors, strict=True):
        assert strips <= 1.3 * whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("step", [0, 1, 8])
@pytest.mark.parametrize("length", [2, 17])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": 3}], ids=str)
def test_rows_that_share_memory(options, length, step, name, dtype):
    """As windows that slide over one buffer: PyTorch's products of such matrices are wrong, or raise."""
    inputs = Case(q_len=length, kv_len=length, **options).build(dtype)
    storage = torch.randn(2, 2, 17 * 8 + 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    shared = storage.as_strided((2, 2, length, 16), (*storage.stride()[:2], step, 1)).requires_grad_()
    inputs = replace(inputs, **{name: shared})
    inputs.dlse.zero_()
    want = expected(inputs)
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend="sdpa")
    dq, dk, dv = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    del want.tensors["lse"]
    judge(Result({"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}), want, dtype, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": 3}, {"sinks": torch.zeros(2)}, {"window_size": (300, 0)}],
)
def test_rows_whose_scores_are_all_below_what_floats_can_hold(options, dtype):
    """Every second query; those of the others are 0, so that ``lse`` is 0, too, where one key is seen."""
    large = 1e200 if dtype == torch.float64 else 1e25
    q = torch.zeros(1, 2, 600, 16, dtype=dtype)
    q[:, :, ::2] = large
    k = torch.full((1, 1, 600, 16), -large, dtype=dtype)
    v = torch.zeros(1, 1, 600, 16, dtype=dtype)
    results = {}
    for backend in ("sdpa", "reference"):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*tensors, **options, return_lse=True, backend=backend)
        results[backend] = [out, lse, *torch.autograd.grad(out, tensors, torch.ones_like(out))]
    torch.testing.assert_close(results["sdpa"], results["reference"], rtol=0.02, atol=1e-3)
    if "sinks" not in options:
        assert (results["sdpa"][1][:, :, ::2] == -torch.inf).all()
