"""The counters that the Hopper forward draws from: who shares one, and where it lies.

The GPU and its streams are fakes.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import hopper_launch
from streamattn.kernels.hopper_launch import CHUNK, counter_of


class Gpu:
    """Where a launch is asked for: the stream, whether it is captured; and what was allocated meanwhile."""

    def __init__(self) -> None:
        self.stream, self.capturing = 7, False
        self.allocations: list[tuple[int, bool, int]] = []  # bytes, by the calling thread, on which stream
        self.chunks: list[weakref.ref[Tensor]] = []
        self._of_thread = threading.local()
        self._zeros = torch.zeros

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self._of_thread.stream = stream
        yield

    def zeros(self, *size: int, dtype: torch.dtype, device: int) -> Tensor:
        x = self._zeros(*size, dtype=dtype)
        ours = threading.current_thread() is threading.main_thread()
        stream = self.stream if ours else self._of_thread.stream
        self.allocations.append((x.nbytes, ours, stream))
        self.chunks.append(weakref.ref(x))
        return x

    def capture(self, count: int, device: int = 0) -> list[Tensor]:
        """The counters of so many launches in a graph."""
        self.capturing = True
        counters = [counter_of(device) for _ in range(count)]
        self.capturing = False
        return counters


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    for name, empty in {"_counters": {}, "_spare": {}, "_chunks": []}.items():
        monkeypatch.setattr(hopper_launch, name, empty)
    monkeypatch.setattr(torch, "zeros", gpu.zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.stream)
    monkeypatch.setattr(torch.cuda, "stream", gpu.on)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: gpu.stream, raising=False)
    return gpu


def addresses(counters: list[Tensor]) -> set[int]:
    return {counter.data_ptr() for counter in counters}


def test_launches_of_a_stream_share_a_counter_and_others_do_not(gpu):
    seen: dict[tuple[int, int], Tensor] = {}
    for device, stream in [(0, 7), (0, 0), (1, 7), (0, 7), (1, 7), (0, 0)]:
        gpu.stream = stream
        counter = counter_of(device)
        assert counter.shape == (1,) and counter.dtype == torch.int32 and counter == 0
        assert seen.setdefault((device, stream), counter).data_ptr() == counter.data_ptr()
    assert len(addresses(list(seen.values()))) == 3


def test_each_launch_of_a_graph_has_a_counter_for_itself(gpu):
    own = counter_of(0)
    gpu.stream = 8  # which captures, and has launched nothing before
    made = len(gpu.allocations)
    counters = [*gpu.capture(300), *gpu.capture(300)]
    assert len(gpu.allocations) == made, "memory of a graph, and a kernel that clears it"
    assert len(addresses([own, counter_of(0), *counters])) == 602
    for counter in counters:
        assert counter.shape == (1,) and counter == 0
    assert all(counter.data_ptr() % 16 == 0 for counter in counters), "another alignment is another kernel"


def test_a_graph_of_another_gpu_takes_none(gpu):
    counter_of(0)
    gpu.capture(1, device=1)
    assert gpu.allocations[1:] == [(4, True, 7)]


@pytest.mark.parametrize("before", [0, 1])
def test_where_none_is_left_a_graph_clears_its_own(before, gpu):
    """And the next launch outside of a graph makes more, while the old ones stay where graphs know them."""
    for _ in range(before):
        counter_of(0)
    left = before * (CHUNK - 1)
    gpu.capture(left)
    chunks = len(gpu.allocations)
    counters = gpu.capture(3)
    assert gpu.allocations[chunks:] == [(4, True, 7)] * 3
    assert len(addresses(counters)) == 3
    counter_of(0)
    gpu.capture(CHUNK - 1)
    assert [size for size, _, _ in gpu.allocations[chunks + 3 :]] == [CHUNK * 16]
    gpu.capture(1)
    counter_of(0)
    del counters
    gc.collect()
    kept = [chunk() for chunk in gpu.chunks]
    assert [x.nbytes for x in kept if x is not None] == [CHUNK * 16] * (before + 2)


def test_a_chunk_is_allocated_by_a_thread_of_its_own_on_the_stream_that_launches(gpu):
    gpu.stream = 9
    counter_of(0)
    assert gpu.allocations == [(CHUNK * 16, False, 9)]


def test_threads_that_come_at_once_have_counters_of_their_stream(gpu, monkeypatch):
    """Whoever is second may replace what the first one keeps, but not what it launches with."""
    make, others = hopper_launch._new_counter, []

    def interrupted(device: int) -> Any:
        if not others:
            others.append(None)
            others.append(counter_of(device))
        return make(device)

    monkeypatch.setattr(hopper_launch, "_new_counter", interrupted)
    first = counter_of(0)
    again = counter_of(0)
    assert again is first and others[1] is not first
    assert len(addresses([first, others[1], *gpu.capture(CHUNK - 1)])) == CHUNK + 1
