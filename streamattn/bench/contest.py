"""One case: its contestants are judged, timed in turns, and written down.

All providers run a case on the same inputs and take turns; of a provider's turns the one of the least median
counts. What fails the gate is not timed. What a peer can't do, and memory that doesn't suffice, are noted in
a row's ``status``, as is another backend than a provider is named for: what really ran is looked at last, for
no time may be taken once a profiler was open.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from streamattn.bench.backends import recording, served
from streamattn.bench.cases import DTYPES, Case, precision
from streamattn.bench.gate import Gate, WrongResult
from streamattn.bench.machine import sm_clock
from streamattn.bench.providers import Call, Provider, Unsupported, find, first_line
from streamattn.bench.resume import Stamp, stamp
from streamattn.bench.tables import Row
from streamattn.bench.timers import MOST_CALLS, TIMERS, Measure, ceilings, clock, footprint, quantiles

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """What is done with each case.

    Attributes:
        passes: names in `PASSES`.
        timers: names in `TIMERS`.
        repeats: pieces of work of a turn.
        rounds: turns of each provider.
        device: ``cuda`` or ``cpu``.
    """

    passes: Sequence[str]
    timers: Sequence[str]
    repeats: int
    rounds: int
    device: str


@dataclass
class Entry:
    """One pass of one provider; the turns of each timer, and the GPU's clock right after the last one."""

    name: str
    provider: Provider
    part: str
    status: str = "ok"
    work: Callable[[], object] | None = None
    backend: str | None = None
    error: float | None = None
    held_mib: float | None = None
    peak_mib: float | None = None
    measures: dict[str, Measure] = field(default_factory=dict)
    turns: dict[str, list[list[float]]] = field(default_factory=dict)
    sm_mhz: dict[str, int | None] = field(default_factory=dict)

    def fail(self, status: str) -> None:
        """Nothing more of it is measured, and nothing of it is reported."""
        self.status, self.work = status, None
        for found in (self.measures, self.turns, self.sm_mhz):
            found.clear()


def steps(
    part: str, call: Call, inputs: Inputs
) -> tuple[Callable[[], Tensor], Callable[[Tensor], tuple[Tensor, ...] | None]]:
    """The forward of a pass, and what follows it: gradients, or nothing."""
    q, k, v, dout = inputs
    if part == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return call(q, k, v)

        return forward, lambda out: None
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return lambda: call(*leaves), lambda out: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def elsewhere(inputs: Inputs, cache: int) -> list[Inputs]:
    """The same inputs in so many more places that all of them outgrow a cache three times.

    They are no more than a graph has calls, so that small inputs may still lie in the cache.

    Args:
        inputs: q, k, v, dout.
        cache: its size in bytes.
    """
    q, k, v, dout = inputs
    places = math.ceil(3 * cache / (k.nbytes + v.nbytes))
    return [(q, k.clone(), v.clone(), dout) for _ in range(min(places, MOST_CALLS) - 1)]


def prepared(part: str, call: Call, inputs: Inputs, others: Sequence[Inputs] = ()) -> Callable[[], object]:
    """The piece of work that is timed; for the backward the forward has been run once.

    A forward that is called again takes the next of ``inputs`` and ``others``, around and around.
    """
    forward, rest = steps(part, call, inputs)
    if part == "forward":
        forwards = cycle([forward, *(steps(part, call, each)[0] for each in others)])
        return lambda: next(forwards)()
    if part == "both":
        return lambda: rest(forward())
    out = forward()
    return lambda: rest(out)


def enter(
    name: str, provider: Provider, gate: Gate, inputs: Inputs, others: Sequence[Inputs], plan: Plan
) -> list[Entry]:
    """Checks a provider on the gate's case and prepares its measurements, each pass by itself.

    What it can't do is noted, and ours is wrong where it fails at anything but memory.
    """
    entries = [Entry(name, provider, part) for part in plan.passes]
    call: Call | None = None
    for entry in entries:
        backward = entry.part != "forward"
        try:
            call = call or provider.bind(gate.case, inputs[0].device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, of each backend that it can't use
                error = gate.check(provider.bind, call, backward)
            entry.held_mib, entry.peak_mib = footprint(*steps(entry.part, call, inputs))
            entry.work = prepared(entry.part, call, inputs, others)
            for timer in plan.timers:
                prepare = clock if plan.device == "cpu" else TIMERS[timer]
                entry.measures[timer] = prepare(entry.work, plan.repeats)
            entry.error = float(f"{error:.3g}")
        except Unsupported as error:
            entry.fail(f"unsupported: {error}")
        except WrongResult as error:
            entry.fail(f"wrong: {error}")
        except torch.OutOfMemoryError:
            entry.fail("out of memory")
        except Exception as error:  # a peer may fail in any way, and that is a result
            entry.fail(f"{'wrong: fails: ' if provider.ours else ''}{first_line(error)}")
    return entries


def compete(entries: Iterable[Entry], rounds: int, device: str) -> None:
    """Lets them take turns, every second round the other way around."""
    order, clock = list(entries), sm_clock(device)
    for _ in range(rounds):
        for entry in order:
            try:
                with entry.provider.around():
                    for timer, measure in entry.measures.items():
                        entry.turns.setdefault(timer, []).append(measure())
                        entry.sm_mhz[timer] = clock()
            except torch.OutOfMemoryError:  # it ran alone before; now all that the others saved is held too
                entry.fail("out of memory")
        order.reverse()


def name_backends(case: Case, entries: Iterable[Entry], inputs: Inputs, device: str) -> None:
    """Says what served each one that was timed, by its work done once more; refuses what isn't its own.

    Neither a prediction nor this work costs figures that are taken: of what fails nothing is known.
    """
    for entry in entries:
        if entry.work is None:
            continue
        provider, predicted = entry.provider, None
        names: list[str] = []
        with suppress(Exception):
            if provider.backend is not None:
                predicted = provider.backend(case, *inputs[:3], entry.part != "forward")
        with suppress(Exception):
            with provider.around(), recording(device) as seen:
                entry.work()
            names = seen
        try:
            entry.backend = served(names, predicted, provider.named) or entry.name
        except Unsupported as error:
            entry.fail(f"unsupported: {error}")


def figures_of(
    case: Case, part: str, turns: Sequence[list[float]], most: tuple[float, float]
) -> dict[str, Any]:
    """The columns of a row that follow from its times.

    Args:
        case: what was measured.
        part: a name in `PASSES`.
        turns: milliseconds of each piece of work, by turn.
        most: TFLOP/s of a product and GB/s of a copy, as `ceilings` measures them.
    """
    best = min(turns, key=statistics.median)
    p20, ms, p80 = quantiles(best)
    flops, moved = case.flops(part), case.moved(part)
    speed, bandwidth = flops / ms / 1e9, moved / ms / 1e6
    return dict(
        median_ms=round(ms, 4),
        p20_ms=round(p20, 4),
        p80_ms=round(p80, 4),
        tflops=round(speed, 1 if speed >= 10.0 else 4),
        peak_share=round(speed / most[0], 4),
        flop_per_byte=round(flops / moved, 2),
        gb_s=round(bandwidth, 1),
        copy_share=round(bandwidth / most[1], 4),
        spread=round(max(map(statistics.median, turns)) / ms - 1.0, 3),
    )


def rows_of(
    case: Case, entries: Sequence[Entry], plan: Plan, most: tuple[float, float], on: Stamp
) -> list[Row]:
    """The lines of a case that was run, in the order of provider, pass and timer."""
    best: dict[tuple[str, str], float] = {}
    for entry in entries:
        for timer, turns in entry.turns.items():
            if not entry.provider.ours:
                least = min(map(statistics.median, turns))
                best[entry.part, timer] = min(least, best.get((entry.part, timer), float("inf")))
    rows = []
    for entry in entries:
        for timer in plan.timers:
            figures: dict[str, Any] = {}
            if timer in entry.turns:
                figures = figures_of(case, entry.part, entry.turns[timer], most)
                least = min(map(statistics.median, entry.turns[timer]))
                if (entry.part, timer) in best:
                    figures["speedup"] = round(best[entry.part, timer] / least, 3)
                memory = dict(held_mib=entry.held_mib, peak_mib=entry.peak_mib)
                figures |= dict(backend=entry.backend, error=entry.error, **memory)
            rows.append(
                Row(
                    **asdict(replace(on, sm_mhz=entry.sm_mhz.get(timer))),
                    **asdict(case),
                    provider=entry.name,
                    version=entry.provider.version,
                    part=entry.part,
                    timer=timer,
                    status=entry.status,
                    **figures,
                )
            )
    return rows


def contest(case: Case, providers: Mapping[str, Provider], plan: Plan) -> list[Row]:
    """Runs a case in this process.

    Args:
        case: what is measured.
        providers: who takes part, by name.
        plan: what is done with it.
    """
    device = torch.device(plan.device)
    stream = nullcontext() if plan.device == "cpu" else torch.cuda.stream(torch.cuda.Stream())
    with stream, precision(case.dtype):
        most = ceilings(device, DTYPES[case.dtype])
        inputs = case.tensors(device)
        others: list[Inputs] = []
        if case.queries is not None and plan.device == "cuda":
            # Decoding reads its cache once and does little else: in the second-level cache, where a graph of
            # many calls would leave it, it would be read faster than memory can.
            others = elsewhere(inputs, torch.cuda.get_device_properties(device).L2_cache_size)
        gate = Gate(case, inputs)
        entries: list[Entry] = []
        for name, provider in providers.items():
            with provider.around():
                entries += enter(name, provider, gate, inputs, others, plan)
        compete(entries, plan.rounds, plan.device)
        name_backends(case, entries, inputs, plan.device)
    return rows_of(case, entries, plan, most, stamp(plan.device))


def measure(case: Case, names: Sequence[str], plan: Plan) -> list[Row]:
    """Runs a case in this process; as `contest`, of the providers of these names that can run here."""
    return contest(case, find(list(names))[0], plan)
