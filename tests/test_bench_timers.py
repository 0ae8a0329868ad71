"""Medians, cleared caches and graphs, on an imagined device whose time is what its work says."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from streamattn.bench import timers


class Device:
    """Work takes ``ms[i % len(ms)]``, clearing the cache 1000; a graph replays what was called in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ms: list[float]) -> None:
        self.now, self.calls, self.cleared, self.ms = 0.0, 0, 0, ms
        self.capturing: list[float] | None = None
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Scratch:
            def zero_(self) -> None:
                device.cleared += 1
                device.now += 1000.0

        class Graph:
            times: list[float]

            def replay(self) -> None:
                device.now += sum(self.times)

        @contextmanager
        def graph(captured: Graph, stream: str):
            assert stream == "the current one"
            device.capturing = captured.times = []
            yield
            device.capturing = None

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current one")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(timers.torch, "empty", lambda *size, **options: Scratch())

    def work(self) -> None:
        time = self.ms[self.calls % len(self.ms)]
        self.calls += 1
        if self.capturing is None:
            self.now += time
        else:
            self.capturing.append(time)


def test_events_give_the_times_of_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, [1.0, 2.0, 50.0])
    measure = timers.events(device.work, 5)
    assert device.calls == 3, "warmed up"
    assert measure() == [1.0, 2.0, 50.0, 1.0, 2.0]
    assert (device.calls, device.cleared) == (8, 5)


@pytest.mark.parametrize(("ms", "calls"), [(0.5, 16), (3.0, 3), (100.0, 1), (0.001, timers.MOST_CALLS)])
def test_graphs_give_the_time_of_one_of_many_calls(
    ms: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, [ms])
    measure = timers.graph(device.work, 5)
    prepared = device.calls
    assert prepared - 6 == calls  # three warm up, three estimate
    cleared = device.cleared
    assert measure() == pytest.approx([ms] * 5)
    assert (device.calls, device.cleared) == (prepared, cleared), "replayed, the cache left alone"


def test_the_clock_gives_the_times_of_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls, seconds = [0.0], [0], (7.0, 7.0, 7.0, 0.5, 0.25, 3.0)

    def work() -> None:
        now[0] += seconds[calls[0] % 6]
        calls[0] += 1

    monkeypatch.setattr(timers.time, "perf_counter", lambda: now[0])
    measure = timers.clock(work, 3)
    assert calls == [3], "warmed up"
    assert measure() == [500.0, 250.0, 3000.0]  # milliseconds
    assert calls == [6]


def test_a_sleep_of_known_length() -> None:
    times = timers.clock(lambda: time.sleep(0.02), 3)()
    assert len(times) == 3
    assert 20.0 <= min(times) < 30.0, "of three on a busy machine the least"


def test_memory_is_not_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen: list[Tensor] = []
    assert timers.footprint(lambda: torch.ones(1), seen.append) == (None, None)
    assert seen == [torch.ones(1)], "the work is done all the same"


def test_memory_is_told_at_its_most_and_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    used, most = [5 << 20], [9 << 20]

    def take(mib: int) -> None:
        used[0] += mib << 20
        most[0] = max(most[0], used[0])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: most.__setitem__(0, used[0]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most[0])

    def forward() -> Tensor:
        take(4)
        take(-1)
        return torch.ones(1)

    assert timers.footprint(forward, lambda out: (take(7), take(-8))) == (3.0, 10.0)


def test_the_most_that_a_machine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By clocks that show 2 milliseconds for a product and 4 for a copy."""
    shown = iter([2.0, 4.0])

    def clock(work, repeats: int):
        ms = next(shown)
        return lambda: [3 * ms, ms]

    monkeypatch.setattr(timers, "clock", clock)
    product, copy = timers.ceilings(torch.device("cpu"), torch.float32)
    assert product == pytest.approx(2 * 256**3 / 2e-3 / 1e12)
    assert copy == pytest.approx(2 * 4 * 2**20 / 4e-3 / 1e9)
