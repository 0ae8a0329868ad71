"""Launch parameters as data: the tile of a pass, an architecture, a head dimension and an element size.

``BLOCK_M`` is the number of queries of a tile, ``BLOCK_N`` the number of keys (an older name of it is
TILE_K). The tables are pinned: no run tunes, so ranks and runs agree. Lengths never change a tile of the
portable kernels, so they never recompile; the Hopper forward has a tile for each of a few classes of lengths.
"""

from dataclasses import dataclass, replace
from typing import Literal

Pass = Literal["forward", "dq", "dkdv", "decode"]
Architecture = Literal["sm_80", "sm_86", "sm_90", "interpreter"]


@dataclass(frozen=True)
class Tile:
    """One row of a table.

    Attributes:
        BLOCK_M: queries of a tile, a power of two from 16; in the decode kernel the most rows of one.
        BLOCK_N: keys of a tile, a power of two from 16.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


def architecture(capability: tuple[int, int] | None) -> Architecture:
    """The row family of a compute capability: by shared memory a block can have (163 KB, 99 KB, 227 KB)."""
    if capability is None:
        return "interpreter"
    if capability in ((8, 6), (8, 9)) or capability[0] >= 12:
        return "sm_86"
    return "sm_80" if capability[0] == 8 else "sm_90"


# (pass, architecture, bytes an element) -> {head dimension up to: tile}; head dimension = the larger of q's
# and v's
_TABLES: dict[tuple[Pass, Architecture, int], dict[int, Tile]] = {
    ("forward", "sm_90", 2): {64: Tile(128, 64, 8, 3), 128: Tile(128, 128, 8, 3), 256: Tile(128, 64, 8, 2)},
    ("dq", "sm_90", 2): {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    ("dkdv", "sm_90", 2): {64: Tile(32, 128, 4, 3), 128: Tile(64, 128, 8, 3), 256: Tile(64, 64, 8, 1)},
    ("forward", "sm_90", 4): {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
    ("dq", "sm_90", 4): {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(32, 32, 8, 1)},
    ("dkdv", "sm_90", 4): {64: Tile(32, 64, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(32, 32, 8, 1)},
    ("forward", "sm_80", 2): {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    ("dq", "sm_80", 2): {64: Tile(64, 64, 4, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 8, 2)},
    ("dkdv", "sm_80", 2): {64: Tile(32, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    ("forward", "sm_80", 4): {64: Tile(64, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
    ("dq", "sm_80", 4): {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(32, 32, 8, 1)},
    ("dkdv", "sm_80", 4): {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(32, 32, 8, 1)},
    ("forward", "sm_86", 2): {64: Tile(128, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 1)},
    ("dq", "sm_86", 2): {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
    ("dkdv", "sm_86", 2): {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 4, 1), 256: Tile(16, 32, 4, 1)},
    ("forward", "sm_86", 4): {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(32, 32, 4, 1)},
    ("dq", "sm_86", 4): {64: Tile(32, 32, 4, 1), 128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    ("dkdv", "sm_86", 4): {64: Tile(32, 32, 4, 1), 128: Tile(16, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    ("decode", "sm_90", 2): {64: Tile(32, 128, 4, 3), 128: Tile(32, 64, 4, 3), 256: Tile(32, 32, 4, 3)},
    ("decode", "sm_90", 4): {64: Tile(16, 64, 4, 3), 128: Tile(16, 32, 4, 3), 256: Tile(16, 16, 8, 2)},
    ("decode", "sm_80", 2): {64: Tile(32, 64, 4, 4), 128: Tile(32, 64, 4, 3), 256: Tile(32, 32, 4, 3)},
    ("decode", "sm_80", 4): {64: Tile(16, 64, 4, 3), 128: Tile(16, 32, 4, 3), 256: Tile(16, 16, 8, 2)},
    ("decode", "sm_86", 2): {64: Tile(32, 64, 4, 3), 128: Tile(32, 32, 4, 3), 256: Tile(32, 32, 4, 3)},
    ("decode", "sm_86", 4): {64: Tile(16, 32, 4, 3), 128: Tile(16, 32, 4, 3), 256: Tile(16, 16, 8, 2)},
}
_INTERPRETED = Tile(32, 32, 4, 1)


def choose_tile(name: Pass, arch: Architecture, head_dim: int, itemsize: int, dense_mask: bool) -> Tile:
    """The tile of a pass.

    Args:
        name: which kernel.
        arch: see `architecture`.
        head_dim: the larger of q's and v's head dimension, at most 256.
        itemsize: bytes of an element of q: 2 or 4.
        dense_mask: whether an ``attn_mask`` is read: its tiles take shared memory too, so tile and pipeline
        shrink.
    """
    if arch == "interpreter":
        return _INTERPRETED
    table = _TABLES[name, arch, itemsize]
    tile = next(tile for limit, tile in table.items() if head_dim <= limit)
    if not dense_mask:
        return tile
    return Tile(min(tile.BLOCK_M, 64), min(tile.BLOCK_N, 64), 4 if head_dim <= 128 else 8, 1)


DECODE_PROGRAMS = 2
"""Programs of the decode kernel that a multiprocessor is given: enough loads in flight, and few parts."""

DECODE_SPLIT = 128
"""Fewest keys of a split for which adding up one more part pays."""

MAX_DECODE_SPLITS = 128
"""Most splits of the keys, a power of two: the second kernel looks at the maxima of all together."""

SCALE_LIMIT = 2.0**-100
"""Kernels fold a scale above it into the exponent's argument; a tiny one becomes 0, and 0 * -inf is NaN."""

HOPPER_BLOCK_M = 64
"""Queries of one consumer of the Hopper kernels: the rows of a warpgroup's product."""


@dataclass(frozen=True)
class HopperTile:
    """One row of the Hopper kernels' table.

    Attributes:
        CONSUMERS: warpgroups of a program that compute, 2 to 4, each on `HOPPER_BLOCK_M` queries.
        BLOCK_N: keys of a tile.
        BLOCK_D: head dimension, padded.
        STAGES: buffers for tiles of keys, and as many for values; at most 4, as each takes a named barrier.
        REGISTERS: of a thread of a consumer.
        OVERLAP: whether a tile's exponentials run during the product of the tile before.
        SHARED_OUT: whether the output leaves through q's buffer, for want of shared memory.
        Q_BUFFERS: work items whose queries have room in shared memory, 1 or 2.
    """

    CONSUMERS: int
    BLOCK_N: int
    BLOCK_D: int
    STAGES: int
    REGISTERS: int
    OVERLAP: bool
    SHARED_OUT: bool
    Q_BUFFERS: int


_WIDE_64 = HopperTile(3, 128, 64, 3, 160, True, False, 2)  # fastest where a row of keys is long
_TALL_64 = HopperTile(4, 64, 64, 4, 120, False, False, 2)  # fastest up to 1024 queries
_TALL_64_DRAWN = HopperTile(4, 64, 64, 4, 120, False, False, 1)
_SMALL_64 = HopperTile(2, 128, 64, 3, 240, True, False, 2)  # fewest queries an item: for few of them
_128 = HopperTile(2, 128, 128, 2, 240, True, True, 2)
_128_SEGMENTS = HopperTile(2, 128, 128, 2, 240, True, False, 1)
_256 = HopperTile(2, 64, 256, 2, 240, True, True, 1)


def choose_hopper_tile(
    head_dim: int,
    q_len: int,
    num_heads: int,
    multiprocessors: int,
    even: bool,
    segments: bool,
    dropout: bool,
) -> HopperTile:
    """The tile of the Hopper forward.

    Args:
        head_dim: of q, k and v, at most 256.
        q_len: number of queries of a sequence.
        num_heads: heads over the whole batch.
        multiprocessors: of the GPU; an item for each is wanted before items grow.
        even: whether all items take equally long; where they don't, a program that has room for the next
            item's queries draws that item early, and short items end unevenly.
        segments: whether there are; they are short where sequences are packed.
        dropout: whether there is; it takes registers.
    """
    if head_dim > 128:
        return _256
    if head_dim > 64:
        return _128_SEGMENTS if segments else _128
    if q_len > 1024 and not segments:
        tile = _SMALL_64 if dropout else _WIDE_64
    else:
        tile = _TALL_64 if even else _TALL_64_DRAWN
    items = -(-q_len // (tile.CONSUMERS * HOPPER_BLOCK_M))
    # rows that no query fills, and small items are a tenth slower for a row
    rows, fewest = (-(-q_len // (x.CONSUMERS * HOPPER_BLOCK_M)) * x.CONSUMERS for x in (tile, _SMALL_64))
    return tile if items * num_heads >= multiprocessors and rows <= 1.1 * fewest else _SMALL_64


@dataclass(frozen=True)
class HopperBackwardTile:
    """One row of the Hopper backward's table.

    Its tiles have 64 queries and 128 keys; above head dimension 128 they have 64 keys.

    Attributes:
        STAGES: buffers for tiles of queries, and as many for those of dout; each takes a named barrier.
        OWN_DQ: whether a warpgroup of its own computes dq; or else the two that compute dk and dv, as
            always above head dimension 128.
        REGISTERS: of a thread of these two.
        DQ_REGISTERS: of a thread of that warpgroup, 0 without.
        IN_ORDER: queries and keys up to which dq is added up in one order though nobody asked for it: nobody
            clears the sums then, and few keys make few turns to wait for.
    """

    STAGES: int
    OWN_DQ: bool
    REGISTERS: int
    DQ_REGISTERS: int
    IN_ORDER: int


# head dimension of q, k and v, up to -> tile
HOPPER_BACKWARD_TILES = {
    64: HopperBackwardTile(3, True, 184, 104, 512),
    128: HopperBackwardTile(2, False, 240, 0, 1024),
    256: HopperBackwardTile(2, False, 240, 0, 0),
}


WIDE_WORKSPACE_BYTES = 128 << 20
"""Of a workspace of the kernels for wide heads, which holds the weights of as many queries as fit."""

WIDE_SHORT_KEYS = 64
"""Keys up to which scores are summed from parts, each over some columns of the head."""

WidePass = Literal["weights", "out", "partial", "short", "dscores", "dq", "dkdv"]


@dataclass(frozen=True)
class WideTile:
    """One row of the table for wide heads; sizes are powers of two from 16.

    Attributes:
        BLOCK_M: queries of a tile.
        BLOCK_N: keys of a tile.
        BLOCK_D: columns of a head: of a step where they are summed over, or else of the result's tile.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    num_warps: int
    num_stages: int


# (pass, bytes an element) -> tiles from large to small: the first that gives each multiprocessor a program is
# taken. A tile of "out" and "dq" divides one of "weights" and "dscores", whose tiles they read; one of "dkdv"
# that of "dscores".
_WIDE_TABLES: dict[tuple[WidePass, int], tuple[WideTile, ...]] = {
    ("weights", 2): (
        WideTile(128, 128, 64, 8, 3),
        WideTile(64, 64, 64, 4, 3),
        WideTile(32, 32, 64, 4, 3),
    ),
    ("weights", 4): (
        WideTile(128, 128, 32, 8, 3),
        WideTile(128, 64, 32, 8, 3),
        WideTile(64, 64, 32, 4, 3),
        WideTile(64, 32, 64, 4, 3),
        WideTile(32, 32, 64, 4, 3),
    ),
    ("out", 2): (
        WideTile(128, 64, 256, 8, 3),
        WideTile(128, 64, 128, 8, 3),
        WideTile(64, 64, 128, 4, 3),
        WideTile(32, 32, 64, 4, 2),
    ),
    ("out", 4): (
        WideTile(128, 32, 64, 8, 3),
        WideTile(64, 32, 64, 4, 3),
        WideTile(64, 32, 32, 4, 3),
        WideTile(32, 32, 64, 4, 2),
    ),
    ("partial", 2): (WideTile(32, 64, 64, 4, 3),),
    ("partial", 4): (WideTile(32, 64, 64, 4, 3),),
    ("short", 2): (WideTile(32, 64, 64, 4, 2),),
    ("short", 4): (WideTile(32, 64, 64, 4, 2),),
    ("dscores", 2): (
        WideTile(128, 128, 64, 8, 3),
        WideTile(64, 64, 64, 4, 3),
        WideTile(32, 32, 64, 4, 3),
    ),
    ("dscores", 4): (
        WideTile(128, 64, 32, 8, 3),
        WideTile(64, 64, 32, 4, 3),
        WideTile(64, 32, 64, 4, 3),
        WideTile(32, 32, 64, 4, 3),
    ),
    ("dq", 2): (
        WideTile(128, 64, 256, 8, 3),
        WideTile(128, 64, 128, 8, 3),
        WideTile(64, 64, 128, 4, 3),
        WideTile(32, 32, 64, 4, 2),
    ),
    ("dq", 4): (
        WideTile(128, 32, 64, 8, 3),
        WideTile(64, 32, 64, 4, 3),
        WideTile(32, 32, 64, 4, 2),
    ),
    ("dkdv", 2): (
        WideTile(64, 128, 256, 8, 3),
        WideTile(64, 128, 128, 8, 3),
        WideTile(64, 64, 128, 4, 3),
        WideTile(32, 32, 64, 4, 2),
    ),
    ("dkdv", 4): (WideTile(32, 64, 64, 4, 3), WideTile(32, 32, 64, 4, 2)),
}
_WIDE_INTERPRETED = WideTile(32, 32, 512, 4, 1)


def wide_tiles(name: WidePass, arch: Architecture, itemsize: int) -> tuple[WideTile, ...]:
    """The tiles of a pass over wide heads, from large to small.

    Args:
        name: which kernel.
        arch: see `architecture`; those before sm_90 have the two smallest, in two stages.
        itemsize: bytes of an element of q: 2 or 4.
    """
    if arch == "interpreter":
        return (_WIDE_INTERPRETED,)
    tiles = _WIDE_TABLES[name, itemsize]
    if arch == "sm_90":
        return tiles
    return tuple([replace(tile, num_stages=min(tile.num_stages, 2)) for tile in tiles[-2:]])
