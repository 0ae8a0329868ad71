"""What moving tensors costs: ``streamattn bench comm --csv FILE``.

Collectives by message size and number of processes, over gloo on a CPU and NCCL where there are GPUs; and
copies between host and GPU, from pinned memory and not. Each is judged on known numbers before it is timed.
The time of a round is that of the slowest process; medians are reported. Sizes are those of the larger of a
process's two buffers. Algorithm bandwidth is size over time; bus bandwidth is what each process's link
carries of that: 2 (n - 1) / n of it in an all-reduce, (n - 1) / n in the others, all of it from one process
to the next. Left out on purpose: several hosts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from streamattn.bench.arguments import HelpFormatter, positive, writable
from streamattn.bench.gate import WrongResult
from streamattn.bench.machine import sm_clock
from streamattn.bench.providers import first_line
from streamattn.bench.resume import Mismatch, Stamp, appended, holds, rows_in, stamp
from streamattn.bench.timers import quantiles

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
COPIES = ("host_to_device", "device_to_host")
MB = 10**6
WARMUP = 3


@dataclass(frozen=True)
class CommRow(Stamp):
    """One operation, size and number of processes, one line of the CSV.

    Attributes:
        operation: a name in `COLLECTIVES` or `COPIES`.
        backend: gloo or nccl; pinned or pageable for copies.
        world_size: processes; 1 for copies.
        megabytes: of the larger buffer, 10^6 bytes each.
        median_ms: of a round.
        p20_ms: of the same rounds.
        p80_ms: of the same rounds.
        algorithm_gb_s: size over time, 10^9 bytes a second.
        bus_gb_s: of one link.
        status: ok, or why there are no figures.
    """

    operation: str
    backend: str
    world_size: int
    megabytes: int
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    algorithm_gb_s: float | None = None
    bus_gb_s: float | None = None
    status: str = "ok"


def bus_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    if operation == "all_reduce":
        return 2 * (world_size - 1) / world_size
    return 1.0 if operation in ("send_recv", *COPIES) else (world_size - 1) / world_size


def join(rank: int, world_size: int, backend: str, store: str) -> torch.device:
    """Makes this process one of a group; returns its device."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    return device


def collective(name: str, size: int, device: torch.device) -> tuple[Callable[[], object], Tensor, Tensor]:
    """What runs a collective once, its output, and what that must hold after the first run.

    Args:
        name: in `COLLECTIVES`.
        size: bytes of the larger buffer.
        device: of the buffers, whose elements are the process's number, float32.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    part = max(1, size // 4 // world)
    ranks = torch.arange(world, device=device, dtype=torch.float32)
    all_sum = float(ranks.sum())

    def filled(count: int) -> Tensor:
        return torch.full((count,), float(rank), device=device)

    out = torch.empty(part * world, device=device)
    if name == "all_reduce":
        out = filled(part * world)
        return lambda: dist.all_reduce(out), out, torch.full_like(out, all_sum)
    if name == "all_gather":
        mine = filled(part)
        return lambda: dist.all_gather_into_tensor(out, mine), out, ranks.repeat_interleave(part)
    if name == "reduce_scatter":
        given, out = filled(part * world), torch.empty(part, device=device)
        return lambda: dist.reduce_scatter_tensor(out, given), out, torch.full_like(out, all_sum)
    if name == "all_to_all":
        given = filled(part * world)
        return lambda: dist.all_to_all_single(out, given), out, ranks.repeat_interleave(part)
    given = filled(part * world)

    def ring() -> None:
        """To the next process, from the one before."""
        operations = [
            dist.P2POp(dist.isend, given, (rank + 1) % world),
            dist.P2POp(dist.irecv, out, (rank - 1) % world),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return ring, out, torch.full_like(out, float((rank - 1) % world))


def rounds(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each round, of the slowest process."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for index in range(WARMUP + repeats):
        finish()
        dist.barrier()
        start = time.perf_counter()
        work()
        finish()
        if index >= WARMUP:
            times.append((time.perf_counter() - start) * 1000.0)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.tolist()


def member(
    rank: int, world_size: int, backend: str, folder: str, cases: Sequence[tuple[str, int]], repeats: int
) -> None:
    """One process of a group: runs all cases; the first writes what they took."""
    device = join(rank, world_size, backend, f"{folder}/store")
    found: list[dict[str, Any]] = []
    clock = sm_clock(device.type)
    for name, size in cases:
        entry: dict[str, Any] = dict(operation=name, size=size, status="ok")
        try:
            work, out, want = collective(name, size, device)
            work()
            wrong = torch.tensor(float(not torch.equal(out, want)), device=device)
            dist.all_reduce(wrong)
            if wrong.item():
                raise WrongResult("wrong: a process got other numbers than were sent")
            entry["times"] = rounds(work, repeats, device)
            entry["sm_mhz"] = clock()
        except WrongResult as error:
            entry["status"] = str(error)
        except RuntimeError as error:  # every process fails alike at what its backend has not
            entry["status"] = first_line(error)
        found.append(entry)
    if rank == 0:
        Path(f"{folder}/found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def group(function: Callable[..., None], world_size: int, backend: str, *arguments: Any) -> Any:
    """Runs a function in so many processes and returns what the first wrote.

    Args:
        function: takes its rank, ``world_size``, ``backend``, a folder, and the arguments; the first process
            writes ``found.json`` there.
        world_size: processes.
        backend: gloo or nccl.
        arguments: picklable.

    Raises:
        ProcessException: a process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(function, (world_size, backend, folder, *arguments), nprocs=world_size)
        return json.loads(Path(f"{folder}/found.json").read_text(encoding="utf-8"))


def copy(operation: str, memory: str, megabytes: int, repeats: int) -> tuple[list[float], int | None]:
    """Milliseconds of copies between host and GPU, judged by what arrived, and the GPU's clock after them.

    Args:
        operation: a name in `COPIES`.
        memory: of the host: pinned or pageable.
        megabytes: how much.
        repeats: copies that count.

    Raises:
        WrongResult: other numbers arrived.
    """
    host = torch.zeros(megabytes * MB, dtype=torch.uint8, pin_memory=memory == "pinned")
    there = torch.ones(megabytes * MB, dtype=torch.uint8, device="cuda")
    to, of = (there, host) if operation == "host_to_device" else (host, there)
    times, clock = [], sm_clock("cuda")
    for index in range(WARMUP + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        to.copy_(of, non_blocking=memory == "pinned")
        torch.cuda.synchronize()
        if index >= WARMUP:
            times.append((time.perf_counter() - start) * 1000.0)
    mhz = clock()
    if not torch.equal(to.cpu(), of.cpu()):
        raise WrongResult("wrong: other numbers arrived than were copied")
    return times, mhz


def row_of(
    on: Stamp,
    operation: str,
    backend: str,
    world_size: int,
    megabytes: int,
    times: Sequence[float],
    status: str,
) -> CommRow:
    """A row with its bandwidths; without figures where there are no times."""
    figures: dict[str, Any] = {}
    if times:
        p20, ms, p80 = quantiles(times)
        speed = megabytes * MB / ms / 1e6
        figures = dict(
            median_ms=round(ms, 4),
            p20_ms=round(p20, 4),
            p80_ms=round(p80, 4),
            algorithm_gb_s=round(speed, 3),
            bus_gb_s=round(speed * bus_factor(operation, world_size), 3),
        )
    return CommRow(
        **asdict(on),
        operation=operation,
        backend=backend,
        world_size=world_size,
        megabytes=megabytes,
        status=status,
        **figures,
    )


def table(rows: Sequence[CommRow]) -> Table:
    """All rows."""
    headings = ("operation", "over", "processes", "MB", "ms", "p20", "p80", "algorithm GB/s", "bus GB/s")
    shown = Table(*headings, "status", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        figures = (row.median_ms, row.p20_ms, row.p80_ms, row.algorithm_gb_s, row.bus_gb_s)
        cells = ["" if figure is None else f"{figure:.3f}" for figure in figures]
        shown.add_row(
            row.operation, row.backend, str(row.world_size), str(row.megabytes), *cells, row.status[:50]
        )
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the file doesn't hold yet.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where a result was wrong or a group of processes failed.

    Raises:
        SystemExit: the command line is wrong, or the file has other columns.
    """
    command, gpus = "streamattn bench comm", torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog=command,
        description="Times collectives and copies by size and number of processes.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the rows go; a file with some is continued")
    add("--backend", choices=["gloo", "nccl"], default="nccl" if gpus > 1 else "gloo", help="NCCL needs GPUs")
    worlds = [n for n in (2, 4, 8) if n <= gpus] if gpus > 1 else [2]
    add("--world-sizes", type=positive, nargs="+", default=worlds, help="processes")
    sizes = [1, 8, 64, 512, 1000] if gpus else [1, 8]
    add("--megabytes", type=positive, nargs="+", default=sizes, help="of the larger buffer")
    there = [*COLLECTIVES, *(COPIES if gpus else ())]
    add("--operations", nargs="+", choices=(*COLLECTIVES, *COPIES), default=there, help="copies need a GPU")
    add("--repeats", type=positive, default=20 if gpus else 5, help="rounds behind a median")
    options = parser.parse_args(argv)
    if min(options.world_sizes) < 2:
        parser.error("expected --world-sizes of 2 or more")
    if options.backend == "nccl" and max(options.world_sizes) > gpus:
        raise SystemExit(f"{command}: NCCL needs a GPU a process; there are {gpus}, take --backend gloo")
    copies = [name for name in options.operations if name in COPIES]
    if copies and not gpus:
        raise SystemExit(f"{command}: {' and '.join(copies)} need a CUDA device, and none is visible")
    console, bad = Console(width=120), False
    rows: list[CommRow] = []
    try:
        held = rows_in(options.csv, CommRow)
        on = stamp("cuda" if options.backend == "nccl" else "cpu")
        with appended(options.csv, CommRow) as write:
            for world in options.world_sizes:
                wanted = [
                    (name, megabytes * MB)
                    for name in options.operations
                    if name not in COPIES
                    for megabytes in options.megabytes
                    if not holds(
                        held,
                        on,
                        dict(operation=name, backend=options.backend, world_size=world, megabytes=megabytes),
                    )
                ]
                if not wanted:
                    continue
                try:
                    found = group(member, world, options.backend, wanted, options.repeats)
                except ProcessException as error:
                    console.print(f"{world} processes: {first_line(error)}", markup=False, highlight=False)
                    bad = True
                    continue
                for entry in found:
                    size = entry["size"] // MB
                    times, status = entry.get("times", ()), entry["status"]
                    there = replace(on, sm_mhz=entry.get("sm_mhz"))
                    row = row_of(there, entry["operation"], options.backend, world, size, times, status)
                    write(row)
                    rows.append(row)
                    bad |= row.status.startswith("wrong")
            if copies:
                on = stamp("cuda")
            for megabytes, memory, name in product(options.megabytes, ("pinned", "pageable"), copies):
                wanted_copy = dict(operation=name, backend=memory, world_size=1, megabytes=megabytes)
                if holds(held, on, wanted_copy):
                    continue
                times, mhz, status = [], None, "ok"
                try:
                    times, mhz = copy(name, memory, megabytes, options.repeats)
                except WrongResult as error:
                    status, bad = str(error), True
                row = row_of(replace(on, sm_mhz=mhz), name, memory, 1, megabytes, times, status)
                write(row)
                rows.append(row)
    except Mismatch as error:
        raise SystemExit(f"{command}: {error}") from None
    console.print(table(rows) if rows else "every case is in the file already", highlight=False)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
