"""Attention backward in portable Triton: dq, dk and dv, and the gradient of an additive mask.

Two kernels, each recomputing the probabilities from ``lse``: one program per BLOCK_M queries for dq, which
also leaves ``delta = rowsum(dout * out) - dlse`` and lse for the others, one per BLOCK_N keys for dk and dv,
which walks the query heads of its group and so needs no atomics: the same inputs give the same bits. A third,
run only where the mask wants a gradient, serves one tile of the mask's own shape and sums over what the mask
broadcasts. Layouts as in forward.py; gradients are stored [B, T, H, D]. Left out on purpose: what forward.py
leaves out.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamattn.kernels.launch import (
    UNSPECIALIZED,
    architecture_of,
    call_key,
    device_guard,
    heads_last,
    heads_per_group,
    launch,
    mask_pointers,
    score_arguments,
    strides,
)
from streamattn.kernels.primitives import (
    INSIDE,
    LOG2E,
    UNBOUNDED,
    dot_add,
    keep_tile,
    kv_span,
    kv_span_full,
    load_rows,
    q_span,
    q_span_full,
    schedule,
    segment_range,
    segment_span,
    store_rows,
    tanh,
    visible,
)
from streamattn.kernels.tiles import Tile, choose_tile


@triton.jit
def probabilities(
    s,
    lse2,
    rows,
    keys,
    row_mask,
    key_mask,
    own,
    theirs,
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
    TESTED: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
):
    """(p, slope, seen) of one tile from its products s, p = exp(score - lse).

    slope is the softcap's derivative, seen which pairs are visible. The tile is [M, N] with per-query vectors
    [M, 1] and per-key vectors [1, N], or all of it transposed. Where a flag is off, the value it governs
    comes back as some tensor of the tile's shape and is not to be used.
    """
    if FOLD_SCALE:
        s *= scale * LOG2E
        slope = s
    else:
        s *= scale
        slope = s
        if HAS_SOFTCAP:
            t = tanh(s / softcap)
            s = softcap * t
            slope = 1.0 - t * t
    seen = s
    if TESTED:
        seen = visible(rows, keys, q_len, length, left, right)
        if HAS_SEGMENTS:
            seen = seen & (own == theirs) & (own >= 0)
        if MASK_KIND > 0:
            mask_ptrs = mask_ptr + rows.to(tl.int64) * stride_mask_m + keys.to(tl.int64) * stride_mask_n
            entry = tl.load(mask_ptrs, mask=row_mask & key_mask, other=0)
            if MASK_KIND == 1:
                seen = seen & (entry != 0)
            else:
                seen = seen & row_mask & (entry > hidden_below)
                s += entry.to(tl.float32)
    if not FOLD_SCALE:
        s *= LOG2E
    p = tl.exp2(s - lse2)
    if TESTED:
        p = tl.where(seen, p, 0.0)
        if HAS_SOFTCAP:
            slope = tl.where(seen, slope, 0.0)
    return p, slope, seen


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
    EMPTY_ROWS: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    SCAN: tl.constexpr,
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
    if MASK_KIND > 0:
        mask_ptr += b64 * stride_mask_b + h64 * stride_mask_h

    i_first = tile_m * BLOCK_M
    rows = i_first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < q_len
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    q = load_rows(q_ptr, rows, cols_d, stride_q_t, row_mask, HEAD_DIM, BLOCK_D, False)
    dout = load_rows(dout_ptr, rows, cols_dv, stride_dout_t, row_mask, HEAD_DIM_V, BLOCK_DV, False)
    out = load_rows(out_ptr, rows, cols_dv, stride_out_t, row_mask, HEAD_DIM_V, BLOCK_DV, False)
    # lse in base 2, +inf for a row that sees nothing or does not exist, so that its probabilities are 0
    lse = tl.load(lse_ptr + rows, mask=row_mask, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [BLOCK_M]
    if HAS_DLSE:
        dlse_ptr += b64 * stride_dlse_b + h64 * stride_dlse_h
        delta -= tl.load(dlse_ptr + rows.to(tl.int64) * stride_dlse_t, mask=row_mask, other=0.0)
    tl.store(lse2_ptr + rows, lse2)
    tl.store(delta_ptr + rows, delta)

    length = kv_len
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + b * stride_kv_lengths), 0), kv_len).to(
            tl.int32
        )
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
    if MASK_KIND == 0 and not HAS_SEGMENTS:
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
            (phase == 0 and HAS_LEFT and MASK_KIND == 0 and not HAS_SEGMENTS)
            or (phase == INSIDE and MASK_KIND == 0 and not HAS_SEGMENTS)
            or phase == 2
        ):
            for n_start in range(begin, end, BLOCK_N):
                keys = n_start + tl.arange(0, BLOCK_N)
                key_mask = (keys >= first_seen) & (keys < length)
                k = load_rows(k_ptr, keys, cols_d, stride_k_t, key_mask, HEAD_DIM, BLOCK_D, phase == INSIDE)
                v = load_rows(
                    v_ptr, keys, cols_dv, stride_v_t, key_mask, HEAD_DIM_V, BLOCK_DV, phase == INSIDE
                )
                theirs = keys
                if HAS_SEGMENTS:
                    theirs = tl.load(
                        kv_segments_ptr + keys.to(tl.int64) * stride_kv_segments_t, mask=key_mask, other=-1
                    )
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
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
                if phase != INSIDE and (MASK_KIND > 0 or HAS_SEGMENTS):
                    some = (tl.max(seen.to(tl.int32), 0) > 0)[:, None]
                    k = tl.where(some, k, 0.0)
                    v = tl.where(some, v, 0.0)
                dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
                if HAS_DROPOUT:
                    keep = keep_tile(seed, head, rows, n_start, drop_threshold, BLOCK_M, BLOCK_N)
                    dp = tl.where(keep, dp * rescale, 0.0)
                ds = p * (dp - delta[:, None])
                if HAS_SOFTCAP:
                    ds *= slope
                dq = dot_add(ds.to(k.dtype), k, dq, PRECISION)
    dq *= scale
    if EMPTY_ROWS:
        dq = tl.where((lse2 < float("inf"))[:, None], dq, 0.0)
    store_rows(dq_ptr, dq, rows, cols_d, stride_dq_t, row_mask, HEAD_DIM)


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
    SCAN: tl.constexpr,
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

    length = kv_len
    if HAS_LENGTHS:
        length = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + b * stride_kv_lengths), 0), kv_len).to(
            tl.int32
        )
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    n_start = tile_n * BLOCK_N
    keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    first_seen = max(length - q_len - left, 0)
    key_mask = (keys >= first_seen) & (keys < length)
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    k = load_rows(k_ptr, keys, cols_d, stride_k_t, key_mask, HEAD_DIM, BLOCK_D, False)
    v = load_rows(v_ptr, keys, cols_dv, stride_v_t, key_mask, HEAD_DIM_V, BLOCK_DV, False)

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
    if MASK_KIND == 0 and not HAS_SEGMENTS:
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
        if MASK_KIND > 0:
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
                (phase == 0 and HAS_RIGHT and MASK_KIND == 0 and not HAS_SEGMENTS)
                or (phase == INSIDE and MASK_KIND == 0 and not HAS_SEGMENTS)
                or phase == 2
            ):
                for m_start in range(begin, end, BLOCK_M):
                    rows = m_start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
                    row_mask = rows < q_len
                    q = load_rows(
                        q_head_ptr, rows, cols_d, stride_q_t, row_mask, HEAD_DIM, BLOCK_D, phase == INSIDE
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
                    )
                    lse2 = tl.load(lse2_ptr + row_offset + rows)
                    delta = tl.load(delta_ptr + row_offset + rows)
                    if EMPTY_ROWS and phase != INSIDE:
                        alive = lse2 < float("inf")
                        q = tl.where(alive[:, None], q, 0.0)
                        dout = tl.where(alive[:, None], dout, 0.0)
                        delta = tl.where(alive, delta, 0.0)
                    own = rows
                    if HAS_SEGMENTS:
                        own = tl.load(
                            q_segments_ptr + rows.to(tl.int64) * stride_q_segments_t, mask=row_mask, other=-1
                        )
                    # transposed, so that p and ds are left operands of the next products as they stand
                    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
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
                    dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
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
    store_rows(dk_ptr, dk * scale, keys, cols_d, stride_dk_t, store_mask, HEAD_DIM)
    store_rows(dv_ptr, dv, keys, cols_dv, stride_dv_t, store_mask, HEAD_DIM_V)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_bwd_dmask_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dmask_ptr,
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
    FOLD_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVER_B: tl.constexpr,
    OVER_H: tl.constexpr,
    OVER_M: tl.constexpr,
    OVER_N: tl.constexpr,
):
    """dmask in the mask's own shape, [B or 1, Hq or 1, Tq or 1, Tk or 1], contiguous, one tile a program.

    OVER_X: the mask broadcasts over X, so a program sums over all of it.
    """
    pid = tl.program_id(0).to(tl.int64)
    tiles_n = 1 if OVER_N else tl.cdiv(kv_len, BLOCK_N)
    tiles_m = 1 if OVER_M else tl.cdiv(q_len, BLOCK_M)
    mask_heads = 1 if OVER_H else num_heads
    tile_n = (pid % tiles_n).to(tl.int32)
    tile_m = (pid // tiles_n % tiles_m).to(tl.int32)
    own_h = (pid // tiles_n // tiles_m % mask_heads).to(tl.int32)
    own_b = (pid // tiles_n // tiles_m // mask_heads).to(tl.int32)
    b_start, b_stop = (0, batch) if OVER_B else (own_b, own_b + 1)
    h_start, h_stop = (0, num_heads) if OVER_H else (own_h, own_h + 1)
    m_start, m_stop = (0, q_len) if OVER_M else (tile_m * BLOCK_M, tile_m * BLOCK_M + 1)
    n_start, n_stop = (0, kv_len) if OVER_N else (tile_n * BLOCK_N, tile_n * BLOCK_N + 1)

    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        rescale = 1.0 / (1.0 - drop_threshold / 256.0)
    else:
        seed = 0
        rescale = 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for b in range(b_start, b_stop):
        length = kv_len
        if HAS_LENGTHS:
            length = tl.minimum(tl.maximum(tl.load(kv_lengths_ptr + b * stride_kv_lengths), 0), kv_len).to(
                tl.int32
            )
        first_seen = max(length - q_len - left, 0)
        for h in range(h_start, h_stop):
            b64, h64 = tl.cast(b, tl.int64), tl.cast(h, tl.int64)
            row_offset = (b64 * num_heads + h64) * stride_row_stats
            head = b * num_heads + h
            for i_first in range(m_start, m_stop, BLOCK_M):
                rows = i_first + tl.arange(0, BLOCK_M)
                row_mask = rows < q_len
                q = load_rows(
                    q_ptr + b64 * stride_q_b + h64 * stride_q_h,
                    rows,
                    cols_d,
                    stride_q_t,
                    row_mask,
                    HEAD_DIM,
                    BLOCK_D,
                    False,
                )
                dout = load_rows(
                    dout_ptr + b64 * stride_dout_b + h64 * stride_dout_h,
                    rows,
                    cols_dv,
                    stride_dout_t,
                    row_mask,
                    HEAD_DIM_V,
                    BLOCK_DV,
                    False,
                )
                lse2 = tl.load(lse2_ptr + row_offset + rows)
                delta = tl.load(delta_ptr + row_offset + rows)
                own = rows
                if HAS_SEGMENTS:
                    own = tl.load(
                        q_segments_ptr + b64 * stride_q_segments_b + rows.to(tl.int64) * stride_q_segments_t,
                        mask=row_mask,
                        other=-1,
                    )
                i_last = min(i_first + BLOCK_M, q_len) - 1
                start, stop = kv_span(i_first, i_last, q_len, length, left, right)
                for j_first in range(n_start, n_stop, BLOCK_N):
                    if (j_first + BLOCK_N > start) & (j_first < stop):
                        keys = j_first + tl.arange(0, BLOCK_N)
                        key_mask = (keys >= first_seen) & (keys < length)
                        k = load_rows(
                            k_ptr + b64 * stride_k_b + (h64 // group) * stride_k_h,
                            keys,
                            cols_d,
                            stride_k_t,
                            key_mask,
                            HEAD_DIM,
                            BLOCK_D,
                            False,
                        )
                        v = load_rows(
                            v_ptr + b64 * stride_v_b + (h64 // group) * stride_v_h,
                            keys,
                            cols_dv,
                            stride_v_t,
                            key_mask,
                            HEAD_DIM_V,
                            BLOCK_DV,
                            False,
                        )
                        theirs = keys
                        if HAS_SEGMENTS:
                            theirs = tl.load(
                                kv_segments_ptr
                                + b64 * stride_kv_segments_b
                                + keys.to(tl.int64) * stride_kv_segments_t,
                                mask=key_mask,
                                other=-1,
                            )
                        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                        p, _, seen = probabilities(
                            s,
                            lse2[:, None],
                            rows[:, None],
                            keys[None, :],
                            row_mask[:, None],
                            key_mask[None, :],
                            own[:, None],
                            theirs[None, :],
                            mask_ptr + b64 * stride_mask_b + h64 * stride_mask_h,
                            stride_mask_m,
                            stride_mask_n,
                            q_len,
                            length,
                            left,
                            right,
                            scale,
                            softcap,
                            hidden_below,
                            True,
                            MASK_KIND,
                            HAS_SEGMENTS,
                            HAS_SOFTCAP,
                            FOLD_SCALE,
                        )
                        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
                        if HAS_DROPOUT:
                            keep = keep_tile(seed, head, rows, j_first, drop_threshold, BLOCK_M, BLOCK_N)
                            dp = tl.where(keep, dp * rescale, 0.0)
                        acc += tl.where(seen, p * (dp - delta[:, None]), 0.0)

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_rows = 1 if OVER_M else q_len
    mask_keys = 1 if OVER_N else kv_len
    dmask_ptr += (own_b.to(tl.int64) * mask_heads + own_h) * mask_rows * mask_keys
    dtype = dmask_ptr.dtype.element_ty
    if OVER_M and OVER_N:
        tl.store(dmask_ptr, tl.sum(tl.sum(acc, 1), 0).to(dtype))
    elif OVER_M:
        tl.store(dmask_ptr + keys, tl.sum(acc, 0).to(dtype), mask=keys < kv_len)
    elif OVER_N:
        tl.store(dmask_ptr + rows, tl.sum(acc, 1).to(dtype), mask=rows < q_len)
    else:
        ptrs = dmask_ptr + rows.to(tl.int64)[:, None] * kv_len + keys[None, :]
        tl.store(ptrs, acc.to(dtype), mask=(rows < q_len)[:, None] & (keys < kv_len)[None, :])


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
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``(dq, dk, dv, dmask)``, dmask None unless ``mask_grad``; arguments as in `streamattn.ops`."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = v.shape[1:]
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    arch = architecture_of(q)
    widest, itemsize = max(head_dim, head_dim_v), q.element_size()
    dq_tile, dkdv_tile = (
        choose_tile(name, arch, widest, itemsize, attn_mask is not None) for name in ("dq", "dkdv")
    )
    assert dq_tile.BLOCK_M % dkdv_tile.BLOCK_M == 0, "the dq kernel writes the row statistics the others read"
    dq, dk, dv = heads_last(q), heads_last(k), heads_last(v)
    # two floats a row, padded so that the kernels need no row test: lse in base 2, and delta
    padded = triton.cdiv(q_len, dq_tile.BLOCK_M) * dq_tile.BLOCK_M
    lse2, delta = q.new_empty((2, batch, num_heads, padded), dtype=torch.float32)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    options = (scale, window_left, window_right, softcap, dropout_p)
    key = call_key((q, k, v, *masks, dout, dlse, out), *options)

    # whether some query may see no key at all; such a row may hold anything
    empty_rows = any(x is not None for x in masks) or kv_len - q_len + window_right < 0

    def common(tile: Tile, num_stages: int) -> dict[str, Any]:
        return dict(
            **strides("q", q),
            **strides("k", k),
            **strides("v", v),
            **strides("dout", dout),
            **score_arguments(q, k, v, *masks, *options),
            stride_row_stats=padded,
            batch=batch,
            BLOCK_M=tile.BLOCK_M,
            BLOCK_N=tile.BLOCK_N,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_DV=max(16, triton.next_power_of_2(head_dim_v)),
            num_warps=tile.num_warps,
            num_stages=num_stages,
        )

    def dq_arguments() -> tuple[int, dict[str, Any]]:
        return triton.cdiv(q_len, dq_tile.BLOCK_M) * batch * num_heads, dict(
            **common(dq_tile, dq_tile.num_stages),
            **strides("out", out),
            **strides("dlse", dlse),
            **strides("dq", dq),
            heads_per_group=heads_per_group(k, window_right),
            HAS_DLSE=dlse is not None,
            EMPTY_ROWS=empty_rows,
            SCAN=1024,
        )

    def dkdv_arguments() -> tuple[int, dict[str, Any]]:
        return triton.cdiv(kv_len, dkdv_tile.BLOCK_N) * batch * num_kv_heads, dict(
            **common(dkdv_tile, dkdv_tile.num_stages),
            **strides("dk", dk),
            **strides("dv", dv),
            heads_per_group=heads_per_group(q, window_right),
            EMPTY_ROWS=empty_rows,
            SCAN=1024,
        )

    pointers = dict(
        q_ptr=q,
        k_ptr=k,
        v_ptr=v,
        dout_ptr=dout,
        lse2_ptr=lse2,
        delta_ptr=delta,
        **mask_pointers(*masks, seed),
    )
    with device_guard(q):
        dq_pointers = dict(**pointers, out_ptr=out, lse_ptr=lse, dlse_ptr=dlse, dq_ptr=dq)
        launch(attention_bwd_dq_kernel, key, dq_pointers, dq_arguments)
        launch(attention_bwd_dkdv_kernel, key, dict(**pointers, dk_ptr=dk, dv_ptr=dv), dkdv_arguments)
        if not mask_grad or attn_mask is None:
            return dq, dk, dv, None
        dmask = torch.empty_like(attn_mask, memory_format=torch.contiguous_format)

        def dmask_arguments() -> tuple[int, dict[str, Any]]:
            over = tuple(size == 1 for size in attn_mask.shape)
            tiles_m = 1 if over[2] else triton.cdiv(q_len, dq_tile.BLOCK_M)
            tiles_n = 1 if over[3] else triton.cdiv(kv_len, dq_tile.BLOCK_N)
            return tiles_m * tiles_n * attn_mask.shape[0] * attn_mask.shape[1], dict(
                **common(dq_tile, num_stages=1),
                OVER_B=over[0],
                OVER_H=over[1],
                OVER_M=over[2],
                OVER_N=over[3],
            )

        launch(attention_bwd_dmask_kernel, key, dict(**pointers, dmask_ptr=dmask), dmask_arguments)
    return dq, dk, dv, dmask
