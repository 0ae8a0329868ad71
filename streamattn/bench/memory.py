"""Memory of whole models by length: ``streamattn bench memory --csv FILE``.

The peak of a forward that will be differentiated, what it holds for the backward, and the peak of a full
training step, with one attention or another on shared weights, each case in a process of its own. Weights,
gradients and the optimizer's state are part of a peak, for they are of a run. The largest allocations alive
at the step's peak are named: on a GPU from the allocator's own history, by the line of Python that asked; on
a CPU from the profiler's, by the operator. ``--snapshots`` keeps the allocator's history for PyTorch's memory
viewer, ``--plot`` draws the file's peaks by length and the course of each step that was measured.

Left out on purpose: memory outside PyTorch's allocator (the CUDA context, libraries), and compiled models.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from streamattn.bench import plots, report
from streamattn.bench.arguments import HelpFormatter, positive, writable, writable_folder
from streamattn.bench.backends import recording, served
from streamattn.bench.contestants import CONTESTANTS, NAMED, base_model, configuration, contestant
from streamattn.bench.machine import sm_clock
from streamattn.bench.models import DTYPES, WIDTH, Entry, ModelCase, autocast, clean, failures_of
from streamattn.bench.resume import Died, Mismatch, Stamp, apart, appended, holds, rows_in, stamp

MIB = 2**20


@dataclass(frozen=True)
class Change:
    """One allocation, or the release of one.

    Attributes:
        size: bytes; negative: released.
        address: of the block.
        where: who asked for it.
    """

    size: int
    address: int
    where: str


@dataclass(frozen=True)
class MemoryCase:
    """One piece of work; as `ModelCase`, of which it is a part."""

    shape: str
    layers: int | None
    batch: int
    seq_len: int
    dtype: str


@dataclass(frozen=True)
class MemoryRow(MemoryCase, Stamp):
    """One contestant in one case, one line of the CSV.

    Attributes:
        contestant: whose attention.
        status: ok, or why there are no figures.
        backend: what served a step, as `streamattn.bench.models.ModelRow` has it.
        held_before_mib: weights and the optimizer's state.
        held_after_forward_mib: what the forward leaves for the backward.
        forward_peak_mib: the most during the forward, what was held before included.
        step_peak_mib: the most during forward, backward and optimizer.
        largest: the largest blocks alive at the step's peak, "MiB who asked", separated by semicolons.
    """

    contestant: str = ""
    status: str = "ok"
    backend: str | None = None
    held_before_mib: float | None = None
    held_after_forward_mib: float | None = None
    forward_peak_mib: float | None = None
    step_peak_mib: float | None = None
    largest: str | None = None


def history_on_cpu(work: Callable[[], object]) -> list[Change]:
    """Allocations and releases during the work, by operator, as PyTorch's profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        profiler.export_chrome_trace(path)
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    changes, running = [], {}
    for event in sorted(events, key=lambda event: event.get("ts", 0.0)):
        thread = event.get("tid")
        if event.get("cat") == "cpu_op":
            # The outermost operator on its thread, which is the one that was called by name.
            if event["ts"] >= running.get(thread, (0.0, ""))[0]:
                running[thread] = (event["ts"] + event["dur"], event["name"])
        elif event["name"] == "[memory]" and event["args"]["Device Type"] == 0:
            end, name = running.get(thread, (0.0, ""))
            where = name if event["ts"] <= end else "outside of operators"
            changes.append(Change(event["args"]["Bytes"], event["args"]["Addr"], where))
    return changes


def place(frames: Sequence[dict[str, Any]]) -> str:
    """The innermost line of Python outside of torch, as ``file.py:12 function``."""
    outside = [frame for frame in frames if f"{Path(torch.__file__).parent}" not in str(frame["filename"])]
    for frame in outside or frames:
        return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"
    return "no Python: the backward"


def history_on_gpu(work: Callable[[], object], snapshot: str | None) -> list[Change]:
    """Allocations and releases during the work, by line of Python, as PyTorch's allocator sees them.

    Args:
        work: what is done.
        snapshot: where the history is kept for PyTorch's memory viewer; None = nowhere.
    """
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(stacks="python", context="alloc", max_entries=1_000_000)
    try:
        work()
        torch.cuda.synchronize()
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(snapshot)
        history: Any = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    signs = {"alloc": 1, "free_completed": -1}
    return [
        Change(signs[event["action"]] * event["size"], event["addr"], place(event.get("frames", ())))
        for event in history["device_traces"][torch.cuda.current_device()]
        if event["action"] in signs
    ]


def at_peak(changes: Sequence[Change]) -> tuple[int, list[Change]]:
    """The most bytes in use beyond those at first, and the blocks alive then that came since, by size."""
    used = list(accumulate(change.size for change in changes))
    most = max(used, default=0)
    if most <= 0:
        return 0, []
    alive: dict[int, Change] = {}
    for change in changes[: used.index(most) + 1]:
        if change.size > 0:
            alive[change.address] = change
        else:
            alive.pop(change.address, None)
    return most, sorted(alive.values(), key=lambda change: -change.size)


@dataclass(frozen=True)
class Course:
    """A step of one contestant: MiB in use after each change, and the largest blocks at the peak."""

    contestant: str
    sizes: list[float]
    largest: list[tuple[float, str]]


def label(case: MemoryCase) -> str:
    """A case's name in the names of files."""
    layers = "" if case.layers is None else f"-{case.layers}_layers"
    return f"{case.shape}{layers}-{case.batch}x{case.seq_len}-{case.dtype}"


def measure(
    case: MemoryCase, names: Sequence[str], device: str, snapshots: str | None
) -> tuple[list[MemoryRow], list[Course]]:
    """Runs a case in this process.

    Args:
        case: what is done.
        names: of the contestants.
        device: ``cuda`` or ``cpu``.
        snapshots: folder of the snapshots; None = none are kept.

    Returns:
        A row of each contestant, and the course of each one's step that was done.
    """
    torch.manual_seed(0)
    base = base_model(configuration(case.shape, case.layers, case.seq_len, 0.0), device)
    ids = torch.randint(2, base.config.vocab_size, (case.batch, case.seq_len), device=device)
    optimizer = torch.optim.AdamW(base.parameters(), lr=0.0, fused=True)
    for parameter in base.parameters():  # so that the optimizer's state is there
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = [*base.parameters(), *base.buffers()]
    held += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    held_before = sum(x.untyped_storage().nbytes() for x in {x.data_ptr(): x for x in held}.values())
    work = ModelCase(
        case.shape, "train", case.shape, case.layers, case.batch, case.seq_len, 0, dtype=case.dtype
    )
    on, clock = stamp(device), sm_clock(device)
    rows, courses = [], []
    for name in names:
        entry, mhz = Entry(name), None
        figures: dict[str, Any] = {}
        clean(base, device)
        with failures_of(entry):
            model = contestant(base, name).train()

            def forward(model: Any = model) -> Tensor:
                with autocast(work, device):
                    return model(input_ids=ids, labels=ids).loss

            def step(forward: Callable[[], Tensor] = forward) -> None:
                forward().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

            with recording(device) as kernels:
                step()  # whatever is made once is made
            backend = served(kernels, NAMED.get(name), name in NAMED)
            if device == "cuda":
                file = None if snapshots is None else f"{snapshots}/{label(case)}-{name}.pickle"
                changes = history_on_gpu(step, file)
                before, after, most, step_most = peaks_on_gpu(forward, step)
            else:
                changes = history_on_cpu(step)
                before, step_most = held_before, at_peak(changes)[0]
                after, most = peaks_on_cpu(forward)
            mhz = clock()
            largest = [(change.size / MIB, change.where) for change in at_peak(changes)[1][:8]]
            figures = dict(
                backend=backend,
                held_before_mib=round(before / MIB, 1),
                held_after_forward_mib=round(after / MIB, 1),
                forward_peak_mib=round((before + most) / MIB, 1),
                step_peak_mib=round((before + step_most) / MIB, 1),
                largest="; ".join(f"{size:.1f} {where}" for size, where in largest[:5]),
            )
            sizes = [(before + used) / MIB for used in accumulate(c.size for c in changes)]
            courses.append(Course(name, sizes, largest))
        there = asdict(replace(on, sm_mhz=mhz))
        rows.append(MemoryRow(**there, **asdict(case), contestant=name, status=entry.status, **figures))
    return rows, courses


def peaks_on_gpu(forward: Callable[[], Tensor], step: Callable[[], None]) -> tuple[int, int, int, int]:
    """Bytes held before; and beyond these: held after the forward, the most during it, and during a step."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = forward()
    torch.cuda.synchronize()
    after, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    del loss
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return before, after - before, most - before, torch.cuda.max_memory_allocated() - before


def peaks_on_cpu(forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes that the forward holds, and the most during it."""
    kept: list[Tensor] = []
    changes = history_on_cpu(lambda: kept.append(forward()))
    return sum(change.size for change in changes), at_peak(changes)[0]


def tables(rows: Sequence[MemoryRow], courses: Sequence[Course]) -> list[Table]:
    """Peaks of all rows, and the largest blocks of the last case."""
    shown = Table(
        *("shape", "length", "dtype", "attention", "before", "forward", "held", "step", "status"),
        title="MiB: before the step, peak of the forward, held for the backward, peak of the step",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for row in rows:
        sizes = (
            row.held_before_mib,
            row.forward_peak_mib,
            row.held_after_forward_mib,
            row.step_peak_mib,
        )
        cells = ["" if size is None else f"{size:.1f}" for size in sizes]
        name = f"{row.shape} x{row.batch}"
        shown.add_row(name, str(row.seq_len), row.dtype, row.contestant, *cells, row.status)
    blocks = Table("attention", "MiB", "who asked", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    blocks.title = "largest blocks at the peak of the last step"
    for course in courses:
        for index, (size, where) in enumerate(course.largest):
            blocks.add_row("" if index else course.contestant, f"{size:.1f}", where)
    return [shown, blocks]


def draw_course(case: MemoryCase, courses: Sequence[Course], folder: str) -> str:
    """The course of a case's steps as a picture; returns its path."""
    path = f"{folder}/{label(case)}-step.png"
    title = f"{case.shape}, {case.batch} x {case.seq_len}, {case.dtype}: one training step"
    plots.timeline(path, {course.contestant: course.sizes for course in courses}, title)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases that the file doesn't hold yet.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where ours failed or a process died.

    Raises:
        SystemExit: the command line is wrong, or something is not there.
    """
    command, gpu = "streamattn bench memory", torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=command,
        description="Peak memory of whole models by length, with one attention or another.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the rows go; a file with some is continued")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu", help="where")
    add("--contestants", nargs="+", choices=CONTESTANTS, default=["eager", "sdpa", "streamattn"], help="who")
    add("--shapes", nargs="+", default=["gpt2-small" if gpu else "gpt2-nano"], help="files in configs/shapes")
    add("--layers", type=positive, help="of each model, in place of its own number")
    lengths = [512, 1024, 2048, 4096] if gpu else [32, 64, 128]
    add("--seq-lens", type=positive, nargs="+", default=lengths, help="tokens of a row")
    add("--batch", type=positive, default=4 if gpu else 2, help="rows")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="bfloat16 is autocast")
    kept = "keep histories for PyTorch's memory viewer (GPU only)"
    add("--snapshots", type=writable_folder, metavar="FOLDER", help=kept)
    drawn = "draw PNGs of the file and of the steps there"
    add("--plot", type=writable_folder, metavar="FOLDER", help=drawn)
    options = parser.parse_args(argv)
    if options.device == "cuda" and not gpu:
        raise SystemExit(
            f"{command}: needs a CUDA device, and none is visible; --device cpu measures the CPU"
        )
    if options.snapshots and options.device == "cpu":
        raise SystemExit(f"{command}: --snapshots needs a CUDA device, whose allocator keeps a history")
    if options.plot:
        plots.need_matplotlib(command)
    for folder in (options.plot, options.snapshots):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
    cases = [
        MemoryCase(shape, options.layers, options.batch, seq_len, dtype)
        for shape, dtype, seq_len in product(options.shapes, options.dtypes, options.seq_lens)
    ]
    return run(cases, options, command)


def run(cases: Sequence[MemoryCase], options: argparse.Namespace, command: str) -> int:
    """Runs the cases, each in a process of its own, and prints and draws what they found."""
    console, errors = Console(width=WIDTH), Console(width=WIDTH, stderr=True)
    rows: list[MemoryRow] = []
    courses: list[Course] = []
    drawn: list[str] = []
    bad = False
    try:
        held = rows_in(options.csv, MemoryRow)
        on = apart(stamp, options.device) if held else None
        with appended(options.csv, MemoryRow) as write:
            for case in track(cases, console=errors):
                wanted = [{**asdict(case), "contestant": name} for name in options.contestants]
                if on is not None and all(holds(held, on, each) for each in wanted):
                    continue
                try:
                    found, courses = apart(
                        measure, case, options.contestants, options.device, options.snapshots
                    )
                except (Died, ValueError) as error:
                    errors.print(f"{case.shape}, {case.seq_len}: {error}", markup=False, highlight=False)
                    bad = True
                    continue
                for row in found:
                    write(row)
                    bad |= row.status.startswith("wrong")
                rows += found
                if options.plot and courses:
                    drawn.append(draw_course(case, courses, options.plot))
    except Mismatch as error:
        raise SystemExit(f"{command}: {error}") from None
    if rows:
        for table in tables(rows, courses):
            console.print(table, highlight=False)
    else:
        console.print("every case is in the file already")
    if options.plot:
        for path in (*drawn, *report.draw(options.csv, options.plot)):
            console.print(path, markup=False, highlight=False, soft_wrap=True)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
