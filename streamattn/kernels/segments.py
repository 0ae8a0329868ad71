"""Which keys each block of queries may see of packed segments: a light pass before a kernel that must know.

Ids are read once, and of each 64 the least, the greatest and whether there is padding are kept: a block of
queries looks at these alone. The programs have a warp each, which needs to wait for no other.

Other kernels find out by themselves (`primitives.segment_span`), and each of their programs reads all ids.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from streamattn import pattern
from streamattn.kernels.launch import UNSPECIALIZED, call_key, device_guard, launch, starts_early
from streamattn.kernels.primitives import ITEM, ORDER, SPAN, UNBOUNDED, kv_span, segment_range, visible
from streamattn.kernels.tiles import HOPPER_BLOCK_M

BLOCK = HOPPER_BLOCK_M  # queries of a row of spans
WHOLE = 768  # ids are read in whole tiles of 128 keys, and 192 or 256 queries
SCAN = 256  # blocks of keys looked at together, by one warp: nothing goes from warp to warp
REACH = tl.constexpr(128)  # keys of the longest tile
RANKED = 4  # items that a program finds places for
COMPARED = 128  # with so many others at once
NO_ID = tl.constexpr(2147483647)


@triton.jit
def seen_by_some(keys, theirs, q_segments_ptr, stride_t, q_len, kv_len, left, right, NEAR: tl.constexpr):
    """Which of the keys [N] of segments `theirs` some query sees: bool [N].

    Most are seen by the query at their own place, which every window shows; others are looked for.
    """
    at = keys - (kv_len - q_len)
    own = tl.load(q_segments_ptr + at.to(tl.int64) * stride_t, mask=(at >= 0) & (at < q_len), other=-1)
    seen = (own == theirs) & (theirs >= 0)
    if tl.max(((theirs >= 0) & ~seen).to(tl.int32)) > 0:
        for first in range(0, q_len, NEAR):
            rows = first + tl.arange(0, NEAR)
            ids = tl.load(q_segments_ptr + rows.to(tl.int64) * stride_t, mask=rows < q_len, other=-1)
            pairs = (ids[:, None] == theirs[None, :]) & (ids >= 0)[:, None]
            pairs = pairs & visible(rows[:, None], keys[None, :], q_len, kv_len, left, right)
            seen = seen | (tl.max(pairs.to(tl.int32), 0) > 0)
    return seen


@triton.jit(do_not_specialize=UNSPECIALIZED)
def segment_blocks_kernel(
    q_segments_ptr,
    kv_segments_ptr,
    q_blocks_ptr,
    kv_blocks_ptr,
    q_ids_ptr,
    kv_ids_ptr,
    stride_q_segments_b,
    stride_q_segments_t,
    stride_kv_segments_b,
    stride_kv_segments_t,
    stride_q_ids,
    stride_kv_ids,
    q_len,
    kv_len,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """q_blocks and kv_blocks [B, 2, blocks], q_ids and kv_ids [B, padded], a block of both a program."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    programs = max(stride_q_ids, stride_kv_ids) // BLOCK  # of a sequence
    b, block = tl.program_id(0) // programs, tl.program_id(0) % programs
    i_first = block * BLOCK
    rows = i_first + tl.arange(0, BLOCK)
    q_segments_ptr += b.to(tl.int64) * stride_q_segments_b
    own = tl.load(q_segments_ptr + rows.to(tl.int64) * stride_q_segments_t, mask=rows < q_len, other=0)
    own = tl.maximum(own, -1)
    if i_first < stride_q_ids:
        tl.store(q_ids_ptr + b.to(tl.int64) * stride_q_ids + rows, own)
    store_block(q_blocks_ptr, own, rows, b, block, q_len, BLOCK)
    if PAIR:
        kv_segments_ptr += b.to(tl.int64) * stride_kv_segments_b
        theirs = tl.load(
            kv_segments_ptr + rows.to(tl.int64) * stride_kv_segments_t, mask=rows < kv_len, other=0
        )
        left = window_left if HAS_LEFT else UNBOUNDED
        right = window_right if HAS_RIGHT else UNBOUNDED
        seen = seen_by_some(
            rows, theirs, q_segments_ptr, stride_q_segments_t, q_len, kv_len, left, right, BLOCK
        )
        kept = tl.where(seen | (rows >= kv_len), theirs, -1)
        if i_first < stride_kv_ids:
            tl.store(kv_ids_ptr + b.to(tl.int64) * stride_kv_ids + rows, kept)
        store_block(kv_blocks_ptr, kept, rows, b, block, kv_len, BLOCK)


@triton.jit
def store_block(blocks_ptr, ids, rows, b, block, length, BLOCK: tl.constexpr):
    """Of one of blocks [B, 2, blocks], its least and its greatest valid segment; ~ the least with padding.

    ~x is negative, and no block that holds padding passes for one whose segments are all the same.
    """
    num_blocks = tl.cdiv(length, BLOCK)
    low, high = segment_range(tl.where(rows < length, ids, -1))
    padded = tl.max(((rows < length) & (ids < 0)).to(tl.int32)) > 0
    if block < num_blocks:
        blocks_ptr += b * 2 * num_blocks + block
        tl.store(blocks_ptr, tl.where(padded, ~low, low))
        tl.store(blocks_ptr + num_blocks, high)


@triton.jit
def load_blocks(blocks_ptr, num_blocks, first, end, SCAN: tl.constexpr):
    """(least, greatest) segments [SCAN] of blocks from `first` on, as `store_block` left them."""
    at = tl.arange(0, SCAN)
    inside = at < end - first
    least = tl.load(blocks_ptr + first + at, mask=inside, other=NO_ID)
    return least, tl.load(blocks_ptr + (num_blocks + first) + at, mask=inside, other=-1)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_spans_kernel(
    q_blocks_ptr,
    kv_blocks_ptr,
    spans_ptr,
    q_len,
    kv_len,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """spans [B, blocks, SPAN], one block of queries a program, from what `segment_blocks_kernel` leaves."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    num_blocks, num_key_blocks = tl.cdiv(q_len, BLOCK), tl.cdiv(kv_len, BLOCK)
    b, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    i_first = block * BLOCK
    i_last = min(i_first + BLOCK, q_len) - 1
    start, stop = kv_span(i_first, i_last, q_len, kv_len, left, right)
    place = i_last + kv_len - q_len
    # in blocks of keys: those of the window, those that whole tiles read beside it, which may hold padding,
    # and the one behind all that end at or before the last query's place
    window_first, window_end = start // BLOCK, tl.cdiv(stop, BLOCK)
    read_first, read_end = max(start - REACH, 0) // BLOCK, tl.cdiv(min(stop + REACH, kv_len), BLOCK)
    middle = (place + 1) // BLOCK
    q_blocks_ptr += b * 2 * num_blocks + block
    kv_blocks_ptr += b * 2 * num_key_blocks
    first_block, first_padded, whole_end = num_key_blocks, num_key_blocks, window_end
    end_block, last_padded, whole_first = 0, -1, window_first
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    leasts, highs = load_blocks(kv_blocks_ptr, num_key_blocks, read_first, read_end, SCAN)
    # behind the first of the keys' blocks, or these would be asked for when this is there
    least, high = tl.load(q_blocks_ptr), tl.load(q_blocks_ptr + num_blocks)
    low = tl.where(least < 0, ~least, least)
    for chunk in range(read_first, read_end, SCAN):
        at = chunk + tl.arange(0, SCAN)
        padded = leasts < 0
        hit = (tl.where(padded, ~leasts, leasts) <= high) & (highs >= low)
        hit = hit & (at >= window_first) & (at < window_end)
        first_block = min(first_block, tl.min(tl.where(hit, at, num_key_blocks)))
        end_block = max(end_block, tl.max(tl.where(hit, at + 1, 0)))
        first_padded = min(first_padded, tl.min(tl.where(padded, at, num_key_blocks)))
        last_padded = max(last_padded, tl.max(tl.where(padded, at, -1)))
        other = ((leasts != high) | (highs != high)) & (at < read_end)
        whole_first = max(whole_first, tl.max(tl.where(other & (at < middle), at + 1, 0)))
        whole_end = min(whole_end, tl.min(tl.where(other & (at >= middle), at, num_key_blocks)))
        leasts, highs = load_blocks(kv_blocks_ptr, num_key_blocks, chunk + SCAN, read_end, SCAN)
    some = end_block > 0
    first = tl.where(some, tl.maximum(first_block * BLOCK, start), kv_len)
    end = tl.where(some, tl.minimum(end_block * BLOCK, stop), 0)
    whole_first = tl.maximum(whole_first * BLOCK, start)
    whole_end = tl.where(least == high, tl.minimum(whole_end * BLOCK, stop), 0)
    near = (last_padded * BLOCK >= first // REACH * REACH) & (
        first_padded < tl.cdiv(end, REACH) * (REACH // BLOCK)
    )
    spans_ptr += (b * num_blocks + block) * SPAN
    tl.store(spans_ptr, first)
    tl.store(spans_ptr + 1, end)
    tl.store(spans_ptr + 2, whole_first)
    tl.store(spans_ptr + 3, whole_end)
    tl.store(spans_ptr + 4, near.to(tl.int32))


@triton.jit
def tiles_of_items(
    spans_ptr,
    items,
    q_len,
    kv_len,
    left,
    right,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First and end of the tiles of keys [N] that are read for items [N] of ROWS queries."""
    num_blocks = tl.cdiv(q_len, BLOCK)
    first, end = items * 0 + kv_len, items * 0
    for c in tl.static_range(ROWS // BLOCK):
        at = spans_ptr + tl.minimum(items * (ROWS // BLOCK) + c, num_blocks - 1) * SPAN
        first, end = tl.minimum(first, tl.load(at)), tl.maximum(end, tl.load(at + 1))
    i_first = items * ROWS
    i_last = tl.minimum(i_first + ROWS, q_len) - 1
    start, stop = kv_span(i_first, i_last, q_len, kv_len, left, right)
    start, stop = tl.maximum(start, first), tl.minimum(stop, end)
    n_start = start // BLOCK_N
    return n_start, tl.maximum(tl.cdiv(stop, BLOCK_N), n_start)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def longest_first_kernel(
    spans_ptr,
    draws_ptr,
    q_len,
    kv_len,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKED: tl.constexpr,
    COMPARED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """draws [ORDER + B * items * ITEM], RANKED items of a sequence a program."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    num_items = tl.cdiv(q_len, ROWS)
    programs = tl.cdiv(num_items, RANKED)  # of a sequence
    b, part = tl.program_id(0) // programs, tl.program_id(0) % programs
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    spans_ptr += b * tl.cdiv(q_len, BLOCK) * SPAN
    items = part * RANKED + tl.arange(0, RANKED)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    padded = items * 0
    for c in tl.static_range(ROWS // BLOCK):
        at = tl.minimum(items * (ROWS // BLOCK) + c, tl.cdiv(q_len, BLOCK) - 1)
        padded |= tl.load(spans_ptr + at * SPAN + 4)
    n_start, n_stop = tiles_of_items(spans_ptr, items, q_len, kv_len, left, right, ROWS, BLOCK_N, BLOCK)
    own = n_stop - n_start
    place = tl.zeros([RANKED], tl.int32)
    for first in range(0, num_items, COMPARED):
        others = first + tl.arange(0, COMPARED)
        start, stop = tiles_of_items(spans_ptr, others, q_len, kv_len, left, right, ROWS, BLOCK_N, BLOCK)
        theirs = tl.where(others < num_items, stop - start, -1)
        longer = theirs[None, :] > own[:, None]
        later = (theirs[None, :] == own[:, None]) & (others[None, :] > items[:, None])
        place += tl.sum((longer | later).to(tl.int32), 1)
    row = draws_ptr + ORDER + (b * num_items + place) * ITEM
    tl.store(row, items * ROWS, mask=items < num_items)
    tl.store(row + 1, n_start, mask=items < num_items)
    tl.store(row + 2, n_stop, mask=items < num_items)
    tl.store(row + 3, padded, mask=items < num_items)
    if tl.program_id(0) == 0:
        tl.store(draws_ptr, 0)


def longest_first(
    spans: Tensor, q_len: int, kv_len: int, window_left: int, window_right: int, rows: int, block_n: int
) -> Tensor:
    """A counter to draw work items by, and each sequence's items, those with most tiles of keys first.

    Args:
        spans: from `query_spans`.
        q_len: number of queries of a sequence.
        kv_len: number of keys.
        window_left: as there.
        window_right: as there.
        rows: queries of an item, a multiple of 64.
        block_n: keys of a tile.

    Returns:
        int32 [ORDER + B * items * ITEM]: 0 at first, and from ORDER on for each item of a sequence its first
        query, the first and the end of its tiles of keys, and whether these may hold padding.
    """
    batch = spans.shape[0]
    num_items = -(-q_len // rows)
    draws = spans.new_empty(ORDER.value + batch * num_items * ITEM.value)

    def arguments() -> tuple[int, dict[str, Any]]:
        early = starts_early(spans)
        return batch * -(-num_items // RANKED), dict(
            q_len=q_len,
            kv_len=kv_len,
            window_left=window_left,
            window_right=window_right,
            HAS_LEFT=window_left < pattern.UNBOUNDED,
            HAS_RIGHT=window_right < pattern.UNBOUNDED,
            ROWS=rows,
            BLOCK_N=block_n,
            BLOCK=BLOCK,
            RANKED=RANKED,
            COMPARED=COMPARED,
            DEPENDENT=early,
            num_warps=1,
            launch_pdl=early,
        )

    with device_guard(spans):
        key = call_key((spans,), q_len, kv_len, window_left, window_right, rows, block_n)
        launch(longest_first_kernel, key, (spans, draws), arguments)
    return draws


def query_spans(
    q_segments: Tensor, kv_segments: Tensor, window_left: int, window_right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Spans of keys of each 64 queries, and the ids, ready to be read in whole tiles.

    Args:
        q_segments: int32 [B, Tq]; negative = padding.
        kv_segments: int32 [B, Tk]; may be the same tensor.
        window_left: keys before its own place that a query sees, `pattern.UNBOUNDED` = all.
        window_right: keys behind it.

    Returns:
        int32 [B, ceil(Tq / 64), 8]: first and end of the keys that some of the queries may see, (Tk, 0) where
        there is none; first and end of keys whose segment all of the queries have, empty where they differ;
        whether a tile with one of the first may hold padding. Firsts and ends are those of whole 64 keys, or
        of the window.
        int32 [B, Tq rounded up to 768], the queries' ids, and [B, Tk rounded up], the keys': -1 for padding
        and for keys that no query sees; behind the last one anything that is not negative.
    """
    batch, q_len = q_segments.shape
    kv_len = kv_segments.shape[1]
    pair = not _same(q_segments, kv_segments)
    num_blocks = -(-q_len // BLOCK)
    spans = q_segments.new_empty((batch, num_blocks, SPAN.value))
    q_ids = q_segments.new_empty((batch, -(-q_len // WHOLE) * WHOLE))
    kv_ids = q_segments.new_empty((batch, -(-kv_len // WHOLE) * WHOLE)) if pair else q_ids
    q_blocks = q_segments.new_empty((batch, 2, num_blocks))
    kv_blocks = q_segments.new_empty((batch, 2, -(-kv_len // BLOCK))) if pair else q_blocks
    window_left, window_right = pattern.open_sides(q_len, kv_len, window_left, window_right)

    def shared() -> dict[str, Any]:
        return dict(
            q_len=q_len,
            kv_len=kv_len,
            window_left=window_left,
            window_right=window_right,
            HAS_LEFT=window_left < pattern.UNBOUNDED,
            HAS_RIGHT=window_right < pattern.UNBOUNDED,
            BLOCK=BLOCK,
            DEPENDENT=starts_early(q_segments),
        )

    def block_arguments() -> tuple[int, dict[str, Any]]:
        return max(q_ids.numel(), kv_ids.numel()) // BLOCK, dict(
            **shared(),
            stride_q_segments_b=q_segments.stride(0),
            stride_q_segments_t=q_segments.stride(1),
            stride_kv_segments_b=kv_segments.stride(0),
            stride_kv_segments_t=kv_segments.stride(1),
            stride_q_ids=q_ids.stride(0),
            stride_kv_ids=kv_ids.stride(0),
            PAIR=pair,
            num_warps=4 if pair else 1,
        )

    def span_arguments() -> tuple[int, dict[str, Any]]:
        options = dict(SCAN=SCAN, num_warps=1, launch_pdl=starts_early(q_segments))
        return batch * num_blocks, dict(**shared(), **options)

    with device_guard(q_segments):
        key = call_key((q_segments, kv_segments), window_left, window_right, pair)
        tensors = (q_segments, kv_segments, q_blocks, kv_blocks, q_ids, kv_ids)
        launch(segment_blocks_kernel, key, tensors, block_arguments)
        launch(query_spans_kernel, key, (q_blocks, kv_blocks, spans), span_arguments)
    return spans, q_ids, kv_ids


def key_spans(
    q_segments: Tensor, kv_segments: Tensor, window_left: int, window_right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`query_spans` the other way round: of queries for each 64 keys; the rule is the same for both.

    Arguments as there; returns spans [B, ceil(Tk / 64), 8] of queries, and the ids of queries and of keys, -1
    for padding and for whatever sees nothing or is seen by nobody.
    """
    spans, kv_ids, q_ids = query_spans(kv_segments, q_segments, window_right, window_left)
    if q_ids is not kv_ids:
        kv_ids = query_spans(q_segments, kv_segments, window_left, window_right)[2]
    return spans, q_ids, kv_ids


def _same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one."""
    return x is y or (x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())
