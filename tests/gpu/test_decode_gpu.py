"""Calls of few queries, which take a short way once one of their kind has been served: by either kernel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import streamattn
from streamattn import attention, kinds
from streamattn.kernels import decode, forward, launch
from tests.cases import relative_errors

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["auto", "triton"])
def nothing_served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds.KINDS.clear()
    named = functools.partial(streamattn.attention, backend=request.param)
    monkeypatch.setattr(sys.modules[__name__], "attention", named)


def served() -> list[kinds.Kind]:
    """The kinds of calls that take the short way from now on."""
    return [kind for alike in kinds.KINDS.values() for kind in alike if kind.again is not None]


@pytest.fixture
def precision_restored() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"


def inputs(
    kv_len: int, dtype: torch.dtype = torch.bfloat16, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, 1, 4 * 64, device="cuda", dtype=dtype).view(1, 1, 4, 64).transpose(1, 2)
    k, v = torch.randn(2, 1, kv_heads, kv_len, 64, device="cuda", dtype=dtype)
    return q, k, v


def check(q: Tensor, k: Tensor, v: Tensor, limit: float = 1e-2, **options) -> Tensor:
    out = attention(q, k, v, **options)
    want = attention(q.double(), k.double(), v.double(), backend="reference", **options)
    assert relative_errors(out, want)[0] < limit
    return out


@pytest.mark.parametrize("options", [{}, {"window_size": 40}, {"softcap": 5.0}, {"scale": 0.3}], ids=str)
def test_token_by_token(options):
    for kv_len in range(100, 110):
        for _ in range(3):
            check(*inputs(kv_len), causal=True, **options)
    assert len(served()) in (1, 2)  # a window that reaches past all keys is another kind


def test_token_by_token_while_splits_become_more():
    """One kind for all of them, with a plan for each number of splits."""
    for kv_len in (100, 300, 301, 1000, 5000, 5001, 300):
        for _ in range(2):
            check(*inputs(kv_len), causal=True)
    assert len(served()) == 1


def test_lse_and_its_meaning_stay():
    first, second = inputs(77), inputs(77)
    attention(*first)
    assert served()
    out, lse = attention(*second, return_lse=True)
    want_out, want_lse = attention(*(x.double() for x in second), return_lse=True, backend="reference")
    assert relative_errors(out, want_out)[0] < 1e-2
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


def test_no_call_of_a_kind_is_launched_by_triton(monkeypatch):
    first, other = inputs(77), inputs(78)
    attention(*first, causal=True)
    monkeypatch.setattr(launch, "_launch_by_triton", lambda *given: pytest.fail("launched by Triton"))
    for kernel in (decode, forward):
        monkeypatch.setattr(kernel, "attention_forward", lambda *given: pytest.fail("the long way"))
    check(*first, causal=True)
    check(*other, causal=True)


def test_a_captured_call_of_a_kind_is_replayed():
    q, k, v = inputs(77)
    attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    other = inputs(77)
    for x, y in zip((q, k, v), other, strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, attention(*other))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current():
    q, k, v = (x.to("cuda:1") for x in inputs(64))
    for _ in range(3):
        check(q, k, v, causal=True)


def test_keys_that_are_the_values():
    q, k, _ = inputs(64)
    for _ in range(3):
        check(q, k, k)
    assert not served()


def test_gradients_after_a_call_without():
    q, k, v = inputs(50)
    attention(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    attention(*leaves).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


def test_tensors_that_start_elsewhere():
    q, k, v = inputs(64)
    check(q, k, v)
    store = torch.randn(k.numel() + 1, device="cuda", dtype=k.dtype)
    check(q, store[1:].view(k.shape), v)
    check(q, store[:-1].view(k.shape), v)


def test_autocast_still_casts():
    q, k, v = inputs(64, torch.float32)
    assert attention(q, k, v).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16


def test_the_precision_of_products_is_asked_every_time(precision_restored):
    q, k, v = inputs(640, torch.float32)
    exact = check(q, k, v, 1e-5)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert not torch.equal(attention(q, k, v), exact)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert torch.equal(attention(q, k, v), exact)


def test_the_profiler_still_sees_the_operator():
    q, k, v = inputs(64)
    attention(q, k, v)
    with torch.profiler.profile() as profile:
        attention(q, k, v)
    assert "streamattn::attention_forward" in {event.key for event in profile.key_averages()}


def test_what_is_wrong_still_raises():
    q, k, v = inputs(64)
    attention(q, k, v, causal=True)
    with pytest.raises(TypeError, match="one dtype"):
        attention(q, k.half(), v, causal=True)
    with pytest.raises(ValueError, match="one device"):
        attention(q, k.cpu(), v, causal=True)
    with pytest.raises(ValueError, match="k and v must agree"):
        attention(q, k, v[:, :, :-1], causal=True)
    with pytest.raises(TypeError, match="causal must be"):
        attention(q, k, v, causal=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="scale must be"):
        attention(q, k, v, causal=True, scale=True)
    with pytest.raises(ValueError, match="backend='sdpa' can't serve"):
        attention(q, k, v, causal=True, backend="sdpa")
    with pytest.raises(TypeError, match="dense"):
        attention(q.to_sparse(), k, v, causal=True)
    with pytest.raises(TypeError, match="q must be a"):
        attention([1.0], k, v, causal=True)  # pyright: ignore[reportArgumentType]


def test_a_masked_call_after_a_plain_one():
    q, k, v = inputs(64)
    check(q, k, v)
    check(q, k, v, attn_mask=torch.rand(64, device="cuda") < 0.5)
    lengths = torch.tensor([9], device="cuda")
    check(q, k, v, kv_lengths=lengths)
