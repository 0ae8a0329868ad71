"""The copying half of `hopper_forward`, and what its two halves must agree on.

Both walk the same work items in the same order, and the same tiles of an item: `work` says which. `Variant`
says what their code depends on. Lengths and segments exclude each other (see `dispatch.unsupported`), so that
tiles of segments begin at key 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from streamattn.kernels.hopper_primitives import FIRST_BARRIER, await_kernel_before, await_release, copy_in
from streamattn.kernels.primitives import ITEM, ORDER, SPAN, kv_span, schedule


@dataclass(frozen=True)
class Variant:
    """What the code of a kernel depends on beside the shape of its tile.

    Attributes:
        CONSUMERS: of a program; this and the next three as in `HopperTile`.
        OVERLAP: see there.
        SHARED_OUT: see there.
        Q_BUFFERS: see there.
        DYNAMIC: whether work items are drawn from a counter.
        HAS_LEFT: whether the window limits the keys before a query.
        HAS_RIGHT: whether it limits those behind it.
        WIDE_EDGE: whether the last keys that a consumer's queries see may lie in two tiles or more.
        HAS_LENGTHS: whether sequences have filled lengths of their own.
        HAS_SEGMENTS: whether a sequence holds segments.
        HAS_SOFTCAP: whether scores are capped.
        HAS_DROPOUT: whether probabilities are dropped.
    """

    CONSUMERS: int
    OVERLAP: bool
    SHARED_OUT: bool
    Q_BUFFERS: int
    DYNAMIC: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    WIDE_EDGE: bool
    HAS_LENGTHS: bool
    HAS_SEGMENTS: bool
    HAS_SOFTCAP: bool
    HAS_DROPOUT: bool

    @property
    def has_low_edge(self) -> bool:
        """Whether a consumer's first keys may lie in a tile of which its queries see only a part."""
        return self.HAS_LEFT or self.HAS_LENGTHS or self.HAS_SEGMENTS

    @property
    def in_pairs(self) -> bool:
        """Whether probabilities are carried to their product in pairs of 16 bits.

        Carried as single ones from one loop over tiles to another, they would be taken apart and put together
        at each tile, one instruction for each.
        """
        return self.HAS_DROPOUT or (self.OVERLAP and (self.WIDE_EDGE or self.has_low_edge))


@gluon.constexpr_function
def variant_of(*flags):
    """`Variant` of a kernel's own flags."""
    return Variant(*flags)


@gluon.jit
def await_tile(full, t, STAGES: gl.constexpr, pred=True):
    """Waits until the t-th tile of keys or values is in its buffer."""
    mbarrier.wait(full.index(t % STAGES), (t // STAGES) & 1, pred=pred)


@gluon.jit
def work(item, shape, visibility, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, VARIANT: gl.constexpr):
    """(batch, head, first query, filled keys, origin, first and end of seen key tiles, padded) of an item.

    The origin is the first key of tile 0. With lengths the tiles end with the last filled key, so that no key
    behind it is ever read, whatever it holds; the first tile may begin before key 0, where the copies fill in
    zeros. Padded: whether these tiles may hold keys of no segment.
    """
    batch, num_heads, q_len, kv_len, left, right, heads_per_group = shape
    lengths_ptr, stride_lengths, _ = visibility
    num_tiles = gl.cdiv(q_len, ROWS)
    tile_m, head = schedule(item, num_tiles, batch * num_heads, heads_per_group)
    b = head // num_heads
    if VARIANT.value.HAS_SEGMENTS and VARIANT.value.DYNAMIC:  # `segments.longest_first`
        row = visibility[2][5] + ORDER + (b * num_tiles + tile_m) * ITEM
        i_first, n_start, n_stop = gl.load(row), gl.load(row + 1), gl.load(row + 2)
        return b, head % num_heads, i_first, kv_len, 0, n_start, n_stop, gl.load(row + 3)
    i_first = (num_tiles - 1 - tile_m) * ROWS  # under a causal mask late queries see most
    i_last = gl.minimum(i_first + ROWS, q_len) - 1
    length = kv_len
    origin = 0
    if VARIANT.value.HAS_LENGTHS:
        length = gl.minimum(gl.maximum(gl.load(lengths_ptr + b * stride_lengths), 0), kv_len).to(gl.int32)
        origin = length % BLOCK_N
        origin = gl.where(origin > 0, origin - BLOCK_N, 0)
    start, stop = kv_span(i_first, i_last, q_len, length, left, right)
    padded = 0
    if VARIANT.value.HAS_SEGMENTS:
        first, end = kv_len, 0
        for c in gl.static_range(ROWS // 64):
            at = row_of_spans(visibility, b, q_len, i_first + c * 64)
            first, end = gl.minimum(first, gl.load(at)), gl.maximum(end, gl.load(at + 1))
            padded |= gl.load(at + 4)
        start, stop = gl.maximum(start, first), gl.minimum(stop, end)
    n_start = (start - origin) // BLOCK_N
    n_stop = gl.maximum(gl.cdiv(stop - origin, BLOCK_N), n_start)
    return b, head % num_heads, i_first, length, origin, n_start, n_stop, padded


@gluon.jit
def row_of_spans(visibility, b, q_len, i_first):
    """Pointer to what `segments.query_spans` found for the 64 queries from i_first on, or for the last."""
    spans_ptr = visibility[2][0]
    blocks = gl.cdiv(q_len, 64)
    block = gl.minimum(i_first // 64, blocks - 1)
    return spans_ptr + (b * blocks + block) * SPAN


@gluon.jit
def q_ids_of(visibility, b):
    """Pointer to the queries' segment ids of sequence b, as `segments.query_spans` leaves them."""
    return visibility[2][1] + b.to(gl.int64) * visibility[2][2]


@gluon.jit
def kv_ids_of(visibility, b):
    """Pointer to the keys' segment ids."""
    return visibility[2][3] + b.to(gl.int64) * visibility[2][4]


@gluon.jit
def holds_padding(ids_ptr, BLOCK_N: gl.constexpr):
    """Whether the segment id of some key of a tile is negative; by one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return (gl.min(gl.load(ids_ptr + gl.arange(0, BLOCK_N, layout=LAYOUT)), 0) < 0).to(gl.int32)


@gluon.jit
def prefetch(ids_ptr, COUNT: gl.constexpr):
    """Brings so many ids to the multiprocessor before the consumers ask for them; by one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    LINES: gl.constexpr = COUNT // 32  # of 128 bytes
    at = (ids_ptr + gl.arange(0, 32, layout=LAYOUT) % LINES * 32).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )


# few rows at once: a copying warp has few registers
EIGHT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))


@gluon.jit
def rows_of_eight():
    """0 to 7 as `clear_eight` wants its rows."""
    return gl.arange(0, 8, layout=gl.SliceLayout(1, EIGHT))


@gluon.jit
def clear_eight(rows, i, hidden):
    """Zeros in those of rows [N, D] 8 i to 8 i + 7 that are hidden [8]; by one warp."""
    for j in gl.static_range(rows.shape[1] // 64):
        part = rows.slice(i * 8, 8).slice(j * 64, 64, dim=1)
        values = part.load(EIGHT)
        part.store(gl.where(hidden[:, None], gl.zeros_like(values), values))


@gluon.jit
def copy_cleared(v_desc, v_at, tile, full, raw, cleared, ids_ptr, padded):
    """Copies a tile of v, with zeros in the rows of padding, which may hold NaN; by one warp.

    Returns how many tiles were cleared so far. Not padded: the tile is known to hold none.
    """
    BLOCK_N: gl.constexpr = tile.shape[2]
    BLOCK_D: gl.constexpr = tile.shape[3]
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * 2
    if padded != 0:
        padded = holds_padding(ids_ptr, BLOCK_N)
    if padded != 0:
        mbarrier.expect(raw, BYTES)
        copy_in(v_desc, v_at, raw, tile)
        mbarrier.wait(raw, cleared & 1)
        rows = tile.reshape([BLOCK_N, BLOCK_D])
        for i in gl.static_range(BLOCK_N // 8):
            clear_eight(rows, i, gl.load(ids_ptr + i * 8 + rows_of_eight()) < 0)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
        cleared += 1
    else:
        mbarrier.expect(full, BYTES)
        copy_in(v_desc, v_at, full, tile)
    return cleared


@gluon.jit
def producer(feed, VARIANT: gl.constexpr):
    """Copies what the consumers of this program will read, in their order, as buffers fall free."""
    descs, buffers, barriers, counter, shape, visibility, group = feed
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, _, next_smem = buffers
    q_full, q_free, k_full, v_full, next_full, next_free, v_raw = barriers
    BLOCK_M: gl.constexpr = q_smem.shape[3]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    CONSUMERS: gl.constexpr = VARIANT.value.CONSUMERS
    Q_BUFFERS: gl.constexpr = VARIANT.value.Q_BUFFERS
    Q_BYTES: gl.constexpr = BLOCK_M * q_smem.shape[4] * 2
    KV_BYTES: gl.constexpr = BLOCK_N * k_smem.shape[4] * 2
    THREADS: gl.constexpr = CONSUMERS * 128 + 32
    batch, num_heads, q_len, _, _, _, _ = shape
    if VARIANT.value.HAS_SEGMENTS:
        await_kernel_before()
    items = gl.cdiv(q_len, CONSUMERS * BLOCK_M) * batch * num_heads
    programs = gl.num_programs(0)
    item = gl.program_id(0)
    count = 0  # work items so far
    t = 0  # key tiles so far
    cleared = 0  # of them, whose values held padding
    while item < items:
        # drawn no earlier, or at the end some programs have claimed long items while others are done
        following = item
        if VARIANT.value.DYNAMIC:
            following = gl.atomic_add(counter, 1, sem="relaxed")  # the answer is waited for behind the copies
        following += programs
        b, h, i_first, _, origin, n_start, n_stop, padded = work(
            item, shape, visibility, CONSUMERS * BLOCK_M, BLOCK_N, VARIANT
        )
        if VARIANT.value.HAS_SEGMENTS:
            prefetch(q_ids_of(visibility, b) + i_first, CONSUMERS * BLOCK_M)
            last = gl.maximum((n_stop - 2) * BLOCK_N, 0)
            prefetch(kv_ids_of(visibility, b) + last, 2 * BLOCK_N)
        for c in gl.static_range(CONSUMERS):
            at = count % Q_BUFFERS * CONSUMERS + c
            mbarrier.wait(q_free.index(at), ((count // Q_BUFFERS) & 1) ^ 1)
            mbarrier.expect(q_full.index(at), Q_BYTES)
            copy_in(q_desc, [b, h, i_first + c * BLOCK_M, 0], q_full.index(at), q_smem.index(at))
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
                    [b, h // group, origin + n * BLOCK_N, 0],
                    k_full.index(u % STAGES),
                    k_smem.index(u % STAGES),
                )
            if step > 0:
                w = t + step - 1
                if w >= STAGES:
                    await_release(FIRST_BARRIER + STAGES + w % STAGES, THREADS)
                v_at = [b, h // group, origin + (n + 1) * BLOCK_N, 0]
                v_tile = v_smem.index(w % STAGES)
                full = v_full.index(w % STAGES)
                if VARIANT.value.HAS_SEGMENTS:
                    ids_ptr = kv_ids_of(visibility, b) + (n + 1) * BLOCK_N
                    cleared = copy_cleared(v_desc, v_at, v_tile, full, v_raw, cleared, ids_ptr, padded)
                else:
                    mbarrier.expect(full, KV_BYTES)
                    copy_in(v_desc, v_at, full, v_tile)
        t += n_stop - n_start
        item = following
        if VARIANT.value.DYNAMIC:
            slot = count % 2
            mbarrier.wait(next_free.index(slot), ((count // 2) & 1) ^ 1)
            number = gl.full([1], item, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0]))
            next_smem.index(slot).store(number)
            mbarrier.arrive(next_full.index(slot), count=1)
        count += 1
    if VARIANT.value.DYNAMIC and not VARIANT.value.HAS_SEGMENTS:  # `segments.longest_first` makes one a call
        # whoever drew items - 1 made the last draw, as each item makes one; a branch here spills registers
        gl.store(counter, 0, mask=item == programs + items - 1)
    # every arrival is met, so that no barrier is left half full
    for u in range(gl.maximum(t - STAGES, 0), t):
        await_release(FIRST_BARRIER + u % STAGES, THREADS)
        await_release(FIRST_BARRIER + STAGES + u % STAGES, THREADS)
