"""Attention forward in portable Triton: NVIDIA GPUs from compute capability 8.0 on, and Triton's interpreter.

One program serves BLOCK_M queries of one (batch, head), walks the tiles of keys that they can see, and keeps
the online softmax's maximum, denominator and accumulator in registers (see `streamattn.reference` for the
algorithm). Tiles that every query sees whole skip the visibility test. q, k, v [B, H, T, D] with any strides
but a unit last one; ``out`` is stored [B, Tq, Hq, Dv]; ``lse`` [B, Hq, Tq] float32. Left out on purpose:
float64, head_dim above 256, empty tensors (the dispatcher never sends them).
"""

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
    heads_per_group,
    launch,
    launch_again,
    mask_pointers,
    product_precision,
    result_layouts,
    rows_are_aligned,
    strides,
    tile_for,
)
from streamattn.kernels.primitives import (
    BOOL_MASK,
    INSIDE,
    LN2,
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
    online_softmax_update,
    schedule,
    segment_range,
    segment_span,
    store_rows,
    tanh,
    valid_length,
    visible,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    kv_lengths_ptr,
    seed_ptr,
    sinks_ptr,
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
    FOLD_SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out [B, Hq, Tq, Dv] and lse [B, Hq, Tq], BLOCK_M rows of one head a program."""
    num_tiles = tl.cdiv(q_len, BLOCK_M)
    tile_m, head = schedule(tl.program_id(0), num_tiles, batch * num_heads, heads_per_group)
    tile_m = num_tiles - 1 - tile_m  # under a causal mask late queries see most
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    q_ptr += b64 * stride_q_b + h64 * stride_q_h
    k_ptr += b64 * stride_k_b + (h64 // group) * stride_k_h
    v_ptr += b64 * stride_v_b + (h64 // group) * stride_v_h
    out_ptr += b64 * stride_out_b + h64 * stride_out_h
    lse_ptr += (b64 * num_heads + h64) * q_len

    i_first = tile_m * BLOCK_M
    rows = i_first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < q_len
    cols_d = tl.arange(0, BLOCK_D)
    cols_dv = tl.arange(0, BLOCK_DV)
    q = load_rows(
        q_ptr, rows, cols_d, stride_q_t, row_mask, HEAD_DIM, BLOCK_D, False, ALIGNED
    )  # [BLOCK_M, BLOCK_D]

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

    # [start, left_end) and [full_end, stop) need the visibility test, [left_end, full_end) is seen by every
    # query
    if MASK_KIND == NO_MASK and not HAS_SEGMENTS:
        full_start, full_stop = kv_span_full(i_first, i_last, q_len, length, left, right)
        left_end = start
        if HAS_LEFT:
            left_end = max(start, min(tl.cdiv(full_start, BLOCK_N) * BLOCK_N, stop))
        full_end = max(left_end, full_stop // BLOCK_N * BLOCK_N)
    else:
        left_end = start
        full_end = start
    first_seen = max(length - q_len - left, 0)  # keys before it are seen by no query at all

    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
    else:
        seed = 0
    score_scale = scale * LOG2E if FOLD_SCALE else 1.0
    if HAS_SINKS:  # a key of its own, seen by every row, with no value
        m = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
        l = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

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
                keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
                key_mask = (keys >= first_seen) & (keys < length)
                k = load_rows(
                    k_ptr, keys, cols_d, stride_k_t, key_mask, HEAD_DIM, BLOCK_D, phase == INSIDE, ALIGNED
                )
                s = dot_rows(q, k, PRECISION)  # [BLOCK_M, BLOCK_N]
                if not FOLD_SCALE:
                    s *= scale
                    if HAS_SOFTCAP:
                        s = softcap * tanh(s / softcap)
                if phase != INSIDE:
                    seen = visible(rows[:, None], keys[None, :], q_len, length, left, right)
                    if HAS_SEGMENTS:
                        theirs = tl.load(
                            kv_segments_ptr + keys.to(tl.int64) * stride_kv_segments_t,
                            mask=key_mask,
                            other=-1,
                        )
                        seen = seen & (own[:, None] == theirs[None, :]) & (own[:, None] >= 0)
                    if MASK_KIND != NO_MASK:
                        mask_ptrs = (
                            mask_ptr
                            + (b64 * stride_mask_b + h64 * stride_mask_h)
                            + rows.to(tl.int64)[:, None] * stride_mask_m
                            + keys.to(tl.int64)[None, :] * stride_mask_n
                        )
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
                if phase != INSIDE:
                    s = tl.where(seen, s, float("-inf"))
                p, rescale, m, l = online_softmax_update(s, m, l, score_scale, phase != INSIDE)
                if HAS_DROPOUT:
                    p = tl.where(
                        keep_tile(seed, head, rows, n_start, drop_threshold, BLOCK_M, BLOCK_N), p, 0.0
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
                if phase != INSIDE and (MASK_KIND != NO_MASK or HAS_SEGMENTS):
                    v = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], v, 0.0)
                acc = acc * rescale[:, None]
                acc = dot_add(p.to(v.dtype), v, acc, PRECISION)

    denominator = tl.where(l == 0.0, 1.0, l)
    if HAS_DROPOUT:
        denominator *= 1.0 - drop_threshold / 256.0
    acc /= denominator[:, None]
    store_rows(out_ptr, acc, rows, cols_dv, stride_out_t, row_mask, HEAD_DIM_V, ALIGNED)
    tl.store(lse_ptr + rows, (m + tl.log2(l)) * LN2, mask=row_mask)


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
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``; arguments as in `streamattn.ops`, whose calls of one ``kind`` are launched alike."""
    batch, num_heads, q_len, _ = q.shape
    out = heads_last(q, v.shape[-1])
    lse = q.new_empty(batch, num_heads, q_len, dtype=torch.float32)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    options = (scale, window_left, window_right, softcap, dropout_p)
    if kind is None:
        key, varying = call_key((q, k, v, *masks, sinks), *options), ()
    else:
        key, varying = _kind_key(q, k, v, kind)

    def arguments() -> tuple[int, dict[str, Any]]:
        tile = tile_for("forward", q, v, attn_mask)
        return -(-q_len // tile.BLOCK_M) * batch * num_heads, dict(
            **call_arguments(tile, q, k, v, *masks, *options),
            **strides("out", out),
            heads_per_group=heads_per_group(k, window_right),
            HAS_SINKS=sinks is not None,
            ALIGNED=rows_are_aligned(q, k, v, out),
        )

    pointers = (q, k, v, out, lse, *mask_pointers(*masks, seed), sinks)
    with device_guard(q):
        launch(attention_fwd_kernel, key, pointers, arguments, varying)
    return out, lse


def repeat_attention_forward(
    q: Tensor, v: Tensor, kind: Hashable
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """What serves more calls of a kind that `attention_forward` has served, in a third of its time.

    Args:
        q: of a call of that kind.
        v: of the same call.
        kind: as `attention_forward` takes it.

    Returns:
        Returns ``(out, lse)`` of q, k and v of another call; None where `attention_forward` must serve it.
    """
    dtype, device = q.dtype, q.get_device()
    out_layout, lse_layout = result_layouts(q, v.shape[3])

    def again(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        if device != torch._C._cuda_getDevice():
            return None
        # the dispatcher is half of the time that `new_empty` takes
        out = _empty_strided_cuda(*out_layout, dtype)
        lse = _empty_strided_cuda(*lse_layout, torch.float32)
        key, varying = _kind_key(q, k, v, kind)
        return (out, lse) if launch_again(attention_fwd_kernel, key, (q, k, v, out, lse), varying) else None

    return again


def _kind_key(q: Tensor, k: Tensor, v: Tensor, kind: Hashable) -> tuple[Hashable, tuple[int, ...]]:
    """Key and varying arguments of the launches of one kind.

    Only a kind of few queries is of any number of keys, and then heads_per_group need not depend on it.
    """
    k_strides, v_strides = k.stride(), v.stride()
    varying = (k.shape[2], k_strides[0], k_strides[1], v_strides[0], v_strides[1])
    return (kind, product_precision(q)), varying
