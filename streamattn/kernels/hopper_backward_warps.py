"""What the warps of `hopper_backward` do: two consumers, one for dq where there is one, and one that copies.

All of them walk the same tiles in the same order: `work` says which. Each stage takes a named barrier for its
tile of queries and one for that of dout, on which a warp arrives without waiting for the others of its
consumer; two more are for the gradients of the scores.
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

from streamattn.kernels.hopper_primitives import (
    FIRST_BARRIER,
    add_out,
    await_release,
    copy_in,
    copy_out,
    exp2,
    program_again,
    release,
)
from streamattn.kernels.hopper_producer import await_tile
from streamattn.kernels.primitives import LOG2E, schedule

CONSUMERS = gl.constexpr(2)  # of a program
ROWS = gl.constexpr(64)  # queries of a tile, and keys of a consumer
DS_BUFFERS = gl.constexpr(2)  # for the scores' gradients of a tile


@gluon.constexpr_function
def acc_layout(columns):
    """Of a consumer's product with so many columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def dq_product(ds_smem, k_smem, t, PART: gl.constexpr):
    """Begins the product for 64 columns of tile t's dq, [64, 64], from what all consumers left in ds_smem."""
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    dq = gl.zeros([ROWS, 64], gl.float32, layout=acc_layout(64))
    for c in gl.static_range(CONSUMERS):
        ds = ds_smem.index(t % DS_BUFFERS * CONSUMERS + c).permute((1, 0))
        k = k_smem.index(c).reshape([ROWS, HEAD_DIM]).slice(PART * 64, 64, dim=1)
        dq = warpgroup_mma(ds, k, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.jit
def add_dq(dq_desc, dq_tile, dq, row):
    """Adds a product [64, 64] to the sums, to their 16 rows of 256 from `row` on.

    There it lies as its threads hold it, 16 bytes of one beside those of the next.
    """
    held = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, 256])
    tma.store_wait(0)  # the tile before
    dq_tile.store(held)
    fence_async_shared()
    add_out(dq_desc, [row, 0], dq_tile)


@gluon.jit
def step(
    operands,
    dk,
    dv,
    t,
    i_first,
    row,
    s,
    BEGUN: gl.constexpr,
    NEXT: gl.constexpr,
    MASKED: gl.constexpr,
    WHICH: gl.constexpr,
    CAUSAL: gl.constexpr,
    OWN_DQ: gl.constexpr,
):
    """(dk, dv, next products of k and q) after tile t of queries, from i_first on; `row` of the sums.

    BEGUN: s holds this tile's products of k and q, which may be on their way. NEXT: begins the next tile's.
    The order in which products begin is what keeps the tensor cores busy: first what others wait for.
    """
    dq_desc, buffers, barriers, place, scale2 = operands
    k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, ds_smem, dq_smem = buffers
    _, _, q_full, dout_full, ds_free = barriers
    first_key, offset, kv_len = place
    STAGES: gl.constexpr = q_smem.shape[0]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    Q_FREE: gl.constexpr = FIRST_BARRIER
    DOUT_FREE: gl.constexpr = FIRST_BARRIER + STAGES
    DS_FULL: gl.constexpr = FIRST_BARRIER + 2 * STAGES
    S_LAYOUT: gl.constexpr = acc_layout(ROWS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc_layout(HEAD_DIM), 2)
    dtype: gl.constexpr = q_smem.dtype
    k = k_smem.index(WHICH).reshape([ROWS, HEAD_DIM])
    v = v_smem.index(WHICH).reshape([ROWS, HEAD_DIM])
    q = q_smem.index(t % STAGES).reshape([ROWS, HEAD_DIM])
    dout = dout_smem.index(t % STAGES).reshape([ROWS, HEAD_DIM])
    # everything is transposed, [keys, queries], so that p and ds are left operands as they stand
    if not BEGUN:
        await_tile(q_full, t, STAGES)
        s = gl.zeros([ROWS, ROWS], gl.float32, layout=S_LAYOUT)
        s = warpgroup_mma(k, q.permute((1, 0)), s, use_acc=False, is_async=True)
    await_tile(dout_full, t, STAGES)
    dp = gl.zeros([ROWS, ROWS], gl.float32, layout=S_LAYOUT)
    dp = warpgroup_mma(v, dout.permute((1, 0)), dp, use_acc=False, is_async=True)
    lse2 = lse_smem.index(t % STAGES).load(COLUMNS)
    s = warpgroup_mma_wait(1, deps=[s])
    x = s * scale2 - lse2[None, :]
    if MASKED:
        keys = first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
        seen = (keys < kv_len)[:, None]
        if CAUSAL:
            positions = i_first + offset + gl.arange(0, ROWS, layout=COLUMNS)
            seen = seen & (keys[:, None] <= positions[None, :])
        x = gl.where(seen, x, float("-inf"))
    p = exp2(x)
    p16 = gl.convert_layout(p.to(dtype), OPERAND)
    delta = delta_smem.index(t % STAGES).load(COLUMNS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (p * (dp - delta[None, :])).to(dtype)
    if OWN_DQ:
        mbarrier.wait(ds_free.index(t % DS_BUFFERS), ((t // DS_BUFFERS) & 1) ^ 1)
    ds_smem.index(t % DS_BUFFERS * CONSUMERS + WHICH).store(ds)
    fence_async_shared()
    ds16 = gl.convert_layout(ds, OPERAND)
    if OWN_DQ:
        release(DS_FULL + t % DS_BUFFERS, CONSUMERS * 128 + 128)
        dv = warpgroup_mma(p16, dout, dv, is_async=True)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        if NEXT:
            await_tile(q_full, t + 1, STAGES)
            q_next = q_smem.index((t + 1) % STAGES).reshape([ROWS, HEAD_DIM])
            s = warpgroup_mma(k, q_next.permute((1, 0)), s, use_acc=False, is_async=True)
            dv, dk = warpgroup_mma_wait(1, deps=[dv, dk])
        else:
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        release(DOUT_FREE + t % STAGES, THREADS)
        release(Q_FREE + t % STAGES, THREADS)
    else:
        gl.static_assert(not NEXT)
        dv = warpgroup_mma(p16, dout, dv, is_async=True)
        await_release(DS_FULL, CONSUMERS * 128)
        dq = dq_product(ds_smem, k_smem, t, WHICH)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
        release(DOUT_FREE + t % STAGES, THREADS)
        add_dq(dq_desc, dq_smem.index(WHICH), dq, row + WHICH * 16)
        dk = warpgroup_mma_wait(0, deps=[dk])
        release(Q_FREE + t % STAGES, THREADS)
    return dk, dv, s


@gluon.jit
def work(shape, program, CAUSAL: gl.constexpr, MASKS: gl.constexpr):
    """(batch, key head, first key, first tile of queries, first that sees all keys, end) of a program.

    There is one tile at least: the last query sees every key.
    """
    batch, num_heads, group, q_len, kv_len, heads_per_group = shape
    KEYS: gl.constexpr = CONSUMERS * ROWS
    kv_heads = num_heads // group
    # under a causal mask early keys are seen by most
    tile, head = schedule(program, gl.cdiv(kv_len, KEYS), batch * kv_heads, heads_per_group)
    first_key = tile * KEYS
    m_end = gl.cdiv(q_len, ROWS)
    m_start = 0
    m_full = 0
    if CAUSAL:
        first_query = first_key - (kv_len - q_len)
        m_start = gl.maximum(first_query, 0) // ROWS
        m_full = gl.minimum(gl.cdiv(gl.maximum(first_query + KEYS - 1, 0), ROWS), m_end)
    if MASKS:
        m_full = gl.where(first_key + KEYS > kv_len, m_end, m_full)
    return head // kv_heads, head % kv_heads, first_key, m_start, m_full, m_end


@gluon.jit
def consumer(job, WHICH: gl.constexpr, CAUSAL: gl.constexpr, MASKS: gl.constexpr, OWN_DQ: gl.constexpr):
    """dk and dv of 64 keys; without OWN_DQ also 64 columns of each tile's dq."""
    dk_desc, dv_desc, dq_desc, buffers, barriers, shape, scale = job
    k_smem, v_smem, q_smem = buffers[0], buffers[1], buffers[2]
    k_full, v_full, ds_free = barriers[0], barriers[1], barriers[4]
    num_heads, group, q_len, kv_len = shape[1], shape[2], shape[3], shape[4]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    SUMS: gl.constexpr = ROWS * HEAD_DIM // 256  # rows that a tile has of them
    dtype: gl.constexpr = q_smem.dtype
    b, kv_head, first_key, m_start, m_full, m_end = work(shape, gl.program_id(0), CAUSAL, MASKS)
    place = (first_key + WHICH * ROWS, kv_len - q_len, kv_len)
    operands = (dq_desc, buffers, barriers, place, scale * LOG2E)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=acc_layout(HEAD_DIM))
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=acc_layout(HEAD_DIM))
    s = gl.zeros([ROWS, ROWS], gl.float32, layout=acc_layout(ROWS))
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    t = 0
    for g in range(group):
        first = (b * num_heads + kv_head * group + g) * gl.cdiv(q_len, ROWS) * SUMS
        if MASKS:
            for m in range(m_start, m_full):
                row = first + m * SUMS
                dk, dv, _ = step(
                    operands, dk, dv, t, m * ROWS, row, s, False, False, True, WHICH, CAUSAL, OWN_DQ
                )
                t += 1
        m_single = m_full
        if OWN_DQ:  # two tiles at a time, or the products of the next one would outlive a loop
            for m in range(m_full, m_end - 1, 2):
                row = first + m * SUMS
                dk, dv, s_next = step(
                    operands, dk, dv, t, m * ROWS, row, s, False, True, False, WHICH, CAUSAL, OWN_DQ
                )
                dk, dv, _ = step(
                    operands, dk, dv, t + 1, (m + 1) * ROWS, row + SUMS, s_next,
                    True, False, False, WHICH, CAUSAL, OWN_DQ,
                )  # fmt: skip
                t += 2
            m_single += (m_end - m_full) // 2 * 2
        for m in range(m_single, m_end):
            row = first + m * SUMS
            dk, dv, _ = step(
                operands, dk, dv, t, m * ROWS, row, s, False, False, False, WHICH, CAUSAL, OWN_DQ
            )
            t += 1
    # computed anew, or it would take registers all the way
    b, kv_head, first_key, m_start, m_full, m_end = work(shape, program_again(), CAUSAL, MASKS)
    v_tile = v_smem.index(WHICH)
    v_tile.reshape([ROWS, HEAD_DIM]).store(dv.to(dtype))
    fence_async_shared()
    copy_out(dv_desc, [b, kv_head, first_key + WHICH * ROWS, 0], v_tile)
    # k's place is free once its last product is done
    if OWN_DQ:
        mbarrier.wait(ds_free.index((t - 1) % DS_BUFFERS), ((t - 1) // DS_BUFFERS) & 1)
    else:
        await_release(FIRST_BARRIER + 2 * q_smem.shape[0] + 1, CONSUMERS * 128)
    k_tile = k_smem.index(WHICH)
    k_tile.reshape([ROWS, HEAD_DIM]).store((dk * scale).to(dtype))
    fence_async_shared()
    copy_out(dk_desc, [b, kv_head, first_key + WHICH * ROWS, 0], k_tile)
    tma.store_wait(0)


@gluon.jit
def dq_worker(job, CAUSAL: gl.constexpr, MASKS: gl.constexpr):
    """dq of every tile, by a warpgroup of its own, at head dimension 64."""
    _, _, dq_desc, buffers, barriers, shape, _ = job
    k_smem, _, q_smem, _, _, _, ds_smem, dq_smem = buffers
    k_full, _, _, _, ds_free = barriers
    _, num_heads, group, q_len, _, _ = shape
    SUMS: gl.constexpr = ROWS * 64 // 256
    DS_FULL: gl.constexpr = FIRST_BARRIER + 2 * q_smem.shape[0]
    b, kv_head, _, m_start, _, m_end = work(shape, gl.program_id(0), CAUSAL, MASKS)
    mbarrier.wait(k_full, 0)
    t = 0
    for g in range(group):
        first = (b * num_heads + kv_head * group + g) * gl.cdiv(q_len, ROWS) * SUMS
        for m in range(m_start, m_end):
            await_release(DS_FULL + t % DS_BUFFERS, CONSUMERS * 128 + 128)
            dq = dq_product(ds_smem, k_smem, t, 0)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(ds_free.index(t % DS_BUFFERS), count=1)
            add_dq(dq_desc, dq_smem.index(0), dq, first + m * SUMS)
            t += 1
    tma.store_wait(0)


@gluon.jit
def copy_pair(desc, at, stats_desc, stats_at, full, tile, stats):
    """Copies a tile of queries' rows, and the one statistic that goes with it."""
    mbarrier.expect(full, ROWS * tile.shape[3] * 2 + ROWS * 4)
    copy_in(desc, at, full, tile)
    copy_in(stats_desc, [stats_at], full, stats)


@gluon.jit
def copy_keys(desc, b, kv_head, first_key, full, smem):
    """Copies the keys or values of all consumers."""
    mbarrier.expect(full, CONSUMERS * ROWS * smem.shape[4] * 2)
    for c in gl.static_range(CONSUMERS):
        copy_in(desc, [b, kv_head, first_key + c * ROWS, 0], full, smem.index(c))


@gluon.jit
def producer(feed, CAUSAL: gl.constexpr, MASKS: gl.constexpr):
    """Copies what the consumers will read, in their order, as buffers fall free."""
    descs, buffers, barriers, shape = feed
    q_desc, k_desc, v_desc, dout_desc, stats_desc = descs
    k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, _, _ = buffers
    k_full, v_full, q_full, dout_full, _ = barriers
    batch, num_heads, group, q_len, _, _ = shape
    STAGES: gl.constexpr = q_smem.shape[0]
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    b, kv_head, first_key, m_start, _, m_end = work(shape, gl.program_id(0), CAUSAL, MASKS)
    padded = gl.cdiv(q_len, ROWS) * ROWS
    copy_keys(k_desc, b, kv_head, first_key, k_full, k_smem)
    t = 0
    for g in range(group):
        h = kv_head * group + g
        for m in range(m_start, m_end):
            place = t % STAGES
            at = [b, h, m * ROWS, 0]
            stats_at = (b * num_heads + h) * padded + m * ROWS
            if t >= STAGES:
                await_release(FIRST_BARRIER + place, THREADS)
            copy_pair(
                q_desc, at, stats_desc, stats_at, q_full.index(place), q_smem.index(place),
                lse_smem.index(place),
            )  # fmt: skip
            if t == 0:
                copy_keys(v_desc, b, kv_head, first_key, v_full, v_smem)
            if t >= STAGES:
                await_release(FIRST_BARRIER + STAGES + place, THREADS)
            stats_at += batch * num_heads * padded
            copy_pair(
                dout_desc, at, stats_desc, stats_at, dout_full.index(place), dout_smem.index(place),
                delta_smem.index(place),
            )  # fmt: skip
            t += 1
    # every arrival is met, so that no barrier is left half full
    for u in range(gl.maximum(t - STAGES, 0), t):
        await_release(FIRST_BARRIER + u % STAGES, THREADS)
        await_release(FIRST_BARRIER + STAGES + u % STAGES, THREADS)
