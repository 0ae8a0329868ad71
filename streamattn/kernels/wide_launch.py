"""What the launchers of the kernels for wide heads share: tiles by the work, and queries by the workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from streamattn.kernels import tiles
from streamattn.kernels.launch import architecture_of, multiprocessor_count
from streamattn.kernels.tiles import Tile, WidePass, WideTile, wide_tiles


class Chunk(NamedTuple):
    """Queries whose weights are in the workspace at once.

    Attributes:
        head_start: the first of its heads, counted over the whole batch.
        heads: how many heads.
        row_start: the first of its queries in each of them.
        row_stop: behind the last.
    """

    head_start: int
    heads: int
    row_start: int
    row_stop: int


def multiprocessors(x: Tensor) -> int:
    """Multiprocessors of x's GPU; a few where there is none, as in the interpreter."""
    return multiprocessor_count(x.get_device()) if x.is_cuda else 8


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(size: int) -> int:
    """The least power of two from size on."""
    return 1 << (size - 1).bit_length()


def pick(
    name: WidePass, q: Tensor, fits: Callable[[WideTile], bool], programs: Callable[[WideTile], int]
) -> WideTile:
    """The largest tile that fits and gives three of four multiprocessors a program, or else the smallest."""
    found = wide_tiles(name, architecture_of(q), q.element_size())
    legal = [tile for tile in found if fits(tile)] or [found[-1]]
    return next((tile for tile in legal if 4 * programs(tile) >= 3 * multiprocessors(q)), legal[-1])


def pick_weights(name: WidePass, q: Tensor, k: Tensor) -> WideTile:
    """The tile of a pass that makes weights: no larger than the matrix of them."""
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    return pick(
        name,
        q,
        lambda tile: power_of_two(q_len) >= tile.BLOCK_M and power_of_two(kv_len) >= tile.BLOCK_N,
        lambda tile: batch * heads * cdiv(q_len, tile.BLOCK_M) * cdiv(kv_len, tile.BLOCK_N),
    )


def pick_reader(name: WidePass, q: Tensor, weights: WideTile, heads: int, rows: int, width: int) -> WideTile:
    """The tile of a pass that reads weights in tiles of theirs, for `rows` of each head, `width` columns."""
    along_keys = name == "dkdv"
    return pick(
        name,
        q,
        lambda tile: weights.BLOCK_M % tile.BLOCK_M == 0 and weights.BLOCK_N % tile.BLOCK_N == 0,
        lambda tile: (
            heads * cdiv(rows, tile.BLOCK_N if along_keys else tile.BLOCK_M) * cdiv(width, tile.BLOCK_D)
        ),
    )


def chunks(num_heads: int, unit: int, q_len: int, kv_padded: int, itemsize: int, rows: int) -> list[Chunk]:
    """Cuts the heads, or the queries of each, so that the workspace is kept.

    Args:
        num_heads: over the whole batch.
        unit: heads that must stay together.
        q_len: queries of a head.
        kv_padded: keys of a row of the workspace.
        itemsize: bytes of one of its numbers.
        rows: queries of a tile, which stay together too, whatever they take.

    Returns:
        Chunks of which each but the last few is as large as the others; the first is as large as any.
    """
    padded = cdiv(q_len, rows) * rows
    budget = tiles.WIDE_WORKSPACE_BYTES // (kv_padded * itemsize * unit)  # queries of a unit
    if budget >= padded:
        units = num_heads // unit
        pieces = cdiv(units, budget // padded)
        size = cdiv(units, pieces) * unit
        starts = range(0, num_heads, size)
        return [Chunk(head, min(size, num_heads - head), 0, q_len) for head in starts]
    pieces = cdiv(padded, max(rows, budget // rows * rows))
    size = cdiv(padded // rows, pieces) * rows
    return [
        Chunk(head, unit, row, min(row + size, q_len))
        for head in range(0, num_heads, unit)
        for row in range(0, q_len, size)
    ]


def shared_tile(tile: WideTile) -> Tile:
    """The tile as `launch.call_arguments` takes one."""
    return Tile(tile.BLOCK_M, tile.BLOCK_N, tile.num_warps, tile.num_stages)


def arguments_of(kernel: Any, shared: dict[str, Any], **own: Any) -> dict[str, Any]:
    """What a kernel takes of the shared arguments, its own ones, and the launch options."""
    merged = shared | own
    wanted = (*kernel.arg_names, "num_warps", "num_stages", "launch_pdl")
    return {name: merged[name] for name in wanted if name in merged}
