"""What a program of the emulator holds: numbers, blocks, pointers, descriptors and shared memory.

Whole numbers are held in 64 bits with sign; those of 32 bits without sign are cut to that when they are made.
Division rounds towards zero, as the hardware's does. Layouts mean nothing.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Anything:
    """A layout, and whatever is asked of one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Anything:
        return self

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


LAYOUT = Anything()


@dataclass(frozen=True)
class Dtype:
    """A type of the language."""

    name: str
    torch: torch.dtype
    mask: int = 0  # of the bits that such a number has

    @property
    def value(self) -> Dtype:
        return self


DTYPES = {
    "float16": Dtype("float16", torch.float16),
    "bfloat16": Dtype("bfloat16", torch.bfloat16),
    "float32": Dtype("float32", torch.float32),
    "int32": Dtype("int32", torch.int64),
    "int64": Dtype("int64", torch.int64),
    "uint32": Dtype("uint32", torch.int64, 0xFFFFFFFF),
    "uint64": Dtype("uint64", torch.int64),
}


def dtype_of(x: Tensor) -> Dtype:
    return DTYPES.get(str(x.dtype).removeprefix("torch."), DTYPES["int64"])


def quotient(a: Any, b: Any) -> Any:
    """Rounded towards zero."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a >= 0) == (b >= 0) else -1)


def remainder(a: Any, b: Any) -> Any:
    return a - quotient(a, b) * b


class Value:
    """A number or a block; operators work on either and give either."""

    data: Any
    __hash__ = None  # type: ignore[assignment]


def bare(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def wrap(x: Any) -> Any:
    return Block(x) if isinstance(x, Tensor) else Scalar(x)


def _both_ways(name: str, way: Callable[[Any, Any], Any]) -> None:
    setattr(Value, f"__{name}__", lambda self, other: wrap(way(self.data, bare(other))))
    setattr(Value, f"__r{name}__", lambda self, other: wrap(way(bare(other), self.data)))


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "lshift", "rshift"):
    _both_ways(_name, getattr(operator, f"__{_name}__"))
_both_ways("floordiv", quotient)
_both_ways("mod", remainder)


def _comparison(name: str) -> None:
    way = getattr(operator, name)
    setattr(Value, f"__{name}__", lambda self, other: wrap(way(self.data, bare(other))))


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name)


class Scalar(Value):
    """A number that a program computed, or one of its arguments."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __float__(self) -> float:
        return float(self.data)

    def __neg__(self) -> Scalar:
        return Scalar(-self.data)

    def to(self, dtype: Dtype) -> Scalar:
        if dtype.torch.is_floating_point:
            return Scalar(float(self.data))
        return Scalar(int(self.data) & dtype.mask if dtype.mask else int(self.data))


class Block(Value):
    """A tensor that the threads of a warpgroup hold."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Dtype:
        return dtype_of(self.data)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=LAYOUT)

    def __neg__(self) -> Block:
        return Block(-self.data)

    def __invert__(self) -> Block:
        return Block(~self.data)

    def __getitem__(self, index: Any) -> Block:
        return Block(self.data[index])

    def to(self, dtype: Dtype) -> Block:
        x = self.data.to(dtype.torch)
        return Block(x & dtype.mask if dtype.mask else x)

    def reshape(self, shape: list[int]) -> Block:
        return Block(self.data.reshape([int(size) for size in shape]))

    def permute(self, order: Any) -> Block:
        return Block(self.data.permute([int(dim) for dim in order]))


class Pointer:
    """An address in a tensor's memory, or a block of them."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    @classmethod
    def to_start(cls, x: Tensor) -> Pointer:
        count = x.untyped_storage().nbytes() // x.element_size()
        return cls(x.as_strided((count,), (1,), 0), x.storage_offset())

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + bare(offset))

    def to(self, dtype: Dtype) -> Pointer:
        return self

    def places(self, mask: Any = None) -> Tensor:
        """Which elements; an access outside of the memory is an error."""
        at = torch.as_tensor(self.offset)
        if mask is not None:
            at = at[mask]
        assert ((at >= 0) & (at < self.memory.numel())).all(), "an access outside of a tensor"
        return at


class Descriptor:
    """What a tensor map holds."""

    def __init__(self, base: Tensor, shape: Any, strides: Any, block_shape: Any, layout: Any) -> None:
        self.base, self.shape, self.block_shape, self.layout = base, shape, block_shape, layout

    @property
    def dtype(self) -> Dtype:
        return dtype_of(self.base)

    def common(self, coord: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """The part of a block that lies in the tensor: where there, and where in the block."""
        there, here = [], []
        for first, size, length in zip(coord, self.block_shape, self.shape, strict=True):
            low = max(first, 0)
            high = max(min(first + size, length), low)
            there.append(slice(low, high))
            here.append(slice(low - first, high - first))
        return tuple(there), tuple(here)


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor, dtype: Dtype) -> None:
        self.data, self.dtype, self.layout = data, dtype, LAYOUT

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.data.shape[0], "no such buffer"
        return Shared(self.data[int(i)], self.dtype)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), int(length)), self.dtype)

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.permute([int(dim) for dim in order]), self.dtype)

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view([int(size) for size in shape]), self.dtype)

    def load(self, layout: Any = None) -> Block:
        return Block(self.data.clone())

    def store(self, x: Block) -> None:
        assert x.shape == self.shape, f"{x.shape} into {self.shape}"
        self.data.copy_(x.data)
