"""Attention forward for Hopper (compute capability 9.0), in Gluon: warp-specialized and persistent.

A program keeps one producer warp and CONSUMERS warpgroups. A work item is CONSUMERS * BLOCK_M queries of one
(batch, head), each consumer owning BLOCK_M of them. The producer copies q, k and v to shared memory by TMA;
a consumer walks its keys from the last tile to the first and, while the tensor cores multiply one tile's
probabilities with v, computes the exponentials of the next (see `streamattn.reference` for the algorithm).
Only a tile at an edge of the window is tested for visibility. Under a window items differ in length: the
longest start first and, where there are more than programs, a program draws its next one from a counter; else
the items of a program are fixed.

q, k, v [B, H, T, D] with a unit last stride and other strides of whole 16-byte words; ``out`` is stored [B,
Tq, Hq, D]; ``lse`` [B, Hq, Tq] float32. Left out on purpose, and left to the portable kernel: masks,
segments, lengths, softcap, dropout, sinks, and windows whose first keys no query sees (see `unsupported`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from streamattn.kernels.launch import (
    UNSPECIALIZED,
    View,
    call_key,
    device_guard,
    heads_last,
    heads_per_group,
    launch,
)
from streamattn.kernels.primitives import LN2, LOG2E, kv_span, kv_span_full, schedule
from streamattn.kernels.tiles import HOPPER_BLOCK_M, choose_hopper_tile
from streamattn.pattern import UNBOUNDED, open_sides

# Triton 3.9 gave the copies new names
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Triton takes the named barriers below this one for itself
FIRST_BARRIER = gl.constexpr(8)


@gluon.jit
def exp2(x):
    """2^x, one instruction: results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def at_barrier(ASM: gl.constexpr, index, threads):
    """An instruction on a named barrier of so many threads, by all threads of a warp."""
    gl.inline_asm_elementwise(
        ASM,
        "=r,r,r",
        [gl.to_tensor(index), gl.to_tensor(threads)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def release(index, threads):
    """Hands a buffer back: this warp arrives at the named barrier and waits for nobody.

    An mbarrier's arrival would make the warps of a consumer wait for one another first.
    """
    at_barrier("bar.arrive $1, $2; mov.u32 $0, 0;", index, threads)


@gluon.jit
def await_release(index, threads):
    """The producer's side of `release`."""
    at_barrier("bar.sync $1, $2; mov.u32 $0, 0;", index, threads)


@gluon.jit
def await_tile(full, t, STAGES: gl.constexpr, pred=True):
    """Waits until the t-th tile of keys or values is in its buffer."""
    mbarrier.wait(full.index(t % STAGES), (t // STAGES) & 1, pred=pred)


@gluon.jit
def work(item, shape, ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """(batch, head, first query, first and end of the key tiles that some of its queries see) of an item."""
    batch, num_heads, q_len, kv_len, left, right, heads_per_group = shape
    num_tiles = gl.cdiv(q_len, ROWS)
    tile_m, head = schedule(item, num_tiles, batch * num_heads, heads_per_group)
    i_first = (num_tiles - 1 - tile_m) * ROWS  # under a causal mask late queries see most
    i_last = gl.minimum(i_first + ROWS, q_len) - 1
    start, stop = kv_span(i_first, i_last, q_len, kv_len, left, right)
    n_start = start // BLOCK_N
    n_stop = gl.maximum(gl.cdiv(stop, BLOCK_N), n_start)
    return head // num_heads, head % num_heads, i_first, n_start, n_stop


@gluon.jit
def producer(
    descs,
    buffers,
    barriers,
    counter,
    shape,
    group,
    CONSUMERS: gl.constexpr,
    DYNAMIC: gl.constexpr,
):
    """Copies what the consumers of this program will read, in their order, as buffers fall free."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, next_smem = buffers
    q_full, q_free, k_full, v_full, next_full, next_free = barriers
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    Q_BYTES: gl.constexpr = BLOCK_M * q_smem.shape[4] * 2
    KV_BYTES: gl.constexpr = BLOCK_N * k_smem.shape[4] * 2
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    batch, num_heads, q_len, _, _, _, _ = shape
    items = gl.cdiv(q_len, CONSUMERS * BLOCK_M) * batch * num_heads
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    following = item + programs
    count = 0  # work items so far
    t = 0  # key tiles so far
    while item < items:
        b, h, i_first, n_start, n_stop = work(item, shape, CONSUMERS * BLOCK_M, BLOCK_N)
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_free.index(c), (count & 1) ^ 1)
            mbarrier.expect(q_full.index(c), Q_BYTES)
            copy_in(q_desc, [b, h, i_first + c * BLOCK_M, 0], q_full.index(c), q_smem.index(c))
        # k runs one tile ahead of v
        for step in range(0, gl.where(n_stop > n_start, n_stop - n_start + 1, 0)):
            n = n_stop - 1 - step
            if n >= n_start:
                u = t + step
                if u >= STAGES:
                    await_release(FIRST_BARRIER + u % STAGES, THREADS)
                mbarrier.expect(k_full.index(u % STAGES), KV_BYTES)
                copy_in(
                    k_desc,
                    [b, h // group, n * BLOCK_N, 0],
                    k_full.index(u % STAGES),
                    k_smem.index(u % STAGES),
                )
            if step > 0:
                w = t + step - 1
                if w >= STAGES:
                    await_release(FIRST_BARRIER + STAGES + w % STAGES, THREADS)
                mbarrier.expect(v_full.index(w % STAGES), KV_BYTES)
                copy_in(
                    v_desc,
                    [b, h // group, (n + 1) * BLOCK_N, 0],
                    v_full.index(w % STAGES),
                    v_smem.index(w % STAGES),
                )
        t += n_stop - n_start
        item = following
        if DYNAMIC:
            # fetched one item ahead, so that nobody waits for memory
            following = gl.atomic_add(counter, 1) + 2 * programs
            mbarrier.wait(next_free, (count & 1) ^ 1)
            next_smem.store(gl.full([1], following, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(next_full, count=1)
        else:
            following += programs
        count += 1
    # every arrival is met, so that no barrier is left half full
    for u in range(gl.maximum(t - STAGES, 0), t):
        await_release(FIRST_BARRIER + u % STAGES, THREADS)
        await_release(FIRST_BARRIER + STAGES + u % STAGES, THREADS)


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
def hide(s, i_first, n, shape, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Scores [BLOCK_M, BLOCK_N] of key tile n, -inf where `pattern.visible` says no."""
    _, _, q_len, kv_len, left, right, _ = shape
    L: gl.constexpr = s.type.layout
    p = i_first + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, L)) + (kv_len - q_len)  # [BLOCK_M]
    keys = n * s.shape[1] + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, L))  # [BLOCK_N]
    last = gl.zeros_like(p) + (kv_len - 1)
    if HAS_RIGHT:
        last = gl.minimum(last, p + right)
    seen = keys[None, :] <= last[:, None]
    if HAS_LEFT:
        seen = seen & (keys[None, :] >= (p - left)[:, None])
    return gl.where(seen, s, float("-inf"))


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
def step(
    operands,
    s,
    p16,
    acc,
    m,
    l,
    t,
    n,
    n_end,
    i_first,
    CONSUMERS: gl.constexpr,
    MASKED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Key tile n of a consumer, the one after tile t; p16 holds tile t's probabilities.

    With OVERLAP tile t's product with v runs during tile n's exponentials. The wait for the tile after next,
    between these and the wait for that product, keeps the compiler from exchanging them. Without OVERLAP p16
    is of no interest: tile n is finished within.
    """
    q, k_smem, v_smem, k_full, v_full, shape, scale2 = operands
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    u = t + 1
    k = k_smem.index(u % STAGES).reshape([BLOCK_N, BLOCK_D])
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    if OVERLAP:
        await_tile(v_full, t, STAGES)
        v = v_smem.index(t % STAGES).reshape([BLOCK_N, BLOCK_D])
        acc = warpgroup_mma(p16, v, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    release(FIRST_BARRIER + u % STAGES, THREADS)
    if MASKED:
        s = hide(s, i_first, n, shape, HAS_LEFT, HAS_RIGHT)
    p, m, l, rescale = online_softmax(s, m, l, scale2, MASKED)
    await_tile(k_full, u + 1, STAGES, pred=n > n_end)
    if OVERLAP:
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(FIRST_BARRIER + STAGES + t % STAGES, THREADS)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
    p16 = gl.convert_layout(p.to(p16.dtype), p16.type.layout)
    if not OVERLAP:
        await_tile(v_full, u, STAGES)
        v = v_smem.index(u % STAGES).reshape([BLOCK_N, BLOCK_D])
        acc = warpgroup_mma(p16, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(FIRST_BARRIER + STAGES + u % STAGES, THREADS)
    return s, p16, acc, m, l


@gluon.jit
def consumer(
    job,
    WHICH: gl.constexpr,
    CONSUMERS: gl.constexpr,
    DYNAMIC: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    WIDE_EDGE: gl.constexpr,
    OVERLAP: gl.constexpr,
    SHARED_OUT: gl.constexpr,
):
    """out and lse of the queries of one consumer, item after item."""
    out_desc, lse_ptr, buffers, barriers, shape, scale2 = job
    q_smem, k_smem, v_smem, out_smem, next_smem = buffers
    q_full, q_free, k_full, v_full, next_full, next_free = barriers
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    dtype: gl.constexpr = q_smem.dtype
    batch, num_heads, q_len, kv_len, left, right, heads_per_group = shape  # noqa: RUF059
    items = gl.cdiv(q_len, CONSUMERS * BLOCK_M) * batch * num_heads
    programs = gl.num_programs(0)
    q = q_smem.index(WHICH).reshape([BLOCK_M, BLOCK_D])
    operands = (q, k_smem, v_smem, k_full, v_full, shape, scale2)
    item = gl.program_id(0)
    following = item + programs
    count = 0
    t = 0
    while item < items:
        if DYNAMIC and count > 0:
            mbarrier.wait(next_full, (count - 1) & 1)
            following = gl.max(next_smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(next_free, count=1)
        b, h, item_first, n_start, n_stop = work(item, shape, CONSUMERS * BLOCK_M, BLOCK_N)
        i_first = item_first + WHICH * BLOCK_M
        i_last = gl.minimum(i_first + BLOCK_M, q_len) - 1
        start, stop = kv_span(i_first, i_last, q_len, kv_len, left, right)
        full_start, full_stop = kv_span_full(i_first, i_last, q_len, kv_len, left, right)
        # own tiles [n_low, n_high), walked downwards; none where the queries lie past the last one
        n_high = gl.where(i_first < q_len, gl.minimum(gl.cdiv(stop, BLOCK_N), n_stop), n_start)
        n_high = gl.maximum(n_high, n_start)
        n_low = gl.minimum(gl.maximum(start // BLOCK_N, n_start), n_high)
        t = skip(k_full, v_full, t, n_stop - n_high, STAGES, THREADS)
        m = gl.full([BLOCK_M], float("-inf"), gl.float32, layout=ROW_LAYOUT)
        acc = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, layout=OUT_LAYOUT)
        l = own_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S_LAYOUT))
        mbarrier.wait(q_full.index(WHICH), count & 1)
        if n_high > n_low:
            await_tile(k_full, t, STAGES)
            k = k_smem.index(t % STAGES).reshape([BLOCK_N, BLOCK_D])
            s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=S_LAYOUT)
            s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            release(FIRST_BARRIER + t % STAGES, THREADS)
            s = hide(s, i_first, n_high - 1, shape, HAS_LEFT, HAS_RIGHT)
            p, m, l, first = online_softmax(s, m, l, scale2, True)  # noqa: RUF059
            p16 = gl.convert_layout(p.to(dtype), P_LAYOUT)
            await_tile(k_full, t + 1, STAGES, pred=n_high - 1 > n_low)
            if not OVERLAP:
                await_tile(v_full, t, STAGES)
                v = v_smem.index(t % STAGES).reshape([BLOCK_N, BLOCK_D])
                acc = warpgroup_mma(p16, v, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                release(FIRST_BARRIER + STAGES + t % STAGES, THREADS)
            # [n_low, low_end) and [high_start, n_high) are edges, between them every query sees every key
            high_start = n_high - 1
            low_end = n_low
            if WIDE_EDGE:
                high_start = gl.maximum(gl.minimum(full_stop // BLOCK_N, high_start), n_low)
                for n in range(n_high - 2, high_start - 1, -1):
                    s, p16, acc, m, l = step(
                        operands, s, p16, acc, m, l, t, n, n_low, i_first,
                        CONSUMERS, True, HAS_LEFT, HAS_RIGHT, OVERLAP,
                    )  # fmt: skip
                    t += 1
            if HAS_LEFT:
                low_end = gl.minimum(gl.maximum(gl.cdiv(full_start, BLOCK_N), n_low), high_start)
            for n in range(high_start - 1, low_end - 1, -1):
                s, p16, acc, m, l = step(
                    operands, s, p16, acc, m, l, t, n, n_low, i_first,
                    CONSUMERS, False, HAS_LEFT, HAS_RIGHT, OVERLAP,
                    )  # fmt: skip
                t += 1
            if HAS_LEFT:
                for n in range(low_end - 1, n_low - 1, -1):
                    s, p16, acc, m, l = step(
                        operands, s, p16, acc, m, l, t, n, n_low, i_first,
                        CONSUMERS, True, HAS_LEFT, HAS_RIGHT, OVERLAP,
                    )  # fmt: skip
                    t += 1
            if not SHARED_OUT:
                mbarrier.arrive(q_free.index(WHICH), count=1)
            if OVERLAP:
                await_tile(v_full, t, STAGES)
                v = v_smem.index(t % STAGES).reshape([BLOCK_N, BLOCK_D])
                acc = warpgroup_mma(p16, v, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                release(FIRST_BARRIER + STAGES + t % STAGES, THREADS)
            t += 1
        else:
            if not SHARED_OUT:
                mbarrier.arrive(q_free.index(WHICH), count=1)
        t = skip(k_full, v_full, t, n_low - n_start, STAGES, THREADS)

        total = gl.convert_layout(gl.sum(l, 1), ROW_LAYOUT)
        divisor = gl.where(total == 0.0, 1.0, total)
        out = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        if SHARED_OUT:
            out_tile = q_smem.index(WHICH)
        else:
            out_tile = out_smem.index(WHICH)
            tma.store_wait(0)  # the item before
        out_tile.reshape([BLOCK_M, BLOCK_D]).store(out.to(dtype))
        fence_async_shared()
        copy_out(out_desc, [b, h, i_first, 0], out_tile)
        if SHARED_OUT:
            tma.store_wait(0)
            mbarrier.arrive(q_free.index(WHICH), count=1)
        rows = i_first + gl.arange(0, BLOCK_M, layout=ROW_LAYOUT)
        lse_ptrs = lse_ptr + (b.to(gl.int64) * num_heads + h) * q_len + rows
        gl.store(lse_ptrs, m * LN2 + gl.log(total), mask=rows < q_len)
        item = following
        if not DYNAMIC:
            following += programs
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
    batch,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    window_right,
    heads_per_group,
    scale,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
    DYNAMIC: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    WIDE_EDGE: gl.constexpr,
    SHARED_OUT: gl.constexpr,
):
    """out [B, Hq, Tq, D] and lse [B, Hq, Tq]; descriptors of blocks [1, 1, BLOCK_M or BLOCK_N, BLOCK_D]."""
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005
    k_smem = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    if SHARED_OUT:
        out_smem = q_smem
    else:
        out_smem = gl.allocate_shared_memory(dtype, [CONSUMERS] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    next_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    q_free = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    next_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    next_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
        mbarrier.init(q_free.index(c), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(next_full, count=1)
    mbarrier.init(next_free, count=CONSUMERS)
    fence_async_shared()

    shape = (batch, num_heads, q_len, kv_len, window_left, window_right, heads_per_group)
    barriers = (q_full, q_free, k_full, v_full, next_full, next_free)
    descs = (q_desc, k_desc, v_desc)
    inputs = (q_smem, k_smem, v_smem, next_smem)
    buffers = (q_smem, k_smem, v_smem, out_smem, next_smem)
    job = (out_desc, lse_ptr, buffers, barriers, shape, scale * LOG2E)
    # the first consumer has the program's own warps and what the others leave of the registers
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer, (job, 0, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (consumer, (job, 1, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (producer, (descs, inputs, barriers, counter_ptr, shape, group, CONSUMERS, DYNAMIC)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consumer, (job, 0, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (consumer, (job, 1, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (consumer, (job, 2, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (producer, (descs, inputs, barriers, counter_ptr, shape, group, CONSUMERS, DYNAMIC)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.static_assert(CONSUMERS == 4)
        gl.warp_specialize(
            [
                (consumer, (job, 0, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (consumer, (job, 1, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (consumer, (job, 2, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (consumer, (job, 3, CONSUMERS, DYNAMIC, HAS_LEFT, HAS_RIGHT, WIDE_EDGE, OVERLAP, SHARED_OUT)),
                (producer, (descs, inputs, barriers, counter_ptr, shape, group, CONSUMERS, DYNAMIC)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )  # fmt: skip


def descriptor(view: View, rows: int, block_d: int) -> TensorDescriptor:
    """Of a tensor [B, H, T, D], for blocks [1, 1, rows, block_d]."""
    block = [1, 1, rows, block_d]
    dtype = gl.bfloat16 if view.base.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(view.base, list(view.shape), list(view.strides), block, layout)


def group_of_heads(k: Tensor, window_right: int, num_tiles: int, num_heads: int, multiprocessors: int) -> int:
    """How many heads start side by side (see `primitives.schedule`).

    The last group's longest items take twice as long as an average one, and something has to go on beside
    them: two items for each multiprocessor at least, whatever fits the cache.
    """
    group = heads_per_group(k, window_right)
    if window_right < UNBOUNDED:
        group = max(group, triton.cdiv(2 * multiprocessors, num_tiles))
    return triton.cdiv(num_heads, max(1, num_heads // group))


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window_left: int, window_right: int
) -> tuple[Tensor, Tensor]:
    """``(out, lse)``; arguments as in `streamattn.ops`, of a call that `dispatch.unsupported` lets pass."""
    batch, num_heads, q_len, head_dim = q.shape
    kv_len = k.shape[2]
    out = heads_last(q, head_dim)
    lse = q.new_empty((batch, num_heads, q_len), dtype=torch.float32)
    views = tuple(View.of(x) for x in (q, k, v, out))
    window_left, window_right = open_sides(q_len, kv_len, window_left, window_right)
    limited = window_left < UNBOUNDED or window_right < UNBOUNDED
    multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
    tile = choose_hopper_tile(head_dim, q_len, batch * num_heads, multiprocessors)
    num_tiles = triton.cdiv(q_len, tile.CONSUMERS * HOPPER_BLOCK_M)
    items = num_tiles * batch * num_heads
    drawn = limited and items > multiprocessors
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if drawn else None

    def arguments() -> tuple[int, dict[str, Any]]:
        q_view, k_view, v_view, out_view = views
        return min(items, multiprocessors), dict(
            q_desc=descriptor(q_view, HOPPER_BLOCK_M, tile.BLOCK_D),
            k_desc=descriptor(k_view, tile.BLOCK_N, tile.BLOCK_D),
            v_desc=descriptor(v_view, tile.BLOCK_N, tile.BLOCK_D),
            out_desc=descriptor(out_view, HOPPER_BLOCK_M, tile.BLOCK_D),
            batch=batch,
            num_heads=num_heads,
            group=num_heads // k.shape[1],
            q_len=q_len,
            kv_len=kv_len,
            window_left=window_left,
            window_right=window_right,
            heads_per_group=group_of_heads(k, window_right, num_tiles, batch * num_heads, multiprocessors),
            scale=scale,
            CONSUMERS=tile.CONSUMERS,
            STAGES=tile.STAGES,
            REGISTERS=tile.REGISTERS,
            OVERLAP=tile.OVERLAP,
            DYNAMIC=drawn,
            HAS_LEFT=window_left < UNBOUNDED,
            HAS_RIGHT=window_right < UNBOUNDED,
            # whether the last keys of a consumer's queries may lie in two tiles
            WIDE_EDGE=window_right < UNBOUNDED
            and (kv_len - q_len + window_right) % HOPPER_BLOCK_M not in (0, 63),
            SHARED_OUT=tile.SHARED_OUT,
            num_warps=4,
        )

    with device_guard(q):
        key = call_key((q, k, v), scale, window_left, window_right)
        launch(hopper_fwd_kernel, key, (*views, lse, counter), arguments)
    return out, lse
