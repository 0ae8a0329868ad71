"""Runs the kernels for Hopper without a GPU: what each warpgroup does, in a thread of its own.

Triton's interpreter knows no Gluon. `install` imports the kernels with a stand-in for it, and `run` runs the
programs of a grid, one after the other or some at a time, on tensors of the CPU. What counts is what is
computed, and in which order: see `machine`. Not seen: what the compiler makes of it, layouts, registers,
missing fences, and races between the threads of one warpgroup. Kernels of plain Triton are left to the
interpreter.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.experimental
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from streamattn.pattern import PHILOX_ROUNDS
from tests.emulator import machine
from tests.emulator.values import DTYPES, LAYOUT, Block, Descriptor, Pointer, Scalar, bare, wrap

GLUON = "triton.experimental.gluon"
KERNELS = (
    "primitives",
    "producer",
    "launch",
    "forward",
    "backward_warps",
    "backward_order",
    "backward_shared",
    "backward",
)


def program_id(axis: int) -> Scalar:
    return Scalar(machine.here().number)


def num_programs(axis: int) -> Scalar:
    return Scalar(machine.here().programs)


def cdiv(a: Any, b: Any) -> Scalar:
    return Scalar(-(-int(a) // int(b)))


def arange(start: Any, end: Any, layout: Any = None) -> Block:
    return Block(torch.arange(int(start), int(end)))


def full(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Block:
    return Block(torch.full([int(size) for size in shape], bare(value), dtype=dtype.torch))


def zeros(shape: list[int], dtype: Any, layout: Any = None) -> Block:
    return full(shape, 0, dtype)


def full_like(x: Block, value: Any) -> Block:
    return Block(torch.full_like(x.data, value))


def zeros_like(x: Block) -> Block:
    return full_like(x, 0)


def where(condition: Any, a: Any, b: Any) -> Any:
    condition, a, b = bare(condition), bare(a), bare(b)
    return wrap(torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b)


def _extreme(of_two: Callable[[Any, Any], Any], of_blocks: Callable[..., Tensor]) -> Callable[..., Any]:
    def pick(a: Any, b: Any) -> Any:
        a, b = bare(a), bare(b)
        if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
            return Scalar(of_two(a, b))
        return Block(of_blocks(*(torch.as_tensor(x) for x in (a, b))))

    return pick


def _reduction(way: Callable[..., Tensor]) -> Callable[..., Any]:
    def reduce(x: Block, axis: int) -> Any:
        result = way(x.data, axis)
        return wrap(result if result.dim() else result.item())

    return reduce


def load(ptr: Pointer) -> Any:
    x = ptr.memory[ptr.places()]
    x = x if x.is_floating_point() else x.long()
    return wrap(x if x.dim() else x.item())


def store(ptr: Pointer, value: Any, mask: Any = None) -> None:
    seen = None if mask is None else torch.as_tensor(bare(mask))
    x = torch.as_tensor(bare(value))
    x = x if seen is None else x[seen]
    ptr.memory[ptr.places(seen)] = x.to(ptr.memory.dtype)


def prmt(x: Tensor, selection: int) -> Tensor:
    """Four bytes picked from those of x, 0 to 3, and from 0x64, 4 to 7."""
    total = torch.zeros_like(x)
    for i in range(4):
        pick = selection >> 4 * i & 15
        total |= (x >> 8 * pick & 255 if pick < 4 else torch.full_like(x, 0x64)) << 8 * i
    return total


def not_below(x: Tensor, limit: Any) -> Tensor:
    """All ones in each half of x that is not below the limit's; as positive float16, so as whole numbers."""
    halves = [((x >> s & 0xFFFF) >= (limit >> s & 0xFFFF)).long() * 0xFFFF << s for s in (0, 16)]
    return halves[0] | halves[1]


def in_pairs(even: Tensor, odd: Tensor, dtype: torch.dtype) -> Tensor:
    """Two numbers as a pair of 16 bits."""
    low, high = (x.to(dtype).view(torch.int16).long() & 0xFFFF for x in (even, odd))
    return low | high << 16


def inline_asm(asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """The few instructions that the kernels write themselves."""
    x = [bare(arg) for arg in args]
    if asm.startswith("bar."):
        return machine.at_named_barrier(int(x[0]), int(x[1]), asm.startswith("bar.sync"))
    if asm.startswith(("prefetch", "griddepcontrol.wait")):
        return None
    if asm.startswith("red.global.add.v4.f32"):
        return machine.add_directly(args[0], x[1:])
    if "ld.acquire" in asm:
        return machine.await_turn(args[0], int(x[1]))
    if "st.release" in asm:
        return machine.pass_on(args[0], int(x[1]), "cp.async.bulk.wait_group 0;" in asm)
    if "%ctaid.x" in asm:
        return program_id(0)
    if asm.startswith("ex2.approx.ftz"):
        y = torch.exp2(x[0])
        return Block(torch.where(y < 2.0**-126, 0.0, y))
    if asm.startswith("rcp.approx.ftz"):
        return Block(1.0 / x[0])
    if asm.startswith("prmt.b32"):
        return Block(prmt(x[0], int(asm.rstrip(";").split()[-1], 16)))
    if asm.startswith("set.ge.u32.f16x2"):
        return Block(not_below(x[0], x[1]))
    if "cvt.rn." in asm:
        half = torch.bfloat16 if "cvt.rn.bf16x2" in asm else torch.float16
        pairs = in_pairs(x[0], x[1], half)
        return Block(pairs & not_below(x[2], x[3]) if len(x) == 4 else pairs)
    if asm.startswith("mov.b32") and pack == 2:  # both halves of each pair of words, which are alike
        words = x[0].reshape(-1, 2)[:, 0]
        halves = torch.stack([words & 0xFFFF, words >> 16], 1).to(torch.int32).to(torch.int16)
        return Block(halves.view(dtype.torch).reshape(x[0].shape))
    raise NotImplementedError(asm)


def philox(seed: Scalar, c0: Block, c1: Block, c2: Block) -> tuple[Block, ...]:
    """As `hopper_primitives.philox`, whose products take 64 bits without sign: here in two parts."""
    low = 0xFFFFFFFF
    c = [c0.data, c1.data, c2.data, torch.zeros_like(c0.data)]
    k = [int(seed) & low, int(seed) >> 32 & low]

    def product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
        first, second = x * (factor & 0xFFFF), x * (factor >> 16)
        middle = (first >> 16) + second
        return middle >> 16, (middle & 0xFFFF) << 16 | first & 0xFFFF

    for _ in range(PHILOX_ROUNDS):
        (x_high, x_low), (y_high, y_low) = product(c[0], 0xD2511F53), product(c[2], 0xCD9E8D57)
        c = [y_high ^ c[1] ^ k[0], y_low, x_high ^ c[3] ^ k[1], x_low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return tuple(Block(x) for x in c)


def constexpr(value: Any) -> Any:
    """A number that has its value as attribute too; nothing else is asked for it."""
    return type("Number", (int,), {"value": property(int)})(value) if type(value) is int else value


def constexpr_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        result = fn(*args)
        return types.SimpleNamespace(value=result) if dataclasses.is_dataclass(result) else result

    return call


def jit(fn: Any = None, **options: Any) -> Any:
    return (lambda fn: fn) if fn is None else fn


def static_assert(condition: Any) -> None:
    assert condition


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(f"{GLUON}{name}")
    vars(module).update(contents)
    return module


def _stand_ins() -> dict[str, types.ModuleType]:
    layouts = "Blocked DotOperand DistributedLinear NVMMADistributed NVMMAShared Slice SwizzledShared"
    language = _module(
        ".language",
        **DTYPES,
        **{f"{name}Layout": LAYOUT for name in layouts.split()},
        allocate_shared_memory=machine.allocate,
        arange=arange,
        atomic_add=machine.atomic_add,
        cdiv=cdiv,
        constexpr=constexpr,
        convert_layout=lambda x, layout: x,
        expand_dims=lambda x, axis: Block(x.data.unsqueeze(axis)),
        full=full,
        full_like=full_like,
        inline_asm_elementwise=inline_asm,
        join=lambda a, b: Block(torch.stack([a.data, b.data], -1)),
        load=load,
        log=lambda x: Block(x.data.log()),
        max=_reduction(torch.amax),
        maximum=_extreme(max, torch.maximum),
        min=_reduction(torch.amin),
        minimum=_extreme(min, torch.minimum),
        num_programs=num_programs,
        program_id=program_id,
        reshape=lambda x, shape: x.reshape(shape),
        split=lambda x: tuple(Block(part) for part in x.data.unbind(-1)),
        static_assert=static_assert,
        static_range=range,
        store=store,
        sum=_reduction(torch.sum),
        thread_barrier=lambda: None,
        to_tensor=lambda x: x if isinstance(x, (Scalar, Block)) else Scalar(x),
        warp_specialize=machine.warp_specialize,
        where=where,
        zeros=zeros,
        zeros_like=zeros_like,
    )
    barriers = ("init", "expect", "arrive", "wait")
    hopper = _module(
        ".language.nvidia.hopper",
        fence_async_shared=lambda: None,
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=LAYOUT, **{name: getattr(machine, name) for name in barriers}
        ),
        tma=types.SimpleNamespace(
            async_load=machine.copy_in, async_store=machine.copy_out, store_wait=machine.store_wait
        ),
        warpgroup_mma=machine.warpgroup_mma,
        warpgroup_mma_wait=machine.warpgroup_mma_wait,
    )
    gluon = _module("", jit=jit, constexpr_function=constexpr_function, language=language)
    core, nvidia = _module(".language._core", builtin=jit), _module(".language.nvidia")
    return {module.__name__: module for module in (gluon, language, core, nvidia, hopper)}


def install() -> None:
    """Imports the kernels with the stand-in for Gluon; nobody may have imported them before."""
    names = [f"streamattn.kernels.hopper_{name}" for name in KERNELS]
    assert not any(name in sys.modules for name in names)
    stand_ins = _stand_ins()
    real = {name: importlib.import_module(name) for name in stand_ins}
    package: Any = triton.experimental
    sys.modules.update(stand_ins)
    package.gluon = stand_ins[GLUON]
    modules = [importlib.import_module(name) for name in names]
    sys.modules.update(real)  # which Triton looks at
    package.gluon = real[GLUON]
    ours = {"add_out": machine.add_out, "philox": philox, "TensorDescriptor": Descriptor}
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in ours:
                setattr(module, name, ours[name])
            elif isinstance(value, tl.constexpr):
                setattr(module, name, value.value)
            elif isinstance(value, InterpretedFunction) and not name.endswith("_kernel"):
                setattr(module, name, value.fn)


def run(
    kernel: Callable[..., None], programs: int, arguments: dict[str, Any], seed: int = 0, together: int = 1
) -> None:
    """Runs a kernel of Gluon.

    Args:
        kernel: the function.
        programs: how many; they start in the order of their numbers.
        arguments: of all its parameters by name; launch options are ignored.
        seed: of the order in which copies happen.
        together: how many run at a time, each after a delay of its own if more than one.

    Raises:
        machine.Deadlock: a program waits for what never comes.
        AssertionError: a barrier or an access is wrong.
    """
    taken: dict[str, Any] = {}
    for name in inspect.signature(kernel).parameters:
        value = arguments[name]
        if isinstance(value, Tensor):
            value = Pointer.to_start(value)
        elif type(value) in (int, float) and not name.isupper():
            value = Scalar(value)
        taken[name] = value
    machine.additions.clear()
    machine.late.clear()
    failures: list[BaseException] = []

    @torch.no_grad()  # each thread has a setting of its own
    def run_one(number: int) -> None:
        if failures:
            return
        program = machine.Program(number, programs, seed + number)
        if together > 1:
            time.sleep(program.draw.random() * 0.02)
        engine = threading.Thread(target=program.copy_on, daemon=True)
        engine.start()
        machine.enter(program, kernel.__name__, 128)
        try:
            kernel(**taken)
        except BaseException as error:
            failures.append(error)
        finally:
            program.finish()
            engine.join()
        program.check()

    with ThreadPoolExecutor(together) as multiprocessors:
        results = [multiprocessors.submit(run_one, number) for number in range(programs)]
    if failures:
        raise failures[0]
    for result in results:
        result.result()
    random.Random(seed).shuffle(machine.late)
    for add in machine.late:
        add()
