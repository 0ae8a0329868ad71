"""Attention forward for wide heads with few queries and keys, which would leave most of a GPU idle otherwise.

One kernel sums scores over parts of the columns of a head, each by a program of its own; the other adds up
the parts, in order, takes the softmax and makes slices of the columns of ``out``. All keys, at most
`tiles.WIDE_SHORT_KEYS`, are one tile. The parts take as much memory as the scores, times their number.
wide.py calls this; layouts are as there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamattn.kernels import tiles
from streamattn.kernels.launch import (
    UNSPECIALIZED,
    architecture_of,
    call_arguments,
    launch,
    mask_pointers,
    starts_early,
    strides,
)
from streamattn.kernels.primitives import (
    LN2,
    LOG2E,
    NO_MASK,
    UNBOUNDED,
    dot_add_parts,
    keep_tile,
    load_rows,
    store_rows,
    sum_of_parts,
    valid_length,
)
from streamattn.kernels.wide_launch import arguments_of, cdiv, multiprocessors, power_of_two, shared_tile
from streamattn.kernels.wide_primitives import head_products, only_weighted, scores

MAX_PARTS = 32


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_partial_kernel(
    q_ptr,
    k_ptr,
    parts_ptr,
    kv_lengths_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_t,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_kv_lengths,
    stride_parts,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of q and k over PART columns each, float32 [PARTS, heads, rows, BLOCK_N]; a tile a program.

    BLOCK_N holds all keys. DEPENDENT where the kernel that adds up the parts starts before they are there.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(q_len, BLOCK_M)
    pid = tl.program_id(0)
    part, tile_m, head = pid % PARTS, pid // PARTS % tiles_m, pid // (PARTS * tiles_m)
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    q_ptr += b64 * stride_q_b + h64 * stride_q_h
    k_ptr += b64 * stride_k_b + (h64 // group) * stride_k_h
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    keys = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    key_mask = (keys >= max(length - q_len - left, 0)) & (keys < length)
    s = head_products(
        q_ptr,
        k_ptr,
        rows,
        keys,
        stride_q_t,
        stride_k_t,
        rows < q_len,
        key_mask,
        part * PART,
        min(part * PART + PART, HEAD_DIM),
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        PRECISION,
    )
    local_rows = (head * tiles_m + tile_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    ptrs = parts_ptr + part.to(tl.int64) * stride_parts + local_rows[:, None] * BLOCK_N + keys[None, :]
    tl.store(ptrs, s)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_short_kernel(
    v_ptr,
    parts_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    kv_lengths_ptr,
    seed_ptr,
    sinks_ptr,
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
    stride_parts,
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
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    SLICE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [B, Hq, Tq, Dv] and lse [B, Hq, Tq] from parts of the scores, SLICE columns a program.

    BLOCK_N holds all keys.
    """
    slices: tl.constexpr = (HEAD_DIM_V + SLICE - 1) // SLICE
    tiles_m = tl.cdiv(q_len, BLOCK_M)
    pid = tl.program_id(0)
    part, tile_m, head = pid % slices, pid // slices % tiles_m, pid // (slices * tiles_m)
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    v_ptr += b64 * stride_v_b + (h64 // group) * stride_v_h
    out_ptr += b64 * stride_out_b + h64 * stride_out_h
    lse_ptr += (b64 * num_heads + h64) * q_len
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    keys = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row_mask = rows < q_len
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    key_mask = (keys >= max(length - q_len - left, 0)) & (keys < length)

    local_rows = (head * tiles_m + tile_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for n in tl.static_range(0, PARTS):  # unrolled, so that all are on their way at once
        s += tl.load(parts_ptr + n * stride_parts + local_rows[:, None] * BLOCK_N + keys[None, :])
    own = rows
    theirs = keys
    if HAS_SEGMENTS:
        q_segments_ptr += b64 * stride_q_segments_b
        kv_segments_ptr += b64 * stride_kv_segments_b
        own = tl.load(q_segments_ptr + rows.to(tl.int64) * stride_q_segments_t, mask=row_mask, other=-1)
        theirs = tl.load(kv_segments_ptr + keys.to(tl.int64) * stride_kv_segments_t, mask=key_mask, other=-1)
    if MASK_KIND != NO_MASK:
        mask_ptr += b64 * stride_mask_b + h64 * stride_mask_h
    s = scores(
        s,
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
        False,
        MASK_KIND,
        HAS_SEGMENTS,
        HAS_SOFTCAP,
        FOLD_SCALE,
    )
    m = tl.max(s, 1)
    if HAS_SINKS:  # a key of its own, seen by every row, with no value
        sink = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    base = tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp2(s - base[:, None])
    l = tl.sum(p, 1)
    if HAS_SINKS:
        l += tl.exp2(sink - base)
    denominator = tl.where(l == 0.0, 1.0, l)
    if HAS_DROPOUT:
        seed = tl.load(seed_ptr)
        p = tl.where(keep_tile(seed, head, rows, 0, drop_threshold, BLOCK_M, BLOCK_N), p, 0.0)
        denominator *= 1.0 - drop_threshold / 256.0
    if part == 0:
        tl.store(lse_ptr + rows, (m + tl.log2(l)) * LN2, mask=row_mask)

    WIDTH: tl.constexpr = HEAD_DIM_V if HEAD_DIM_V % BLOCK_D == 0 else 0
    p = p.to(v_ptr.dtype.element_ty)
    for start in range(part * SLICE, min(part * SLICE + SLICE, HEAD_DIM_V), BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        v = load_rows(
            v_ptr, keys, cols, stride_v_t, key_mask, HEAD_DIM_V, WIDTH, False, False
        )  # [BLOCK_N, BLOCK_D]
        if MASK_KIND != NO_MASK or HAS_SEGMENTS:
            v = only_weighted(v, p, 0)
        zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        acc, low = dot_add_parts(p, v, zeros, zeros, PRECISION)
        acc = sum_of_parts(acc, low, PRECISION)
        store_rows(out_ptr, acc / denominator[:, None], rows, cols, stride_out_t, row_mask, HEAD_DIM_V, False)


def parts_of(q: Tensor, k: Tensor) -> int:
    """In how many parts the columns of a head are summed; 1 where there are programs enough without."""
    batch, num_heads, q_len, head_dim = q.shape
    if k.shape[2] > tiles.WIDE_SHORT_KEYS:
        return 1
    (tile,) = tiles.wide_tiles("partial", architecture_of(q), q.element_size())
    programs = batch * num_heads * cdiv(q_len, tile.BLOCK_M)
    return min(cdiv(head_dim, tile.BLOCK_D), max(1, multiprocessors(q) // programs), MAX_PARTS)


def forward_by_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: tuple[Tensor | None, ...],
    seed: Tensor | None,
    sinks: Tensor | None,
    options: tuple[Any, ...],
    key: Any,
) -> None:
    """Writes out [B, Hq, Tq, Dv] and lse [B, Hq, Tq] of a call that `parts_of` cuts.

    Args:
        q: [B, Hq, Tq, D].
        k: [B, Hkv, Tk, D].
        v: [B, Hkv, Tk, Dv].
        out: written.
        lse: written.
        masks: attn_mask, q_segments, kv_segments and kv_lengths, as in `streamattn.ops`.
        seed: as there.
        sinks: as there.
        options: scale, window_left, window_right, softcap and dropout_p, as there.
        key: of the call, as `launch` takes it.
    """
    batch, num_heads, q_len, head_dim = q.shape
    arch, itemsize = architecture_of(q), q.element_size()
    (partial,), (short,) = (tiles.wide_tiles(name, arch, itemsize) for name in ("partial", "short"))
    block_m = min(partial.BLOCK_M, max(16, power_of_two(q_len)))
    block_n = max(16, power_of_two(k.shape[2]))
    tiles_m = cdiv(q_len, block_m)
    heads = batch * num_heads
    steps = cdiv(head_dim, partial.BLOCK_D)
    part = cdiv(steps, parts_of(q, k)) * partial.BLOCK_D
    parts = cdiv(head_dim, part)
    sums = q.new_empty((parts, heads * tiles_m * block_m, block_n), dtype=torch.float32)
    blocks = dict(BLOCK_M=block_m, BLOCK_N=block_n, PARTS=parts, stride_parts=sums.stride(0))

    def partial_arguments() -> tuple[int, dict[str, Any]]:
        shared = call_arguments(shared_tile(partial), q, k, v, *masks, *options)
        own = dict(**blocks, BLOCK_D=partial.BLOCK_D, PART=part, DEPENDENT=starts_early(q))
        return parts * tiles_m * heads, arguments_of(attention_wide_partial_kernel, shared, **own)

    def short_arguments() -> tuple[int, dict[str, Any]]:
        shared = call_arguments(shared_tile(short), q, k, v, *masks, *options)
        steps = cdiv(v.shape[3], short.BLOCK_D)
        programs = min(steps, max(1, multiprocessors(q) // (tiles_m * heads)))
        width = cdiv(steps, programs) * short.BLOCK_D
        own = dict(**blocks, **strides("out", out), BLOCK_D=short.BLOCK_D, SLICE=width)
        early = starts_early(q)
        own.update(HAS_SINKS=sinks is not None, DEPENDENT=early, launch_pdl=early)
        slices = cdiv(v.shape[3], width)
        return slices * tiles_m * heads, arguments_of(attention_wide_short_kernel, shared, **own)

    pointers = (q, k, sums, masks[3])
    launch(attention_wide_partial_kernel, key, pointers, partial_arguments)
    pointers = (v, sums, out, lse, *mask_pointers(*masks, seed), sinks)
    launch(attention_wide_short_kernel, key, pointers, short_arguments)
