"""Attention backward for Hopper (compute capability 9.0), in Gluon: dq, dk and dv in one walk of the tiles.

Three kernels, and with segments in order a fourth. The first leaves the statistics of the rows, ``lse`` in
base 2 and ``delta = rowsum(dout * out) - dlse``, and clears the float32 sums of dq, or whose turn it is. In
the second a program has CONSUMERS * 64 keys of one (batch, key head), whose dk and dv its consumers keep in
registers; it walks the tiles of 64 queries that see them, over all query heads of the group, while one warp
copies by TMA. Each tile's share of dq is added to the sums by TMA. Its product belongs to the consumers, each
taking half of the columns, or where registers suffice (head dimension 64) to a warpgroup of its own, so that
no consumer ever waits for another. The third kernel scales and rounds dq.

Layouts as in `hopper_forward`; gradients are stored [B, T, H, D]. dk and dv are the same bits for the same
inputs; dq is too if asked for or short (see `hopper_backward_order`), or else its sums take their terms as
they come.
Left out on purpose, and left to `backward`: ``attn_mask``, sinks, and what `dispatch.unsupported_backward`
says. Head dimensions above 128 have a kernel of their own in `hopper_backward_shared`, between the same two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from streamattn.kernels.hopper_backward_order import dq_adder, hopper_bwd_ranks_kernel
from streamattn.kernels.hopper_backward_shared import hopper_bwd_shared_kernel
from streamattn.kernels.hopper_backward_warps import (
    CONSUMERS,
    DS_BUFFERS,
    ROWS,
    backward_variant_of,
    consumer,
    dq_worker,
    producer,
)
from streamattn.kernels.hopper_launch import descriptor, flat_descriptor, group_of_heads
from streamattn.kernels.launch import (
    UNSPECIALIZED,
    call_key,
    device_guard,
    heads_last,
    launch,
    multiprocessor_count,
    strides,
)
from streamattn.kernels.primitives import LOG2E
from streamattn.kernels.tiles import HOPPER_BACKWARD_TILES
from streamattn.pattern import UNBOUNDED, drop_threshold, open_sides


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def hopper_bwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    stats_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    kv_lengths_ptr,
    spans_ptr,
    q_ids_ptr,
    kv_ids_ptr,
    seed_ptr,
    turns_ptr,
    ranks_ptr,
    stride_kv_lengths,
    stride_q_ids,
    stride_kv_ids,
    batch,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    window_right,
    heads_per_group,
    scale,
    softcap,
    dk_scale,
    dv_scale,
    drop_threshold,
    first_query,
    STAGES: gl.constexpr,
    OWN_DQ: gl.constexpr,
    REGISTERS: gl.constexpr,
    DQ_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    HAS_SEGMENTS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_DROPOUT: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """dk, dv [B, Hkv, Tk, D], and sums of dq; first_query is what dropout calls the first of q.

    turns [B, Hq, tiles of queries] if ORDERED: how many programs have added to the sums of a tile. ranks if
    segments are ORDERED: see `hopper_bwd_ranks_kernel`.
    """
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [CONSUMERS] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(dtype, [CONSUMERS] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q_smem = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES] + dout_desc.block_shape, dout_desc.layout)  # noqa: RUF005
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats_desc.layout)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [DS_BUFFERS * CONSUMERS, ROWS, ROWS], DS_LAYOUT)
    VARIANT: gl.constexpr = backward_variant_of(
        OWN_DQ,
        False,
        RAGGED,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_LENGTHS,
        HAS_SEGMENTS,
        HAS_SOFTCAP,
        HAS_DROPOUT,
        ORDERED,
    )
    PARTS: gl.constexpr = 1 if OWN_DQ else CONSUMERS
    ADDERS: gl.constexpr = VARIANT.value.ADDERS
    dq_smem = gl.allocate_shared_memory(
        gl.float32, [ADDERS * PARTS if ORDERED else PARTS, 16, 256], dq_desc.layout
    )
    BITS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    bits_smem = gl.allocate_shared_memory(
        gl.uint32, [CONSUMERS, 4, 4, 8] if HAS_DROPOUT else [1, 1, 1, 1], BITS_LAYOUT
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [DS_BUFFERS, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
    for i in gl.static_range(DS_BUFFERS):
        mbarrier.init(ds_free.index(i), count=1)
    raw = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(raw, count=1)
    barriers = (k_full, v_full, q_full, dout_full, ds_free, raw)
    if ORDERED:
        dq_full = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], BARRIER)
        dq_free = gl.allocate_shared_memory(gl.int64, [ADDERS, 1], BARRIER)
        for i in gl.static_range(ADDERS):
            mbarrier.init(dq_full.index(i), count=PARTS)
            mbarrier.init(dq_free.index(i), count=1)
        barriers = (k_full, v_full, q_full, dout_full, ds_free, raw, dq_full, dq_free)
    fence_async_shared()

    shape = (batch, num_heads, group, q_len, kv_len, window_left, window_right, heads_per_group)
    segments = (spans_ptr, q_ids_ptr, stride_q_ids, kv_ids_ptr, stride_kv_ids)
    visibility = (kv_lengths_ptr, stride_kv_lengths, segments)
    scaling = (scale, softcap, (seed_ptr, drop_threshold, first_query))
    buffers = (k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, ds_smem, dq_smem, bits_smem)
    job = (dk_desc, dv_desc, dq_desc, buffers, barriers, shape, visibility, scaling, dk_scale, dv_scale)
    feed = ((q_desc, k_desc, v_desc, dout_desc, stats_desc), buffers, barriers, shape, visibility)
    sums = (turns_ptr, ranks_ptr, dq_desc, dq_smem, barriers, shape, visibility)
    # the first consumer has the program's own warps and what the others leave of the registers
    if ORDERED and OWN_DQ:
        gl.warp_specialize(
            [
                (consumer, (job, 0, VARIANT)),
                (consumer, (job, 1, VARIANT)),
                (dq_worker, (job, VARIANT)),
                (producer, (feed, VARIANT)),
                (dq_adder, (sums, 0, VARIANT)),
                (dq_adder, (sums, 1, VARIANT)),
                (dq_adder, (sums, 2, VARIANT)),
            ],
            [4, 4, 1, 1, 1, 1],
            [REGISTERS, DQ_REGISTERS, 24, 24, 24, 24],
        )
    elif ORDERED:
        gl.warp_specialize(
            [
                (consumer, (job, 0, VARIANT)),
                (consumer, (job, 1, VARIANT)),
                (producer, (feed, VARIANT)),
                (dq_adder, (sums, 0, VARIANT)),
                (dq_adder, (sums, 1, VARIANT)),
            ],
            [4, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )
    elif OWN_DQ:
        gl.warp_specialize(
            [
                (consumer, (job, 0, VARIANT)),
                (consumer, (job, 1, VARIANT)),
                (dq_worker, (job, VARIANT)),
                (producer, (feed, VARIANT)),
            ],
            [4, 4, 1],
            [REGISTERS, DQ_REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (job, 0, VARIANT)),
                (consumer, (job, 1, VARIANT)),
                (producer, (feed, VARIANT)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def hopper_bwd_prepare_kernel(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    stats_ptr,
    sums_ptr,
    turns_ptr,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    stride_dout_b,
    stride_dout_h,
    stride_dout_t,
    stride_lse_b,
    stride_lse_h,
    stride_lse_t,
    stride_dlse_b,
    stride_dlse_h,
    stride_dlse_t,
    batch,
    num_heads,
    q_len,
    delta_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """stats [2, B, Hq, padded], lse in base 2 and delta, +inf and 0 where a row sees nothing.

    Also sums of 0, or turns of 0, where the first program to add writes the sums.
    """
    num_tiles = tl.cdiv(q_len, BLOCK_M)
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    i = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    mask = i < q_len
    rows = i.to(tl.int64)
    cols = tl.arange(0, BLOCK_D)
    out_ptrs = out_ptr + b * stride_out_b + h * stride_out_h + rows[:, None] * stride_out_t + cols
    dout_ptrs = dout_ptr + b * stride_dout_b + h * stride_dout_h + rows[:, None] * stride_dout_t + cols
    inside = mask[:, None] & (cols < HEAD_DIM)[None, :]
    out = tl.load(out_ptrs, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptrs, mask=inside, other=0.0).to(tl.float32)
    lse_ptrs = lse_ptr + b * stride_lse_b + h * stride_lse_h + rows * stride_lse_t
    lse = tl.load(lse_ptrs, mask=mask, other=float("-inf"))
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        dlse_ptrs = dlse_ptr + b * stride_dlse_b + h * stride_dlse_h + rows * stride_dlse_t
        delta -= tl.load(dlse_ptrs, mask=mask, other=0.0)
    at = head * num_tiles * BLOCK_M + rows
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    tl.store(stats_ptr + at, lse2)
    delta = tl.where(lse == float("-inf"), 0.0, delta * delta_scale)
    tl.store(stats_ptr + batch.to(tl.int64) * num_heads * num_tiles * BLOCK_M + at, delta)
    if turns_ptr is None:
        tl.store(sums_ptr + at[:, None] * BLOCK_D + cols, tl.zeros([BLOCK_M, BLOCK_D], tl.float32))
    else:
        tl.store(turns_ptr + tl.program_id(0), 0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def hopper_bwd_finish_kernel(
    sums_ptr,
    turns_ptr,
    dq_ptr,
    stride_dq_b,
    stride_dq_h,
    stride_dq_t,
    num_heads,
    q_len,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dq [B, Hq, Tq, D] from its sums, tiles of 64 queries in 64 columns each in the order of `add_dq`."""
    num_tiles = tl.cdiv(q_len, 64)
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    b, h = head // num_heads, head % num_heads
    m = tl.program_id(0) % num_tiles
    rows = m * 64 + tl.arange(0, 64)  # [64]
    if turns_ptr is not None:
        seen = tl.load(turns_ptr + tl.program_id(0)) > 0
    sums_ptr += (head * num_tiles + m) * (64 * BLOCK_D)
    dq_ptr += b * stride_dq_b + h * stride_dq_h
    for part in tl.static_range(BLOCK_D // 64):
        x = tl.load(sums_ptr + part * 4096 + tl.arange(0, 4096)) * scale
        if turns_ptr is not None:  # no program added to what no key is seen by
            x = tl.where(seen, x, 0.0)
        # warp, half, row of eight, block of eight columns, pair, column
        x = x.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 64])
        cols = part * 64 + tl.arange(0, 64)
        dq_ptrs = dq_ptr + rows.to(tl.int64)[:, None] * stride_dq_t + cols
        inside = (rows < q_len)[:, None] & (cols < HEAD_DIM)[None, :]
        tl.store(dq_ptrs, x.to(dq_ptr.dtype.element_ty), mask=inside)


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Tensor | None,
    q_ids: Tensor | None,
    kv_ids: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    deterministic: bool,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(dq, dk, dv)`` of a call that `dispatch.unsupported_backward` lets pass; see `streamattn.ops`.

    ``spans``, ``q_ids`` and ``kv_ids`` are what `segments.key_spans` makes of segments. ``grads`` are written
    if given; they start, and step from row to row, at whole 16 bytes.
    """
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len = k.shape[1:3]
    dq, dk, dv = grads or (heads_last(x, head_dim) for x in (q, k, v))
    window_left, window_right = open_sides(q_len, kv_len, window_left, window_right)
    live_dq = dq
    blind = q_len - kv_len - window_right  # queries too far before the first key; they may hold anything
    blind = max(blind, 0) if spans is None and kv_lengths is None else 0
    if blind:
        dq[:, :, :blind] = 0.0
        q, out, dout, lse, live_dq = (x[:, :, blind:] for x in (q, out, dout, lse, dq))
        dlse = None if dlse is None else dlse[:, :, blind:]
        q_len -= blind
    block_d = next(x for x in HOPPER_BACKWARD_TILES if head_dim <= x)
    tile, shared_keys = HOPPER_BACKWARD_TILES[block_d], block_d > 128
    ordered = deterministic or (max(q_len, kv_len) <= tile.IN_ORDER and spans is None)
    assert not (ordered and shared_keys), "its kernel adds up dq in any order"
    rows = ROWS.value
    keys = rows if shared_keys else CONSUMERS.value * rows
    q_tiles, kv_tiles = -(-q_len // rows) * batch * num_heads, -(-kv_len // keys)
    stats = lse.new_empty(2 * q_tiles * rows)
    sums = lse.new_empty((q_tiles * rows * block_d // 256, 256))
    turns = lse.new_empty(q_tiles, dtype=torch.int32) if ordered else None
    ranks = None
    if ordered and spans is not None:
        dtype = torch.int16 if kv_tiles < 1 << 15 else torch.int32
        ranks = spans.new_empty(batch * kv_tiles * -(-q_len // rows), dtype=dtype)
    threshold = drop_threshold(dropout_p)
    rescale = 1.0 / (1.0 - threshold / 256)  # of what is kept; folded into the gradients' scales

    def rank_arguments() -> tuple[int, dict[str, Any]]:
        tiles = 64
        return batch * -(-q_len // (rows * tiles)), dict(
            q_len=q_len,
            kv_len=kv_len,
            window_left=window_left,
            window_right=window_right,
            ROWS=rows,
            CONSUMERS=CONSUMERS.value,
            TILES=tiles,
            num_warps=4,
        )

    def prepare_arguments() -> tuple[int, dict[str, Any]]:
        return q_tiles, dict(
            **strides("out", out),
            **strides("dout", dout),
            **strides("lse", lse),
            **strides("dlse", dlse),
            batch=batch,
            num_heads=num_heads,
            q_len=q_len,
            delta_scale=1.0 / rescale,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            BLOCK_M=rows,
            HAS_DLSE=dlse is not None,
            num_warps=4,
        )

    def arguments() -> tuple[int, dict[str, Any]]:
        multiprocessors, kv_heads = multiprocessor_count(q.get_device()), batch * num_kv_heads
        own: dict[str, Any] = {}
        if not shared_keys:
            own = dict(
                dq_desc=flat_descriptor(sums, 16, 256),
                OWN_DQ=tile.OWN_DQ,
                DQ_REGISTERS=tile.DQ_REGISTERS,
                ORDERED=ordered,
            )
        return kv_tiles * kv_heads, own | dict(
            q_desc=descriptor(q, rows, block_d),
            k_desc=descriptor(k, rows, block_d),
            v_desc=descriptor(v, rows, block_d),
            dout_desc=descriptor(dout, rows, block_d),
            stats_desc=flat_descriptor(stats, rows),
            dk_desc=descriptor(dk, rows, block_d),
            dv_desc=descriptor(dv, rows, block_d),
            stride_kv_lengths=0 if kv_lengths is None else kv_lengths.stride(0),
            stride_q_ids=0 if q_ids is None else q_ids.stride(0),
            stride_kv_ids=0 if kv_ids is None else kv_ids.stride(0),
            batch=batch,
            num_heads=num_heads,
            group=num_heads // num_kv_heads,
            q_len=q_len,
            kv_len=kv_len,
            window_left=window_left,
            window_right=window_right,
            heads_per_group=group_of_heads(q, window_right, kv_tiles, kv_heads, multiprocessors, ordered),
            scale=scale,
            softcap=softcap,
            dk_scale=scale * rescale,
            dv_scale=rescale,
            drop_threshold=threshold,
            first_query=blind,
            STAGES=tile.STAGES,
            REGISTERS=tile.REGISTERS,
            RAGGED=kv_len % keys > 0,
            HAS_LEFT=window_left < UNBOUNDED,
            HAS_RIGHT=window_right < UNBOUNDED,
            HAS_LENGTHS=kv_lengths is not None,
            HAS_SEGMENTS=spans is not None,
            HAS_SOFTCAP=softcap > 0.0,
            HAS_DROPOUT=threshold > 0,
            num_warps=4,
        )

    def finish_arguments() -> tuple[int, dict[str, Any]]:
        return q_tiles, dict(
            **strides("dq", live_dq),
            num_heads=num_heads,
            q_len=q_len,
            scale=scale * rescale,
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            num_warps=4,
        )

    tensors = (q, k, v, out, dout, lse, dlse, q_ids, kv_ids, kv_lengths, *(grads or ()))
    key = call_key(tensors, scale, window_left, window_right, softcap, dropout_p, blind, ordered)
    with device_guard(q):
        launch(hopper_bwd_prepare_kernel, key, (out, dout, lse, dlse, stats, sums, turns), prepare_arguments)
        pointers = (q, k, v, dout, stats, sums, dk, dv, kv_lengths, spans, q_ids, kv_ids, seed)
        if ranks is not None:
            launch(hopper_bwd_ranks_kernel, key, (spans, ranks), rank_arguments)
        if shared_keys:
            launch(hopper_bwd_shared_kernel, key, pointers, arguments)
        else:
            launch(hopper_bwd_kernel, key, (*pointers, turns, ranks), arguments)
        launch(hopper_bwd_finish_kernel, key, (sums, turns, live_dq), finish_arguments)
    return dq, dk, dv
