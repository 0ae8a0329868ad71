"""How it is measured: CUDA events around single calls, or around replays of a CUDA graph of many; memory.

A timer prepares a call once and returns what measures it, so that contestants can take turns. Times are
milliseconds of the current stream, which must not be the default one (graphs are captured on it); on the CPU
those of the host's clock. What the machine could do at most is measured too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

GRAPH_MS = 8.0
"""About how long a replay takes: long beside the launch of a graph."""
MOST_CALLS = 100
"""In a graph."""

Work = Callable[[], object]
Measure = Callable[[], list[float]]
Timer = Callable[[Work, int], Measure]
"""(work, repeats) -> what gives the times of so many pieces of work."""


def _times(work: Work, before: Work, repeats: int) -> list[float]:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        before()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def events(work: Work, repeats: int) -> Measure:
    """Single calls, the second-level cache cleared before each.

    Calls are queued without waiting for one another, so the host's time shows only where it is the longer.
    """
    for _ in range(3):
        work()

    def measure() -> list[float]:
        scratch = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
        return _times(work, scratch.zero_, repeats)

    return measure


def graph(work: Work, repeats: int) -> Measure:
    """Calls one after another in a CUDA graph: no host time, and the cache as the calls before left it."""
    calls = min(MOST_CALLS, max(1, round(GRAPH_MS / statistics.median(events(work, 3)()))))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            work()
    captured.replay()

    def measure() -> list[float]:
        return [ms / calls for ms in _times(captured.replay, lambda: None, repeats)]

    return measure


def clock(work: Work, repeats: int) -> Measure:
    """Single calls on the CPU, by its own clock, with whatever its caches hold."""
    for _ in range(3):
        work()

    def once() -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1000.0

    return lambda: [once() for _ in range(repeats)]


def quantiles(times: Sequence[float]) -> tuple[float, float, float]:
    """What a fifth of the times are below, the median, and what a fifth are above."""
    p20, median, p80 = np.quantile(times, (0.2, 0.5, 0.8)).tolist()
    return p20, median, p80


TIMERS: dict[str, Timer] = {"events": events, "graph": graph}
"""Of a GPU; on the CPU `clock` takes the place of ``events``."""


def footprint(
    forward: Callable[[], Tensor], rest: Callable[[Tensor], object]
) -> tuple[float | None, float | None]:
    """Memory of a piece of work beyond that before it, in MiB; None and None without a GPU.

    Args:
        forward: the first part of it.
        rest: the second, which is given what the first returned.

    Returns:
        What is held between the two, and the most in use.
    """
    if not torch.cuda.is_available():
        rest(forward())
        return None, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    rest(out)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return round(held / 2**20, 1), round(peak / 2**20, 1)


def ceilings(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """What this machine does at most: TFLOP/s of a matrix product of a dtype, and GB/s of a copy.

    A copy reads and writes; both count. Small on a CPU.
    """
    gpu = device.type == "cuda"
    size, elements = (8192, 1 << 28) if gpu else (256, 1 << 20)
    prepare = TIMERS["events"] if gpu else clock
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product_ms = min(prepare(lambda: a @ b, 5)())
    of = torch.zeros(elements, device=device)
    to = torch.empty_like(of)
    copy_ms = min(prepare(lambda: to.copy_(of), 5)())
    return 2 * size**3 / product_ms / 1e9, 2 * of.nbytes / copy_ms / 1e6
