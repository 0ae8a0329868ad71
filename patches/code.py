"""What the code of HuggingFace's modules says of the masks that they are given or make.

Contract. Told from the functions' bytecode, for nothing else says it: which of transformers' functions they
call, and whether they do more with a mask than to hand it on. Only classes are looked at.

Left out on purpose: following a mask through a module's other methods.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from patches.registry import INTERFACE, REPLACEMENTS, path_of

_MASK_NAMES = ("attention_mask", "mask")
"""What layers call the mask that they are given."""


_MASK_MAKERS = frozenset(
    {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
)


def code_of(cls: type, method: str = "forward") -> CodeType | None:
    """The code of a class's method, past decorators; None if it isn't Python's."""
    return getattr(inspect.unwrap(getattr(cls, method)), "__code__", None)


def names(code: CodeType) -> Iterator[str]:
    """The names of globals and attributes in a function and in those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names(constant)


def words(code: CodeType) -> Iterator[str]:
    """The strings in a function, keywords of calls included."""
    for constant in code.co_consts:
        yield from (
            word
            for word in (constant if isinstance(constant, tuple) else (constant,))
            if isinstance(word, str)
        )


def calls_with(code: CodeType, keyword: str) -> int:
    """How many kinds of calls in a function, by all their keywords, pass one by that name."""
    return sum(keyword in constant for constant in code.co_consts if isinstance(constant, tuple))


def uses(code: CodeType) -> list[str]:
    """The local variables that a function reads, as often as it does."""
    loads = [use.argval for use in dis.get_instructions(code) if use.opname.startswith("LOAD_FAST")]
    return [name for load in loads for name in (load if isinstance(load, tuple) else (load,))]


def mask_makers(cls: type[nn.Module]) -> set[str]:
    """The functions of transformers for causal masks that a module's `forward` calls."""
    code = code_of(cls)
    return set() if code is None else {name for name in names(code) if name in _MASK_MAKERS}


def hands_mask_on(cls: type[nn.Module]) -> bool:
    """Whether a layer hands its mask to the attention function without looking at it or making another."""
    code = code_of(cls)
    if code is None:
        return False
    arguments = code.co_argcount + code.co_kwonlyargcount
    if any("mask" in name for name in code.co_varnames[arguments:]):
        return False
    return max(map(uses(code).count, _MASK_NAMES)) <= 1


def makes_masks_for_torch(cls: type[nn.Module]) -> bool:
    """Whether a module makes a mask and works on it, for a layer of torch's own, which can't read ours."""
    code, init = code_of(cls), code_of(cls, "__init__")
    if code is None or init is None or "MultiheadAttention" not in init.co_names:
        return False
    return any(name.startswith("create_") and name.endswith("_mask") for name in names(code))


@torch.compiler.assume_constant_result
def works_on_masks(config_class: type[PretrainedConfig]) -> bool:
    """Whether some module written for a configuration does more with a mask than to hand it on.

    Args:
        config_class: the class of a configuration, whose models' classes lie beside it.
    """
    return _works_on_masks(config_class)


@cache
def _works_on_masks(config_class: type[PretrainedConfig]) -> bool:
    homes = {cls.__module__ for cls in config_class.__mro__ if issubclass(cls, PretrainedConfig)}
    homes.discard(PretrainedConfig.__module__)
    found: list[Any] = []
    for name, module in list(sys.modules.items()):
        package, _, last = name.rpartition(".")
        beside = last.startswith("modeling_") and any(home.rpartition(".")[0] == package for home in homes)
        if name in homes or beside:
            found += [each for each in vars(module).values() if isinstance(each, type)]
    return any(
        makes_masks_for_torch(cls) or (_is_attention(cls) and not hands_mask_on(cls))
        for cls in found
        if issubclass(cls, nn.Module)
    )


def _is_attention(cls: type[nn.Module]) -> bool:
    """Whether a class is of attention layers on transformers' interface, of those in no table of ours."""
    code = code_of(cls)
    return code is not None and INTERFACE in code.co_names and path_of(cls) not in REPLACEMENTS
