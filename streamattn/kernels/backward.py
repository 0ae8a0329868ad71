"""Attention backward in portable Triton: dq, dk and dv.

Two kernels, each recomputing the probabilities from ``lse``: one program per BLOCK_M queries for dq, which
also leaves ``delta = rowsum(dout * out) - dlse`` and lse for the other, one per BLOCK_N keys for dk and dv,
which walks the query heads of its group and so needs no atomics: the same inputs give the same bits. Layouts
as in forward.py; gradients are stored [B, T, H, D]. Left out on purpose: what forward.py leaves out, and the
gradient of a mask, which mask_gradient.py computes from the same row statistics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamattn.kernels.launch import (
    UNSPECIALIZED,
    call_arguments,
    call_key,
    device_guard,
    heads_last,
    heads_per_group,
    launch,
    mask_pointers,
    rows_are_aligned,
    strides,
    tile_for,
)
from streamattn.kernels.primitives import (
    INSIDE,
    LOG2E,
    NO_MASK,
    SCAN,
    UNBOUNDED,
    dot_add,
    dot_rows,
    keep_tile,
    kv_span,
    kv_span_full,
    load_rows,
    probabilities,
    q_span,
    q_span_full,
    schedule,
    segment_range,
    segment_span,
    store_rows,
    valid_length,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    kv_lengths_ptr,
    seed_ptr,
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
    stride_dout_b,
    stride_dout_h,
    stride_dout_t,
    stride_dlse_b,
    stride_dlse_h,
    stride_dlse_t,
    stride_dq_b,
    stride_dq_h,
    stride_dq_t,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_q_segments_b,
    stride_q_segments_t,
    stride_kv_segments_b,
    stride_kv_segments_t,
    stride_kv_lengths,
    stride_row_stats,
    heads_per_group,
    batch,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    window_right,
    scale,
    softcap,
    hidden_below,
    drop_threshold,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EMPTY_ROWS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """dq [B, Hq, Tq, D], and lse2 and delta [B, Hq, stride_row_stats], BLOCK_M rows of one head a program."""
    num_tiles = tl.cdiv(q_len, BLOCK_M)
    tile_m, head = schedule(tl.program_id(0), num_tiles, batch * num_heads, heads_per_group)
    tile_m = num_tiles - 1 - tile_m  # under a causal mask late queries see most
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    q_ptr += b64 * stride_q_b + h64 * stride_q_h
    k_ptr += b64 * stride_k_b + (h64 // group) * stride_k_h
    v_ptr += b64 * stride_v_b + (h64 // group) * stride_v_h
    out_ptr += b64 * stride_out_b + h64 * stride_out_h
    dout_ptr += b64 * stride_dout_b + h64 * stride_dout_h
    dq_ptr += b64 * stride_dq_b + h64 * stride_dq_h
    lse_ptr += (b64 * num_heads + h64) * q_len
    lse2_ptr += (b64 * num_heads + h64) * stride_row_stats
    delta_ptr += (b64 * num_heads + h64) * stride_row_stats
    if MASK_KIND != NO_MASK:
        mask_ptr += b64 * stride_mask_b + h64 * stride_mask_h

    i_first = tile_m * BLOCK_M
    rows = i_first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < q_len
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    q = load_rows(q_ptr, rows, cols_d, stride_q_t, row_mask, HEAD_DIM, BLOCK_D, False, ALIGNED)
    dout = load_rows(dout_ptr, rows, cols_dv, stride_dout_t, row_mask, HEAD_DIM_V, BLOCK_DV, False, ALIGNED)
    out = load_rows(out_ptr, rows, cols_dv, stride_out_t, row_mask, HEAD_DIM_V, BLOCK_DV, False, ALIGNED)
    # lse in base 2, +inf for a row that sees nothing or does not exist, so that its probabilities are 0
    lse = tl.load(lse_ptr + rows, mask=row_mask, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [BLOCK_M]
    dlse = tl.zeros([BLOCK_M], tl.float32)
    if HAS_DLSE:
        dlse_ptr += b64 * stride_dlse_b + h64 * stride_dlse_h
        dlse = tl.load(dlse_ptr + rows.to(tl.int64) * stride_dlse_t, mask=row_mask, other=0.0)
        delta -= dlse
    # under a sink lse does not tell which rows see no key: one far above the scores rounds them away
    sees = tl.zeros([BLOCK_M], tl.int32)

    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    i_last = min(i_first + BLOCK_M, q_len) - 1
    start, stop = kv_span(i_first, i_last, q_len, length, left, right)
    own = rows
    if HAS_SEGMENTS:
        own = tl.load(
            q_segments_ptr + b64 * stride_q_segments_b + rows.to(tl.int64) * stride_q_segments_t,
            mask=row_mask,
            other=-1,
        )
        kv_segments_ptr += b64 * stride_kv_segments_b
        low, high = segment_range(own)
        start, stop = segment_span(kv_segments_ptr, stride_kv_segments_t, low, high, start, stop, SCAN)
    start = start // BLOCK_N * BLOCK_N
    left_end = start
    full_end = start
    if MASK_KIND == NO_MASK and not HAS_SEGMENTS:
        full_start, full_stop = kv_span_full(i_first, i_last, q_len, length, left, right)
        if HAS_LEFT:
            left_end = max(start, min(tl.cdiv(full_start, BLOCK_N) * BLOCK_N, stop))
        full_end = max(left_end, full_stop // BLOCK_N * BLOCK_N)
    first_seen = max(length - q_len - left, 0)

    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        rescale = 1.0 / (1.0 - drop_threshold / 256.0)
    else:
        seed = 0
        rescale = 1.0
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for phase in tl.static_range(0, 3):  # edge, inside, edge
        if phase == 0:
            begin, end = start, left_end
        elif phase == INSIDE:
            begin, end = left_end, full_end
        else:
            begin, end = full_end, stop
        if (
            (phase == 0 and HAS_LEFT and MASK_KIND == NO_MASK and not HAS_SEGMENTS)
            or (phase == INSIDE and MASK_KIND == NO_MASK and not HAS_SEGMENTS)
            or phase == 2
        ):
            for n_start in range(begin, end, BLOCK_N):
                keys = n_start + tl.arange(0, BLOCK_N)
                key_mask = (keys >= first_seen) & (keys < length)
                k = load_rows(
                    k_ptr, keys, cols_d, stride_k_t, key_mask, HEAD_DIM, BLOCK_D, phase == INSIDE, ALIGNED
                )
                v = load_rows(
                    v_ptr,
                    keys,
                    cols_dv,
                    stride_v_t,
                    key_mask,
                    HEAD_DIM_V,
                    BLOCK_DV,
                    phase == INSIDE,
                    ALIGNED,
                )
                theirs = keys
                if HAS_SEGMENTS:
                    theirs = tl.load(
                        kv_segments_ptr + keys.to(tl.int64) * stride_kv_segments_t, mask=key_mask, other=-1
                    )
                s = dot_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
                p, slope, seen = probabilities(
                    s,
                    lse2[:, None],
                    rows[:, None],
                    keys[None, :],
                    row_mask[:, None],
                    key_mask[None, :],
                    own[:, None],
                    theirs[None, :],
                    mask_ptr,
                    stride_mask_m,
                    stride_mask_n,
                    q_len,
                    length,
                    left,
                    right,
                    scale,
                    softcap,
                    hidden_below,
                    phase != INSIDE,
                    MASK_KIND,
                    HAS_SEGMENTS,
                    HAS_SOFTCAP,
                    FOLD_SCALE,
                )
                if HAS_SINKS and EMPTY_ROWS:
                    if phase == INSIDE:
                        sees = tl.full([BLOCK_M], 1, tl.int32)
                    else:
                        sees = tl.maximum(sees, tl.max(seen.to(tl.int32), 1))
                if phase != INSIDE and (MASK_KIND != NO_MASK or HAS_SEGMENTS):
                    some = (tl.max(seen.to(tl.int32), 0) > 0)[:, None]
                    k = tl.where(some, k, 0.0)
                    v = tl.where(some, v, 0.0)
                dp = dot_rows(dout, v, PRECISION)
                if HAS_DROPOUT:
                    keep = keep_tile(seed, head, rows, n_start, drop_threshold, BLOCK_M, BLOCK_N)
                    dp = tl.where(keep, dp * rescale, 0.0)
                ds = p * (dp - delta[:, None])
                if HAS_SOFTCAP:
                    ds *= slope
                dq = dot_add(ds.to(k.dtype), k, dq, PRECISION)
    if HAS_SINKS and EMPTY_ROWS:
        lse2 = tl.where(sees > 0, lse2, float("inf"))
        delta = tl.where(sees > 0, delta, -dlse)
    tl.store(lse2_ptr + rows, lse2)
    tl.store(delta_ptr + rows, delta)
    dq *= scale
    if EMPTY_ROWS:
        dq = tl.where((lse2 != float("inf"))[:, None], dq, 0.0)
    store_rows(dq_ptr, dq, rows, cols_d, stride_dq_t, row_mask, HEAD_DIM, ALIGNED)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    kv_lengths_ptr,
    seed_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_t,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_dout_b,
    stride_dout_h,
    stride_dout_t,
    stride_dk_b,
    stride_dk_h,
    stride_dk_t,
    stride_dv_b,
    stride_dv_h,
    stride_dv_t,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_q_segments_b,
    stride_q_segments_t,
    stride_kv_segments_b,
    stride_kv_segments_t,
    stride_kv_lengths,
    stride_row_stats,
    heads_per_group,
    batch,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    window_right,
    scale,
    softcap,
    hidden_below,
    drop_threshold,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    EMPTY_ROWS: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """dk [B, Hkv, Tk, D] and dv [B, Hkv, Tk, Dv], BLOCK_N keys of one key head a program."""
    num_kv_heads = num_heads // group
    # under a causal mask early keys are seen by most
    tile_n, batch_head = schedule(
        tl.program_id(0), tl.cdiv(kv_len, BLOCK_N), batch * num_kv_heads, heads_per_group
    )
    b, kv_head = batch_head // num_kv_heads, batch_head % num_kv_heads
    b64 = b.to(tl.int64)
    k_ptr += b64 * stride_k_b + kv_head.to(tl.int64) * stride_k_h
    v_ptr += b64 * stride_v_b + kv_head.to(tl.int64) * stride_v_h
    dk_ptr += b64 * stride_dk_b + kv_head.to(tl.int64) * stride_dk_h
    dv_ptr += b64 * stride_dv_b + kv_head.to(tl.int64) * stride_dv_h

    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    n_start = tile_n * BLOCK_N
    keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    first_seen = max(length - q_len - left, 0)
    key_mask = (keys >= first_seen) & (keys < length)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    k = load_rows(k_ptr, keys, cols_d, stride_k_t, key_mask, HEAD_DIM, BLOCK_D, False, ALIGNED)
    v = load_rows(v_ptr, keys, cols_dv, stride_v_t, key_mask, HEAD_DIM_V, BLOCK_DV, False, ALIGNED)

    start, stop = q_span(n_start, n_start + BLOCK_N - 1, q_len, length, left, right)
    theirs = keys
    if HAS_SEGMENTS:
        theirs = tl.load(
            kv_segments_ptr + b64 * stride_kv_segments_b + keys.to(tl.int64) * stride_kv_segments_t,
            mask=key_mask,
            other=-1,
        )
        q_segments_ptr += b64 * stride_q_segments_b
        low, high = segment_range(theirs)
        start, stop = segment_span(q_segments_ptr, stride_q_segments_t, low, high, start, stop, SCAN)
    if n_start >= length:
        stop = 0
    start = start // BLOCK_M * BLOCK_M
    # [start, first_full) and [full_end, stop) need the visibility test; a tile with keys past the length
    # always does
    first_full = start
    full_end = start
    if MASK_KIND == NO_MASK and not HAS_SEGMENTS:
        full_start, full_stop = q_span_full(n_start, n_start + BLOCK_N - 1, q_len, length, left, right)
        if HAS_RIGHT:
            first_full = max(start, min(tl.cdiv(full_start, BLOCK_M) * BLOCK_M, stop))
        full_end = max(first_full, full_stop // BLOCK_M * BLOCK_M)
        if n_start + BLOCK_N > length:
            full_end = first_full

    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        rescale = 1.0 / (1.0 - drop_threshold / 256.0)
    else:
        seed = 0
        rescale = 1.0
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for g in range(0, group):
        h64 = kv_head.to(tl.int64) * group + g
        q_head_ptr = q_ptr + b64 * stride_q_b + h64 * stride_q_h
        dout_head_ptr = dout_ptr + b64 * stride_dout_b + h64 * stride_dout_h
        row_offset = (b64 * num_heads + h64) * stride_row_stats
        mask_head_ptr = mask_ptr
        if MASK_KIND != NO_MASK:
            mask_head_ptr = mask_ptr + b64 * stride_mask_b + h64 * stride_mask_h
        head = b * num_heads + kv_head * group + g
        for phase in tl.static_range(0, 3):  # edge, inside, edge
            if phase == 0:
                begin, end = start, first_full
            elif phase == INSIDE:
                begin, end = first_full, full_end
            else:
                begin, end = full_end, stop
            if (
                (phase == 0 and HAS_RIGHT and MASK_KIND == NO_MASK and not HAS_SEGMENTS)
                or (phase == INSIDE and MASK_KIND == NO_MASK and not HAS_SEGMENTS)
                or phase == 2
            ):
                for m_start in range(begin, end, BLOCK_M):
                    rows = m_start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
                    row_mask = rows < q_len
                    q = load_rows(
                        q_head_ptr,
                        rows,
                        cols_d,
                        stride_q_t,
                        row_mask,
                        HEAD_DIM,
                        BLOCK_D,
                        phase == INSIDE,
                        ALIGNED,
                    )
                    dout = load_rows(
                        dout_head_ptr,
                        rows,
                        cols_dv,
                        stride_dout_t,
                        row_mask,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        phase == INSIDE,
                        ALIGNED,
                    )
                    lse2 = tl.load(lse2_ptr + row_offset + rows)
                    delta = tl.load(delta_ptr + row_offset + rows)
                    if EMPTY_ROWS and phase != INSIDE:
                        alive = lse2 != float("inf")
                        q = tl.where(alive[:, None], q, 0.0)
                        dout = tl.where(alive[:, None], dout, 0.0)
                        delta = tl.where(alive, delta, 0.0)
                    own = rows
                    if HAS_SEGMENTS:
                        own = tl.load(
                            q_segments_ptr + rows.to(tl.int64) * stride_q_segments_t, mask=row_mask, other=-1
                        )
                    # transposed, so that p and ds are left operands of the next products as they stand
                    s = dot_rows(k, q, PRECISION)  # [BLOCK_N, BLOCK_M]
                    p, slope, seen = probabilities(
                        s,
                        lse2[None, :],
                        rows[None, :],
                        keys[:, None],
                        row_mask[None, :],
                        key_mask[:, None],
                        own[None, :],
                        theirs[:, None],
                        mask_head_ptr,
                        stride_mask_m,
                        stride_mask_n,
                        q_len,
                        length,
                        left,
                        right,
                        scale,
                        softcap,
                        hidden_below,
                        phase != INSIDE,
                        MASK_KIND,
                        HAS_SEGMENTS,
                        HAS_SOFTCAP,
                        FOLD_SCALE,
                    )
                    dp = dot_rows(v, dout, PRECISION)
                    p_kept = p
                    if HAS_DROPOUT:
                        keep = tl.trans(
                            keep_tile(seed, head, rows, n_start, drop_threshold, BLOCK_M, BLOCK_N)
                        )
                        p_kept = tl.where(keep, p * rescale, 0.0)
                        dp = tl.where(keep, dp * rescale, 0.0)
                    dv = dot_add(p_kept.to(dout.dtype), dout, dv, PRECISION)
                    ds = p * (dp - delta[None, :])
                    if EMPTY_ROWS and phase != INSIDE:
                        ds = tl.where(seen, ds, 0.0)  # dp of an unseen value may be NaN
                    if HAS_SOFTCAP:
                        ds *= slope
                    dk = dot_add(ds.to(q.dtype), q, dk, PRECISION)
    store_mask = keys < kv_len
    store_rows(dk_ptr, dk * scale, keys, cols_d, stride_dk_t, store_mask, HEAD_DIM, ALIGNED)
    store_rows(dv_ptr, dv, keys, cols_dv, stride_dv_t, store_mask, HEAD_DIM_V, ALIGNED)


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
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
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, lse2, delta)``, in ``grads`` if given; arguments as in `ops`, dout with last stride 1.

    lse2 and delta [B, Hq, Tq rounded up to whole tiles] float32: lse in base 2, rowsum(dout * out) - dlse.
    """
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = v.shape[1:]
    dq, dk, dv = grads or (heads_last(q, head_dim), heads_last(k, head_dim), heads_last(v, head_dim_v))
    dq_tile = tile_for("dq", q, v, attn_mask)
    padded = triton.cdiv(q_len, dq_tile.BLOCK_M) * dq_tile.BLOCK_M  # so that no row is tested
    lse2, delta = q.new_empty((2, batch, num_heads, padded), dtype=torch.float32)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    options = (scale, window_left, window_right, softcap, dropout_p)
    # whether some query may see no key at all; such a row may hold anything
    empty_rows = any(x is not None for x in masks) or kv_len - q_len + window_right < 0

    def dq_arguments() -> tuple[int, dict[str, Any]]:
        return triton.cdiv(q_len, dq_tile.BLOCK_M) * batch * num_heads, dict(
            **call_arguments(dq_tile, q, k, v, *masks, *options),
            **strides("out", out),
            **strides("dout", dout),
            **strides("dlse", dlse),
            **strides("dq", dq),
            stride_row_stats=padded,
            heads_per_group=heads_per_group(k, window_right),
            HAS_DLSE=dlse is not None,
            HAS_SINKS=sinks is not None,
            EMPTY_ROWS=empty_rows,
            ALIGNED=rows_are_aligned(q, k, v, out, dout, dq),
        )

    def dkdv_arguments() -> tuple[int, dict[str, Any]]:
        tile = tile_for("dkdv", q, v, attn_mask)
        assert padded % tile.BLOCK_M == 0, "the dq kernel writes the row statistics that this one reads"
        return triton.cdiv(kv_len, tile.BLOCK_N) * batch * num_kv_heads, dict(
            **call_arguments(tile, q, k, v, *masks, *options),
            **strides("dout", dout),
            **strides("dk", dk),
            **strides("dv", dv),
            stride_row_stats=padded,
            heads_per_group=heads_per_group(q, window_right),
            EMPTY_ROWS=empty_rows,
            ALIGNED=rows_are_aligned(q, k, v, dout, dk, dv),
        )

    key = call_key((q, k, v, *masks, sinks, dout, dlse, out, *(grads or ())), *options)
    pointers = mask_pointers(*masks, seed)
    with device_guard(q):
        dq_pointers = (q, k, v, out, dout, lse, dlse, lse2, delta, dq, *pointers)
        launch(attention_bwd_dq_kernel, key, dq_pointers, dq_arguments)
        dkdv_pointers = (q, k, v, dout, lse2, delta, dk, dv, *pointers)
        launch(attention_bwd_dkdv_kernel, key, dkdv_pointers, dkdv_arguments)
    return dq, dk, dv, lse2, delta
