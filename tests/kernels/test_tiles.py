"""The tables of launch parameters: complete, legal, and fitting together."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from itertools import product

import pytest

from streamattn.dispatch import MAX_TRITON_HEAD_DIM
from streamattn.kernels.tiles import (
    _TABLES,
    HOPPER_BLOCK_M,
    Architecture,
    HopperTile,
    Pass,
    Tile,
    architecture,
    choose_hopper_tile,
    choose_tile,
)

PASSES: tuple[Pass, ...] = ("forward", "dq", "dkdv")
ARCHITECTURES: tuple[Architecture, ...] = ("sm_80", "sm_86", "sm_90", "interpreter")
ITEMSIZES = (2, 4)
CALLS: list[tuple[Architecture, int, int, bool]] = [
    (arch, head_dim, itemsize, dense_mask)
    for arch, itemsize, dense_mask in product(ARCHITECTURES, ITEMSIZES, [False, True])
    for head_dim in [1, 16, 64, 65, 96, 128, 129, 192, MAX_TRITON_HEAD_DIM]
]


@pytest.mark.parametrize("name", PASSES)
def test_every_call_has_a_legal_tile(name):
    for arch, head_dim, itemsize, dense_mask in CALLS:
        tile = choose_tile(name, arch, head_dim, itemsize, dense_mask)
        assert tile.BLOCK_M >= 16, (arch, head_dim)
        assert tile.BLOCK_N >= 16, (arch, head_dim)
        for size in (tile.BLOCK_M, tile.BLOCK_N, tile.num_warps):
            assert size & (size - 1) == 0, (arch, head_dim)
        assert 1 <= tile.num_stages <= 4


def test_the_row_statistics_of_dq_cover_the_tiles_of_dkdv():
    """dq pads them to its own tiles; dk and dv read them without a test."""
    for call in CALLS:
        assert choose_tile("dq", *call).BLOCK_M % choose_tile("dkdv", *call).BLOCK_M == 0, call


def test_the_passes_have_the_same_rows():
    for arch, itemsize in product(ARCHITECTURES[:-1], ITEMSIZES):
        forward, dq, dkdv = (list(_TABLES[name, arch, itemsize]) for name in PASSES)
        assert forward == dq == dkdv == sorted(forward)


SHARED_BYTES = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448}  # of a block, at most


# triton-lang/triton#8182: out of shared memory at a large head_dim
@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("name", PASSES)
def test_what_is_in_flight_fits_a_block(name, arch):
    """The tiles that a pass loads ahead, two a stage; `test_tiles_compiled.py` knows all of it."""
    for itemsize in ITEMSIZES:
        for head_dim in _TABLES[name, arch, itemsize]:
            tile = choose_tile(name, arch, head_dim, itemsize, dense_mask=False)
            rows = tile.BLOCK_M if name == "dkdv" else tile.BLOCK_N
            assert 2 * tile.num_stages * rows * head_dim * itemsize <= SHARED_BYTES[arch], head_dim


# triton-lang/triton#8182: a GPU gets the tiles of those whose blocks have as much
@pytest.mark.parametrize(
    ("capability", "family"),
    [
        (None, "interpreter"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_80"),
        ((8, 9), "sm_86"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_90"),
        ((10, 3), "sm_90"),
        ((12, 0), "sm_86"),
        ((12, 1), "sm_86"),
    ],
)
def test_families_follow_the_shared_memory_of_a_block(capability, family):
    assert architecture(capability) == family


def test_tiles_are_pinned():
    tile = Tile(64, 64, 4, 2)
    with pytest.raises(FrozenInstanceError):
        tile.BLOCK_M = 128  # pyright: ignore[reportAttributeAccessIssue]


def chosen(
    head_dim: int,
    q_len: int,
    num_heads: int,
    even: bool = False,
    segments: bool = False,
    dropout: bool = False,
) -> HopperTile:
    return choose_hopper_tile(head_dim, q_len, num_heads, 132, even, segments, dropout)


def test_hopper_tiles_grow_with_the_work():
    tall, wide = chosen(64, 1024, 100), chosen(64, 1025, 100)
    assert tall.CONSUMERS > wide.CONSUMERS
    assert tall.BLOCK_N < wide.BLOCK_N
    # 48 items of 256 queries would leave most of 132 multiprocessors without work
    assert chosen(64, 1024, 12).CONSUMERS == 2
    assert chosen(64, 128, 1000).CONSUMERS == 2
    # two items of 256 queries would have a third more rows than three of 128
    assert chosen(64, 384, 1000).CONSUMERS == 2
    assert chosen(64, 512, 1000).CONSUMERS == 4
    assert chosen(64, 2048, 100, segments=True) == tall
    assert chosen(64, 1025, 100, dropout=True).CONSUMERS == 2


@pytest.mark.parametrize("q_len", [64, 500, 5000])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 136, 192, 256])
def test_hopper_tiles_are_what_the_kernel_takes(head_dim, q_len):
    for num_heads, *flags in product((1, 10_000), *[(False, True)] * 3):
        tile = chosen(head_dim, q_len, num_heads, *map(bool, flags))
        assert head_dim <= tile.BLOCK_D
        assert tile.CONSUMERS in (2, 3, 4)
        assert 8 + 2 * tile.STAGES <= 16, "two named barriers a stage, from the eighth on"
        # a consumer's queries end in one tile of keys where the diagonal starts at a multiple of theirs
        assert tile.BLOCK_N % HOPPER_BLOCK_M == 0
        assert tile.Q_BUFFERS in (1, 2)
