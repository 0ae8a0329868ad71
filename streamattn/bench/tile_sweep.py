"""Which tile is fastest: ``streamattn bench kernel --tiles --passes forward backward --csv FILE``.

Tiles take the place of providers: each is put into the table of `streamattn.kernels.tiles` by turns, judged
and timed like any other contestant, and what a GPU can't launch is noted. The forward is timed for the tiles
of its kernel (of decode's in its own cases), the backward for those of dq and those of dkdv, the other kernel
left as it is. The best are marked, and printed as rows of that table. Left out on purpose: the tables of the
kernels for Hopper and for wide heads, whose tiles depend on one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from streamattn.bench.cases import DTYPES, Case
from streamattn.bench.contest import Plan, contest
from streamattn.bench.providers import PROVIDERS, Provider
from streamattn.bench.tables import Row, case_of, geometric_mean
from streamattn.kernels import tiles
from streamattn.kernels.tiles import Pass, Tile

GRID: dict[Pass, list[Tile]] = {
    "decode": [Tile(m, n, 4, stages) for m in (16, 32) for n in (32, 64, 128) for stages in (2, 3, 4)],
}
for _kernel in ("forward", "dq", "dkdv"):
    GRID[_kernel] = [
        Tile(m, n, warps, stages)
        for m in (32, 64, 128)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for stages in (1, 2, 3)
        if m * n >= 2048 and (warps == 4 or m * n >= 4096)
    ]
SHOWN = 5
"""Tiles of a case that are printed; the file has all."""


def name_of(kernel: Pass, tile: Tile) -> str:
    """A contestant's name: the kernel, BLOCK_M x BLOCK_N x num_warps x num_stages."""
    return f"{kernel} {tile.BLOCK_M}x{tile.BLOCK_N}x{tile.num_warps}x{tile.num_stages}"


def tile_of(name: str) -> tuple[Pass, Tile]:
    """What `name_of` named."""
    first, sizes = name.split()
    kernels: dict[str, Pass] = {kernel: kernel for kernel in GRID}
    return kernels[first], Tile(*map(int, sizes.split("x")))


def limit_of(head_dim: int) -> int:
    """The row of a table that serves a head dimension: its greatest."""
    return next(limit for limit in tiles._TABLES["forward", "sm_90", 2] if head_dim <= limit)


def work(cases: Sequence[Case], plan: Plan) -> Iterator[tuple[Case, list[str], Plan]]:
    """What is timed together: a case, tiles of one kernel by their names, and the pass that they serve.

    Each kernel's own tiles, those of every architecture, are among them.
    """
    for case in cases:
        if case.head_dim > max(tiles._TABLES["forward", "sm_90", 2]):
            continue
        kernels: dict[Pass, str] = {"forward": "forward", "dq": "backward", "dkdv": "backward"}
        if case.queries is not None:
            kernels = {"decode": "forward"}
        for kernel, part in kernels.items():
            if part in plan.passes:
                itemsize, limit = DTYPES[case.dtype].itemsize, limit_of(case.head_dim)
                own = [
                    table[limit]
                    for (name, _, size), table in tiles._TABLES.items()
                    if (name, size) == (kernel, itemsize)
                ]
                found = dict.fromkeys([*own, *GRID[kernel]])
                yield case, [name_of(kernel, tile) for tile in found], replace(plan, passes=(part,))


@contextmanager
def in_table(kernel: Pass, tile: Tile, case: Case) -> Iterator[None]:
    """A tile in the table's place for a case on this machine; launches that were planned are forgotten."""
    from streamattn.kernels import launch

    arch = tiles.architecture(torch.cuda.get_device_capability())
    key = (kernel, arch, DTYPES[case.dtype].itemsize)
    before = tiles._TABLES[key]
    tiles._TABLES[key] = {**before, limit_of(case.head_dim): tile}
    launch._plans.clear()
    try:
        yield
    finally:
        tiles._TABLES[key] = before
        launch._plans.clear()


def measure(case: Case, names: Sequence[str], plan: Plan) -> list[Row]:
    """Runs a case in this process with each of these tiles; a tile that can't be launched is no error."""
    providers: dict[str, Provider] = {}
    for name in names:
        kernel, tile = tile_of(name)
        backend = "streamattn-decode" if kernel == "decode" else "streamattn-portable"
        providers[name] = replace(
            PROVIDERS[backend](),
            ours=False,
            around=partial(in_table, kernel, tile, case),
        )
    return contest(case, providers, plan)


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """The fastest tiles of each kernel in each case and timer, the best marked."""
    groups: dict[tuple[Case, str, str], list[Row]] = {}
    for row in rows:
        if row.median_ms is not None:
            groups.setdefault((case_of(row), row.provider.split()[0], row.timer), []).append(row)
    for (case, kernel, timer), found in groups.items():
        shown = Table("", "tile", "ms", "TFLOP/s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        shape = f"{case.batch}x{case.seq_len}x{case.num_heads}, D {case.head_dim}, {case.dtype}"
        shown.title = f"{kernel}, {case.case}, {case.label}, {shape}, {timer}"
        for index, row in enumerate(sorted(found, key=lambda row: row.median_ms or 0.0)[:SHOWN]):
            mark = "" if index else "best"
            shown.add_row(mark, row.provider.split()[1], f"{row.median_ms:.4f}", f"{row.tflops:.1f}")
        yield shown


def table_rows(rows: Sequence[Row], arch: str) -> list[str]:
    """Rows for `streamattn.kernels.tiles`: the best of each kernel, element size and class of head_dim.

    That is the tile of the least geometric mean of times over the best, in all of its cases.

    Args:
        rows: of a sweep.
        arch: of the machine, as `tiles.architecture` names it.
    """
    found: dict[tuple[str, int], dict[int, dict[str, list[float]]]] = {}
    for row in rows:
        kernel, size = row.provider.split()[0], DTYPES[row.dtype].itemsize
        tile_ratios = found.setdefault((kernel, size), {}).setdefault(limit_of(row.head_dim), {})
        ratios = tile_ratios.setdefault(row.provider, [])
        if row.speedup is not None:
            ratios.append(row.speedup)
    lines = []
    for (kernel, size), limits in found.items():
        best = {}
        for limit, ratios in sorted(limits.items()):
            most = max(map(len, ratios.values()))
            whole = {name: each for name, each in ratios.items() if len(each) == most > 0}
            if whole:
                _, tile = tile_of(max(whole, key=lambda name: geometric_mean(whole[name])))
                best[limit] = (
                    f"{limit}: Tile({tile.BLOCK_M}, {tile.BLOCK_N}, {tile.num_warps}, {tile.num_stages})"
                )
        if best:
            lines.append(f'("{kernel}", "{arch}", {size}): {{{", ".join(best.values())}}},')
    return lines
