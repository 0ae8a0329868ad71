"""What the warps of `hopper_backward` do: two consumers, one for dq where there is one, and one that copies.

All of them walk the same tiles in the same order: `work` and `tile_at` say which. Each stage takes a named
barrier for its tile of queries and one for that of dout, on which a warp arrives without waiting for the
others of its consumer; two more are for the gradients of the scores.

What nobody sees never enters a product, whatever it holds: rows of k that no query sees, and rows of q and
dout that see no key, are cleared in shared memory, where lengths or segments make such rows.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    draw_bits,
    exp2,
    kept,
    program_again,
    release,
    softcapped_slope,
    thread_barrier,
)
from streamattn.kernels.hopper_producer import (
    await_tile,
    clear_eight,
    holds_padding,
    kv_ids_of,
    q_ids_of,
    row_of_spans,
    rows_of_eight,
)
from streamattn.kernels.primitives import LOG2E, q_span, q_span_full, schedule

CONSUMERS = gl.constexpr(2)  # of a program
ROWS = gl.constexpr(64)  # queries of a tile, and keys of a consumer
DS_BUFFERS = gl.constexpr(2)  # for the scores' gradients of a tile


@dataclass(frozen=True)
class BackwardVariant:
    """What the code of the backward depends on beside the shape of its tile.

    Attributes:
        OWN_DQ: as in `HopperBackwardTile`.
        SHARED_KEYS: whether both consumers have the same 64 keys; see `hopper_backward_shared`.
        RAGGED: whether the last tile of keys may be a part of one.
        HAS_LEFT: whether the window limits the keys before a query.
        HAS_RIGHT: whether it limits those behind it.
        HAS_LENGTHS: whether sequences have filled lengths of their own.
        HAS_SEGMENTS: whether a sequence holds segments.
        HAS_SOFTCAP: whether scores are capped.
        HAS_DROPOUT: whether probabilities are dropped.
        ORDERED: whether the sums of dq take their terms in one order; see `hopper_backward_order`.
    """

    OWN_DQ: bool
    SHARED_KEYS: bool
    RAGGED: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_LENGTHS: bool
    HAS_SEGMENTS: bool
    HAS_SOFTCAP: bool
    HAS_DROPOUT: bool
    ORDERED: bool

    @property
    def TESTS(self) -> bool:
        """Whether some tile is tested for visibility."""
        return self.RAGGED or self.HAS_RIGHT or self.HAS_TAIL or self.HAS_LENGTHS

    @property
    def HAS_TAIL(self) -> bool:
        """Whether the last tiles of queries may need the test too."""
        return self.HAS_LEFT or self.HAS_SEGMENTS

    @property
    def KEY_BLOCKS(self) -> int:
        """How many times 64 keys a program has."""
        return 1 if self.SHARED_KEYS else 2

    @property
    def ADDERS(self) -> int:
        """Warps that add to the sums of dq in order, and buffers for what they add."""
        return 3 if self.OWN_DQ else 2

    @property
    def HIDES(self) -> bool:
        """Whether what nobody sees may hold anything, and keys may be seen by nobody."""
        return self.HAS_LENGTHS or self.HAS_SEGMENTS


@gluon.constexpr_function
def backward_variant_of(*flags):
    """`BackwardVariant` of a kernel's own flags."""
    return BackwardVariant(*flags)


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
def hand_dq(dq_smem, dq, t, WHICH: gl.constexpr, barriers, VARIANT: gl.constexpr):
    """Leaves a product [64, 64] of the t-th tile to its adder, laid out as by `add_dq`."""
    ADDERS: gl.constexpr = VARIANT.value.ADDERS
    PARTS: gl.constexpr = dq_smem.shape[0] // ADDERS
    dq_full, dq_free = barriers[6], barriers[7]
    held = dq.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([16, 256])
    mbarrier.wait(dq_free.index(t % ADDERS), ((t // ADDERS) & 1) ^ 1)
    dq_smem.index(t % ADDERS * PARTS + WHICH).store(held)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(t % ADDERS), count=1)


@gluon.jit
def hide(x, i_first, theirs, place, ids, VARIANT: gl.constexpr):
    """Exponents [keys, queries], -inf where `pattern.visible` says no or the segments differ.

    place = (first key, filled keys, last and first key that query 0 sees); ids = segments of all queries.
    """
    first_key, length, last_of_0, first_of_0 = place
    L: gl.constexpr = x.type.layout
    keys = first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    rows = i_first + gl.arange(0, ROWS, layout=gl.SliceLayout(0, L))
    seen = (keys < length)[:, None]
    if VARIANT.value.HAS_RIGHT:
        seen = seen & (keys[:, None] <= (rows + last_of_0)[None, :])
    if VARIANT.value.HAS_LEFT:
        seen = seen & (keys[:, None] >= (rows + first_of_0)[None, :])
    if VARIANT.value.HAS_SEGMENTS:
        own = gl.load(ids + rows)
        own = gl.where(own < 0, -2, own)  # padding sees nothing, not even padding
        seen = seen & (theirs[:, None] == own[None, :])
    return gl.where(seen, x, float("-inf"))


@gluon.jit
def step(
    operands,
    dk,
    dv,
    t,
    m,
    head,
    s,
    BEGUN: gl.constexpr,
    NEXT: gl.constexpr,
    TESTED: gl.constexpr,
    WHICH: gl.constexpr,
    VARIANT: gl.constexpr,
):
    """(dk, dv, next products of k and q) after the t-th tile of queries, tile m of a head.

    BEGUN: s holds this tile's products of k and q, which may be on their way. NEXT: begins the next tile's.
    The order in which products begin is what keeps the tensor cores busy: first what others wait for.
    """
    dq_desc, buffers, barriers, place, ids, theirs, scaling, q_tiles = operands
    k_smem, v_smem, q_smem, dout_smem, lse_smem, delta_smem, ds_smem, dq_smem, bits_smem = buffers
    q_full, dout_full, ds_free = barriers[2], barriers[3], barriers[4]
    scale, softcap, dropout = scaling
    STAGES: gl.constexpr = q_smem.shape[0]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    SUMS: gl.constexpr = ROWS * HEAD_DIM // 256  # rows that a tile has of them
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
    if VARIANT.value.HAS_DROPOUT:  # while no product takes registers
        seed, drop_threshold, first_query = dropout
        draw_bits(seed, head, first_query + m * ROWS, place[0], drop_threshold, bits_smem.index(WHICH))
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
    if VARIANT.value.HAS_SOFTCAP:
        x, slope = softcapped_slope(s, scale, softcap)
        x = x - lse2[None, :]
    else:
        x = s * (scale * LOG2E) - lse2[None, :]
    if TESTED:
        x = hide(x, m * ROWS, theirs, place, ids, VARIANT)
    p = exp2(x)
    if VARIANT.value.HAS_DROPOUT:
        keep = kept(bits_smem.index(WHICH), S_LAYOUT)
        p16 = gl.convert_layout(gl.where(keep, p, 0.0).to(dtype), OPERAND)
    else:
        p16 = gl.convert_layout(p.to(dtype), OPERAND)
    if VARIANT.value.HAS_SOFTCAP:
        p = p * slope
    delta = delta_smem.index(t % STAGES).load(COLUMNS)
    dp = warpgroup_mma_wait(0, deps=[dp])
    if VARIANT.value.HAS_DROPOUT:
        dp = gl.where(keep, dp, 0.0)
    ds = (p * (dp - delta[None, :])).to(dtype)
    if VARIANT.value.OWN_DQ:
        mbarrier.wait(ds_free.index(t % DS_BUFFERS), ((t // DS_BUFFERS) & 1) ^ 1)
    ds_smem.index(t % DS_BUFFERS * CONSUMERS + WHICH).store(ds)
    fence_async_shared()
    ds16 = gl.convert_layout(ds, OPERAND)
    if VARIANT.value.OWN_DQ:
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
        if VARIANT.value.ORDERED:
            hand_dq(dq_smem, dq, t, WHICH, barriers, VARIANT)
        else:
            add_dq(dq_desc, dq_smem.index(WHICH), dq, (head * q_tiles + m) * SUMS + WHICH * 16)
        dk = warpgroup_mma_wait(0, deps=[dk])
        release(Q_FREE + t % STAGES, THREADS)
    return dk, dv, s


@gluon.jit
def work(shape, visibility, program, VARIANT: gl.constexpr):
    """(batch, key head, first key, filled keys, span) of a program.

    span = tiles of queries: first, first and end of those where all queries see all keys, end.
    """
    batch, num_heads, group, q_len, kv_len, left, right, heads_per_group = shape
    lengths_ptr, stride_lengths, _ = visibility
    KEY_BLOCKS: gl.constexpr = VARIANT.value.KEY_BLOCKS
    KEYS: gl.constexpr = KEY_BLOCKS * ROWS
    kv_heads = num_heads // group
    # under a causal mask early keys are seen by most
    tile, head = schedule(program, gl.cdiv(kv_len, KEYS), batch * kv_heads, heads_per_group)
    if VARIANT.value.ORDERED:
        tile = gl.cdiv(kv_len, KEYS) - 1 - tile
    b = head // kv_heads
    first_key = tile * KEYS
    length = kv_len
    m_start = 0
    m_full = 0
    m_end = gl.cdiv(q_len, ROWS)
    m_tail = m_end
    if VARIANT.value.TESTS:
        if VARIANT.value.HAS_LENGTHS:
            length = gl.minimum(gl.maximum(gl.load(lengths_ptr + b * stride_lengths), 0), kv_len).to(gl.int32)
        last_key = first_key + KEYS - 1
        start, stop = q_span(first_key, last_key, q_len, length, left, right)
        full_start, full_stop = q_span_full(first_key, last_key, q_len, length, left, right)
        if VARIANT.value.HAS_LENGTHS:
            stop = gl.where(first_key < length, stop, 0)
        if VARIANT.value.HAS_SEGMENTS:
            low, high = q_len, 0
            for c in gl.static_range(KEY_BLOCKS):
                at = row_of_spans(visibility, b, kv_len, first_key + c * ROWS)
                low, high = gl.minimum(low, gl.load(at)), gl.maximum(high, gl.load(at + 1))
                full_start = gl.maximum(full_start, gl.load(at + 2))
                full_stop = gl.minimum(full_stop, gl.load(at + 3))
            start, stop = gl.maximum(start, low), gl.minimum(stop, high)
        if VARIANT.value.RAGGED or VARIANT.value.HAS_LENGTHS:
            full_stop = gl.where(last_key < length, full_stop, 0)
        m_start = start // ROWS
        m_end = gl.maximum(gl.cdiv(stop, ROWS), m_start)
        m_full = gl.where(full_stop > full_start, gl.cdiv(full_start, ROWS), m_end)
        m_full = gl.minimum(gl.maximum(m_full, m_start), m_end)
        m_tail = m_end
        if VARIANT.value.HAS_TAIL:  # queries behind the last one are no reason to test
            inside = gl.where(full_stop < q_len, full_stop // ROWS, m_end)
            m_tail = gl.maximum(gl.minimum(inside, m_end), m_full)
    return b, head % kv_heads, first_key, length, (m_start, m_full, m_tail, m_end)


@gluon.jit
def tile_at(x, span, VARIANT: gl.constexpr):
    """The x-th tile of queries that a program visits: first the ones that need the test, from both ends.

    Where the sums of dq are ordered, they are visited from the first to the last.
    """
    m_start, m_full, m_tail, m_end = span
    m = m_start + x
    if VARIANT.value.HAS_TAIL and not VARIANT.value.ORDERED:
        lead = m_full - m_start
        tested = lead + m_end - m_tail
        m = gl.where(x < lead, m, gl.where(x < tested, m_tail + x - lead, m_full + x - tested))
    return m


@gluon.jit
def clear_unseen(smem, first_key, length, visibility, b, VARIANT: gl.constexpr):
    """Zeros in the rows of 64 keys or values that no query sees; by one consumer."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    keys = first_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    unseen = keys >= length
    if VARIANT.value.HAS_SEGMENTS:
        unseen = unseen | (gl.load(kv_ids_of(visibility, b) + keys) < 0)
    if gl.max(unseen.to(gl.int32), 0) > 0:
        tile = smem.reshape([ROWS, smem.shape[3]])
        values = tile.load(LAYOUT)
        tile.store(gl.where(unseen[:, None], gl.zeros_like(values), values))
        fence_async_shared()
        thread_barrier()  # or the compiler waits in every loop, just before the products that read it


@gluon.jit
def consumer(job, WHICH: gl.constexpr, VARIANT: gl.constexpr):
    """dk and dv of 64 keys; without OWN_DQ also 64 columns of each tile's dq."""
    dk_desc, dv_desc, dq_desc, buffers, barriers, shape, visibility, scaling, dk_scale, dv_scale = job
    k_smem, v_smem, q_smem = buffers[0], buffers[1], buffers[2]
    k_full, v_full, ds_free = barriers[0], barriers[1], barriers[4]
    num_heads, group, q_len = shape[1], shape[2], shape[3]
    left, right = shape[5], shape[6]
    HEAD_DIM: gl.constexpr = k_smem.shape[4]
    dtype: gl.constexpr = q_smem.dtype
    b, kv_head, first_key, length, span = work(shape, visibility, gl.program_id(0), VARIANT)
    own_key = first_key + WHICH * ROWS
    theirs, ids = own_key, own_key  # of no interest without segments
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)
    if VARIANT.value.HAS_SEGMENTS:
        ids = q_ids_of(visibility, b)
        theirs = own_key + gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc_layout(ROWS)))
        theirs = gl.load(kv_ids_of(visibility, b) + theirs)
    if VARIANT.value.HIDES:
        clear_unseen(k_smem.index(WHICH), own_key, length, visibility, b, VARIANT)
        clear_unseen(v_smem.index(WHICH), own_key, length, visibility, b, VARIANT)
    if VARIANT.value.HAS_DROPOUT:
        scale, softcap, dropout = scaling
        scaling = (scale, softcap, (gl.load(dropout[0]), dropout[1], dropout[2]))
    shift = length - q_len
    place = (own_key, length, shift + right, shift - left)
    operands = (dq_desc, buffers, barriers, place, ids, theirs, scaling, gl.cdiv(q_len, ROWS))
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=acc_layout(HEAD_DIM))
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=acc_layout(HEAD_DIM))
    s = gl.zeros([ROWS, ROWS], gl.float32, layout=acc_layout(ROWS))
    m_start, m_full, m_tail, m_end = span
    t = 0
    for g in range(group):
        head = b * num_heads + kv_head * group + g
        if VARIANT.value.TESTS:
            tested = m_full - m_start
            if not VARIANT.value.ORDERED:
                tested += m_end - m_tail
            for x in range(tested):
                m = tile_at(x, span, VARIANT)
                dk, dv, _ = step(operands, dk, dv, t, m, head, s, False, False, True, WHICH, VARIANT)
                t += 1
        m_single = m_full
        if VARIANT.value.OWN_DQ:  # two tiles at a time, or the products of the next one would outlive a loop
            for m in range(m_full, m_tail - 1, 2):
                dk, dv, s_next = step(operands, dk, dv, t, m, head, s, False, True, False, WHICH, VARIANT)
                dk, dv, _ = step(
                    operands, dk, dv, t + 1, m + 1, head, s_next, True, False, False, WHICH, VARIANT
                )
                t += 2
            m_single += (m_tail - m_full) // 2 * 2
        for m in range(m_single, m_tail):
            dk, dv, _ = step(operands, dk, dv, t, m, head, s, False, False, False, WHICH, VARIANT)
            t += 1
        if VARIANT.value.ORDERED and VARIANT.value.HAS_TAIL:
            for m in range(m_tail, m_end):
                dk, dv, _ = step(operands, dk, dv, t, m, head, s, False, False, True, WHICH, VARIANT)
                t += 1
    # computed anew, or it would take registers all the way
    b, kv_head, first_key, length, span = work(shape, visibility, program_again(), VARIANT)
    if VARIANT.value.HAS_DROPOUT:
        dv = dv * dv_scale
    v_tile = v_smem.index(WHICH)
    v_tile.reshape([ROWS, HEAD_DIM]).store(dv.to(dtype))
    fence_async_shared()
    copy_out(dv_desc, [b, kv_head, first_key + WHICH * ROWS, 0], v_tile)
    # k's place is free once its last product is done
    if VARIANT.value.OWN_DQ:
        mbarrier.wait(ds_free.index((t + 1) % DS_BUFFERS), ((t - 1) // DS_BUFFERS) & 1, pred=t > 0)
    else:
        await_release(FIRST_BARRIER + 2 * q_smem.shape[0] + 1, CONSUMERS * 128)
    k_tile = k_smem.index(WHICH)
    k_tile.reshape([ROWS, HEAD_DIM]).store((dk * dk_scale).to(dtype))
    fence_async_shared()
    copy_out(dk_desc, [b, kv_head, first_key + WHICH * ROWS, 0], k_tile)
    tma.store_wait(0)


@gluon.jit
def dq_worker(job, VARIANT: gl.constexpr):
    """dq of every tile, by a warpgroup of its own, at head dimension 64."""
    dq_desc, buffers, barriers, shape, visibility = job[2], job[3], job[4], job[5], job[6]
    k_smem, q_smem, ds_smem, dq_smem = buffers[0], buffers[2], buffers[6], buffers[7]
    k_full, ds_free = barriers[0], barriers[4]
    num_heads, group, q_len = shape[1], shape[2], shape[3]
    SUMS: gl.constexpr = ROWS * 64 // 256
    DS_FULL: gl.constexpr = FIRST_BARRIER + 2 * q_smem.shape[0]
    b, kv_head, _, _, span = work(shape, visibility, gl.program_id(0), VARIANT)
    mbarrier.wait(k_full, 0)
    t = 0
    for g in range(group):
        first = (b * num_heads + kv_head * group + g) * gl.cdiv(q_len, ROWS)
        for x in range(span[3] - span[0]):
            await_release(DS_FULL + t % DS_BUFFERS, CONSUMERS * 128 + 128)
            dq = dq_product(ds_smem, k_smem, t, 0)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(ds_free.index(t % DS_BUFFERS), count=1)
            if VARIANT.value.ORDERED:
                hand_dq(dq_smem, dq, t, 0, barriers, VARIANT)
            else:
                add_dq(dq_desc, dq_smem.index(0), dq, (first + tile_at(x, span, VARIANT)) * SUMS)
            t += 1
    tma.store_wait(0)


@gluon.jit
def copy_keys(desc, b, kv_head, first_key, full, smem):
    """Copies the keys or values of a program."""
    BLOCKS: gl.constexpr = smem.shape[0]
    mbarrier.expect(full, BLOCKS * ROWS * smem.shape[4] * 2)
    for c in gl.static_range(BLOCKS):
        copy_in(desc, [b, kv_head, first_key + c * ROWS, 0], full, smem.index(c))


@gluon.jit
def copy_pair(
    desc, at, stats_desc, stats_at, full, tile, stats, raw, cleared, blind, ids, VARIANT: gl.constexpr
):
    """Copies a tile of queries' rows, and the one statistic that goes with it.

    Rows that see no key, which may hold anything, become zeros: with segments those whose id is negative, and
    else the first `blind` of the head. Returns how many tiles were cleared so far.
    """
    ROW_BYTES: gl.constexpr = tile.shape[3] * 2
    i_first = at[2]
    dirty = 0
    if VARIANT.value.HAS_SEGMENTS:
        if blind != 0:  # some tile of this program may have such rows
            dirty = holds_padding(ids + i_first, ROWS)
    elif VARIANT.value.HAS_LENGTHS:
        dirty = (i_first < blind).to(gl.int32)
    if dirty != 0:
        mbarrier.expect(raw, ROWS * ROW_BYTES)
        copy_in(desc, at, raw, tile)
        mbarrier.wait(raw, cleared & 1)
        rows = tile.reshape([ROWS, tile.shape[3]])
        for i in gl.static_range(ROWS // 8):
            at_rows = i_first + i * 8 + rows_of_eight()
            if VARIANT.value.HAS_SEGMENTS:
                hidden = gl.load(ids + at_rows) < 0
            else:
                hidden = at_rows < blind
            clear_eight(rows, i, hidden)
        fence_async_shared()
        cleared += 1
        # complete with the statistics, whose copy is begun by this warp when all of its rows are cleared
        mbarrier.expect(full, ROWS * 4)
    else:
        mbarrier.expect(full, ROWS * ROW_BYTES + ROWS * 4)
        copy_in(desc, at, full, tile)
    copy_in(stats_desc, [stats_at], full, stats)
    return cleared


@gluon.jit
def blind_rows(shape, visibility, b, first_key, length, VARIANT: gl.constexpr):
    """For `copy_pair`: whether queries of this program may be padding, or how many see no key."""
    blind = 0
    if VARIANT.value.HAS_SEGMENTS:
        first, end = 0, shape[3]
        KEY_BLOCKS: gl.constexpr = VARIANT.value.KEY_BLOCKS
        for c in gl.static_range(KEY_BLOCKS):
            at = row_of_spans(visibility, b, shape[4], first_key + c * ROWS)
            first, end = gl.maximum(first, gl.load(at)), gl.minimum(end, gl.load(at + 1))
            blind |= gl.load(at + 4)
        blind |= (first > end).to(gl.int32)  # what lies between two spans is visited, and neither tells of it
    elif VARIANT.value.HAS_LENGTHS:
        blind = shape[3] - length - shape[6]
    return blind


@gluon.jit
def producer(feed, VARIANT: gl.constexpr):
    """Copies what the consumers will read, in their order, as buffers fall free."""
    descs, buffers, barriers, shape, visibility = feed
    q_desc, k_desc, v_desc, dout_desc, stats_desc = descs
    k_smem, v_smem, q_smem, dout_smem = buffers[0], buffers[1], buffers[2], buffers[3]
    lse_smem, delta_smem = buffers[4], buffers[5]
    k_full, v_full, q_full, dout_full, raw = barriers[0], barriers[1], barriers[2], barriers[3], barriers[5]
    batch, num_heads, group, q_len = shape[0], shape[1], shape[2], shape[3]
    STAGES: gl.constexpr = q_smem.shape[0]
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    b, kv_head, first_key, length, span = work(shape, visibility, gl.program_id(0), VARIANT)
    blind = blind_rows(shape, visibility, b, first_key, length, VARIANT)
    ids = blind  # of no interest without segments
    if VARIANT.value.HAS_SEGMENTS:
        ids = q_ids_of(visibility, b)
    padded = gl.cdiv(q_len, ROWS) * ROWS
    copy_keys(k_desc, b, kv_head, first_key, k_full, k_smem)
    t = 0
    cleared = 0
    for g in range(group):
        h = kv_head * group + g
        for x in range(span[3] - span[0]):
            m = tile_at(x, span, VARIANT)
            place = t % STAGES
            at = [b, h, m * ROWS, 0]
            stats_at = (b * num_heads + h) * padded + m * ROWS
            if t >= STAGES:
                await_release(FIRST_BARRIER + place, THREADS)
            cleared = copy_pair(
                q_desc, at, stats_desc, stats_at, q_full.index(place), q_smem.index(place),
                lse_smem.index(place), raw, cleared, blind, ids, VARIANT,
            )  # fmt: skip
            if t == 0:
                copy_keys(v_desc, b, kv_head, first_key, v_full, v_smem)
            if t >= STAGES:
                await_release(FIRST_BARRIER + STAGES + place, THREADS)
            stats_at += batch * num_heads * padded
            cleared = copy_pair(
                dout_desc, at, stats_desc, stats_at, dout_full.index(place), dout_smem.index(place),
                delta_smem.index(place), raw, cleared, blind, ids, VARIANT,
            )  # fmt: skip
            t += 1
    if t == 0:  # nobody sees these keys
        copy_keys(v_desc, b, kv_head, first_key, v_full, v_smem)
    # every arrival is met, so that no barrier is left half full
    for u in range(gl.maximum(t - STAGES, 0), t):
        await_release(FIRST_BARRIER + u % STAGES, THREADS)
        await_release(FIRST_BARRIER + STAGES + u % STAGES, THREADS)
