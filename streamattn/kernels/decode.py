"""Attention of few queries over many keys in portable Triton: decoding. The forward alone.

With one query a head, the time is that of reading the keys and values once. So the query heads that share a
head of keys are the rows of one tile, and the keys are split over as many programs as keep the memory busy
(Flash-Decoding, Dao et al. 2023). Where they are split, each program leaves its accumulator, maximum and
denominator in float32, and a second kernel adds them up in a fixed order. On sm_90 it is started while
the first one runs (programmatic dependent launch) and waits on the device for what it reads.

How many programs there are is decided on the host, from shapes; which keys each one reads on the device, from
``kv_lengths`` and the window, so a long cache that holds little is split as finely as a full one. Nothing
waits for the device, and nothing is kept between calls: CUDA graphs and streams need no care.

q [B, Hq, Tq, D] of few queries (`dispatch.MAX_DECODE_QUERIES`); k and v [B, Hkv, Tk, D or Dv] with any
strides but a unit last one, or [pages, Hkv, page, D or Dv] with a block_table [B, Tk / page]; out [B, Hq, Tq,
Dv] stored [B, Tq, Hq, Dv]; lse [B, Hq, Tq] float32. Left out on purpose: dropout; masks that differ between
the heads of a group, which share what they read; tiles without a test of visibility, for arithmetic is not
what takes the time.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._dynamo.guards import _empty_strided_cuda

from streamattn.kernels.launch import (
    UNSPECIALIZED,
    call_arguments,
    call_key,
    device_guard,
    heads_last,
    launch,
    launch_again,
    mask_pointers,
    multiprocessor_count,
    padded,
    product_precision,
    result_layouts,
    starts_early,
    strides,
    tile_for,
)
from streamattn.kernels.primitives import (
    BOOL_MASK,
    LN2,
    LOG2E,
    NO_MASK,
    SCAN,
    UNBOUNDED,
    dot_add,
    dot_rows,
    kv_span,
    load_rows,
    online_softmax_update,
    segment_range,
    segment_span,
    tanh,
    valid_length,
    visible,
)
from streamattn.kernels.tiles import DECODE_PROGRAMS, DECODE_SPLIT, MAX_DECODE_SPLITS, Tile

COMBINED_COLUMNS = 16  # of a head, which one warp adds up for all splits at once


@triton.jit
def key_offsets(
    n_start,
    steps,
    key_mask,
    table_ptr,
    stride_table_p,
    num_pages,
    stride_b,
    stride_t,
    PAGE_SIZE: tl.constexpr,
):
    """Offsets of keys n_start + steps [N] of a head in memory, int64; of a paged cache by its table's row.

    An entry that names no page is taken for one that does: nothing outside of the cache is read.
    """
    if PAGE_SIZE > 0:
        keys = n_start + steps
        pages = table_ptr + (keys // PAGE_SIZE).to(tl.int64) * stride_table_p
        page = tl.load(pages, mask=key_mask, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64)
        offsets = page * stride_b + (keys % PAGE_SIZE).to(tl.int64) * stride_t
    else:
        # the second term is the same for all tiles
        offsets = tl.cast(n_start, tl.int64) * stride_t + steps.to(tl.int64) * stride_t
    return offsets


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decode_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    kv_lengths_ptr,
    sinks_ptr,
    table_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_t,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_q_segments_b,
    stride_q_segments_t,
    stride_kv_segments_b,
    stride_kv_segments_t,
    stride_kv_lengths,
    stride_table_b,
    stride_table_p,
    batch,
    num_heads,
    group,
    q_len,
    kv_len,
    num_pages,
    num_splits,
    window_left,
    window_right,
    scale,
    softcap,
    hidden_below,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One split of the keys for BLOCK_M of a group's rows: out and lse, or a part of them under HAS_SPLITS.

    Row r of a group is query r % Tq of its head r // Tq. The parts are float32 in three runs: accumulators
    [B, Hq, Tq, splits, Dv], maxima in base 2 [B, Hq, Tq, splits], denominators likewise. DEPENDENT where the
    kernel that adds them up starts before they are there.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    group_rows = group * q_len
    num_tiles = tl.cdiv(group_rows, BLOCK_M)
    pid = tl.program_id(0)
    tile_m = pid % num_tiles  # tiles that read the same keys run side by side
    split = (pid // num_tiles) % num_splits
    kv_head = pid // (num_tiles * num_splits)  # over the whole batch
    num_kv_heads = num_heads // group
    b, h_kv = kv_head // num_kv_heads, kv_head % num_kv_heads
    b64, h_kv64 = b.to(tl.int64), h_kv.to(tl.int64)
    k_ptr += h_kv64 * stride_k_h
    v_ptr += h_kv64 * stride_v_h
    if PAGE_SIZE == 0:
        k_ptr += b64 * stride_k_b
        v_ptr += b64 * stride_v_b
    else:
        table_ptr += b64 * stride_table_b

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < group_rows
    i = rows % q_len
    h = h_kv * group + rows // q_len
    i64, h64 = i.to(tl.int64), h.to(tl.int64)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    q_rows = b64 * stride_q_b + h64 * stride_q_h + i64 * stride_q_t
    q = load_rows(q_ptr, q_rows, cols_d, 1, row_mask, HEAD_DIM, BLOCK_D, False, False)  # [BLOCK_M, BLOCK_D]

    # the keys [start, stop) that some query sees are dealt out to the splits in whole tiles
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    start, stop = kv_span(0, q_len - 1, q_len, length, left, right)
    first_tile = start // BLOCK_N
    tiles = max(tl.cdiv(stop, BLOCK_N) - first_tile, 0)
    each, more = tiles // num_splits, tiles % num_splits
    begin = first_tile + split * each + min(split, more)
    end = begin + each + (split < more).to(tl.int32)
    begin, end = begin * BLOCK_N, end * BLOCK_N
    own = rows
    if HAS_SEGMENTS:
        own = tl.load(
            q_segments_ptr + b64 * stride_q_segments_b + i64 * stride_q_segments_t, mask=row_mask, other=-1
        )
        kv_segments_ptr += b64 * stride_kv_segments_b
        low, high = segment_range(own)
        begin, end = segment_span(
            kv_segments_ptr, stride_kv_segments_t, low, high, max(begin, start), min(end, stop), SCAN
        )
        begin = begin // BLOCK_N * BLOCK_N

    score_scale = scale * LOG2E if FOLD_SCALE else 1.0
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # a key of its own, seen by every row, with no value: the first split has it
        sinks = tl.load(sinks_ptr + h, mask=row_mask, other=0.0).to(tl.float32)
        m = tl.where(split == 0, sinks * LOG2E, m)
        l = tl.where(split == 0, 1.0, l)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    steps = tl.arange(0, BLOCK_N)
    for n_start in range(begin, end, BLOCK_N):
        keys = n_start + steps  # [BLOCK_N]
        key_mask = (keys >= start) & (keys < stop)
        k_rows = key_offsets(
            n_start, steps, key_mask, table_ptr, stride_table_p, num_pages, stride_k_b, stride_k_t, PAGE_SIZE
        )
        k = load_rows(k_ptr, k_rows, cols_d, 1, key_mask, HEAD_DIM, BLOCK_D, False, False)
        s = dot_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
        if not FOLD_SCALE:
            s *= scale
            if HAS_SOFTCAP:
                s = softcap * tanh(s / softcap)
        seen = visible(i[:, None], keys[None, :], q_len, length, left, right) & key_mask[None, :]
        if HAS_SEGMENTS:
            theirs = tl.load(
                kv_segments_ptr + keys.to(tl.int64) * stride_kv_segments_t, mask=key_mask, other=-1
            )
            seen = seen & (own[:, None] == theirs[None, :]) & (own[:, None] >= 0)
        if MASK_KIND != NO_MASK:
            mask_rows = b64 * stride_mask_b + h64 * stride_mask_h + i64 * stride_mask_m
            mask_ptrs = mask_ptr + mask_rows[:, None] + keys.to(tl.int64)[None, :] * stride_mask_n
            entry = tl.load(mask_ptrs, mask=row_mask[:, None] & key_mask[None, :], other=0)
            if MASK_KIND == BOOL_MASK:
                seen = seen & (entry != 0)
            else:
                # the interpreter compares bfloat16 by its bits, and hidden_below is a float32
                entry = entry.to(tl.float32)
                seen = seen & row_mask[:, None] & ~(entry <= hidden_below)
                s += entry
        if not FOLD_SCALE:
            s *= LOG2E
        s = tl.where(seen, s, float("-inf"))
        p, rescale, m, l = online_softmax_update(s, m, l, score_scale, True)
        v_rows = key_offsets(
            n_start, steps, key_mask, table_ptr, stride_table_p, num_pages, stride_v_b, stride_v_t, PAGE_SIZE
        )
        v = load_rows(v_ptr, v_rows, cols_dv, 1, key_mask, HEAD_DIM_V, BLOCK_DV, False, False)
        if MASK_KIND != NO_MASK or HAS_SEGMENTS:
            v = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], v, 0.0)
        acc = acc * rescale[:, None]
        acc = dot_add(p.to(v.dtype), v, acc, PRECISION)

    store_mask = row_mask[:, None] & (cols_dv[None, :] < HEAD_DIM_V)
    stats_rows = (b64 * num_heads + h64) * q_len + i64
    if HAS_SPLITS:
        part_rows = stats_rows * num_splits + split
        num_parts = batch.to(tl.int64) * num_heads * q_len * num_splits
        stats_ptr = parts_ptr + num_parts * HEAD_DIM_V
        tl.store(parts_ptr + part_rows[:, None] * HEAD_DIM_V + cols_dv[None, :], acc, mask=store_mask)
        tl.store(stats_ptr + part_rows, m, mask=row_mask)
        tl.store(stats_ptr + num_parts + part_rows, l, mask=row_mask)
    else:
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        out_rows = b64 * stride_out_b + h64 * stride_out_h + i64 * stride_out_t
        out_ptrs = out_ptr + out_rows[:, None] + cols_dv[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=store_mask)
        tl.store(lse_ptr + stats_rows, (m + tl.log2(l)) * LN2, mask=row_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decode_combine_kernel(
    out_ptr,
    lse_ptr,
    parts_ptr,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    batch,
    num_heads,
    q_len,
    num_splits,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """COLUMNS columns of out, and lse, of one query of a head from the parts that `decode_fwd_kernel` left.

    All that a program reads is asked for at once: one wait for memory, however many splits there are.
    """
    pid = tl.program_id(0)
    row = (pid // (BLOCK_DV // COLUMNS)).to(tl.int64)  # of [B, Hq, Tq]
    cols = pid % (BLOCK_DV // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    col_mask = cols < HEAD_DIM_V
    i, head = row % q_len, row // q_len
    b, h = head // num_heads, head % num_heads
    num_parts = batch.to(tl.int64) * num_heads * q_len * num_splits
    stats_ptr = parts_ptr + num_parts * HEAD_DIM_V + row * num_splits
    parts_ptr += row * num_splits * HEAD_DIM_V
    splits = tl.arange(0, MAX_SPLITS)
    split_mask = splits < num_splits
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    maxima = tl.load(stats_ptr + splits, mask=split_mask, other=float("-inf"))
    denominators = tl.load(stats_ptr + num_parts + splits, mask=split_mask, other=0.0)
    parts = tl.load(
        parts_ptr + splits[:, None] * HEAD_DIM_V + cols[None, :],
        mask=split_mask[:, None] & col_mask[None, :],
        other=0.0,
    )  # [MAX_SPLITS, COLUMNS]
    m = tl.max(maxima)
    base = tl.where(m == float("-inf"), 0.0, m)  # nothing is seen: exp2(-inf - 0) = 0
    weights = tl.exp2(maxima - base)
    l = tl.sum(weights * denominators)
    out = tl.sum(weights[:, None] * parts, 0) / tl.where(l == 0.0, 1.0, l)
    out_ptr += b * stride_out_b + h * stride_out_h + i * stride_out_t
    tl.store(out_ptr + cols, out.to(out_ptr.dtype.element_ty), mask=col_mask)
    if pid % (BLOCK_DV // COLUMNS) == 0:
        tl.store(lse_ptr + row, (m + tl.log2(l)) * LN2)


def tile_of(q: Tensor, v: Tensor, group: int) -> Tile:
    """The tile of a call: as many rows as there are, up to the table's."""
    tile = tile_for("decode", q, v, None)  # of a dense mask a tile has few rows
    rows = max(16, 1 << (group * q.shape[2] - 1).bit_length())
    return dataclasses.replace(tile, BLOCK_M=min(rows, tile.BLOCK_M))


def most_splits(q: Tensor, num_kv_heads: int, tile: Tile) -> int:
    """Splits that give every multiprocessor its programs; more than one where the heads don't."""
    batch, num_heads, q_len, _ = q.shape
    programs = batch * num_kv_heads * -(-(num_heads // num_kv_heads * q_len) // tile.BLOCK_M)
    # no GPU: as many splits of the few keys of an example as are legal
    room = DECODE_PROGRAMS * multiprocessor_count(q.get_device()) if q.is_cuda else MAX_DECODE_SPLITS
    return max(1, min(room // programs, MAX_DECODE_SPLITS))


def split_count(most: int, q_len: int, kv_len: int, window_left: int) -> int:
    """Splits of a call: no more than its keys are worth.

    Args:
        most: `most_splits` of the call.
        q_len: Tq.
        kv_len: Tk, which may be more than the keys that are there.
        window_left: keys before its own place that a query sees.
    """
    return max(1, min(most, min(kv_len, window_left + q_len) // DECODE_SPLIT))


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    kind: Hashable | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``; arguments as in `streamattn.ops`, whose calls of one ``kind`` are launched alike."""
    assert seed is None
    batch, num_heads, q_len, _ = q.shape
    num_kv_heads, kv_len, head_dim_v = v.shape[1:]
    page_size = 0
    if block_table is not None:
        page_size, kv_len = kv_len, kv_len * block_table.shape[1]
    out = heads_last(q, head_dim_v)
    lse = q.new_empty(batch, num_heads, q_len, dtype=torch.float32)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    options = (scale, window_left, window_right, softcap, dropout_p)
    tile = tile_of(q, v, num_heads // num_kv_heads)
    splits = split_count(most_splits(q, num_kv_heads, tile), q_len, kv_len, window_left)
    parts = None
    if splits > 1:
        parts = q.new_empty(batch * num_heads * q_len * splits * (head_dim_v + 2), dtype=torch.float32)
    if kind is None:
        key, varying = (call_key((q, k, v, *masks, sinks, block_table), *options), splits), ()
    else:
        key, varying = _kind_key(q, k, v, kind, splits)

    def arguments() -> tuple[int, dict[str, Any]]:
        named = call_arguments(tile, q, k, v, *masks, *options, kv_len=kv_len)
        for name in ("drop_threshold", "HAS_DROPOUT"):
            del named[name]
        if page_size > 0:  # a load that waits for another one takes a place in the pipeline for both
            named["num_stages"] = 2 * tile.num_stages - 1
        tiles = -(-(named["group"] * q_len) // tile.BLOCK_M)
        return batch * num_kv_heads * splits * tiles, dict(
            **named,
            **strides("out", out),
            stride_table_b=0 if block_table is None else block_table.stride(0),
            stride_table_p=0 if block_table is None else block_table.stride(1),
            num_pages=k.shape[0],
            num_splits=splits,
            PAGE_SIZE=page_size,
            HAS_SINKS=sinks is not None,
            HAS_SPLITS=splits > 1,
            DEPENDENT=splits > 1 and starts_early(q),
        )

    mask_ptrs = mask_pointers(*masks, None)[:-1]
    pointers = (q, k, v, out, lse, parts, *mask_ptrs, sinks, block_table)
    with device_guard(q):
        launch(decode_fwd_kernel, key, pointers, arguments, varying)
        if parts is not None:
            _combine(out, lse, parts, splits)
    return out, lse


def _combine(out: Tensor, lse: Tensor, parts: Tensor, splits: int) -> None:
    """Adds up the parts of a call on the current device."""
    batch, num_heads, q_len, head_dim_v = out.shape

    def arguments() -> tuple[int, dict[str, Any]]:
        early = starts_early(out)
        block = padded(head_dim_v, head_dim_v, 4)
        columns = min(block, COMBINED_COLUMNS)
        return batch * num_heads * q_len * (block // columns), dict(
            **strides("out", out),
            batch=batch,
            num_heads=num_heads,
            q_len=q_len,
            num_splits=splits,
            HEAD_DIM_V=head_dim_v,
            BLOCK_DV=block,
            MAX_SPLITS=MAX_DECODE_SPLITS,
            COLUMNS=columns,
            DEPENDENT=early,
            num_warps=1,
            launch_pdl=early,
        )

    launch(decode_combine_kernel, (out.shape, out.dtype, splits), (out, lse, parts), arguments)


def repeat_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, window_left: int, kind: Hashable
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """What serves more calls of a kind that `attention_forward` has served, at less of the host's time.

    Args:
        q: of a call of that kind.
        k: of the same call.
        v: of the same call.
        window_left: as `attention_forward` takes it.
        kind: as `attention_forward` takes it.

    Returns:
        Returns ``(out, lse)`` of q, k and v of another call; None where `attention_forward` must serve it.
    """
    batch, num_heads, q_len, _ = q.shape
    dtype, device = q.dtype, q.get_device()
    out_layout, lse_layout = result_layouts(q, v.shape[3])
    most = most_splits(q, k.shape[1], tile_of(q, v, num_heads // k.shape[1]))
    part = batch * num_heads * q_len * (v.shape[3] + 2)

    def again(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        if device != torch._C._cuda_getDevice():
            return None
        splits = split_count(most, q_len, k.shape[2], window_left)
        key, varying = _kind_key(q, k, v, kind, splits)
        # the dispatcher is half of the time that `new_empty` takes
        out = _empty_strided_cuda(*out_layout, dtype)
        lse = _empty_strided_cuda(*lse_layout, torch.float32)
        if splits == 1:
            done = launch_again(decode_fwd_kernel, key, (q, k, v, out, lse), varying)
            return (out, lse) if done else None
        parts = _empty_strided_cuda((part * splits,), (1,), torch.float32)
        if not launch_again(decode_fwd_kernel, key, (q, k, v, out, lse, parts), varying):
            return None
        if not launch_again(decode_combine_kernel, (out_layout[0], dtype, splits), (out, lse, parts), ()):
            _combine(out, lse, parts, splits)
        return out, lse

    return again


def _kind_key(
    q: Tensor, k: Tensor, v: Tensor, kind: Hashable, splits: int
) -> tuple[Hashable, tuple[int, ...]]:
    """Key and varying arguments of the launches of one kind, of any number of keys that is split alike."""
    k_strides, v_strides = k.stride(), v.stride()
    varying = (k.shape[2], k_strides[0], k_strides[1], v_strides[0], v_strides[1])
    return (kind, product_precision(q), splits), varying
