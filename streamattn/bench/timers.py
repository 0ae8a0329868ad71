"""How it is measured: medians of CUDA events around single calls, or of replays of a CUDA graph of many.

A timer prepares a call once and returns what measures it, so that contestants can take turns. Times are
milliseconds of the current stream, which must not be the default one (graphs are captured on it); on the CPU
those of the host's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

GRAPH_MS = 8.0
"""About how long a replay takes: long beside the launch of a graph."""
MOST_CALLS = 100
"""In a graph."""

Work = Callable[[], object]
Measure = Callable[[], float]
Timer = Callable[[Work, int], Measure]
"""(work, repeats) -> what gives the median time of one piece of work."""


def _median(work: Work, before: Work, repeats: int) -> float:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        before()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def events(work: Work, repeats: int) -> Measure:
    """Single calls, the second-level cache cleared before each.

    Calls are queued without waiting for one another, so the host's time shows only where it is the longer.
    """
    for _ in range(3):
        work()

    def measure() -> float:
        scratch = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
        return _median(work, scratch.zero_, repeats)

    return measure


def graph(work: Work, repeats: int) -> Measure:
    """Calls one after another in a CUDA graph: no host time, and the cache as the call before left it."""
    calls = min(MOST_CALLS, max(1, round(GRAPH_MS / events(work, 3)())))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            work()
    captured.replay()

    def measure() -> float:
        return _median(captured.replay, lambda: None, repeats) / calls

    return measure


def clock(work: Work, repeats: int) -> Measure:
    """Single calls on the CPU, by its own clock, with whatever its caches hold."""
    work()

    def once() -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1000.0

    return lambda: statistics.median(once() for _ in range(repeats))


TIMERS: dict[str, Timer] = {"events": events, "graph": graph}


def peak_mib(work: Work) -> float | None:
    """The most memory in use during the work beyond that before it, in MiB; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
