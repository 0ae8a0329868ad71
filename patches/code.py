"""What the code of HuggingFace's modules says of the masks that they are given or make.

Contract. Told from the functions' bytecode and source, for nothing else says it: which of transformers'
functions they call, and whether they do more with a mask than to hand it on. Only classes are looked at.
Where that can't be told, for there is no source, a mask is taken to be worked on.

Left out on purpose: following a mask through objects that hold it.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from patches.registry import INTERFACE, REPLACEMENTS, path_of

_MASK_NAMES = ("attention_mask", "mask")
"""What layers call the mask that they are given."""

_GIVEN = frozenset({"attention_mask", "causal_mask", "encoder_attention_mask", "padding_mask"})
"""What modules call it that aren't attention layers: their `mask` is over tokens or pixels."""

_OF_MAPPINGS = frozenset({"get", "items", "keys", "values"})
"""Methods of masks by the type of layer."""

_WORK = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign)
"""What computes with a mask that stands in it."""

_MASK_MAKERS = frozenset(
    {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
)


def code_of(cls: type) -> CodeType | None:
    """The code of a class's `forward`, past decorators; None if it isn't Python's."""
    return getattr(inspect.unwrap(cls.forward), "__code__", None)


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


@torch.compiler.assume_constant_result
def passes(cls: type[nn.Module], keyword: str) -> bool:
    """Whether a module's `forward` calls something with an argument of that name, whatever its value."""
    code = code_of(cls)
    return code is not None and keyword in words(code)


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
    return any(works_on_mask_of(config_class, cls) for cls in found if issubclass(cls, nn.Module))


@cache
def works_on_mask_of(config_class: type[PretrainedConfig], cls: type[nn.Module]) -> bool:
    """Whether a module does more with masks made for a configuration than to hand them on.

    Args:
        config_class: the class of the configuration.
        cls: the module's class. Those whose configuration is another get other masks.
    """
    own = inspect.get_annotations(cls.__init__).get("config")
    if not isinstance(own, type) or not issubclass(own, PretrainedConfig):
        own = config_class
    if not issubclass(config_class, own) and not issubclass(own, config_class):
        return False
    return _works_on_its_mask(cls)


def may_hold_masks(module: nn.Module) -> bool:
    """Whether the masks inside a module may be of transformers' functions: what wraps models gets users'."""
    return isinstance(module, PreTrainedModel) or _asks_for_masks(code_of(type(module)))


@cache
def _works_on_its_mask(cls: type[nn.Module]) -> bool:
    """Whether a module does more with a mask, which it is given or has transformers make, than to hand it on.

    Args:
        cls: the module's class; of layers that there is a patch for by class, and torch's own, never.
    """
    if path_of(cls) in REPLACEMENTS or cls.__module__.split(".")[0] == "torch":
        return False
    code = code_of(cls)
    if code is not None and INTERFACE in code.co_names:
        return not hands_mask_on(cls)
    if issubclass(cls, PreTrainedModel):  # whose other methods are about masks of users
        return _works_on_a_mask(inspect.unwrap(cls.forward), frozenset())
    own = {name for base in cls.__mro__ if base.__module__.split(".")[0] != "torch" for name in vars(base)}
    methods = [each for name in own if isinstance(each := getattr(cls, name, None), FunctionType)]
    given = _GIVEN | {"mask"} if cls.__name__.endswith("Attention") else _GIVEN
    return any(_works_on_a_mask(inspect.unwrap(method), given) for method in methods)


@cache
def _works_on_a_mask(function: Any, given: frozenset[str]) -> bool:
    """Whether a function computes with a mask: one that it has transformers make, or else was given.

    Args:
        function: of Python, without decorators; of others nothing is known.
        given: what masks are called among the arguments of one that makes none itself.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    makes = _asks_for_masks(code)
    arguments = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) & given
    if not makes and not arguments:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return True
    uses = _Uses(function, set() if makes else arguments)
    return uses.work(tree) and not uses.over_tokens


def _asks_for_masks(code: CodeType | None) -> bool:
    return code is not None and any(map(_makes_masks, names(code)))


def _makes_masks(name: str) -> bool:
    return name.startswith("create_") and name.endswith("_mask")


def _is_maker(node: ast.AST) -> bool:
    """Whether a node is the call of one of transformers' functions that make masks."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and _makes_masks(node.func.id)


class _Uses:
    """What a function does with its masks, line by line: a name is a mask from where it is given one."""

    def __init__(self, function: Any, masks: set[str]) -> None:
        self.function, self.masks = function, masks
        self.over_tokens = False  # whether it takes masks of [B, T], so that none of [B, 1, Tq, Tk] comes

    def work(self, tree: ast.AST) -> bool:
        """Whether the function computes with a mask, by all of its lines."""
        self.over_tokens |= self._looks_at_tokens(tree)
        if isinstance(tree, ast.If):
            test = self.work(tree.test)
            before, after, computes = set(self.masks), set(), []
            for branch in (tree.body, tree.orelse):
                self.masks = set(before)
                computes += map(self.work, branch)
                after |= self.masks
            self.masks = after
            return test or any(computes)
        if isinstance(tree, (ast.Assign, ast.AnnAssign)) and tree.value is not None:
            targets = tree.targets if isinstance(tree, ast.Assign) else [tree.target]
            computes = any([*map(self.work, targets), self.work(tree.value)])
            parts = [part for target in targets for part in ast.walk(target)]
            named = {
                part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
            self.masks = self.masks - named | {name for name in named if self._holds(name, tree.value)}
            return computes
        return any([self._computes(tree), *map(self.work, ast.iter_child_nodes(tree))])

    def _looks_at_tokens(self, node: ast.AST) -> bool:
        """Whether it takes a mask for one over tokens: it adds a dimension to two, or counts the tokens."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            places = node.slice.elts
            new = sum(isinstance(place, ast.Constant) and place.value is None for place in places)
            return self._is_mask(node.value) and new > 0 and len(places) - new <= 2
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = (part for each in (node.func.value, *node.args) for part in ast.walk(each))
            return node.func.attr in ("cumsum", "sum", "unsqueeze") and any(map(self._is_mask, parts))
        return False

    def _holds(self, name: str, value: ast.AST) -> bool:
        """Whether what is assigned to a name is a mask, or holds some, by the name where it can't be told."""
        if self._is_mask(value):
            return True
        parts = ast.walk(value) if "mask" in name else ()
        return any(_is_maker(part) or self._is_mask(part) for part in parts)

    def _is_mask(self, node: ast.AST | None) -> bool:
        if isinstance(node, ast.Subscript):  # of masks by the type of layer
            return self._is_mask(node.value)
        return isinstance(node, ast.Name) and node.id in self.masks

    def _computes(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            return False
        if isinstance(node, _WORK):
            return any(map(self._is_mask, ast.iter_child_nodes(node)))
        if isinstance(node, ast.Subscript):
            return self._is_mask(node.value) and isinstance(node.slice, (ast.Slice, ast.Tuple))
        if isinstance(node, ast.Attribute):
            return self._is_mask(node.value) and node.attr not in _OF_MAPPINGS
        return isinstance(node, ast.Call) and self._call_computes(node)

    def _call_computes(self, call: ast.Call) -> bool:
        """Whether a call with a mask is one of torch's, or of a function beside that computes with it."""
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        listed = [each.elts if isinstance(each, (ast.List, ast.Tuple)) else [each] for each in given]
        if not any(self._is_mask(part) for parts in listed for part in parts):
            return False
        root = called = call.func
        if isinstance(called, ast.Name):
            beside = self.function.__globals__.get(called.id)
            if _is_maker(call) or not callable(beside) or inspect.unwrap(beside) is self.function:
                return False
            return _works_on_a_mask(inspect.unwrap(beside), _GIVEN | {"mask"})
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in ("torch", "nn", "F"):
            return True
        of_self = isinstance(root, ast.Name) and root.id == "self"
        return isinstance(called, ast.Attribute) and not of_self and hasattr(torch.Tensor, called.attr)
