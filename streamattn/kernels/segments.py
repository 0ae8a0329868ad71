"""Which keys each block of queries may see of packed segments: a light pass before a kernel that must know.

Other kernels find out by themselves (`primitives.segment_span`), and each of their programs reads all ids.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from streamattn import pattern
from streamattn.kernels.launch import UNSPECIALIZED, call_key, device_guard, launch
from streamattn.kernels.primitives import UNBOUNDED, kv_span, segment_range
from streamattn.kernels.tiles import HOPPER_BLOCK_M

BLOCK = HOPPER_BLOCK_M  # queries of a row of spans
WHOLE = 768  # ids are read in whole tiles of 128 keys, and 192 or 256 queries
SCAN = 4096  # ids looked at together


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_spans_kernel(
    segments_ptr,
    spans_ptr,
    ids_ptr,
    stride_segments_b,
    stride_segments_t,
    stride_ids,
    q_len,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
):
    """spans [B, blocks, 4] and ids [B, padded], one block of queries a program."""
    num_blocks = tl.cdiv(q_len, BLOCK)
    programs = stride_ids // BLOCK  # of a sequence
    b, block = tl.program_id(0) // programs, tl.program_id(0) % programs
    segments_ptr += b.to(tl.int64) * stride_segments_b
    i_first = block * BLOCK
    i_last = min(i_first + BLOCK, q_len) - 1
    rows = i_first + tl.arange(0, BLOCK)
    own = tl.load(segments_ptr + rows.to(tl.int64) * stride_segments_t, mask=rows < q_len, other=0)
    tl.store(ids_ptr + b.to(tl.int64) * stride_ids + rows, tl.maximum(own, -1))
    own = tl.where(rows < q_len, own, -1)
    low, high = segment_range(own)
    alike = (high >= 0) & (tl.min(tl.where(rows < q_len, own, high)) == high)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    start, stop = kv_span(i_first, i_last, q_len, q_len, left, right)
    first, last = q_len, 0
    whole_first, whole_last = start, stop
    for chunk in range(start, stop, SCAN):
        at = chunk + tl.arange(0, SCAN)
        ids = tl.load(segments_ptr + at.to(tl.int64) * stride_segments_t, mask=at < stop, other=-1)
        hit = (ids >= 0) & (ids >= low) & (ids <= high)
        first = min(first, tl.min(tl.where(hit, at, q_len)))
        last = max(last, tl.max(tl.where(hit, at + 1, 0)))
        other = (ids != high) & (at < stop)
        whole_first = max(whole_first, tl.max(tl.where(other & (at < i_first), at + 1, 0)))
        whole_last = min(whole_last, tl.min(tl.where(other & (at > i_last), at, q_len)))
    if not alike:
        whole_last = 0
    if block < num_blocks:
        spans_ptr += (b * num_blocks + block) * 4
        tl.store(spans_ptr, first)
        tl.store(spans_ptr + 1, last)
        tl.store(spans_ptr + 2, whole_first)
        tl.store(spans_ptr + 3, whole_last)


def query_spans(segments: Tensor, window_left: int, window_right: int) -> tuple[Tensor, Tensor]:
    """Spans of keys of each 64 queries of square attention, and the ids, ready to be read in whole tiles.

    Args:
        segments: int32 [B, T], of queries and keys alike; negative = padding.
        window_left: keys before its own place that a query sees, `pattern.UNBOUNDED` = all.
        window_right: keys behind it.

    Returns:
        int32 [B, ceil(T / 64), 4]: first and end of the keys that some of the queries may see, (T, 0) where
        there is none; first and end of keys whose segment all of the queries have, empty where they differ.
        int32 [B, T rounded up to 768]: the ids, -1 for padding; behind T anything that is not negative.
    """
    batch, q_len = segments.shape
    blocks = -(-q_len // BLOCK)
    spans = segments.new_empty((batch, blocks, 4))
    ids = segments.new_empty((batch, -(-q_len // WHOLE) * WHOLE))
    window_left, window_right = pattern.open_sides(q_len, q_len, window_left, window_right)

    def arguments() -> tuple[int, dict[str, Any]]:
        return ids.numel() // BLOCK, dict(
            stride_segments_b=segments.stride(0),
            stride_segments_t=segments.stride(1),
            stride_ids=ids.stride(0),
            q_len=q_len,
            window_left=window_left,
            window_right=window_right,
            HAS_LEFT=window_left < pattern.UNBOUNDED,
            HAS_RIGHT=window_right < pattern.UNBOUNDED,
            BLOCK=BLOCK,
            SCAN=SCAN,
            num_warps=8,
        )

    with device_guard(segments):
        key = call_key((segments,), window_left, window_right)
        launch(query_spans_kernel, key, (segments, spans, ids), arguments)
    return spans, ids
