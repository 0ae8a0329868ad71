"""Attention forward for Hopper (compute capability 9.0), in Gluon: warp-specialized and persistent.

A program keeps one producer warp and CONSUMERS warpgroups. A work item is CONSUMERS * BLOCK_M queries of one
(batch, head), each consumer owning BLOCK_M of them. The producer copies q, k and v to shared memory by TMA;
a consumer walks its keys from the last tile to the first and, while the tensor cores multiply one tile's
probabilities with v, computes the exponentials of the next (see `streamattn.reference` for the algorithm).
Only a tile at an edge of the window or of a segment is tested for visibility. Where items differ in length,
the longest start first and, if there are more items than programs, a program draws its next one from a
counter; else the items of a program are fixed. What nobody sees never enters a product, whatever it holds:
tiles end with a sequence's length, and rows of v that are padding are cleared in shared memory.

q, k, v [B, H, T, D] with a unit last stride and other strides of whole 16-byte words; ``out`` is stored [B,
Tq, Hq, D]; ``lse`` [B, Hq, Tq] float32. Left out on purpose, and left to the portable kernel: ``attn_mask``,
sinks, segments or dropout beside lengths, and windows whose first keys no query sees (see
`dispatch.unsupported`). The producer is in `hopper_producer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from streamattn.kernels.hopper_launch import counter_of, descriptor, group_of_heads
from streamattn.kernels.hopper_primitives import (
    FIRST_BARRIER,
    await_kernel_before,
    copy_out,
    drop,
    exp2,
    in_pairs,
    random_words,
    release,
    softcapped,
    unpacked,
)
from streamattn.kernels.hopper_producer import (
    await_tile,
    kv_ids_of,
    producer,
    q_ids_of,
    row_of_spans,
    variant_of,
    work,
)
from streamattn.kernels.launch import (
    UNSPECIALIZED,
    call_key,
    device_guard,
    heads_last,
    launch,
    multiprocessor_count,
    starts_early,
)
from streamattn.kernels.primitives import LN2, LOG2E, kv_span, kv_span_full
from streamattn.kernels.segments import longest_first
from streamattn.kernels.tiles import HOPPER_BLOCK_M, choose_hopper_tile
from streamattn.pattern import UNBOUNDED, drop_threshold, open_sides


@gluon.jit
def skip(k_full, v_full, t, tiles, STAGES: gl.constexpr, THREADS: gl.constexpr):
    """Passes over tiles that only other consumers' queries see."""
    for u in range(t, t + tiles):
        await_tile(k_full, u, STAGES)
        release(FIRST_BARRIER + u % STAGES, THREADS)
        await_tile(v_full, u, STAGES)
        release(FIRST_BARRIER + STAGES + u % STAGES, THREADS)
    return t + tiles


@gluon.jit
def hide(s, first, i_first, shape, length, VARIANT: gl.constexpr):
    """Scores [BLOCK_M, BLOCK_N] of the keys from `first` on, -inf where `pattern.visible` says no."""
    _, _, q_len, _, left, right, _ = shape
    L: gl.constexpr = s.type.layout
    p = i_first + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, L)) + (length - q_len)  # [BLOCK_M]
    keys = first + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))  # [BLOCK_N]
    last = gl.zeros_like(p) + (length - 1)
    if VARIANT.value.HAS_RIGHT:
        last = gl.minimum(last, p + right)
    seen = keys[None, :] <= last[:, None]
    if VARIANT.value.HAS_LEFT:
        seen = seen & (keys[None, :] >= (p - left)[:, None])
    if VARIANT.value.HAS_LENGTHS:
        seen = seen & (keys >= 0)[None, :]
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def hide_others(s, first, queries, visibility, b):
    """Scores [BLOCK_M, BLOCK_N] of the keys from `first` on, -inf where the segments differ.

    queries = (first query, first and end of the keys of its and the others' segment). Ids are asked for only
    where a tile has other keys: most tiles are of one segment.
    """
    i_first, same_start, same_stop = queries
    if (first < same_start) | (first + s.shape[1] > same_stop):
        L: gl.constexpr = s.type.layout
        rows = i_first + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, L))  # [BLOCK_M]
        keys = first + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))  # [BLOCK_N]
        own = gl.load(q_ids_of(visibility, b) + rows)
        own = gl.where(own < 0, -2, own)  # padding sees nothing, not even padding
        theirs = gl.load(kv_ids_of(visibility, b) + keys)
        s = gl.where(own[:, None] == theirs[None, :], s, float("-inf"))
    return s


@gluon.jit
def own_sums(p):
    """[BLOCK_M, 8] from p [BLOCK_M, BLOCK_N]: every thread adds up what it holds of a row, nothing moves."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def online_softmax(s, m, l, scale2, GUARD: gl.constexpr):
    """(p, m, l, rescale), as `primitives.online_softmax_update`, but for l, which keeps `own_sums`."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale2)
    base = m_new
    if GUARD:  # a row may have seen nothing yet
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = exp2(s * scale2 - base[:, None])
    rescale = exp2(m - base)
    sums = own_sums(p)
    l = l * gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, m_new, l, rescale


@gluon.jit
def probabilities(operands, s, m, l, n, MASKED: gl.constexpr, VARIANT: gl.constexpr):
    """(s, p, m, l, rescale) of tile n from its products s, whose registers are to take the next ones."""
    _, k_smem, _, _, _, shape, visibility, queries, place, scaling = operands
    b, _, length, origin = place
    scale, softcap, _, _ = scaling
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    scale2 = scale * LOG2E
    if VARIANT.value.HAS_SOFTCAP:
        s = softcapped(s, scale, softcap)
        scale2 = 1.0
    if MASKED:
        first = origin + n * BLOCK_N
        if VARIANT.value.HAS_SEGMENTS:
            s = hide_others(s, first, queries, visibility, b)
        s = hide(s, first, queries[0], shape, length, VARIANT)
    p, m, l, factor = online_softmax(s, m, l, scale2, MASKED)
    return s, p, m, l, factor


@gluon.jit
def narrow(operands, p, words, VARIANT: gl.constexpr):
    """Probabilities as they are carried to the product with v, see `operand`.

    No product may be in flight that reads those of the tile before: the compiler gives both one place.
    """
    q, scaling = operands[0], operands[9]
    dtype: gl.constexpr = q.dtype
    if VARIANT.value.HAS_DROPOUT:
        return drop(p, words, scaling[3], dtype)
    elif VARIANT.value.in_pairs:
        return in_pairs(p, dtype)
    else:
        return gl.convert_layout(p.to(dtype), operand_layout(q.shape[1]))


@gluon.jit
def await_scores(operands, s, n, PENDING: gl.constexpr, VARIANT: gl.constexpr):
    """(scores of tile n, its random words or anything) once all but PENDING products are done."""
    _, k_smem, _, _, _, shape, _, queries, place, scaling = operands
    words = queries[0]
    if VARIANT.value.HAS_DROPOUT:
        head = place[0] * shape[1] + place[1]
        BLOCK_N: gl.constexpr = k_smem.shape[3]
        w0, w1, w2, w3 = random_words(scaling[2], head, queries[0], n * BLOCK_N, BLOCK_N)
        s, w0, w1, w2, w3 = warpgroup_mma_wait(PENDING, deps=[s, w0, w1, w2, w3])
        words = (w0, w1, w2, w3)
    else:
        s = warpgroup_mma_wait(PENDING, deps=[s])
    return s, words


@gluon.jit
def step(operands, s, p16, acc, m, l, t, n, n_end, MASKED: gl.constexpr, VARIANT: gl.constexpr):
    """Key tile n of a consumer, the one after tile t; p16 holds tile t's probabilities.

    With OVERLAP tile t's product with v runs during tile n's exponentials. The wait for the tile after next,
    between these and the wait for that product, keeps the compiler from exchanging them. Without OVERLAP p16
    is of no interest: tile n is finished within.
    """
    q, k_smem, v_smem, k_full, v_full, _, _, _, _, _ = operands
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    THREADS: gl.constexpr = VARIANT.value.CONSUMERS * 128 + 32
    u = t + 1
    # before a product is in flight, or the compiler lets none run ahead
    left = operand(p16, q.dtype, BLOCK_D, VARIANT)
    k = k_smem.index(u % STAGES).reshape([BLOCK_N, BLOCK_D])
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    if VARIANT.value.OVERLAP:
        await_tile(v_full, t, STAGES)
        v = v_smem.index(t % STAGES).reshape([BLOCK_N, BLOCK_D])
        acc = warpgroup_mma(left, v, acc, is_async=True)
        s, words = await_scores(operands, s, n, 1, VARIANT)
    else:
        s, words = await_scores(operands, s, n, 0, VARIANT)
    release(FIRST_BARRIER + u % STAGES, THREADS)
    s, p, m, l, factor = probabilities(operands, s, m, l, n, MASKED, VARIANT)
    await_tile(k_full, u + 1, STAGES, pred=n > n_end)
    if VARIANT.value.OVERLAP:
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(FIRST_BARRIER + STAGES + t % STAGES, THREADS)
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    p16 = narrow(operands, p, words, VARIANT)
    if not VARIANT.value.OVERLAP:
        acc = multiply_values(v_full, v_smem, p16, acc, u, VARIANT)
    return s, p16, acc, m, l


@gluon.constexpr_function
def operand_layout(block_d):
    """Of probabilities that are multiplied with so many columns."""
    return gl.DotOperandLayout(0, score_layout(block_d), 2)


@gluon.jit
def operand(p16, dtype: gl.constexpr, BLOCK_D: gl.constexpr, VARIANT: gl.constexpr):
    """Probabilities as the product with v takes them."""
    if VARIANT.value.in_pairs:
        return unpacked(p16, dtype, operand_layout(BLOCK_D))
    else:
        return p16


@gluon.jit
def multiply_values(v_full, v_smem, p16, acc, t, VARIANT: gl.constexpr):
    """acc + p16 @ v of tile t, whose buffer is free then."""
    STAGES: gl.constexpr = v_smem.shape[0]
    await_tile(v_full, t, STAGES)
    v = v_smem.index(t % STAGES).reshape([v_smem.shape[3], v_smem.shape[4]])
    acc = warpgroup_mma(operand(p16, v.dtype, v.shape[1], VARIANT), v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    release(FIRST_BARRIER + STAGES + t % STAGES, VARIANT.value.CONSUMERS * 128 + 32)
    return acc


@gluon.constexpr_function
def score_layout(block_n):
    """Of a consumer's product with so many keys or columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block_n, 16])


@gluon.jit
def consumer(job, WHICH: gl.constexpr, VARIANT: gl.constexpr):
    """out and lse of the queries of one consumer, item after item."""
    out_desc, lse_ptr, buffers, barriers, shape, visibility, scaling = job
    q_smem, k_smem, v_smem, out_smem, next_smem = buffers
    q_full, q_free, k_full, v_full, next_full, next_free, _ = barriers
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    CONSUMERS: gl.constexpr = VARIANT.value.CONSUMERS
    Q_BUFFERS: gl.constexpr = VARIANT.value.Q_BUFFERS
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    S_LAYOUT: gl.constexpr = score_layout(BLOCK_N)
    OUT_LAYOUT: gl.constexpr = score_layout(BLOCK_D)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    batch, num_heads, q_len, kv_len, left, right, heads_per_group = shape  # noqa: RUF059
    items = gl.cdiv(q_len, CONSUMERS * BLOCK_M) * batch * num_heads
    if VARIANT.value.HAS_SEGMENTS:
        await_kernel_before()
    if VARIANT.value.HAS_DROPOUT:
        scale, softcap, seed_ptr, drop_threshold = scaling
        scaling = (scale, softcap, gl.load(seed_ptr), drop_threshold)
    item = gl.program_id(0)
    count = 0
    t = 0
    while item < items:
        b, h, item_first, length, origin, n_start, n_stop, padded = work(  # noqa: RUF059
            item, shape, visibility, CONSUMERS * BLOCK_M, BLOCK_N, VARIANT
        )
        own_q = count % Q_BUFFERS * CONSUMERS + WHICH
        q = q_smem.index(own_q).reshape([BLOCK_M, BLOCK_D])
        i_first = item_first + WHICH * BLOCK_M
        i_last = gl.minimum(i_first + BLOCK_M, q_len) - 1
        start, stop = kv_span(i_first, i_last, q_len, length, left, right)
        full_start, full_stop = kv_span_full(i_first, i_last, q_len, length, left, right)
        rows = i_first + gl.arange(0, BLOCK_M, layout=ROW_LAYOUT)
        same_start, same_stop = start, stop
        if VARIANT.value.HAS_SEGMENTS:
            at = row_of_spans(visibility, b, q_len, i_first)
            same_start, same_stop = gl.load(at + 2), gl.load(at + 3)
            full_start, full_stop = gl.maximum(full_start, same_start), gl.minimum(full_stop, same_stop)
            # what lies outside the window is hidden without a look at its segment
            same_start = gl.where(same_start > start, same_start, 0)
            same_stop = gl.where(same_stop < stop, same_stop, length + BLOCK_N)
            start, stop = gl.maximum(start, gl.load(at)), gl.minimum(stop, gl.load(at + 1))
        queries = (i_first, same_start, same_stop)
        place = (b, h, length, origin)
        operands = (q, k_smem, v_smem, k_full, v_full, shape, visibility, queries, place, scaling)
        # own tiles [n_low, n_high), walked downwards; none where the queries lie past the last one
        n_high = gl.where(i_first < q_len, gl.minimum(gl.cdiv(stop - origin, BLOCK_N), n_stop), n_start)
        n_high = gl.maximum(n_high, n_start)
        n_low = gl.minimum(gl.maximum((start - origin) // BLOCK_N, n_start), n_high)
        t = skip(k_full, v_full, t, n_stop - n_high, STAGES, THREADS)
        m = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=ROW_LAYOUT)
        acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, layout=OUT_LAYOUT)
        l = own_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S_LAYOUT))
        mbarrier.wait(q_full.index(own_q), (count // Q_BUFFERS) & 1)
        if VARIANT.value.SHARED_OUT and Q_BUFFERS == 2:
            tma.store_wait(0)  # the output of the item before has left
            other_q = (count + 1) % Q_BUFFERS * CONSUMERS + WHICH
            mbarrier.arrive(q_free.index(other_q), count=1, pred=count > 0)
        if n_high > n_low:
            await_tile(k_full, t, STAGES)
            k = k_smem.index(t % STAGES).reshape([BLOCK_N, BLOCK_D])
            s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S_LAYOUT)
            s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
            s, words = await_scores(operands, s, n_high - 1, 0, VARIANT)
            release(FIRST_BARRIER + t % STAGES, THREADS)
            s, p, m, l, factor = probabilities(operands, s, m, l, n_high - 1, True, VARIANT)  # noqa: RUF059
            p16 = narrow(operands, p, words, VARIANT)
            await_tile(k_full, t + 1, STAGES, pred=n_high - 1 > n_low)
            if not VARIANT.value.OVERLAP:
                acc = multiply_values(v_full, v_smem, p16, acc, t, VARIANT)
            # [n_low, low_end) and [high_start, n_high) are edges, between them every query sees every key
            high_start = n_high - 1
            low_end = n_low
            if VARIANT.value.WIDE_EDGE:
                high_start = gl.maximum(gl.minimum((full_stop - origin) // BLOCK_N, high_start), n_low)
                for n in range(n_high - 2, high_start - 1, -1):
                    s, p16, acc, m, l = step(operands, s, p16, acc, m, l, t, n, n_low, True, VARIANT)
                    t += 1
            if VARIANT.value.has_low_edge:
                low_end = gl.minimum(gl.maximum(gl.cdiv(full_start - origin, BLOCK_N), n_low), high_start)
            for n in range(high_start - 1, low_end - 1, -1):
                s, p16, acc, m, l = step(operands, s, p16, acc, m, l, t, n, n_low, False, VARIANT)
                t += 1
            if VARIANT.value.has_low_edge:
                for n in range(low_end - 1, n_low - 1, -1):
                    s, p16, acc, m, l = step(operands, s, p16, acc, m, l, t, n, n_low, True, VARIANT)
                    t += 1
            if not VARIANT.value.SHARED_OUT:
                mbarrier.arrive(q_free.index(own_q), count=1)
            if VARIANT.value.OVERLAP:
                acc = multiply_values(v_full, v_smem, p16, acc, t, VARIANT)
            t += 1
        else:
            if not VARIANT.value.SHARED_OUT:
                mbarrier.arrive(q_free.index(own_q), count=1)
        t = skip(k_full, v_full, t, n_low - n_start, STAGES, THREADS)

        total = gl.convert_layout(gl.sum(l, 1), ROW_LAYOUT)
        divisor = gl.where(total == 0.0, 1.0, total)
        if VARIANT.value.HAS_DROPOUT:
            divisor *= 1.0 - scaling[3] / 256.0
        out = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        if VARIANT.value.SHARED_OUT:
            out_tile = q_smem.index(own_q)
        else:
            out_tile = out_smem.index(WHICH)
            tma.store_wait(0)  # the item before
        out_tile.reshape([BLOCK_M, BLOCK_D]).store(out.to(q_smem.dtype))
        fence_async_shared()
        copy_out(out_desc, [b, h, i_first, 0], out_tile)
        if VARIANT.value.SHARED_OUT and Q_BUFFERS == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(own_q), count=1)
        lse_ptrs = lse_ptr + (b.to(gl.int64) * num_heads + h) * q_len + rows
        gl.store(lse_ptrs, m * LN2 + gl.log(total), mask=rows < q_len)
        if VARIANT.value.DYNAMIC:
            slot = count % 2
            mbarrier.wait(next_full.index(slot), (count // 2) & 1)
            item = gl.max(next_smem.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(next_free.index(slot), count=1)
        else:
            item += gl.num_programs(0)
        count += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def hopper_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    counter_ptr,
    kv_lengths_ptr,
    spans_ptr,
    q_ids_ptr,
    kv_ids_ptr,
    seed_ptr,
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
    drop_threshold,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
    DYNAMIC: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    WIDE_EDGE: gl.constexpr,
    SHARED_OUT: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    HAS_SEGMENTS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_DROPOUT: gl.constexpr,
):
    """out [B, Hq, Tq, D] and lse [B, Hq, Tq]; descriptors of blocks [1, 1, BLOCK_M or BLOCK_N, BLOCK_D]."""
    dtype: gl.constexpr = q_desc.dtype
    Q_TILES: gl.constexpr = Q_BUFFERS * CONSUMERS
    q_smem = gl.allocate_shared_memory(dtype, [Q_TILES] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005
    k_smem = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    if SHARED_OUT:
        out_smem = q_smem
    else:
        out_smem = gl.allocate_shared_memory(dtype, [CONSUMERS] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    next_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [Q_TILES, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    next_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    next_free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(next_full.index(i), count=1)
        mbarrier.init(next_free.index(i), count=CONSUMERS)
    for c in gl.static_range(Q_TILES):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_free.index(c), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    v_raw = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(v_raw, count=1)
    fence_async_shared()

    VARIANT: gl.constexpr = variant_of(
        CONSUMERS, OVERLAP, SHARED_OUT, Q_BUFFERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, HAS_LENGTHS,
        HAS_SEGMENTS, HAS_SOFTCAP, HAS_DROPOUT,
    )  # fmt: skip
    shape = (batch, num_heads, q_len, kv_len, window_left, window_right, heads_per_group)
    segments = (spans_ptr, q_ids_ptr, stride_q_ids, kv_ids_ptr, stride_kv_ids, counter_ptr)
    visibility = (kv_lengths_ptr, stride_kv_lengths, segments)
    barriers = (q_full, q_free, k_full, v_full, next_full, next_free, v_raw)
    buffers = (q_smem, k_smem, v_smem, out_smem, next_smem)
    scaling = (scale, softcap, seed_ptr, drop_threshold)
    job = (out_desc, lse_ptr, buffers, barriers, shape, visibility, scaling)
    feed = ((q_desc, k_desc, v_desc), buffers, barriers, counter_ptr, shape, visibility, group)
    # the first consumer has the program's own warps and what the others leave of the registers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(consumer, (job, 0, VARIANT)), (consumer, (job, 1, VARIANT)), (producer, (feed, VARIANT))],
            [4, 1],
            [REGISTERS, 24],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (job, 0, VARIANT)),
                (consumer, (job, 1, VARIANT)),
                (consumer, (job, 2, VARIANT)),
                (producer, (feed, VARIANT)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (consumer, (job, 0, VARIANT)),
                (consumer, (job, 1, VARIANT)),
                (consumer, (job, 2, VARIANT)),
                (consumer, (job, 3, VARIANT)),
                (producer, (feed, VARIANT)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of a call that `dispatch.unsupported` lets pass; arguments as in `streamattn.ops`.

    ``spans``, ``q_ids`` and ``kv_ids`` are what `segments.query_spans` makes of segments.
    """
    batch, num_heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    out = heads_last(q, head_dim)
    lse = q.new_empty((batch, num_heads, q_len), dtype=torch.float32)
    window_left, window_right = open_sides(q_len, kv_len, window_left, window_right)
    has_segments, dropout = spans is not None, drop_threshold(dropout_p) > 0
    limited = window_left < UNBOUNDED or window_right < UNBOUNDED
    even = not (limited or has_segments or kv_lengths is not None)
    multiprocessors = multiprocessor_count(q.get_device())
    heads = batch * num_heads
    tile = choose_hopper_tile(head_dim, q_len, heads, multiprocessors, even, has_segments, dropout)
    rows = tile.CONSUMERS * HOPPER_BLOCK_M
    num_tiles = -(-q_len // rows)
    items = num_tiles * heads
    drawn = not even and items > multiprocessors
    counter = None
    # whether the last keys of a consumer's queries may lie in two tiles; those of a length end with a tile
    diagonal = window_right - q_len + (kv_len if kv_lengths is None else 0)
    wide_edge = window_right < UNBOUNDED and diagonal % HOPPER_BLOCK_M not in (0, 63)

    def arguments() -> tuple[int, dict[str, Any]]:
        return min(items, multiprocessors), dict(
            q_desc=descriptor(q, HOPPER_BLOCK_M, tile.BLOCK_D),
            k_desc=descriptor(k, tile.BLOCK_N, tile.BLOCK_D),
            v_desc=descriptor(v, tile.BLOCK_N, tile.BLOCK_D),
            out_desc=descriptor(out, HOPPER_BLOCK_M, tile.BLOCK_D),
            stride_kv_lengths=0 if kv_lengths is None else kv_lengths.stride(0),
            stride_q_ids=0 if q_ids is None else q_ids.stride(0),
            stride_kv_ids=0 if kv_ids is None else kv_ids.stride(0),
            batch=batch,
            num_heads=num_heads,
            group=num_heads // k.shape[1],
            q_len=q_len,
            kv_len=kv_len,
            window_left=window_left,
            window_right=window_right,
            heads_per_group=group_of_heads(
                k, window_right, num_tiles, heads, multiprocessors, segments=has_segments
            ),
            scale=scale,
            softcap=softcap,
            drop_threshold=drop_threshold(dropout_p),
            CONSUMERS=tile.CONSUMERS,
            STAGES=tile.STAGES,
            REGISTERS=tile.REGISTERS,
            OVERLAP=tile.OVERLAP,
            DYNAMIC=drawn,
            HAS_LEFT=window_left < UNBOUNDED,
            HAS_RIGHT=window_right < UNBOUNDED,
            WIDE_EDGE=wide_edge or has_segments,
            SHARED_OUT=tile.SHARED_OUT,
            Q_BUFFERS=tile.Q_BUFFERS,
            HAS_LENGTHS=kv_lengths is not None,
            HAS_SEGMENTS=has_segments,
            HAS_SOFTCAP=softcap > 0.0,
            HAS_DROPOUT=dropout,
            num_warps=4,
            # spans are of the kernel before; launches without them must not overlap, see `counter_of`
            launch_pdl=has_segments and starts_early(q),
        )

    with device_guard(q):
        if drawn and spans is not None:
            counter = longest_first(spans, q_len, kv_len, window_left, window_right, rows, tile.BLOCK_N)
        elif drawn:
            counter = counter_of(q.get_device())
        tensors = (q, k, v, q_ids, kv_ids, kv_lengths)
        key = call_key(tensors, scale, window_left, window_right, softcap, dropout_p)
        pointers = (q, k, v, out, lse, counter, kv_lengths, spans, q_ids, kv_ids, seed)
        launch(hopper_fwd_kernel, key, pointers, arguments)
    return out, lse
