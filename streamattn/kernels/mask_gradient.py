"""The gradient of an additive mask in portable Triton, run only where the mask wants one.

One program serves one tile of the mask's own shape and sums over what the mask broadcasts, so nothing larger
than the mask is stored and no sum needs atomics: the same inputs give the same bits. It recomputes the
probabilities from the row statistics that backward.py leaves. Layouts as in forward.py. Left out on purpose:
what forward.py leaves out.
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
    launch,
    mask_pointers,
    rows_are_aligned,
    strides,
    tile_for,
)
from streamattn.kernels.primitives import (
    UNBOUNDED,
    dot_rows,
    keep_tile,
    kv_span,
    load_rows,
    probabilities,
    valid_length,
)


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
    ALIGNED: tl.constexpr,
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
        length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
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
                    ALIGNED,
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
                    ALIGNED,
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
                            ALIGNED,
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
                            ALIGNED,
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
                        s = dot_rows(q, k, PRECISION)
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
                        dp = dot_rows(dout, v, PRECISION)
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


def attention_mask_gradient(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    attn_mask: Tensor,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> Tensor:
    """``dmask`` in the mask's own shape and dtype, contiguous.

    lse2 and delta as backward.py's `attention_backward` returned them for the same call; the other arguments
    as in `streamattn.ops`, dout with a unit last stride.
    """
    dmask = torch.empty_like(attn_mask, memory_format=torch.contiguous_format)
    padded = lse2.shape[-1]
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    options = (scale, window_left, window_right, softcap, dropout_p)

    def arguments() -> tuple[int, dict[str, Any]]:
        tile = tile_for("dq", q, v, attn_mask)
        assert padded % tile.BLOCK_M == 0, "the kernel reads whole tiles of the row statistics"
        over_b, over_h, over_m, over_n = (size == 1 for size in attn_mask.shape)
        tiles_m = 1 if over_m else triton.cdiv(q.shape[2], tile.BLOCK_M)
        tiles_n = 1 if over_n else triton.cdiv(k.shape[2], tile.BLOCK_N)
        return tiles_m * tiles_n * attn_mask.shape[0] * attn_mask.shape[1], dict(
            **call_arguments(tile, q, k, v, *masks, *options),
            **strides("dout", dout),
            stride_row_stats=padded,
            ALIGNED=rows_are_aligned(q, k, v, dout),
            OVER_B=over_b,
            OVER_H=over_h,
            OVER_M=over_m,
            OVER_N=over_n,
        )

    pointers = (q, k, v, dout, lse2, delta, dmask, *mask_pointers(*masks, seed))
    with device_guard(q):
        key = call_key((q, k, v, *masks, dout, lse2), *options)
        launch(attention_bwd_dmask_kernel, key, pointers, arguments)
    return dmask
