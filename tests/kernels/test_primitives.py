"""The jitted steps: visibility rule and its spans, dropout, tanh, segment spans."""

# Triton's dialect is not Python to a type checker.
# pyright: reportArgumentType=false
from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from streamattn import pattern
from streamattn.kernels import primitives
from streamattn.reference import keep_mask

SIZES = [(1, 1), (1, 5), (5, 1), (3, 7), (7, 3), (6, 6)]
WINDOWS = [pattern.UNBOUNDED, 0, 1, 2, 5]


@triton.jit
def visible_kernel(out_ptr, q_len, kv_len, left, right, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    seen = primitives.visible(i[:, None], j[None, :], q_len, kv_len, left, right)
    tl.store(out_ptr + i[:, None] * BLOCK + j[None, :], seen)


@triton.jit
def spans_kernel(out_ptr, first, last, q_len, kv_len, left, right):
    start, stop = primitives.kv_span(first, last, q_len, kv_len, left, right)
    tl.store(out_ptr, start)
    tl.store(out_ptr + 1, stop)
    start, stop = primitives.kv_span_full(first, last, q_len, kv_len, left, right)
    tl.store(out_ptr + 2, start)
    tl.store(out_ptr + 3, stop)
    start, stop = primitives.q_span(first, last, q_len, kv_len, left, right)
    tl.store(out_ptr + 4, start)
    tl.store(out_ptr + 5, stop)
    start, stop = primitives.q_span_full(first, last, q_len, kv_len, left, right)
    tl.store(out_ptr + 6, start)
    tl.store(out_ptr + 7, stop)


@triton.jit
def keep_kernel(
    out_ptr, seed_ptr, head, row, n_start, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    rows = row + tl.arange(0, BLOCK_M)
    keep = primitives.keep_tile(tl.load(seed_ptr), head, rows, n_start, threshold, BLOCK_M, BLOCK_N)
    tl.store(out_ptr + tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], keep)


@triton.jit
def tanh_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, primitives.tanh(tl.load(x_ptr + at)))


@triton.jit
def tf32_parts_kernel(high_ptr, low_ptr, x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    high, low = primitives.tf32_parts(tl.load(x_ptr + at))
    tl.store(high_ptr + at, high)
    tl.store(low_ptr + at, low)


@triton.jit
def segment_kernel(out_ptr, ids_ptr, stride, low, high, start, stop, SCAN: tl.constexpr):
    first, last = primitives.segment_span(ids_ptr, stride, low, high, start, stop, SCAN)
    tl.store(out_ptr, first)
    tl.store(out_ptr + 1, last)


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_visible_is_the_rule_of_the_pattern(q_len, kv_len):
    i, j = torch.arange(8).unsqueeze(1), torch.arange(8)
    for left, right in product(WINDOWS, WINDOWS):
        out = torch.zeros(8, 8, dtype=torch.int32)
        visible_kernel[(1,)](out, q_len, kv_len, left, right, BLOCK=8)
        want = pattern.visible(i, j, q_len, kv_len, left, right)
        assert torch.equal(out != 0, want), (left, right)


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_spans_are_those_of_the_pattern(q_len, kv_len):
    for left, right in product(WINDOWS, [pattern.UNBOUNDED, 0, 2]):
        for first, last in [(0, 0), (0, 3), (2, 4), (5, 5)]:
            out = torch.zeros(8, dtype=torch.int32)
            arguments = (first, last, q_len, kv_len, left, right)
            spans_kernel[(1,)](out, *arguments)
            spans = (pattern.kv_span, pattern.kv_span_full, pattern.q_span, pattern.q_span_full)
            assert out.tolist() == [end for span in spans for end in span(*arguments)], arguments


@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("seed", [0, 5, -1, 2**62 + 3])
def test_keep_tile_is_the_tile_of_keep_mask(block_n, seed):
    seeds, heads = torch.tensor([seed]), 3
    for p, head, row, tile in product([0.1, 0.9], [0, 5], [0, 48], [0, 1, 3]):
        out = torch.zeros(16, block_n, dtype=torch.int32)
        n_start = tile * block_n
        threshold = pattern.drop_threshold(p)
        keep_kernel[(1,)](out, seeds, head, row, n_start, threshold, BLOCK_M=16, BLOCK_N=block_n)
        whole = keep_mask(seeds, p, 2, heads, (row, row + 16), (n_start, n_start + block_n))
        assert torch.equal(out != 0, whole[head // heads, head % heads]), (p, head, row, tile)


def test_tanh_is_exact_to_float32():
    x = torch.cat([torch.linspace(-20, 20, 2048), torch.linspace(-0.3, 0.3, 2040)])
    x = torch.cat([x, torch.tensor([0.0, 1e-30, 1e-8, 0.25, -0.25, 88.0, 1e30, -1e30])])
    out = torch.zeros_like(x)
    tanh_kernel[(1,)](out, x, BLOCK=4096)
    want = torch.tanh(x.double())
    error = (out.double() - want).abs() / want.abs().clamp_min(1e-38)
    assert float(error.max()) < 4e-7


def tf32_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = torch.empty_like(x), torch.empty_like(x)
    tf32_parts_kernel[(1,)](high, low, x, BLOCK=x.numel())
    return high, low


def test_tf32_parts_lose_nothing_and_leave_as_much_above_as_below():
    x = torch.randn(8192, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-20, 20, 8192)
    high, low = tf32_parts(x)
    assert not (high.view(torch.int32) & 8191).any()
    assert torch.equal(high.double() + low.double(), x.double())
    last_bit = 2.0 ** (x.double().abs().log2().floor() - 10)
    rest = low.double() * x.sign() / last_bit  # of the last bit of high
    assert float(rest.abs().max()) < 0.75
    assert abs(float(rest.mean())) < 0.02


def test_tf32_parts_of_what_is_not_finite():
    all_ones = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, all_ones])
    high, low = tf32_parts(x)
    torch.testing.assert_close(high, x, equal_nan=True)
    assert low.isnan().all()


@pytest.mark.parametrize("scan", [4, 16])
def test_segment_span_bounds_the_hits(scan):
    ids = torch.tensor([[-1, 0, 0, 1, 1, 1, 3, 3, -1, -1, 5]], dtype=torch.int32)
    for low, high, start, stop in product([0, 1, 4], [0, 3, 5], [0, 2, 5], [3, 8, 11]):
        out = torch.zeros(2, dtype=torch.int32)
        segment_kernel[(1,)](out, ids, 1, low, high, start, stop, SCAN=scan)
        hits = [at for at in range(start, stop) if ids[0, at] >= 0 and low <= ids[0, at] <= high]
        first, last = out.tolist()
        if hits:
            assert (first, last) == (hits[0], hits[-1] + 1), (low, high, start, stop)
        else:
            assert last <= first
