"""One sequence shared by several processes: ``streamattn bench parallel --csv FILE``.

Forward and backward of causal attention in every mode of `streamattn.parallel`, beside one process that does
all of it; each mode is judged on that process's numbers, and what is wrong gets no time. Over gloo on a CPU,
over NCCL where there are several GPUs. A time is the median of the slowest process. Left out on purpose:
whole models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import ProcessException

from streamattn.bench.arguments import HelpFormatter, positive, writable
from streamattn.bench.comm import group, join
from streamattn.bench.machine import sm_clock
from streamattn.bench.providers import first_line
from streamattn.bench.resume import Mismatch, Stamp, appended, holds, rows_in, stamp
from streamattn.parallel.__main__ import TOLERANCE, compared
from streamattn.parallel.functional import MODES

COMMAND = "streamattn bench parallel"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}


@dataclass(frozen=True)
class ParallelCase:
    """What all processes do.

    Attributes:
        backend: gloo or nccl.
        world_size: processes.
        batch: sequences.
        num_heads: query heads.
        num_kv_heads: key heads.
        seq_len: tokens of a sequence, over all processes.
        head_dim: D.
        dtype: a name in `DTYPES`.
    """

    backend: str
    world_size: int
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int
    dtype: str


@dataclass(frozen=True)
class ParallelRow(ParallelCase, Stamp):
    """One mode of one case, one line of the CSV.

    Attributes:
        mode: ``alone``, or a name in `MODES`.
        status: ok, or why there are no figures.
        error: of out, dq, dk and dv the largest, over the largest entry.
        step_ms: forward and backward.
        speedup: the time of one process alone over this.
    """

    mode: str = ""
    status: str = "ok"
    error: float | None = None
    step_ms: float | None = None
    speedup: float | None = None


def member(
    rank: int, world_size: int, backend: str, folder: str, case: ParallelCase, modes: Sequence[str]
) -> None:
    """One process of a group; the first writes what all found."""
    device = join(rank, world_size, backend, f"{folder}/store")
    clock = sm_clock(device.type)
    found = [(*each, clock()) for each in compared(argparse.Namespace(**asdict(case), modes=modes), device)]
    if rank == 0:
        Path(f"{folder}/found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def rows_of(
    case: ParallelCase, found: Sequence[tuple[str, list[float], float, int | None]], on: Stamp
) -> list[ParallelRow]:
    """The lines of a case; ``found`` as `compared` yields it, and the GPU's clock in MHz right after that."""
    alone_ms, rows = found[0][2], []
    for mode, errors, ms, mhz in found:
        status, figures = "ok", {}
        if errors:
            figures["error"] = float(f"{max(errors):.3g}")
        if not errors and mode != "alone":
            status = f"unsupported: it needs a multiple of {case.world_size} query heads"
        elif errors and not max(errors) <= TOLERANCE[DTYPES[case.dtype]]:
            status = f"wrong: it is off by {max(errors):.1e} of the largest entry"
        else:
            figures |= dict(step_ms=round(ms, 3), speedup=round(alone_ms / ms, 3))
        there = asdict(replace(on, sm_mhz=mhz if figures else None))
        rows.append(ParallelRow(**there, **asdict(case), mode=mode, status=status, **figures))
    return rows


def table(rows: Sequence[ParallelRow]) -> Table:
    """All rows."""
    headings = ("processes", "tokens", "heads", "dtype", "mode", "error", "ms", "speedup", "status")
    shown = Table(*headings, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        figures = (row.error, row.step_ms, row.speedup)
        cells = ["" if figure is None else f"{figure:.3g}" for figure in figures]
        heads = f"{row.num_heads}:{row.num_kv_heads} x {row.head_dim}"
        first = (f"{row.world_size} {row.backend}", f"{row.batch}x{row.seq_len}", heads, row.dtype, row.mode)
        shown.add_row(*first, *cells, row.status)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases that the file doesn't hold yet.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where a mode was wrong or a group of processes failed.

    Raises:
        SystemExit: the command line is wrong, or the file has other columns.
    """
    gpus = torch.cuda.device_count()
    gpu = gpus > 1
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Times one sequence shared by several processes, each mode beside one process.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the rows go; a file with some is continued")
    add("--backend", choices=["gloo", "nccl"], default="nccl" if gpu else "gloo", help="NCCL needs GPUs")
    worlds = [n for n in (2, 4, 8) if n <= gpus] if gpu else [2]
    add("--world-sizes", type=positive, nargs="+", default=worlds, help="processes")
    lengths = [16384, 65536] if gpu else [256]
    add("--seq-lens", type=positive, nargs="+", default=lengths, help="tokens of a sequence")
    add("--batch", type=positive, default=1, help="sequences")
    add("--num-heads", type=positive, default=16 if gpu else 4, help="query heads")
    add("--num-kv-heads", type=positive, help="key heads; default: as many")
    add("--head-dim", type=positive, default=128 if gpu else 32, help="columns of a head")
    add("--dtype", choices=DTYPES, default="bfloat16" if gpu else "float32", help="of q, k, v")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="which")
    options = parser.parse_args(argv)
    kv_heads = options.num_kv_heads or options.num_heads
    if options.num_heads % kv_heads:
        parser.error(f"--num-heads: expected a multiple of {kv_heads} key heads")
    if options.backend == "nccl" and max(options.world_sizes) > gpus:
        raise SystemExit(f"{COMMAND}: NCCL needs a GPU a process; there are {gpus}, take --backend gloo")
    cases = [
        ParallelCase(
            options.backend,
            world,
            options.batch,
            options.num_heads,
            kv_heads,
            seq_len,
            options.head_dim,
            options.dtype,
        )
        for world in options.world_sizes
        for seq_len in options.seq_lens
    ]
    console, bad = Console(width=120), False
    rows: list[ParallelRow] = []
    try:
        held = rows_in(options.csv, ParallelRow)
        on = stamp("cuda" if options.backend == "nccl" else "cpu")
        with appended(options.csv, ParallelRow) as write:
            for case in cases:
                modes = ("alone", *options.modes)
                if all(holds(held, on, {**asdict(case), "mode": mode}) for mode in modes):
                    continue
                try:
                    found = group(member, case.world_size, case.backend, case, options.modes)
                except ProcessException as error:
                    text = f"{case.world_size} processes: {first_line(error)}"
                    console.print(text, markup=False, highlight=False)
                    bad = True
                    continue
                for row in rows_of(case, found, on):
                    write(row)
                    rows.append(row)
                    bad |= row.status.startswith("wrong")
    except Mismatch as error:
        raise SystemExit(f"{COMMAND}: {error}") from None
    console.print(table(rows) if rows else "every case is in the file already", highlight=False)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
