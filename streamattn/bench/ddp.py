"""What averaging gradients costs: ``streamattn bench ddp --csv FILE``.

One training step of a model on every process, its gradients averaged in one of these ways: ``naive``, an
all-reduce for each parameter after the backward; ``flat``, one for all of them; ``bucketed``, one for each
bucket, after the backward; ``overlapped``, DistributedDataParallel, whose buckets leave while the backward
goes on, in several bucket sizes. After its first step each way's gradients are judged against those of all
rows in one process. ``zero1`` is ``overlapped`` with the optimizer's state spread over the processes. Left
out on purpose: sharded weights and gradients, several hosts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import ProcessException
from torch.nn.parallel import DistributedDataParallel

from streamattn.bench.arguments import HelpFormatter, positive, writable
from streamattn.bench.comm import group, join, rounds
from streamattn.bench.contestants import base_model, configuration
from streamattn.bench.gate import relative_error
from streamattn.bench.machine import sm_clock
from streamattn.bench.providers import first_line
from streamattn.bench.resume import Mismatch, Stamp, appended, holds, rows_in, stamp
from streamattn.bench.timers import quantiles

WAYS = ("naive", "flat", "bucketed", "overlapped", "zero1")
LIMIT = 1e-4
"""Relative error of all gradients, float32."""


@dataclass(frozen=True)
class DdpRow(Stamp):
    """One way on so many processes, one line of the CSV.

    Attributes:
        shape: of the model.
        layers: how many; None = the shape's.
        batch: rows of each process.
        seq_len: tokens of a row.
        backend: gloo or nccl.
        world_size: processes.
        way: a name in `WAYS`.
        bucket_mib: of a bucket; None where there are none.
        step_ms: median of the slowest process.
        p20_ms: of the same steps.
        p80_ms: of the same steps.
        optimizer_mib: state of the optimizer in the process that holds most.
        error: of the gradients, relative.
        status: ok, or why there are no figures.
    """

    shape: str
    layers: int | None
    batch: int
    seq_len: int
    backend: str
    world_size: int
    way: str
    bucket_mib: int | None
    step_ms: float | None
    p20_ms: float | None
    p80_ms: float | None
    optimizer_mib: float | None
    error: float | None
    status: str = "ok"


def buckets(tensors: Sequence[Tensor], most: float) -> Iterator[list[Tensor]]:
    """Tensors one after another, so many that their bytes don't pass ``most``; at least one in each."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(x.nbytes for x in (*bucket, tensor)) > most:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def average(gradients: Sequence[Tensor], most: float | None) -> None:
    """Averages over the processes, in place.

    Args:
        gradients: of this process.
        most: bytes of a bucket; None = each by itself.
    """
    world = dist.get_world_size()
    if most is None:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= world
        return
    for bucket in buckets(gradients, most):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat)
        flat /= world
        for gradient, averaged in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(averaged)


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    """Of an optimizer's state in this process."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return sum(x.nbytes for state in inner.state.values() for x in state.values() if isinstance(x, Tensor))


def member(
    rank: int,
    world_size: int,
    backend: str,
    folder: str,
    case: dict[str, Any],
    ways: Sequence[Any],
    repeats: int,
) -> None:
    """One process of a group: runs all ways; the first writes what they took."""
    device = join(rank, world_size, backend, f"{folder}/store")
    found = [one(case, way, bucket, device, repeats) for way, bucket in ways]
    if rank == 0:
        Path(f"{folder}/found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def one(
    case: dict[str, Any], way: str, bucket: int | None, device: torch.device, repeats: int
) -> dict[str, Any]:
    """One way in this process of a group."""
    torch.manual_seed(0)
    config = configuration(case["shape"], case["layers"], case["seq_len"], 0.0)
    model = base_model(config, str(device))
    rows = case["batch"] * dist.get_world_size()
    ids = torch.randint(2, config.vocab_size, (rows, case["seq_len"]))
    ids = ids.to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    want = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    mine = ids[dist.get_rank() :: dist.get_world_size()]
    inside = way in ("overlapped", "zero1")
    runs: nn.Module = model
    if inside:
        ids_of_device = [device.index] if device.type == "cuda" else None
        runs = DistributedDataParallel(
            model, device_ids=ids_of_device, bucket_cap_mb=bucket or 25, gradient_as_bucket_view=True
        )
    options: dict[str, Any] = dict(lr=0.0, fused=True)
    optimizer: torch.optim.Optimizer
    if way == "zero1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    most = {"naive": None, "flat": float("inf"), "bucketed": (bucket or 25) * 2.0**20}.get(way)

    def differentiate() -> None:
        runs(input_ids=mine, labels=mine).loss.backward()
        if not inside:
            # The order in which the backward makes them, about: the last layer's first.
            average([parameter.grad for parameter in reversed(list(model.parameters()))], most)

    def step() -> None:
        differentiate()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    differentiate()
    error = relative_error(
        torch.cat([parameter.grad.flatten() for parameter in model.parameters()]),
        torch.cat([gradient.flatten() for gradient in want]),
    )
    worst = torch.tensor(error, device=device).nan_to_num(nan=torch.inf)  # a maximum may lose a NaN
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    entry = dict(way=way, bucket=bucket, error=float(f"{worst.item():.3g}"), status="ok")
    if not worst.item() <= LIMIT:
        return {**entry, "status": f"wrong: the gradients are off by {worst.item():.1e} of their size"}
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    state = torch.tensor(float(bytes_of(optimizer)), device=device)
    dist.all_reduce(state, dist.ReduceOp.MAX)
    clock = sm_clock(device.type)
    times = rounds(step, repeats, device)
    return {**entry, "times": times, "sm_mhz": clock(), "state": state.item()}


def table(rows: Sequence[DdpRow]) -> Table:
    """All rows."""
    headings = (
        "processes",
        "way",
        "bucket MiB",
        "step ms",
        "p20",
        "p80",
        "optimizer MiB",
        "gradients' error",
    )
    shown = Table(*headings, "status", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        bucket = "" if row.bucket_mib is None else str(row.bucket_mib)
        figures = (row.step_ms, row.p20_ms, row.p80_ms, row.optimizer_mib)
        cells = ["" if x is None else f"{x:.2f}" for x in figures]
        shown.add_row(f"{row.world_size} {row.backend}", row.way, bucket, *cells, str(row.error), row.status)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ways that the file doesn't hold yet.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where gradients were wrong or a group of processes failed.

    Raises:
        SystemExit: the command line is wrong, or the file has other columns.
    """
    command, gpus = "streamattn bench ddp", torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog=command,
        description="Times ways to average gradients, and measures an optimizer's state when it is spread.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the rows go; a file with some is continued")
    add("--backend", choices=["gloo", "nccl"], default="nccl" if gpus > 1 else "gloo", help="NCCL needs GPUs")
    add("--world-sizes", type=positive, nargs="+", default=[gpus if gpus > 1 else 2], help="processes")
    add("--shape", default="gpt2-small" if gpus > 1 else "gpt2-nano", help="a file in configs/shapes")
    add("--layers", type=positive, help="in place of the shape's own number")
    add("--batch", type=positive, default=4 if gpus > 1 else 1, help="rows of each process")
    add("--seq-len", type=positive, default=1024 if gpus > 1 else 32, help="tokens of a row")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which")
    add("--buckets", type=positive, nargs="+", default=[1, 25, 100] if gpus > 1 else [1, 25], help="MiB")
    add("--repeats", type=positive, default=10 if gpus > 1 else 3, help="steps behind a median")
    options = parser.parse_args(argv)
    if options.backend == "nccl" and max(options.world_sizes) > gpus:
        raise SystemExit(f"{command}: NCCL needs a GPU a process; there are {gpus}, take --backend gloo")
    ways: list[tuple[str, int | None]] = []
    for way in options.ways:
        ways += [(way, size) for size in (options.buckets if way in ("bucketed", "overlapped") else [None])]
    case = {name: getattr(options, name) for name in ("shape", "layers", "batch", "seq_len")}
    on = stamp("cuda" if options.backend == "nccl" else "cpu")
    console, rows, bad = Console(width=120), [], False
    try:
        held = rows_in(options.csv, DdpRow)
        with appended(options.csv, DdpRow) as write:
            for world in options.world_sizes:
                common = dict(case, backend=options.backend, world_size=world)
                wanted = [
                    (way, size)
                    for way, size in ways
                    if not holds(held, on, dict(common, way=way, bucket_mib=size))
                ]
                if not wanted:
                    continue
                try:
                    found = group(member, world, options.backend, case, wanted, options.repeats)
                except ProcessException as error:
                    console.print(f"{world} processes: {first_line(error)}", markup=False, highlight=False)
                    bad = True
                    continue
                for entry in found:
                    p20, ms, p80 = None, None, None
                    if "times" in entry:
                        p20, ms, p80 = (round(x, 3) for x in quantiles(entry["times"]))
                    row = DdpRow(
                        **asdict(replace(on, sm_mhz=entry.get("sm_mhz"))),
                        **common,
                        way=entry["way"],
                        bucket_mib=entry["bucket"],
                        step_ms=ms,
                        p20_ms=p20,
                        p80_ms=p80,
                        optimizer_mib=round(entry["state"] / 2**20, 2) if "state" in entry else None,
                        error=entry["error"],
                        status=entry["status"],
                    )
                    write(row)
                    rows.append(row)
                    bad |= row.status != "ok"
    except Mismatch as error:
        raise SystemExit(f"{command}: {error}") from None
    console.print(table(rows) if rows else "every case is in the file already", highlight=False)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
