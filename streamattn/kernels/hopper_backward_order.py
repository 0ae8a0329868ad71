"""The order in which the Hopper backward adds up dq, where the same inputs must give the same bits.

So it does too where sequences are so short that this is faster (`tiles.HopperBackwardTile.IN_ORDER`).

The sums of a tile of queries take first the share of the last keys that it sees, and then those of the keys
before, one program after the other. A counter of each tile in global memory says whose turn it is. Warps of
their own, the adders, wait for the turn, add by TMA (the first one writes), wait until that is in global
memory and pass the turn on. They take the tiles by turns, each with a buffer in shared memory, so that nobody
else waits for memory.

Programs of one head start from the last keys to the first, and each walks its queries from the first on.
Where queries see no later keys a program so comes to a tile two tiles later than the program before, and
hardly waits. Where they do all of them meet at the first tile, and then run behind one another. How many
heads start side by side was found by measuring (see `hopper_launch.group_of_heads`).

With segments the programs that visit a tile need not be neighbours: a light pass counts, for each, those
before it.

Termination: a program waits for programs with lower numbers alone. The hardware starts programs in the order
of their numbers, so these run or are done, and the lowest that is not done waits for none. That order is
documented nowhere, but widely relied on; should it not hold, `await_turn` ends the kernel with an error.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from streamattn.kernels.hopper_backward_warps import CONSUMERS, ROWS, tile_at, work
from streamattn.kernels.hopper_primitives import add_out, await_turn, copy_out, pass_on
from streamattn.kernels.launch import UNSPECIALIZED
from streamattn.kernels.primitives import SPAN, q_span


@triton.jit(do_not_specialize=UNSPECIALIZED)
def hopper_bwd_ranks_kernel(
    spans_ptr,
    ranks_ptr,
    q_len,
    kv_len,
    window_left,
    window_right,
    ROWS: tl.constexpr,
    CONSUMERS: tl.constexpr,
    TILES: tl.constexpr,
):
    """ranks [B, tiles of keys, tiles of queries]: how many tiles of later keys visit one of queries.

    A tile of keys visits those that `hopper_backward_warps.work` says.
    """
    KEYS: tl.constexpr = CONSUMERS * ROWS
    q_tiles, kv_tiles, blocks = tl.cdiv(q_len, ROWS), tl.cdiv(kv_len, KEYS), tl.cdiv(kv_len, ROWS)
    parts = tl.cdiv(q_tiles, TILES)
    b = (tl.program_id(0) // parts).to(tl.int64)
    m = tl.program_id(0) % parts * TILES + tl.arange(0, TILES)  # [TILES]
    later = tl.zeros([TILES], tl.int32)
    for x in range(0, kv_tiles, 32):
        tile = kv_tiles - 1 - x - tl.arange(0, 32)  # [32]
        start, stop = q_span(tile * KEYS, tile * KEYS + KEYS - 1, q_len, kv_len, window_left, window_right)
        low, high = tl.zeros([32], tl.int32) + q_len, tl.zeros([32], tl.int32)
        for c in tl.static_range(CONSUMERS):
            block = tl.minimum(tile * CONSUMERS + c, blocks - 1)
            at = spans_ptr + (b * blocks + block) * SPAN
            low = tl.minimum(low, tl.load(at, mask=tile >= 0, other=0))
            high = tl.maximum(high, tl.load(at + 1, mask=tile >= 0, other=0))
        start, stop = tl.maximum(start, low), tl.minimum(stop, high)
        inside = (tile >= 0)[:, None] & (m < q_tiles)[None, :]
        visits = (m[None, :] >= (start // ROWS)[:, None]) & (m[None, :] * ROWS < stop[:, None]) & inside
        visits = visits.to(tl.int32)  # [32, TILES]
        ranks = later[None, :] + tl.cumsum(visits, 0) - visits
        at = ranks_ptr + (b * kv_tiles + tile)[:, None] * q_tiles + m[None, :]
        tl.store(at, ranks.to(ranks_ptr.dtype.element_ty), mask=inside)
        later += tl.sum(visits, 0)


@gluon.jit
def turn_of(m, first_key, length, q_len, window_right, VARIANT: gl.constexpr):
    """How many programs add to tile m's sums before the one that has the keys from first_key on.

    Without segments, where those that visit a tile are neighbours.
    """
    KEYS: gl.constexpr = CONSUMERS * ROWS
    last = length - 1  # of the keys that tile m sees, or that the program visits with it for others' sake
    if VARIANT.value.HAS_RIGHT:
        last = gl.minimum(last, m * ROWS + ROWS - 1 + length - q_len + window_right)
    return last // KEYS - first_key // KEYS


@gluon.jit
def dq_adder(sums, WHICH: gl.constexpr, VARIANT: gl.constexpr):
    """Adds every ADDERS-th tile's share to the sums of dq."""
    turns_ptr, ranks_ptr, dq_desc, dq_smem, barriers, shape, visibility = sums
    dq_full, dq_free = barriers[6], barriers[7]
    num_heads, group, q_len, kv_len, window_right = shape[1], shape[2], shape[3], shape[4], shape[6]
    KEYS: gl.constexpr = CONSUMERS * ROWS
    ADDERS: gl.constexpr = VARIANT.value.ADDERS
    PARTS: gl.constexpr = dq_smem.shape[0] // ADDERS
    b, kv_head, first_key, length, span = work(shape, visibility, gl.program_id(0), VARIANT)
    visits = span[3] - span[0]
    first = (b * num_heads + kv_head * group) * gl.cdiv(q_len, ROWS)
    for t in range(WHICH, group * visits, ADDERS):
        m = tile_at(t % visits, span, VARIANT)
        at = first + t // visits * gl.cdiv(q_len, ROWS) + m
        if VARIANT.value.HAS_SEGMENTS:
            row = (b * gl.cdiv(kv_len, KEYS) + first_key // KEYS).to(gl.int64)
            turn = gl.load(ranks_ptr + row * gl.cdiv(q_len, ROWS) + m).to(gl.int32)
        else:
            turn = turn_of(m, first_key, length, q_len, window_right, VARIANT)
        await_turn(turns_ptr + at, turn)
        mbarrier.wait(dq_full.index(WHICH), t // ADDERS & 1)
        for part in gl.static_range(PARTS):
            place = [(at * PARTS + part) * 16, 0]
            if turn == 0:  # what lies there is nobody's
                copy_out(dq_desc, place, dq_smem.index(WHICH * PARTS + part))
            else:
                add_out(dq_desc, place, dq_smem.index(WHICH * PARTS + part))
        tma.store_wait(0)
        mbarrier.arrive(dq_free.index(WHICH), count=1)
        pass_on(turns_ptr + at, turn + 1)
