"""The multiprocessor of the emulator: its threads, barriers, copies and products.

Each warpgroup or warp of a program is a thread. What runs beside the program happens as late as it may: a
product of the tensor cores when the program waits for it, a copy from shared memory likewise, a copy to it at
some time after it was begun, in any order. An addition to global memory happens when that is waited for, or
when all programs are done. So a buffer that is handed back too early holds something else by then.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.emulator.values import Block, Descriptor, Dtype, Scalar, Shared

TIMEOUT = 20.0  # seconds in which nobody arrives
TURN_DELAY = 0.0  # seconds before a warp looks whether it is its turn

_thread = threading.local()
_memory = threading.Lock()  # of atomic accesses
late: list[Callable[[], None]] = []  # additions nobody waited for
additions: dict[tuple[int, ...], list[int]] = {}  # programs that added to a block, by its address and place


class Deadlock(AssertionError):
    """A program waits for what never comes."""


class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes that it expects have come."""

    def __init__(self, count: int) -> None:
        self.count, self.left, self.bytes, self.phase = count, count, 0, 0

    def change(self, arrivals: int, size: int) -> None:
        self.left -= arrivals
        self.bytes += size
        assert self.left >= 0, "more arrivals than an mbarrier counts"
        if self.left == 0 and self.bytes == 0:
            self.phase ^= 1
            self.left = self.count


class Named:
    """A named barrier."""

    def __init__(self, threads: int) -> None:
        self.arrived, self.threads, self.generation = 0, threads, 0


class Program:
    """One program of a grid."""

    def __init__(self, number: int, programs: int, seed: int) -> None:
        self.number, self.programs = number, programs
        self.changed = threading.Condition()
        self.barriers: dict[int, Barrier] = {}  # by address
        self.named: dict[int, Named] = {}
        self.failure: BaseException | None = None
        self.done = False
        self.copies: list[Callable[[], None]] = []
        self.draw = random.Random(seed)
        self.memory: list[torch.Tensor] = []  # kept, or an address could be another barrier's

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """With `changed` held."""
        end = time.monotonic() + TIMEOUT
        while not ready():
            if self.failure is not None:
                raise Deadlock("another warpgroup failed") from self.failure
            if time.monotonic() > end:
                raise Deadlock(f"{_thread.name} waits for {what}")
            self.changed.wait(1.0)

    @torch.no_grad()
    def copy_on(self) -> None:
        """The copying engine: begun copies, in any order."""
        while True:
            with self.changed:
                while not self.copies:
                    if self.done:
                        return
                    self.changed.wait()
                copy = self.copies.pop(self.draw.randrange(len(self.copies)))
            if self.draw.random() < 0.1:
                time.sleep(0.001)
            try:
                copy()
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def finish(self) -> None:
        with self.changed:
            self.done = True
            self.changed.notify_all()

    def check(self) -> None:
        """Nothing is left over."""
        assert all(barrier.bytes == 0 for barrier in self.barriers.values()), "bytes nobody waited for"
        left = [index for index, named in self.named.items() if named.arrived]
        assert not left, f"named barriers {left} are left half full"


def here() -> Program:
    return _thread.program


def enter(program: Program, name: str, threads: int) -> None:
    """Makes this thread a warpgroup (or warp) of so many threads."""
    _thread.program, _thread.name, _thread.threads = program, name, threads
    _thread.products, _thread.stores, _thread.sums = [], [], []


def warp_specialize(parts: list[Any], warps: list[int], registers: list[int]) -> None:
    program = here()

    @torch.no_grad()  # each thread has a setting of its own
    def work(at: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        enter(program, f"{function.__name__} {at}", 32 * (4 if at == 0 else warps[at - 1]))
        try:
            function(*args)
            assert not _thread.products, "products nobody waited for"
            assert not _thread.stores, "copies nobody waited for"
            late.extend(_thread.sums)
        except BaseException as error:
            program.fail(error)

    workers = [threading.Thread(target=work, args=(at, *part), daemon=True) for at, part in enumerate(parts)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if program.failure is not None:
        raise program.failure


def allocate(dtype: Dtype, shape: list[int], layout: Any) -> Shared:
    poison = float("nan") if dtype.torch.is_floating_point else -123456789
    data = torch.full([int(size) for size in shape], poison, dtype=dtype.torch)
    here().memory.append(data)
    return Shared(data, dtype)


def _barrier(bar: Shared) -> Barrier:
    return here().barriers[bar.data.data_ptr()]


def init(bar: Shared, count: int) -> None:
    here().barriers[bar.data.data_ptr()] = Barrier(int(count))


def _change(program: Program, barrier: Barrier, arrivals: int, size: int) -> None:
    with program.changed:
        barrier.change(arrivals, size)
        program.changed.notify_all()


def expect(bar: Shared, size: Any) -> None:
    _change(here(), _barrier(bar), 1, int(size))


def arrive(bar: Shared, count: int = 1, pred: Any = True) -> None:
    if not pred:
        return
    _change(here(), _barrier(bar), int(count), 0)


def wait(bar: Shared, phase: Any, pred: Any = True) -> None:
    if not pred:
        return
    program, barrier = here(), _barrier(bar)
    with program.changed:
        program.wait_until(lambda: barrier.phase != (int(phase) & 1), "an mbarrier")


def at_named_barrier(index: int, threads: int, waits: bool) -> None:
    program = here()
    with program.changed:
        named = program.named.setdefault(index, Named(threads))
        assert not named.arrived or named.threads == threads, "a named barrier of two counts"
        named.threads = threads
        named.arrived += _thread.threads
        assert named.arrived <= threads, "more arrivals than a named barrier counts"
        generation = named.generation
        if named.arrived == threads:
            named.arrived = 0
            named.generation += 1
            program.changed.notify_all()
        elif waits:
            program.wait_until(lambda: named.generation != generation, f"named barrier {index}")


def copy_in(desc: Descriptor, coord: Any, bar: Shared, result: Shared) -> None:
    program, barrier, coord = here(), _barrier(bar), [int(first) for first in coord]

    def copy() -> None:
        there, block = desc.common(coord)
        tile = torch.zeros(desc.block_shape, dtype=desc.base.dtype)
        tile[block] = desc.base[there]
        result.data.copy_(tile.view(result.data.shape))
        _change(program, barrier, 0, -tile.numel() * tile.element_size())

    with program.changed:
        program.copies.append(copy)
        program.changed.notify_all()


def copy_out(desc: Descriptor, coord: Any, source: Shared) -> None:
    coord = [int(first) for first in coord]

    def copy() -> None:
        there, block = desc.common(coord)
        tile = source.data.view(desc.block_shape)[block]
        with _memory:
            desc.base[there] = tile

    _thread.stores.append(copy)


def add_out(desc: Descriptor, coord: Any, source: Shared) -> None:
    """Reads when `store_wait` waits, and adds when `pass_on` does or when all programs are done."""
    coord, number, sums = [int(first) for first in coord], here().number, _thread.sums

    def read() -> None:
        there, block = desc.common(coord)
        tile = source.data.view(desc.block_shape)[block].clone()

        def add() -> None:
            with _memory:
                desc.base[there] += tile
                additions.setdefault((desc.base.data_ptr(), *coord), []).append(number)

        sums.append(add)

    _thread.stores.append(read)


def add_directly(ptr: Any, values: list[torch.Tensor]) -> None:
    """Adds four numbers at each address and behind it."""
    at = ptr.places()
    assert (at % 4 == 0).all(), "16 bytes that don't lie together"
    with _memory:
        for i, x in enumerate(values):
            ptr.memory.index_add_(0, (at + i).flatten(), x.flatten())


def _finish(begun: list[Callable[[], None]], but_for: Any) -> None:
    while len(begun) > int(but_for):
        begun.pop(0)()


def store_wait(pending: Any) -> None:
    _finish(_thread.stores, pending)


def warpgroup_mma(
    a: Block | Shared, b: Shared, acc: Block, use_acc: Any = True, is_async: bool = False
) -> Block:
    assert a.shape[1] == b.shape[0] and acc.shape == [a.shape[0], b.shape[1]], (a.shape, b.shape, acc.shape)
    result = Block(torch.full_like(acc.data, float("nan")))

    def multiply() -> None:
        product = a.data.float() @ b.data.float()
        result.data.copy_(acc.data + product if use_acc else product)

    _thread.products.append(multiply)
    if not is_async:
        _finish(_thread.products, 0)
    return result


def warpgroup_mma_wait(pending: Any, deps: list[Any]) -> Any:
    _finish(_thread.products, pending)
    return deps[0] if len(deps) == 1 else tuple(deps)


def await_turn(ptr: Any, turn: int) -> None:
    time.sleep(TURN_DELAY)
    at, program = int(ptr.places()), here()
    end = time.monotonic() + TIMEOUT
    while int(ptr.memory[at]) != turn:
        if program.failure is not None or time.monotonic() > end:
            raise Deadlock(f"{_thread.name} waits for its turn") from program.failure
        time.sleep(0.0005)


def pass_on(ptr: Any, turn: int, waits: bool) -> None:
    if waits:
        _finish(_thread.stores, 0)
        _finish(_thread.sums, 0)
    ptr.memory[int(ptr.places())] = turn


def atomic_add(ptr: Any, value: Any, sem: str = "acq_rel") -> Scalar:
    at = int(ptr.places())
    with _memory:
        before = int(ptr.memory[at])
        ptr.memory[at] = before + int(value)
    return Scalar(before)
