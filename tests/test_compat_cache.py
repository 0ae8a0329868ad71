"""flash-attn's function over a cache against a dense float64 reference: what is written, and what is read."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn.compat import flash_attn_with_kvcache
from tests.test_compat import HEADS, dense, dense_batch, normal


def test_names_and_defaults():
    """Those of flash-attn 2's function, in its order."""
    parameters = inspect.signature(flash_attn_with_kvcache).parameters.values()
    empty = inspect.Parameter.empty
    assert [(p.name, p.default) for p in parameters] == [
        ("q", empty),
        ("k_cache", empty),
        ("v_cache", empty),
        ("k", None),
        ("v", None),
        ("rotary_cos", None),
        ("rotary_sin", None),
        ("cache_seqlens", None),
        ("cache_batch_idx", None),
        ("cache_leftpad", None),
        ("block_table", None),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("rotary_interleaved", True),
        ("alibi_slopes", None),
        ("num_splits", 0),
        ("return_softmax_lse", False),
    ]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)


CACHE_OPTIONS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": True, "window_size": (3, -1), "softcap": 1.5},
    {"window_size": (2, 0), "softmax_scale": 0.3},
    {},
]


@pytest.mark.parametrize("options", CACHE_OPTIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("as_int", [True, False])
def test_appending_to_a_cache_and_attending_equals_attention_to_all(as_int, heads, options):
    """A prompt of 5 tokens, then steps of 1, 3 and 1; the rows of the cache past these stay as they are."""
    total = 10
    q = torch.randn(2, total, heads[0], 8, dtype=torch.float64)
    k, v = (torch.randn(2, total, heads[1], 8, dtype=torch.float64) for _ in range(2))
    k_cache, v_cache = (torch.full((2, 12, heads[1], 8), torch.nan, dtype=torch.float64) for _ in range(2))
    start = 0
    for step in (5, 1, 3, 1):
        stop = start + step
        filled = start if as_int else torch.full((2,), start, dtype=torch.int32)
        new = slice(start, stop)
        out, lse = flash_attn_with_kvcache(
            q[:, new],
            k_cache,
            v_cache,
            k[:, new],
            v[:, new],
            cache_seqlens=filled,
            **options,
            return_softmax_lse=True,
        )
        want, want_lse = dense_batch(q[:, new], k[:, :stop], v[:, :stop], **options)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-11)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-11)
        start = stop
    assert torch.equal(k_cache[:, :total], k)
    assert torch.equal(v_cache[:, :total], v)
    assert k_cache[:, total:].isnan().all()
    assert v_cache[:, total:].isnan().all()


@pytest.mark.parametrize("options", CACHE_OPTIONS, ids=str)
@pytest.mark.parametrize("append", [0, 1, 2])
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_ragged_cache(indexed, leftpad, append, options):
    filled = torch.tensor([4, 7, 1], dtype=torch.int32)
    pads = torch.tensor([1, 3, 0], dtype=torch.int32) if leftpad else torch.zeros(3, dtype=torch.int32)
    rows = torch.tensor([3, 0, 2], dtype=torch.int32) if indexed else torch.arange(3, dtype=torch.int32)
    q_len = max(append, 1)
    q = torch.randn(3, q_len, 4, 8, dtype=torch.float64)
    k_cache, v_cache = (torch.randn(5, 9, 2, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(3, append, 2, 8, dtype=torch.float64) for _ in range(2))
    want_k, want_v = k_cache.clone(), v_cache.clone()
    want = []
    for b in range(3):
        row, start = int(rows[b]), int(filled[b])
        stop = start + append
        want_k[row, start:stop], want_v[row, start:stop] = k[b], v[b]
        want.append(dense(q[b], want_k[row, :stop], want_v[row, :stop], first_key=int(pads[b]), **options))
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *((k, v) if append else ()),
        cache_seqlens=filled,
        cache_batch_idx=rows if indexed else None,
        cache_leftpad=pads if leftpad else None,
        return_softmax_lse=True,
        **options,
    )
    torch.testing.assert_close(out, torch.stack([o for o, _ in want]), rtol=0, atol=1e-11)
    torch.testing.assert_close(lse, torch.stack([x for _, x in want]), rtol=0, atol=1e-11)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


@pytest.mark.parametrize("options", CACHE_OPTIONS, ids=str)
@pytest.mark.parametrize("append", [0, 2])
@pytest.mark.parametrize("leftpad", [False, True])
def test_a_paged_cache(leftpad, append, options):
    """Pages of 3 tokens; new ones go over the end of a page, and into a page that was empty."""
    filled = torch.tensor([4, 8, 3], dtype=torch.int32)
    pads = torch.tensor([1, 3, 0], dtype=torch.int32) if leftpad else torch.zeros(3, dtype=torch.int32)
    table = torch.tensor([[7, 2, 5, -9], [0, 9, 4, 3], [1, 6, -9, -9]], dtype=torch.int32)
    q = torch.randn(3, max(append, 1), 4, 8, dtype=torch.float64)
    k_cache, v_cache = (torch.randn(10, 3, 2, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(3, append, 2, 8, dtype=torch.float64) for _ in range(2))
    want_k, want_v = k_cache.clone(), v_cache.clone()
    want = []
    for b in range(3):
        stop = int(filled[b]) + append
        for t in range(append):
            place = int(filled[b]) + t
            page, row = table[b, place // 3], place % 3
            want_k[page, row], want_v[page, row] = k[b, t], v[b, t]
        own = [
            torch.cat([cache[page] for page in table[b] if page >= 0])[:stop] for cache in (want_k, want_v)
        ]
        want.append(dense(q[b], *own, first_key=int(pads[b]), **options))
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *((k, v) if append else ()),
        cache_seqlens=filled,
        cache_leftpad=pads if leftpad else None,
        block_table=table,
        return_softmax_lse=True,
        **options,
    )
    torch.testing.assert_close(out, torch.stack([o for o, _ in want]), rtol=0, atol=1e-11)
    torch.testing.assert_close(lse, torch.stack([x for _, x in want]), rtol=0, atol=1e-11)
    assert torch.equal(k_cache, want_k)
    assert torch.equal(v_cache, want_v)


def test_a_paged_cache_without_lengths_is_full_and_takes_slopes():
    q, k, v = (torch.randn(1, length, 2, 8, dtype=torch.float64) for length in (2, 6, 6))
    table, slopes = torch.tensor([[1, 0]], dtype=torch.int32), torch.rand(2)
    pages = [torch.stack([x[0, 3:], x[0, :3]]) for x in (k, v)]
    out = flash_attn_with_kvcache(q, *pages, block_table=table, causal=True, alibi_slopes=slopes)
    want, _ = dense(q[0], k[0], v[0], causal=True, slopes=slopes)
    torch.testing.assert_close(out[0], want, rtol=0, atol=1e-11)


def test_a_cache_without_lengths_is_full():
    q, k, v = (torch.randn(2, length, 2, 8, dtype=torch.float64) for length in (3, 7, 7))
    out = flash_attn_with_kvcache(q, k, v, causal=True)
    torch.testing.assert_close(out, dense_batch(q, k, v, causal=True)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("num_splits", [0, 1, 7])
def test_any_number_of_splits_gives_the_same(num_splits):
    q, k, v = (torch.randn(2, length, 2, 8, dtype=torch.float64) for length in (1, 9, 9))
    plain = flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    assert torch.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=7, num_splits=num_splits), plain)


def test_alibi_of_a_cache():
    q, k, v = (torch.randn(2, length, 2, 8, dtype=torch.float64) for length in (2, 9, 9))
    slopes, filled = torch.rand(2, 2), torch.tensor([5, 9], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=filled, causal=True, alibi_slopes=slopes)
    for b, length in enumerate((5, 9)):
        want, _ = dense(q[b], k[b, :length], v[b, :length], causal=True, slopes=slopes[b])
        torch.testing.assert_close(out[b], want, rtol=0, atol=1e-11)


def turned(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D] with pairs of its first dimensions turned by angles [T, R / 2], as complex numbers."""
    half = angles.shape[1]
    first, second = (
        (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2])
        if interleaved
        else (x[..., :half], x[..., half : 2 * half])
    )
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    y = x.clone()
    if interleaved:
        y[..., 0 : 2 * half : 2], y[..., 1 : 2 * half : 2] = z.real, z.imag
    else:
        y[..., :half], y[..., half : 2 * half] = z.real, z.imag
    return y


@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 1)}, {}], ids=str)
@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_rotary(rotary_dim, options, interleaved, leftpad):
    """A token turns by its place in the cache, padding on the left counted."""
    q, k, v = (torch.randn(2, 2, 2, 8, dtype=torch.float64) for _ in range(3))
    k_cache, v_cache = (torch.randn(2, 9, 2, 8, dtype=torch.float64) for _ in range(2))
    angles = torch.rand(20, rotary_dim // 2, dtype=torch.float64)
    want_k, want_v = k_cache.clone(), v_cache.clone()
    filled = torch.tensor([3, 6], dtype=torch.int32)
    pads = (2, 0) if leftpad else (0, 0)
    out = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        angles.cos(),
        angles.sin(),
        filled,
        cache_leftpad=torch.tensor(pads, dtype=torch.int32) if leftpad else None,
        **options,
        rotary_interleaved=interleaved,
    )
    for b, start in enumerate((3, 6)):
        stop = start + 2
        want_k[b, start:stop], want_v[b, start:stop] = turned(k[b], angles[start:stop], interleaved), v[b]
        # without an order among the queries all stand at the first position
        at = angles[start:stop] if options else angles[[start, start]]
        seen = want_k[b, :stop], want_v[b, :stop]
        want, _ = dense(turned(q[b], at, interleaved), *seen, first_key=pads[b], **options)
        torch.testing.assert_close(out[b], want, rtol=0, atol=1e-11)
    torch.testing.assert_close(k_cache, want_k, rtol=0, atol=1e-12)
    assert torch.equal(v_cache, want_v)


def test_a_cache_keeps_no_graph():
    """Tokens that come from trained weights leave no history in the cache, and its own memory stays."""
    q, k, v = (normal(1, 1, 2, 8) for _ in range(3))
    k_cache, v_cache = (
        torch.zeros(1, 4, 2, 8, dtype=torch.float64),
        torch.zeros(1, 4, 2, 8, dtype=torch.float64),
    )
    pointers = k_cache.data_ptr(), v_cache.data_ptr()
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=2)
    assert not out.requires_grad
    assert not k_cache.requires_grad
    assert (k_cache.data_ptr(), v_cache.data_ptr()) == pointers
    assert torch.equal(k_cache[:, 2], k[:, 0])


def test_kvcache_reads_no_value_on_the_host():
    q, k, v = (torch.randn(2, 1, 2, 8) for _ in range(3))
    k_cache, v_cache = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    filled = torch.tensor([2, 5], dtype=torch.int32)

    def call(q, k_cache, v_cache, k, v, filled):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=filled, causal=True)

    torch._dynamo.reset()
    k_copy, v_copy = k_cache.clone(), v_cache.clone()
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k_copy, v_copy, k, v, filled)
    torch.testing.assert_close(got, call(q, k_cache, v_cache, k, v, filled))
    assert torch.equal(k_copy, k_cache)
    assert torch.equal(v_copy, v_cache)
