"""The Hopper backward above head dimension 128: two warpgroups share 64 keys.

dk and dv of 64 keys take all registers of two warpgroups there. So one has dv, the other dk, and each has a
half of the columns of dq. The first computes the probabilities, keeps them as the left operand of its product
with dout, and leaves them in float32 in shared memory; the second computes the products of v and dout, makes
the scores' gradients of both and leaves them in shared memory. Both read those for dq. The tensor cores work
for one while the other computes: the first asks for the next tile's scores while the second has its dk, and
then its products of the next tile.

dq is added to its sums from registers, 16 bytes at a time, for shared memory is full: what a thread adds lies
beside what its neighbours add. Its terms come as they come, so a call that wants them in order is left to the
portable kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from streamattn.kernels.hopper_backward_warps import (
    ROWS,
    acc_layout,
    backward_variant_of,
    clear_unseen,
    hide,
    producer,
    tile_at,
    work,
)
from streamattn.kernels.hopper_primitives import (
    FIRST_BARRIER,
    await_release,
    copy_out,
    draw_bits,
    exp2,
    kept,
    program_again,
    release,
    softcapped_slope,
    thread_barrier,
)
from streamattn.kernels.hopper_producer import await_tile, kv_ids_of, q_ids_of
from streamattn.kernels.launch import UNSPECIALIZED
from streamattn.kernels.primitives import LOG2E

COPY_THREADS = gl.constexpr(288)  # of a barrier that both consumers and the copying warp meet at
PAIR_THREADS = gl.constexpr(256)  # of both consumers
TILES = gl.constexpr(4)  # of queries at a time: the products for the next one may outlive a step, but no loop
DQ_COLUMNS = gl.constexpr(64)  # of a product for dq: more would take the registers of those for the next tile


@gluon.jit
def add_to_sums(ptr, x):
    """Adds a product [64, columns] to its sums, in the order of `hopper_backward_warps.add_dq`."""
    BLOCKS: gl.constexpr = x.shape[1] // 8
    # block of eight columns, warp, row of eight, pair, column, half
    held = x.reshape([4, 2, 8, BLOCKS, 4, 2]).permute([3, 0, 2, 4, 5, 1])
    upper, lower = gl.split(held)
    x0, x1 = gl.split(upper)
    x2, x3 = gl.split(lower)
    at = gl.arange(0, BLOCKS * 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = gl.convert_layout(at.reshape([BLOCKS, 4, 8, 4]), x0.type.layout)
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,f,f,f,f",
        [(ptr + at * 4).to(gl.int64), x0, x1, x2, x3],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def dq_part(ds_smem, k_smem, PART: gl.constexpr):
    """Begins the product for DQ_COLUMNS columns of a tile's dq."""
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    k = k_smem.index(0).reshape([ROWS, HEAD_DIM]).slice(PART * DQ_COLUMNS, DQ_COLUMNS, dim=1)
    dq = gl.zeros([ROWS, DQ_COLUMNS], gl.float32, layout=acc_layout(DQ_COLUMNS))
    return warpgroup_mma(ds_smem.permute((1, 0)), k, dq, use_acc=False, is_async=True)


@gluon.jit
def held_by_thread(p):
    """[64, 64] of a product as [16, 256], in which what a thread holds lies together by 16 bytes."""
    return p.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, 256])


@gluon.jit
def dv_step(operands, dv, t, m, head, TESTED: gl.constexpr, VARIANT: gl.constexpr):
    """dv after the t-th tile of queries, tile m of a head; leaves its probabilities and adds half of dq."""
    sums_ptr, buffers, barriers, place, ids, theirs, scaling, q_tiles = operands
    k_smem, _, q_smem, dout_smem, lse_smem, _, p_smem, ds_smem, bits_smem = buffers
    q_full, dout_full = barriers[2], barriers[3]
    scale, softcap, dropout = scaling
    STAGES: gl.constexpr = q_smem.shape[0]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    Q_FREE: gl.constexpr = FIRST_BARRIER
    DOUT_FREE: gl.constexpr = FIRST_BARRIER + STAGES
    P_FULL: gl.constexpr = FIRST_BARRIER + 2 * STAGES
    DS_FULL: gl.constexpr = FIRST_BARRIER + 2 * STAGES + 1
    S_LAYOUT: gl.constexpr = acc_layout(ROWS)
    dtype: gl.constexpr = q_smem.dtype
    if VARIANT.value.HAS_DROPOUT:
        seed, drop_threshold, first_query = dropout
        draw_bits(seed, head, first_query + m * ROWS, place[0], drop_threshold, bits_smem.index(0))
    await_tile(q_full, t, STAGES)
    q = q_smem.index(t % STAGES).reshape([ROWS, HEAD_DIM])
    s = gl.zeros([ROWS, ROWS], gl.float32, layout=S_LAYOUT)
    k = k_smem.index(0).reshape([ROWS, HEAD_DIM])
    s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
    lse2 = lse_smem.index(t % STAGES).load(gl.SliceLayout(0, S_LAYOUT))
    s = warpgroup_mma_wait(0, deps=[s])
    if VARIANT.value.HAS_SOFTCAP:
        x, slope = softcapped_slope(s, scale, softcap)
        x = x - lse2[None, :]
    else:
        x = s * (scale * LOG2E) - lse2[None, :]
    release(Q_FREE + t % STAGES, COPY_THREADS)
    if TESTED:
        x = hide(x, m * ROWS, theirs, place, ids, VARIANT)
    p = exp2(x)
    p16 = p.to(dtype)
    if VARIANT.value.HAS_SOFTCAP:
        p = p * slope
    if VARIANT.value.HAS_DROPOUT:  # the sign says what is dropped
        keep = kept(bits_smem.index(0), S_LAYOUT)
        p16 = gl.where(keep, p16, gl.zeros_like(p16))
        p = gl.where(keep, p, -p)
    p_smem.store(held_by_thread(p))
    release(P_FULL, PAIR_THREADS)
    await_tile(dout_full, t, STAGES)
    dout = dout_smem.index(t % STAGES).reshape([ROWS, HEAD_DIM])
    p16 = gl.convert_layout(p16, gl.DotOperandLayout(0, acc_layout(HEAD_DIM), 2))
    dv = warpgroup_mma(p16, dout, dv, is_async=True)
    dv = warpgroup_mma_wait(0, deps=[dv])
    release(DOUT_FREE + t % STAGES, COPY_THREADS)
    await_release(DS_FULL, PAIR_THREADS)
    at = sums_ptr + (head * q_tiles + m).to(gl.int64) * (ROWS * HEAD_DIM)
    for part in gl.static_range(HEAD_DIM // 2 // DQ_COLUMNS):
        dq = dq_part(ds_smem, k_smem, part)
        dq = warpgroup_mma_wait(0, deps=[dq])
        add_to_sums(at + part * (ROWS * DQ_COLUMNS), dq)
    return dv


@gluon.jit
def dk_step(operands, dk, t, m, head, dp, BEGUN: gl.constexpr, NEXT: gl.constexpr, VARIANT: gl.constexpr):
    """dk after the t-th tile of queries, tile m of a head; leaves the scores' gradients, adds half of dq.

    BEGUN: dp holds this tile's products of v and dout, maybe on their way. NEXT: begins the next tile's.
    """
    sums_ptr, buffers, barriers, q_tiles = operands
    k_smem, v_smem, q_smem, dout_smem, _, delta_smem, p_smem, ds_smem, _ = buffers
    dout_full = barriers[3]
    STAGES: gl.constexpr = q_smem.shape[0]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    Q_FREE: gl.constexpr = FIRST_BARRIER
    DOUT_FREE: gl.constexpr = FIRST_BARRIER + STAGES
    P_FULL: gl.constexpr = FIRST_BARRIER + 2 * STAGES
    DS_FULL: gl.constexpr = FIRST_BARRIER + 2 * STAGES + 1
    S_LAYOUT: gl.constexpr = acc_layout(ROWS)
    dtype: gl.constexpr = q_smem.dtype
    v = v_smem.index(0).reshape([ROWS, HEAD_DIM])
    if not BEGUN:
        await_tile(dout_full, t, STAGES)
        dout = dout_smem.index(t % STAGES).reshape([ROWS, HEAD_DIM])
        dp = gl.zeros([ROWS, ROWS], gl.float32, layout=S_LAYOUT)
        dp = warpgroup_mma(v, dout.permute((1, 0)), dp, use_acc=False, is_async=True)
    delta = delta_smem.index(t % STAGES).load(gl.SliceLayout(0, S_LAYOUT))
    dp = warpgroup_mma_wait(0, deps=[dp])
    await_release(P_FULL, PAIR_THREADS)
    p = p_smem.load(held_by_thread(dp).type.layout)
    p = p.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([ROWS, ROWS])
    p = gl.convert_layout(p, S_LAYOUT)
    if VARIANT.value.HAS_DROPOUT:
        dp = gl.where(p >= 0.0, dp, 0.0)
        p = gl.maximum(p, -p)
    ds = (p * (dp - delta[None, :])).to(dtype)
    release(DOUT_FREE + t % STAGES, COPY_THREADS)
    ds_smem.store(ds)
    fence_async_shared()
    release(DS_FULL, PAIR_THREADS)
    ds16 = gl.convert_layout(ds, gl.DotOperandLayout(0, acc_layout(HEAD_DIM), 2))
    # the other consumer waited for q, and cleared its rows of k, before the probabilities
    q = q_smem.index(t % STAGES).reshape([ROWS, HEAD_DIM])
    thread_barrier()  # of all that this consumer stored
    at = sums_ptr + (head * q_tiles + m).to(gl.int64) * (ROWS * HEAD_DIM)
    PARTS: gl.constexpr = HEAD_DIM // DQ_COLUMNS
    for part in gl.static_range(PARTS // 2, PARTS):
        dq = dq_part(ds_smem, k_smem, part)
        if part == PARTS - 1:
            dk = warpgroup_mma(ds16, q, dk, is_async=True)
            dq = warpgroup_mma_wait(1, deps=[dq])
        else:
            dq = warpgroup_mma_wait(0, deps=[dq])
        add_to_sums(at + part * (ROWS * DQ_COLUMNS), dq)
    if NEXT:
        await_tile(dout_full, t + 1, STAGES)
        dout_next = dout_smem.index((t + 1) % STAGES).reshape([ROWS, HEAD_DIM])
        dp = gl.zeros([ROWS, ROWS], gl.float32, layout=S_LAYOUT)
        dp = warpgroup_mma(v, dout_next.permute((1, 0)), dp, use_acc=False, is_async=True)
        dk = warpgroup_mma_wait(1, deps=[dk])
    else:
        dk = warpgroup_mma_wait(0, deps=[dk])
    release(Q_FREE + t % STAGES, COPY_THREADS)
    return dk, dp


@gluon.jit
def dv_consumer(job, VARIANT: gl.constexpr):
    """dv of the program's keys, and half of each tile's dq."""
    sums_ptr, dv_desc, _, buffers, barriers, shape, visibility, scaling, dv_scale, _ = job
    k_smem, q_smem, dout_smem = buffers[0], buffers[2], buffers[3]
    num_heads, group, q_len, left, right = shape[1], shape[2], shape[3], shape[5], shape[6]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    b, kv_head, first_key, length, span = work(shape, visibility, gl.program_id(0), VARIANT)
    theirs, ids = first_key, first_key  # of no interest without segments
    mbarrier.wait(barriers[0], 0)
    if VARIANT.value.HAS_SEGMENTS:
        ids = q_ids_of(visibility, b)
        theirs = first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout(ROWS)))
        theirs = gl.load(kv_ids_of(visibility, b) + theirs)
    if VARIANT.value.HIDES:
        clear_unseen(k_smem.index(0), first_key, length, visibility, b, VARIANT)
    if VARIANT.value.HAS_DROPOUT:
        scale, softcap, dropout = scaling
        scaling = (scale, softcap, (gl.load(dropout[0]), dropout[1], dropout[2]))
    shift = length - q_len
    place = (first_key, length, shift + right, shift - left)
    operands = (sums_ptr, buffers, barriers, place, ids, theirs, scaling, gl.cdiv(q_len, ROWS))
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=acc_layout(HEAD_DIM))
    m_start, m_full, m_tail, m_end = span
    t = 0
    for g in range(group):
        head = b * num_heads + kv_head * group + g
        if VARIANT.value.TESTS:
            for x in range(m_full - m_start + m_end - m_tail):
                dv = dv_step(operands, dv, t, tile_at(x, span, VARIANT), head, True, VARIANT)
                t += 1
        for m in range(m_full, m_tail):
            dv = dv_step(operands, dv, t, m, head, False, VARIANT)
            t += 1
    # computed anew, or it would take registers all the way
    b, kv_head, first_key, _, _ = work(shape, visibility, program_again(), VARIANT)
    if VARIANT.value.HAS_DROPOUT:
        dv = dv * dv_scale
    # nobody reads dout any more: the other consumer left the last gradients of scores after its last product
    tile = dout_smem.index(0)
    thread_barrier()
    tile.reshape([ROWS, HEAD_DIM]).store(dv.to(q_smem.dtype))
    fence_async_shared()
    copy_out(dv_desc, [b, kv_head, first_key, 0], tile)
    tma.store_wait(0)


@gluon.jit
def dk_consumer(job, VARIANT: gl.constexpr):
    """dk of the program's keys, and the other half of each tile's dq."""
    sums_ptr, dk_desc, buffers, barriers = job[0], job[2], job[3], job[4]
    shape, visibility, dk_scale = job[5], job[6], job[9]
    k_smem, v_smem, q_smem = buffers[0], buffers[1], buffers[2]
    num_heads, group, q_len = shape[1], shape[2], shape[3]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    b, kv_head, first_key, length, span = work(shape, visibility, gl.program_id(0), VARIANT)
    mbarrier.wait(barriers[0], 0)
    mbarrier.wait(barriers[1], 0)
    if VARIANT.value.HIDES:
        clear_unseen(v_smem.index(0), first_key, length, visibility, b, VARIANT)
    operands = (sums_ptr, buffers, barriers, gl.cdiv(q_len, ROWS))
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=acc_layout(HEAD_DIM))
    dp = gl.zeros([ROWS, ROWS], gl.float32, layout=acc_layout(ROWS))
    tiles = span[3] - span[0]
    single = tiles // TILES * TILES
    t = 0
    for g in range(group):
        head = b * num_heads + kv_head * group + g
        for x in range(0, single, TILES):
            begun = dp
            for i in gl.static_range(TILES):
                m = tile_at(x + i, span, VARIANT)
                dk, begun = dk_step(operands, dk, t + i, m, head, begun, i > 0, i + 1 < TILES, VARIANT)
            t += TILES
        for x in range(single, tiles):
            m = tile_at(x, span, VARIANT)
            dk, _ = dk_step(operands, dk, t, m, head, dp, False, False, VARIANT)
            t += 1
    b, kv_head, first_key, _, _ = work(shape, visibility, program_again(), VARIANT)
    tile = q_smem.index(0)  # the other consumer left the last probabilities after its last product with q
    thread_barrier()
    tile.reshape([ROWS, HEAD_DIM]).store((dk * dk_scale).to(q_smem.dtype))
    fence_async_shared()
    copy_out(dk_desc, [b, kv_head, first_key, 0], tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def hopper_bwd_shared_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    stats_desc,
    sums_ptr,
    dk_desc,
    dv_desc,
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
    dk_scale,
    dv_scale,
    drop_threshold,
    first_query,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_LENGTHS: gl.constexpr,
    HAS_SEGMENTS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_DROPOUT: gl.constexpr,
):
    """As `hopper_backward.hopper_bwd_kernel`, for head dimensions above 128."""
    dtype: gl.constexpr = q_desc.dtype
    k_smem = gl.allocate_shared_memory(dtype, [1] + k_desc.block_shape, k_desc.layout)  # noqa: RUF005
    v_smem = gl.allocate_shared_memory(dtype, [1] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    q_smem = gl.allocate_shared_memory(dtype, [STAGES] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005
    dout_smem = gl.allocate_shared_memory(dtype, [STAGES] + dout_desc.block_shape, dout_desc.layout)  # noqa: RUF005
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], stats_desc.layout)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    p_smem = gl.allocate_shared_memory(gl.float32, [16, 256], P_LAYOUT)
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    ds_smem = gl.allocate_shared_memory(dtype, [ROWS, ROWS], DS_LAYOUT)
    BITS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    bits_smem = gl.allocate_shared_memory(
        gl.uint32, [1, 4, 4, 8] if HAS_DROPOUT else [1, 1, 1, 1], BITS_LAYOUT
    )
    VARIANT: gl.constexpr = backward_variant_of(
        False, True, RAGGED, HAS_LEFT, HAS_RIGHT, HAS_LENGTHS, HAS_SEGMENTS, HAS_SOFTCAP, HAS_DROPOUT, False
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    raw = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
    mbarrier.init(raw, count=1)
    # as `hopper_bwd_kernel` orders them; the first raw stands in for ds_free, which nobody waits for here
    barriers = (k_full, v_full, q_full, dout_full, raw, raw)
    fence_async_shared()

    shape = (batch, num_heads, group, q_len, kv_len, window_left, window_right, heads_per_group)
    segments = (spans_ptr, q_ids_ptr, stride_q_ids, kv_ids_ptr, stride_kv_ids)
    visibility = (kv_lengths_ptr, stride_kv_lengths, segments)
    scaling = (scale, softcap, (seed_ptr, drop_threshold, first_query))
    buffers = (k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, p_smem, ds_smem, bits_smem)
    job = (sums_ptr, dv_desc, dk_desc, buffers, barriers, shape, visibility, scaling, dv_scale, dk_scale)
    feed = ((q_desc, k_desc, v_desc, dout_desc, stats_desc), buffers, barriers, shape, visibility)
    gl.warp_specialize(
        [(dv_consumer, (job, VARIANT)), (dk_consumer, (job, VARIANT)), (producer, (feed, VARIANT))],
        [4, 1],
        [REGISTERS, 24],
    )
