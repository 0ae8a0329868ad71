"""Whole models, training and generating, with one attention or another: ``streamattn bench model``.

A case is a shape, a batch, a length, a dtype, a mode and a number of first steps that don't count; each runs
in a process of its own, and a file is continued. All contestants of a case share one set of weights and take
turns in one process, every second round the other way around. A training step is timed in its three parts
by CUDA events (the host's clock on a CPU), loss included in the forward, fused AdamW at a rate of 0, so that
every step does the same work. bfloat16 is autocast where a model is trained, and the dtype of the weights
where it generates.

After the timing each contestant's gradients (logits where it generates) are judged against PyTorch's
attention in the same model; ``removed`` is none and not judged. With dropout, whose masks differ, the models
are judged without it and not compiled. What is wrong gets no figures, nor what another backend served than
its name says; what really ran is noted then. Out of memory and what a peer can't do
are words in ``status``. Left out on purpose: text, convergence, several GPUs.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from streamattn.bench import plots, report
from streamattn.bench.arguments import HelpFormatter, positive, writable, writable_folder
from streamattn.bench.backends import recording, served
from streamattn.bench.contestants import CONTESTANTS, NAMED, ON_DEMAND, base_model, configuration, contestant
from streamattn.bench.gate import WrongResult, relative_error
from streamattn.bench.machine import sm_clock
from streamattn.bench.providers import Unsupported, first_line
from streamattn.bench.resume import Died, Mismatch, Stamp, apart, appended, holds, rows_in, stamp

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MODES = ("eager", "compiled", "compiled-layers")
WORK = ("train", "generate")
PARTS = ("forward", "backward", "optimizer", "step")
LIMITS = {"bfloat16": 0.1, "float32": 1e-3}
"""Relative error of the gradients of any one parameter of the attention layers, or of the logits."""
WIDTH = 120


@dataclass(frozen=True)
class ModelCase:
    """One piece of work.

    Attributes:
        case: its name.
        work: ``train`` or ``generate``.
        shape: of the model, a file in configs/shapes.
        layers: how many; None = the shape's.
        batch: rows.
        seq_len: tokens of a row; of its prompt where it generates.
        new_tokens: that are generated after each prompt, greedily; 0 where it trains.
        dtype: a name in `DTYPES`.
        mode: a name in `MODES`. ``compiled-layers``: each transformer layer by itself, equal ones once, so
            that forty-eight take no longer than one; what is around them stays eager. Compiled generation is
            transformers' own: a static cache, and on a GPU decoding steps that it compiles.
        warmup: steps (calls of ``generate``) of each contestant that don't count.
        dropout: probability of dropping an attention weight.
    """

    case: str
    work: str
    shape: str
    layers: int | None
    batch: int
    seq_len: int
    new_tokens: int = 0
    dtype: str = "bfloat16"
    mode: str = "eager"
    warmup: int = 3
    dropout: float = 0.0


@dataclass(frozen=True)
class ModelRow(ModelCase, Stamp):
    """One contestant in one case, one line of the CSV.

    Attributes:
        contestant: whose attention.
        status: ok, or why there are no figures.
        backend: what served a training step, or a prompt, as `streamattn.bench.tables.Row` has it; None where
            nothing was judged, or where neither a profiler nor the contestant's name says it.
        graph_breaks: places where compilation gave up; None where it was not asked for.
        steps: timed.
        forward_mean_ms: and so on: milliseconds of a step's parts; of a whole call where it generates.
        tokens_per_s: by the median; trained, or generated.
        speedup: the median of PyTorch's attention as shipped (``sdpa``) over this one.
        peak_mib: the most memory in use, weights and optimizer included; None on a CPU.
        error: the largest relative error of the judgement; None where nothing was judged.
    """

    contestant: str = ""
    status: str = "ok"
    backend: str | None = None
    graph_breaks: int | None = None
    steps: int = 0
    forward_mean_ms: float | None = None
    forward_std_ms: float | None = None
    forward_median_ms: float | None = None
    backward_mean_ms: float | None = None
    backward_std_ms: float | None = None
    backward_median_ms: float | None = None
    optimizer_mean_ms: float | None = None
    optimizer_std_ms: float | None = None
    optimizer_median_ms: float | None = None
    step_mean_ms: float | None = None
    step_std_ms: float | None = None
    step_median_ms: float | None = None
    tokens_per_s: float | None = None
    speedup: float | None = None
    peak_mib: float | None = None
    error: float | None = None


Step = Callable[[], list[Any]]
"""Takes one step and returns the moments between its parts, the first and the last included."""


def mark(device: str) -> Any:
    """Notes the moment: of the current stream, or of the host's clock on a CPU."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(marks: Sequence[Any]) -> list[float]:
    """Between the moments; all work must be done."""
    if isinstance(marks[0], float):
        return [(end - start) * 1000.0 for start, end in pairwise(marks)]
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def autocast(case: ModelCase, device: str) -> Any:
    """The context of a training forward."""
    return nullcontext() if case.dtype == "float32" else torch.autocast(device, DTYPES[case.dtype])


def training_step(
    case: ModelCase, device: str, model: Any, ids: Tensor, optimizer: torch.optim.Optimizer
) -> Step:
    """A step of forward, backward and optimizer."""

    def step() -> list[Any]:
        marks = [mark(device)]
        with autocast(case, device):
            loss = model(input_ids=ids, labels=ids).loss
        marks.append(mark(device))
        loss.backward()
        marks.append(mark(device))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(mark(device))
        return marks

    return step


def generation(case: ModelCase, device: str, model: Any, ids: Tensor) -> Step:
    """A step that generates once."""
    options: dict[str, Any] = dict(
        max_new_tokens=case.new_tokens, min_new_tokens=case.new_tokens, do_sample=False, use_cache=True
    )
    if case.mode == "compiled":
        options["cache_implementation"] = "static"

    def step() -> list[Any]:
        with torch.no_grad():
            start = mark(device)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
            end = mark(device)
        assert out.shape[1] == case.seq_len + case.new_tokens
        return [start, end]

    return step


@dataclass
class Entry:
    """One contestant: its model as it is and as it runs, milliseconds of each step's parts, and its fate."""

    name: str
    model: Any = None
    runs: Any = None
    step: Step | None = None
    times: list[list[float]] | None = None
    peak_mib: float | None = None
    sm_mhz: int | None = None
    graph_breaks: int | None = None
    status: str = "ok"
    backend: str | None = None
    error: float | None = None

    def fail(self, status: str) -> None:
        """Nothing more of it is measured, and nothing of it is reported."""
        self.status, self.step, self.times = status, None, None
        self.peak_mib, self.sm_mhz = None, None


@contextmanager
def failures_of(entry: Entry) -> Iterator[None]:
    """Notes what a contestant fails at; ours is wrong where it fails at anything but memory."""
    try:
        yield
    except Unsupported as error:
        entry.fail(f"unsupported: {error}")
    except WrongResult as error:
        entry.fail(f"wrong: {error}")
    except torch.OutOfMemoryError:
        entry.fail("out of memory")
    except Exception as error:  # a peer may fail in any way, and that is a result
        entry.fail(f"{'wrong: fails: ' if entry.name == 'streamattn' else ''}{first_line(error)}")


def clean(model: Any, device: str) -> None:
    """Gives back what a contestant left."""
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def compiled(model: Any, mode: str) -> Any:
    """A model as a mode, a name in `MODES`, runs it; its layers are compiled in place."""
    if mode == "compiled":
        return torch.compile(model)
    if mode == "compiled-layers":
        for layer in max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len):
            layer.compile()
    return model


def prepare(
    case: ModelCase, device: str, base: Any, ids: Tensor, optimizer: torch.optim.Optimizer | None, name: str
) -> Entry:
    """A contestant that has run nothing yet."""
    entry = Entry(name, times=[])
    with failures_of(entry):
        if case.work == "generate" and case.mode == "compiled" and name == "sdpa_cudnn":
            raise Unsupported("without a mask it would read the empty places of a static cache")
        if case.work == "generate" and case.mode == "compiled-layers":
            raise Unsupported("layers are compiled where they are trained; generate with --modes compiled")
        entry.model = contestant(base, name)
        if optimizer is None:
            entry.runs = entry.model.eval()
            entry.step = generation(case, device, entry.runs, ids)
        else:
            entry.model.train()
            entry.runs = compiled(entry.model, case.mode)
            entry.step = training_step(case, device, entry.runs, ids, optimizer)
    return entry


def turn(entry: Entry, count: int, device: str, keep: bool) -> None:
    """Takes steps one after another, on a GPU without waiting between them; those that are kept count."""
    step = entry.step
    if step is None or entry.times is None:
        return
    gpu = device == "cuda"
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    marks = [step() for _ in range(count)]
    if gpu:
        torch.cuda.synchronize()
    if keep:
        entry.times += map(milliseconds, marks)
        if gpu:
            peak = torch.cuda.max_memory_allocated() / 2**20
            entry.peak_mib = round(max(peak, entry.peak_mib or 0.0), 1)


def results(case: ModelCase, device: str, model: Any, runs: Any, ids: Tensor) -> dict[str, Tensor]:
    """What is judged: gradients of the attention layers' parameters, or logits of the prompt's last token."""
    if case.work == "generate":
        with torch.no_grad():
            return {"logits": runs(input_ids=ids).logits[:, -1].float()}
    for parameter in model.parameters():
        parameter.grad = None
    with autocast(case, device):
        loss = runs(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if "attn" in name and parameter.grad is not None
    }
    for parameter in model.parameters():
        parameter.grad = None
    assert found, "no parameter of an attention layer is named attn"
    return found


def judge(case: ModelCase, device: str, entries: Sequence[Entry], base: Any, ids: Tensor) -> None:
    """Compares each contestant with PyTorch's attention, and notes what served it.

    Each is judged as it was timed, compiled too, but for dropout. What is wrong loses its figures.
    """
    base.train(case.work == "train" and case.dropout == 0.0)
    want: dict[str, Tensor] | None = None
    for entry in entries:
        if entry.step is None or entry.name == "removed":
            continue
        with failures_of(entry):
            want = want or results(case, device, base, base, ids)
            if case.dropout and case.work == "train":
                with recording(device) as names:
                    entry.step()  # with dropout, which another backend may serve
                got = results(case, device, entry.model.eval(), entry.model, ids)
            else:
                with recording(device) as names:
                    got = results(case, device, entry.model, entry.runs, ids)
            errors = {name: relative_error(got[name], x) for name, x in want.items()}
            worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
            entry.error = float(f"{errors[worst]:.3g}")
            if not errors[worst] <= LIMITS[case.dtype]:
                raise WrongResult(f"{worst} is off by {errors[worst]:.1e} of its size")
            entry.backend = served(names, NAMED.get(entry.name), entry.name in NAMED)
        clean(base, device)


def breaks() -> int:
    """Graph breaks so far in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def measure(
    case: ModelCase, names: Sequence[str], device: str, repeats: int, rounds: int, seed: int = 0
) -> list[ModelRow]:
    """Runs a case in this process.

    Args:
        case: what is done.
        names: of the contestants, in `CONTESTANTS`.
        device: ``cuda`` or ``cpu``.
        repeats: steps of a contestant's turn.
        rounds: turns of each.
        seed: of weights and tokens.

    Returns:
        A row of each contestant, in their order.
    """
    torch.manual_seed(seed)
    training = case.work == "train"
    config = configuration(case.shape, case.layers, case.seq_len + case.new_tokens, case.dropout)
    base = base_model(config, device, torch.float32 if training else DTYPES[case.dtype])
    ids = torch.randint(2, config.vocab_size, (case.batch, case.seq_len), device=device)
    optimizer = torch.optim.AdamW(base.parameters(), lr=0.0, fused=True) if training else None
    entries = [prepare(case, device, base, ids, optimizer, name) for name in names]
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=1024):
        for entry in entries:
            before = breaks()
            with failures_of(entry):
                turn(entry, case.warmup, device, keep=False)
                if case.mode != "eager" and training and case.warmup:
                    entry.graph_breaks = breaks() - before
            if entry.step is None:
                clean(base, device)
        order, clock = list(entries), sm_clock(device)
        for _ in range(rounds):
            for entry in order:
                with failures_of(entry):
                    turn(entry, repeats, device, keep=True)
                    entry.sm_mhz = clock() if entry.times else None
                if entry.step is None:
                    clean(base, device)
            order.reverse()
        judge(case, device, entries, base, ids)
    return rows_of(case, entries, stamp(device))


def rows_of(case: ModelCase, entries: Sequence[Entry], on: Stamp) -> list[ModelRow]:
    """The lines of a case that was run."""
    medians: dict[str, float] = {}
    figures: dict[str, dict[str, Any]] = {}
    for entry in entries:
        found: dict[str, Any] = {"steps": len(entry.times or [])}
        for part, times in parts(entry.times or []).items():
            found[f"{part}_mean_ms"] = round(statistics.mean(times), 4)
            found[f"{part}_median_ms"] = round(statistics.median(times), 4)
            found[f"{part}_std_ms"] = round(statistics.stdev(times), 4) if len(times) > 1 else None
            if part == "step":
                medians[entry.name] = statistics.median(times)
        figures[entry.name] = found
    rows = []
    for entry in entries:
        found = figures[entry.name]
        if entry.name in medians:
            tokens = case.batch * (case.new_tokens or case.seq_len)
            found["tokens_per_s"] = round(tokens / medians[entry.name] * 1000.0, 1)
            if "sdpa" in medians:
                found["speedup"] = round(medians["sdpa"] / medians[entry.name], 4)
        rows.append(
            ModelRow(
                **asdict(replace(on, sm_mhz=entry.sm_mhz)),
                **asdict(case),
                contestant=entry.name,
                status=entry.status,
                backend=entry.backend,
                graph_breaks=entry.graph_breaks,
                peak_mib=entry.peak_mib,
                error=entry.error,
                **found,
            )
        )
    return rows


def parts(times: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Milliseconds of each part by step, and of the whole."""
    if not times:
        return {}
    names = PARTS[:-1] if len(times[0]) == 3 else ()
    found = {name: [step[index] for step in times] for index, name in enumerate(names)}
    return {**found, "step": [sum(step) for step in times]}


def table(rows: Sequence[ModelRow]) -> Table:
    """Contestants of each case below its line; the deviation is that of the whole step."""
    headings = ("", "forward", "backward", "optimizer", "step ms", "±", "tokens/s", "to sdpa", "peak MiB")
    shown = Table(*headings, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    forms = ["{:.2f}"] * 5 + ["{:.0f}", "{:.3f}", "{:.0f}"]
    last = ""
    for row in rows:
        name = "" if row.case == row.shape else f"{row.case}: "
        layers = f", {row.layers} layers" if row.layers else ""
        dropout = f", dropout {row.dropout}" if row.dropout else ""
        new = f" + {row.new_tokens}" if row.new_tokens else ""
        title = (
            f"{name}{row.shape}{layers}, {row.work} {row.batch}x{row.seq_len}{new}, {row.dtype}, {row.mode}, "
            f"warm-up {row.warmup}{dropout}"
        )
        if title != last:
            shown.add_section()
            shown.add_row(title)
            last = title
        times = [getattr(row, f"{part}_median_ms") for part in PARTS]
        figures = [*times, row.step_std_ms, row.tokens_per_s, row.speedup, row.peak_mib]
        cells = ["" if x is None else form.format(x) for form, x in zip(forms, figures, strict=True)]
        shown.add_row(f"  {row.contestant}", *cells)
        if row.status != "ok":
            shown.add_row(f"    {row.status}")
    return shown


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options that both commands have."""
    gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the rows go; a file with some is continued")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu", help="where")
    everyone = [*CONTESTANTS, *ON_DEMAND]
    add("--contestants", nargs="+", choices=everyone, default=list(CONTESTANTS), help="whose attention")
    add("--modes", nargs="+", choices=MODES, default=["eager", "compiled"] if gpu else ["eager"], help="how")
    add("--repeats", type=positive, default=10 if gpu else 3, help="steps of a turn")
    add("--rounds", type=positive, default=2, help="turns of each contestant")
    add("--plot", type=writable_folder, metavar="FOLDER", help="draw PNGs of the file there")


def run(cases: Sequence[ModelCase], options: argparse.Namespace, command: str) -> int:
    """Runs the cases that the file doesn't hold yet, each in a process of its own, and prints a table.

    Args:
        cases: in their order.
        options: as `add_common` makes them.
        command: its name, for messages.

    Returns:
        The exit status: 1 where a contestant was wrong or a process died.

    Raises:
        SystemExit: the file has other columns, or there is no such device.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"{command}: needs a CUDA device, and none is visible; --device cpu measures the CPU"
        )
    if options.plot:
        plots.need_matplotlib(command)
    console, errors = Console(width=WIDTH), Console(width=WIDTH, stderr=True)
    bad = False
    try:
        held = rows_in(options.csv, ModelRow)
        on = apart(stamp, options.device) if held else None
        rows: list[ModelRow] = []
        with appended(options.csv, ModelRow) as write:
            for case in track(cases, console=errors):
                if on is not None and all(
                    holds(held, on, {**asdict(case), "contestant": name}) for name in options.contestants
                ):
                    continue
                try:
                    found = apart(
                        measure, case, options.contestants, options.device, options.repeats, options.rounds
                    )
                except (Died, ValueError) as error:
                    errors.print(f"{case.case}, {case.mode}: {error}", markup=False, highlight=False)
                    bad = True
                    continue
                for row in found:
                    write(row)
                    bad |= row.status.startswith("wrong")
                rows += found
    except Mismatch as error:
        raise SystemExit(f"{command}: {error}") from None
    console.print(table(rows) if rows else "every case is in the file already", highlight=False)
    if options.plot:
        for path in report.draw(options.csv, options.plot):
            console.print(path, markup=False, highlight=False, soft_wrap=True)
    return 1 if bad else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study of shapes, lengths, dtypes and warm-up.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where a contestant was wrong.
    """
    command, gpu = "streamattn bench model", torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=command,
        description="Times training steps (or generation) of whole models with one attention or another.",
        formatter_class=HelpFormatter,
    )
    add_common(parser)
    add = parser.add_argument
    sizes = ["gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt2-2.7b"]
    add("--shapes", nargs="+", default=sizes if gpu else ["gpt2-nano"], help="files in configs/shapes")
    add("--layers", type=positive, help="of each model, in place of its own number")
    add("--seq-lens", type=positive, nargs="+", default=[128, 256, 512] if gpu else [64], help="contexts")
    add("--batch", type=positive, default=4 if gpu else 2, help="rows")
    add(
        "--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"] if gpu else ["float32"], help="precisions"
    )
    add("--warmup", type=int, nargs="+", default=[5] if gpu else [1], help="steps that don't count")
    add("--dropout", type=float, default=0.0, help="probability of dropping an attention weight")
    add("--new-tokens", type=positive, help="generate so many after each row in place of training")
    options = parser.parse_args(argv)
    if min(options.warmup) < 0 or not 0.0 <= options.dropout < 1.0:
        parser.error("expected --warmup of 0 or more and --dropout from 0 to below 1")
    work = "generate" if options.new_tokens else "train"
    cases = [
        ModelCase(
            case=shape,
            work=work,
            shape=shape,
            layers=options.layers,
            batch=options.batch,
            seq_len=seq_len,
            new_tokens=options.new_tokens or 0,
            dtype=dtype,
            mode=mode,
            warmup=warmup,
            dropout=options.dropout,
        )
        for shape, seq_len, dtype, mode, warmup in product(
            options.shapes, options.seq_lens, options.dtypes, options.modes, options.warmup
        )
    ]
    return run(cases, options, command)


if __name__ == "__main__":
    raise SystemExit(main())
