"""Most of these tests need Triton's interpreter, and it must be chosen before Triton is imported.

`TRITON_INTERPRET=1 pytest tests/kernels` runs them. Without the variable they are not collected here;
`tests/test_kernels.py` runs them in a process of their own. What needs the compiler is collected without it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

INTERPRETED = [
    "test_forward.py",
    "test_backward.py",
    "test_hopper_emulated.py",
    "test_decode.py",
    "test_decode_launch.py",
    "test_hopper_repeat.py",
    "test_launch.py",
    "test_launch_arguments.py",
    "test_mask_gradient.py",
    "test_packed_gradients.py",
    "test_primitives.py",
    "test_properties.py",
    "test_qk_prologue.py",
    "test_segments.py",
    "test_wide.py",
]
COMPILED = [
    "test_tiles_compiled.py",
    "test_wide_compiled.py",
    "test_qk_prologue_compiled.py",
    "test_hopper_launch.py",
    "test_hopper_forward.py",
    "test_hopper_backward.py",
]

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = COMPILED if INTERPRETING else INTERPRETED


def remap_once_a_launch() -> None:
    """Makes the interpreter more than twice as fast.

    A launch remaps the functions of Triton's language to those of the interpreter and back at its end. Each
    call of a jitted function in a kernel would do so again, which changes nothing and takes most of the time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    remap, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    remapped: set[str] = set()

    @functools.cache
    def languages(fn: Callable[..., Any]) -> frozenset[str]:
        return frozenset(x.__name__ for x in fn.__globals__.values() if x is tl or x is tl.core)

    def remap_once(fn: Callable[..., Any]) -> Any:
        if languages(fn) <= remapped:
            return None  # as good as a call's: only the launch puts back what it has changed
        remapped.update(languages(fn))
        return remap(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        remapped.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = remap_once, launch_anew


def spare_what_nobody_reads() -> None:
    """Takes a third of the rest off.

    The interpreter computes for each sum and product of integers whether it overflows, and asserts it only in
    debugging, which it never does. And it makes a table of all types whenever it looks one up.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    look_up = interpreter._get_np_dtype
    remembered = functools.cache(look_up)

    def np_dtype(kind: tl.dtype) -> Any:
        return look_up(kind) if kind.scalar.is_ptr() else remembered(kind.scalar)

    interpreter._get_np_dtype = np_dtype


def make_shapes_once() -> None:
    """Takes a third off what is left: each operation makes a shape anew, of numbers that know their types."""
    import triton.language

    tl: Any = triton.language
    make_type = tl.block_type.__init__

    @functools.cache
    def shape_of_type(*sizes: int) -> tuple[Any, int]:
        made = tl.block_type.__new__(tl.block_type)
        make_type(made, tl.int32, list(sizes))  # raises where there is no such block
        return made.shape, made.numel

    @functools.cache
    def shape_of_tensor(*sizes: int) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = shape_of_type(*(getattr(size, "value", size) for size in shape))
        self.name = f"<{self.shape}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_of_tensor(*(kind.shape if kind.is_block() else ()))

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


if INTERPRETING:
    remap_once_a_launch()
    spare_what_nobody_reads()
    make_shapes_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file that is named on the command line is collected all the same."""
    for item in items:
        if item.path.parent.name == "kernels" and item.path.name in collect_ignore:
            way = "without" if INTERPRETING else "with"
            item.add_marker(pytest.mark.skip(reason=f"run it {way} TRITON_INTERPRET=1"))


@pytest.fixture
def use_tile(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes all kernels of the test use tiles of so many queries and keys."""
    from streamattn.kernels import tiles

    def use(block_m: int, block_n: int) -> None:
        monkeypatch.setattr(tiles, "_INTERPRETED", tiles.Tile(block_m, block_n, 4, 1))

    return use


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every product of two tiles in the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    made: list[int] = []
    original = InterpreterBuilder.create_dot

    def counting(self: InterpreterBuilder, *args: Any) -> Any:
        made.append(1)
        return original(self, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting)
    return made


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that a kernel allocates and does not write holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
