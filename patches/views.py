"""Live views of HuggingFace configurations, under the name of this implementation of attention.

Contract. Layers of a model share its configuration, often with other models, and look the implementation's
name up in it. A view answers with another name and shares all else, so that a single layer can be patched and
the configuration itself stays as it is, but for what is set through a view. It passes for what it stands for:
in `isinstance`, comparison, mappings by class, copies and pickles.

Layout. A view has the very `__dict__` of what it stands for, and its own fields in slots.

Left out on purpose: which modules get views; `patches.interface` hands them out.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, ClassVar

import torch

from patches.registry import NAME


class LayerConfig:
    """A patched layer's configuration: a live view of the one it had, under the name of this implementation.

    A view has the attributes of what it stands for, is of a class made from that one's class, and is equal to
    it; what is set on either is set on both. Calling its class makes an ordinary configuration.
    """

    __slots__ = ("shared",)

    ordinary: ClassVar[Any]  # the class of configurations that views of this class stand for
    shared: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an ordinary configuration."""
        return cls.ordinary(*args, **kwargs)

    @property
    def _attn_implementation_internal(self) -> str | None:
        return NAME

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: str | None) -> None:
        if value != NAME:  # which a model made of a view writes back to it
            self.shared._attn_implementation_internal = value

    @property
    def output_attentions(self) -> bool | None:
        """Whether the model returns attention weights, whatever it is called with."""
        return self.shared.output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self.shared.output_attentions = value

    def validate(self) -> None:
        """Check the values, as releases of transformers do that check configurations."""
        self.shared.validate()

    def __copy__(self) -> Any:
        return copy.copy(self.shared)  # which has attributes of its own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if torch.compiler.is_compiling():  # a model that copies its configuration, without the modules
            return copy.deepcopy(plain(self), memo)
        make, (kind, shared), *state = self.__reduce__()
        memo[id(self)] = made = make(kind, copy.deepcopy(shared, memo))
        for each in state:
            made.__setstate__(copy.deepcopy(each, memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return view, (LayerConfig, self.shared)


class ModelConfig(LayerConfig):
    """A configuration of a model whose layers are patched, as all its modules see it that need no other name.

    It has the name of this implementation if all layers under it understand compact masks, until the user
    gives another. Weights can be asked for through it: what isn't patched then runs on "eager", the only
    other implementation that gives them.
    """

    __slots__ = ("named", "views")

    named: bool
    views: list[Any]  # of the model's configurations

    @property
    def _attn_implementation_internal(self) -> str | None:
        return NAME if self.named else self.shared._attn_implementation_internal

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, value: str | None) -> None:
        if self.named and value == NAME:  # as a model made of a view writes what it read
            return
        self.rename(value == NAME)
        self.shared._attn_implementation_internal = value

    @LayerConfig.output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        """Set it, also where transformers refuses to for another implementation than "eager"."""
        if value and self.named:
            self.shared._attn_implementation_internal = "eager"
        self.shared.output_attentions = value

    def rename(self, named: bool) -> None:
        """Give this implementation's name, or take it back."""
        object.__setattr__(self, "named", named)

    def part(self, name: str) -> Any:
        """A configuration inside this one, as the model's modules see it."""
        return self._seen(getattr(self.shared, name))

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """The configuration of the text model, as transformers tells it, which may be this one or a copy."""
        return self._seen(self.shared.get_text_config(*args, **kwargs))

    def _seen(self, config: Any) -> Any:
        return next((other for other in self.views if other.shared is config), config)

    def __reduce__(self) -> tuple[Any, ...]:
        return view, (ModelConfig, self.shared), (self.named, self.views)

    def __setstate__(self, state: tuple[bool, list[Any]]) -> None:
        for name, value in zip(("named", "views"), state, strict=True):
            object.__setattr__(self, name, value)


def view(kind: type[LayerConfig], shared: Any) -> Any:
    """A view of a configuration.

    Args:
        kind: `LayerConfig`, or `ModelConfig`, which then wants its state set.
        shared: a configuration, or a view of one.
    """
    made = object.__new__(_class_of_views(kind, type(plain(shared))))
    object.__setattr__(made, "__dict__", shared.__dict__)
    object.__setattr__(made, "shared", shared)
    return made


class _ViewClass(type):
    """A class of views, equal to the class of what they stand for: some mappings of transformers go by it."""

    ordinary: Any

    def __eq__(cls, other: Any) -> bool:
        return cls.ordinary is (other.ordinary if isinstance(other, _ViewClass) else other)

    def __hash__(cls) -> int:
        return hash(cls.ordinary)


@cache
def _class_of_views(kind: type[LayerConfig], cls: Any) -> Any:
    body: dict[str, Any] = {"__slots__": (), "__module__": __name__, "__qualname__": kind.__name__}
    # here, where transformers would put its own
    body |= {"ordinary": cls, "__eq__": _equal, "__hash__": None}
    if kind is ModelConfig:
        body |= {name: _part(name) for name in getattr(cls, "sub_configs", ())}
    else:  # what a layer asks at every call, before what configurations do in Python for each attribute
        body["__getattribute__"] = _answers(cls)
    return _ViewClass(cls.__name__, (kind, cls), body)  # other mappings go by the name


def _answers(cls: Any) -> Any:
    def answer(config: Any, name: str) -> Any:
        return NAME if name == "_attn_implementation" else cls.__getattribute__(config, name)

    return answer


def _part(name: str) -> property:
    def get(config: Any) -> Any:
        return config.part(name)

    def set_(config: Any, value: Any) -> None:
        setattr(config.shared, name, value)

    return property(get, set_)


def plain(config: Any) -> Any:
    """The configuration that a view stands for; anything else as it is.

    Args:
        config: any object; views of views are followed.
    """
    while isinstance(config, LayerConfig):
        config = config.shared
    return config


def _equal(one: Any, other: Any) -> bool:
    return plain(one) == plain(other)
