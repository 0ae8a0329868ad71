"""Times attention beside other implementations on one GPU: ``streamattn bench kernel --csv FILE``.

Or on the CPU, with ``--device cpu --cases cpu --passes forward backward``, beside PyTorch's fused attention.

All providers run each case on the same inputs and take turns; the least of a provider's medians counts. What
fails the gate is not timed: the provider is stopped for the rest of the run, and the exit status is 1. What a
peer can't do, and memory that doesn't suffice, are noted in the row's ``status``. A case's rows are written
as soon as it ends. Left out on purpose: whole models.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from streamattn.bench.arguments import positive, writable
from streamattn.bench.cases import DTYPES, PASSES, SETS, Case, Sweep
from streamattn.bench.gate import Gate, WrongResult
from streamattn.bench.providers import PROVIDERS, Call, Provider, Unsupported, find, first_line
from streamattn.bench.results import Machine, ask_driver, csv_file, this_machine
from streamattn.bench.tables import Row, report
from streamattn.bench.timers import TIMERS, Measure, Timer, Work, clock, peak_mib

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
DEVICE = torch.device("cuda")
GPU_SETS = [name for name in SETS if name not in ("cpu", "single", "headless")]
"""What is measured where nothing is asked for; what has one head is asked for by name."""
PEERS = [name for name in PROVIDERS if not name.startswith("eager")]
"""Who takes part where nobody is asked for: who doesn't hold all scores in memory."""
WIDTH = 120  # columns of the tables, on a terminal or not


@dataclass(frozen=True)
class Plan:
    """What is done with each case.

    Attributes:
        passes: names in `PASSES`.
        timers: by name.
        repeats: pieces of work behind a median.
        rounds: turns of each provider.
        device: where.
    """

    passes: Sequence[str]
    timers: dict[str, Timer]
    repeats: int
    rounds: int
    device: torch.device


@dataclass
class Contestant:
    """One provider in one case; ``times`` and ``measures`` by column of the CSV, ``forward`` and so on."""

    name: str
    provider: Provider
    measures: dict[str, Measure] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    peak_mib: float | None = None
    notes: list[str] = field(default_factory=list)


def column(which: str, timer: str) -> str:
    """The beginning of a pass's columns under a timer."""
    return which if timer == "events" else f"{which}_{timer}"


def _prepared(which: str, call: Call, inputs: Inputs) -> Work:
    """The piece of work of a pass; for the backward the forward has been run once."""
    q, k, v, dout = inputs
    if which == "forward":

        def forward() -> None:
            with torch.no_grad():
                call(q, k, v)

        return forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = call(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def enter(name: str, provider: Provider, gate: Gate, inputs: Inputs, plan: Plan) -> Contestant:
    """Checks a provider on the gate's case and prepares its measurements; what a peer can't do is noted.

    Raises:
        WrongResult: it is wrong, or it is ours and fails.
    """
    entered = Contestant(name, provider)
    try:
        call = provider.bind(gate.case, plan.device)
    except Unsupported as error:
        entered.notes.append(f"unsupported: {error}")
        return entered
    for which in plan.passes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of each backend that it can't use
                gate.check(provider.bind, call, backward=which == "backward")
            peak = peak_mib(lambda which=which: _prepared(which, call, inputs)())
            entered.peak_mib = peak if peak is None else max(peak, entered.peak_mib or 0.0)
            work = _prepared(which, call, inputs)
            for timer, prepare in plan.timers.items():
                entered.measures[column(which, timer)] = prepare(work, plan.repeats)
        except WrongResult as error:
            raise WrongResult(f"{which}: {error}") from error
        except torch.OutOfMemoryError:
            entered.notes.append(f"{which}: out of memory")
        except Exception as error:  # a peer may fail in any way, and that is a result
            if provider.ours:
                raise WrongResult(f"{which} fails: {first_line(error)}") from error
            entered.notes.append(f"{which}: {first_line(error)}")
    return entered


def compete(contestants: Iterable[Contestant], rounds: int) -> str | None:
    """Lets them take turns, every second round the other way around.

    Returns:
        The GPU's clock in MHz, asked for when the last round began; None where that is not known soon after.
    """
    order = list(contestants)
    clock = None
    for turn in range(rounds):
        if turn == rounds - 1:
            clock = ask_driver("clocks.sm")
        for each in order:
            with each.provider.around():
                for name, measure in each.measures.items():
                    each.times.setdefault(name, []).append(measure())
        order.reverse()
    return None if clock is None else clock(0.5)


def rows_of(
    case: Case, contestants: Sequence[Contestant], plan: Plan, machine: Machine, clock: str | None
) -> list[Row]:
    """The lines of a case that was run."""
    best: dict[str, float] = {}
    for each in contestants:
        if not each.provider.ours:
            for name, times in each.times.items():
                best[name] = min(min(times), best.get(name, float("inf")))
    shared: dict[str, Any] = {**asdict(machine), "sm_mhz": clock, **asdict(case)}
    rows = []
    for each in contestants:
        figures: dict[str, Any] = {}
        for which in plan.passes:
            for timer in plan.timers:
                name = column(which, timer)
                if name in each.times:
                    least = min(each.times[name])
                    figures[f"{name}_ms"] = round(least, 4)
                    speed = case.flops(which) / least / 1e9
                    figures[f"{name}_tflops"] = round(speed, 1 if speed >= 10.0 else 4)
                    if name in best:
                        figures[f"{name}_to_best"] = round(best[name] / least, 3)
        spreads = [max(times) / min(times) - 1.0 for times in each.times.values()]
        rows.append(
            Row(
                **shared,
                provider=each.name,
                version=each.provider.version,
                status="; ".join(each.notes) or "ok",
                peak_mib=each.peak_mib,
                spread=round(max(spreads), 3) if spreads else None,
                **figures,
            )
        )
    return rows


def run(
    cases: Iterable[Case],
    providers: dict[str, Provider],
    chosen: Callable[[str, Case], bool],
    plan: Plan,
    machine: Machine,
    write: Callable[[Row], None],
    say: Callable[[str], None],
) -> tuple[list[Row], dict[str, str]]:
    """Runs all cases.

    Args:
        cases: in their order.
        providers: by name, that can run here.
        chosen: whether a provider, by its name, takes part in a case.
        plan: what is done with each case.
        machine: what all rows share.
        write: takes each row as soon as its case has ended.
        say: takes a message as soon as a provider is stopped.

    Returns:
        The rows, and for each provider that was stopped the reason.
    """
    rows: list[Row] = []
    stopped: dict[str, str] = {}
    for case in cases:
        inputs = case.tensors(plan.device)
        gate = Gate(case, inputs)
        contestants = []
        for name, provider in providers.items():
            if name in stopped or not chosen(name, case):
                continue
            try:
                with provider.around():
                    contestants.append(enter(name, provider, gate, inputs, plan))
            except WrongResult as error:
                stopped[name] = f"{case.case}, {case.label}, S {case.seq_len}, D {case.head_dim}: {error}"
                contestants.append(Contestant(name, provider, notes=[f"wrong: {error}"]))
                say(f"{name} is stopped: {stopped[name]}")
        clock = compete(contestants, plan.rounds)
        for row in rows_of(case, contestants, plan, machine, clock):
            write(row)
            rows.append(row)
    return rows, stopped


def worth_compiling(case: Case, longest: int) -> bool:
    """Whether FlexAttention, which compiles for seconds in every case, takes part where not all was asked."""
    pattern = case.window is not None or case.document is not None
    return (
        pattern or case.case == "gpt2" or (case.case, case.seq_len, case.head_dim) == ("sweep", longest, 128)
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="streamattn bench kernel",
        description="Times attention beside other implementations on one GPU; what is wrong is not timed.",
        epilog="On the CPU: --device cpu --cases cpu --passes forward backward "
        "--providers streamattn sdpa_flash, which times float32 [4, 12, 1024, 64], causal, beside the kernel "
        "that scaled_dot_product_attention has there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the measurements go; an older file is replaced")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="where")
    add("--cases", nargs="+", choices=SETS, default=GPU_SETS, help="sets of cases")
    add("--head-dims", type=positive, nargs="+", default=[64, 128, 256], help="of the sweep")
    add(
        "--seq-lens",
        type=positive,
        nargs="+",
        default=[512, 1024, 2048, 4096, 8192, 16384],
        help="of the sweep",
    )
    add("--tokens", type=positive, default=16384, help="batch times sequence length of the sweep")
    add("--hidden", type=positive, default=2048, help="heads times head_dim of the sweep")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of most cases; some are in float32")
    add("--passes", nargs="+", choices=PASSES, default=["forward"], help="what is timed")
    add(
        "--timer",
        nargs="+",
        choices=TIMERS,
        default=["events"],
        help="single calls, or replays of many on a GPU",
    )
    add("--repeats", type=positive, default=10, help="calls, or replays, behind a median")
    add(
        "--rounds", type=positive, default=2, help="turns of each provider; the least of their medians counts"
    )
    add("--providers", nargs="+", choices=PROVIDERS, default=PEERS, help="who takes part")
    add("--all-flex", action="store_true", help="FlexAttention in every case, not in a few: it compiles each")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases, prints tables, and writes the CSV.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where a provider was stopped.

    Raises:
        SystemExit: the device is not there, or the command line is wrong.
    """
    options = parse(argv)
    on_cpu = options.device == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        raise SystemExit(
            "streamattn bench kernel: needs a CUDA device, and none is visible; --device cpu measures the CPU"
        )
    if on_cpu and options.timer != ["events"]:
        raise SystemExit(
            "streamattn bench kernel: --timer graph needs a CUDA device; leave it out on the CPU"
        )
    console = Console(width=WIDTH)
    errors = Console(width=WIDTH, stderr=True)
    providers, absent = find(options.providers)
    for name in options.providers:
        fact = providers[name].version if name in providers else f"absent: {absent[name]}"
        console.print(f"{name:<20} {fact}", markup=False, highlight=False, soft_wrap=True)
    sweep = Sweep(options.head_dims, options.seq_lens, options.tokens, options.hidden, options.dtype)
    cases = [case for name in options.cases for case in SETS[name](sweep)]

    def chosen(name: str, case: Case) -> bool:
        return name != "flex" or options.all_flex or worth_compiling(case, max(options.seq_lens))

    if "flex" in providers and not options.all_flex:
        count = sum(chosen("flex", case) for case in cases)
        console.print(
            f"flex takes part in {count} of {len(cases)} cases; --all-flex: in all", highlight=False
        )
    timers = {"events": clock} if on_cpu else {name: TIMERS[name] for name in options.timer}
    device = torch.device("cpu") if on_cpu else DEVICE
    plan = Plan(options.passes, timers, options.repeats, options.rounds, device)
    machine = replace(this_machine(), device="CPU") if on_cpu else this_machine()
    stream = nullcontext() if on_cpu else torch.cuda.stream(torch.cuda.Stream())
    with csv_file(options.csv, Row) as write, stream:
        rows, stopped = run(
            track(cases, console=errors),
            providers,
            chosen,
            plan,
            machine,
            write,
            lambda text: errors.print(text, markup=False, highlight=False, soft_wrap=True),
        )
    ours = [name for name, provider in providers.items() if provider.ours]
    columns = [column(which, timer) for which in plan.passes for timer in plan.timers]
    for table in report(rows, columns, ours):
        console.print(table)
    for name, reason in stopped.items():
        errors.print(f"{name} was stopped: {reason}", markup=False, highlight=False, soft_wrap=True)
    return 1 if stopped else 0


if __name__ == "__main__":
    raise SystemExit(main())
