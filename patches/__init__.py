"""One line rewires a model: `patch_model` puts the attention layers it knows on `streamattn.attention`.

Contract. A layer changes sides by its ``__class__`` alone: it becomes an instance of an importable subclass
(`registry.REPLACEMENTS`) with the same parameters, buffers, hooks and settings. So state-dict keys,
saving and loading, deepcopy, pickling, adapters and parallel wrappers are untouched, other models and the
classes themselves too, and `set_attn_implementation` has nothing to undo. The module that makes the layers'
masks may get a forward pre-hook, and what would pass patched layers by is told to call them. A report is
read off the model, not remembered. A layer that torch gave a class of its own, sharded by `fully_shard` or
parametrized, before the patch or after it, changes sides in that class.

Layers of other classes that use transformers' attention interface change sides by their configuration, with
the same promises; models of layers of either kind are led to make compact masks (`patches.interface`).
Importing this package registers ``attn_implementation="streamattn"`` where transformers is installed.

Left out on purpose: patching classes before a model is built, and patching at import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from patches.registry import (
    REPLACEMENTS,
    foreign_subclass,
    is_patched,
    listed_class,
    made_of,
    path_of,
    replacement_for,
    replacement_of,
    uses_interface,
)

# Registers attn_implementation="streamattn".
_interface: Any = import_module("patches.interface") if find_spec("transformers") is not None else None

__all__ = ["PatchReport", "patch_model", "patch_report", "unpatch_model"]

Model = TypeVar("Model", bound=nn.Module)

# Where a bound forward can outlive a change of class; accelerate's hooks keep it under the second name.
_BOUND_FORWARDS = ("forward", "_old_forward")
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")  # of the weights, in whatever layer


@dataclass(frozen=True)
class PatchReport:
    """Which attention layers of a model run on StreamAttn.

    Attributes:
        patched: Name of the layer, as in `model.named_modules()` -> its class, without what wraps it; behind
            it "attention=streamattn", as in `print(model)`, where the class itself is not the patch's.
        skipped: Name of the layer -> the reason why it is not patched.
    """

    patched: dict[str, str]
    skipped: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.patched)} attention layers patched, {len(self.skipped)} not"]
        lines += [f"  {_shown(name)}: {cls}" for name, cls in self.patched.items()]
        lines += [f"  {_shown(name)}: not patched, {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def patch_model(
    model: Model, *, strict: bool = True, filter_fn: Callable[[nn.Module, str], bool] | None = None
) -> Model:
    """Put a model's attention layers on `streamattn.attention`, in place.

    Idempotent; undone by `unpatch_model`. Looks through wrappers (adapters, DDP, FSDP, torch.compile), which
    may come before it or after it, and so may FSDP2's `fully_shard` and parametrizations of a layer.

    Args:
        model: any module that contains attention layers.
        strict: True (default): if one selected layer can't be served, raise and leave the model unchanged.
            False: leave such layers alone; `patch_report` says why.
        filter_fn: ``filter_fn(module, name) -> bool`` selects the layers, named as in
            `model.named_modules()`; default all.

    Returns:
        The same object.

    Raises:
        TypeError: `model` is not a module, or `filter_fn` no function.
        ValueError: nothing to patch was found, or, when strict, a selected layer can't be served.
    """
    _check_module("patch_model", model)
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"filter_fn must be a function (module, name) -> bool, got {filter_fn!r}; None selects all layers"
        )
    swaps: list[nn.Module] = []
    adopted: list[nn.Module] = []
    refused: dict[str, str] = {}
    matched = False
    for name, layer in _attention_layers(model):
        if filter_fn is not None and not filter_fn(layer, name):
            continue
        if is_patched(layer):
            matched = True
        elif (reason := _unsupported(layer)) is not None:
            refused[name] = reason
        else:
            matched = True
            if uses_interface(layer):
                adopted.append(layer)
            else:
                swaps.append(layer)
    if refused and (strict or not matched):
        listing = "".join(f"\n  {_shown(name)}: {reason}" for name, reason in refused.items())
        raise ValueError(
            f"these attention layers of {type(model).__name__} can't be patched:{listing}\n"
            "leave them out with filter_fn, or pass strict=False to patch the others if there are any"
        )
    if not matched:
        raise ValueError(
            f"no attention layer to patch in {type(model).__name__}"
            + ("" if filter_fn is None else " among those that filter_fn selects")
            + f"; known are {', '.join(path.split(':')[1] for path in REPLACEMENTS)} and the layers that use "
            "transformers' attention interface"
        )
    made: dict[type, type] = {}
    for layer in swaps:
        original: Any = listed_class(layer)
        _change_class(layer, original, replacement_for(original), made)
    for hook, owner in _hook_owners(model):
        if hook not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(hook, with_kwargs=True)
    for replacement in _replacements_in(model):
        if hasattr(replacement, "attach"):
            replacement.attach(model)
    if _interface is not None:
        _interface.adopt(model, adopted, [layer for _, layer in _attention_layers(model)])
    return model


def unpatch_model(model: Model) -> Model:
    """Give every patched attention layer its original class or configuration back, in place.

    What was done to a layer since stays: hooks, parametrizations, sharding by `fully_shard`.

    Args:
        model: a module, patched or not.

    Returns:
        The same object.

    Raises:
        TypeError: `model` is not a module.
        ValueError: a patched layer has been given a class that is neither the patch's nor torch's; the model
            is left unchanged.
    """
    _check_module("unpatch_model", model)
    stuck = {
        name: cls
        for name, layer in _attention_layers(model)
        if (replacement := replacement_of(layer)) and (cls := foreign_subclass(type(layer), replacement))
    }
    if stuck:
        listing = "".join(f"\n  {_shown(name)}: {path_of(cls)}" for name, cls in stuck.items())
        raise ValueError(
            f"these patched layers of {type(model).__name__} have been given another class since, which may "
            f"do more than the patch's:{listing}\n"
            "give each layer back the class that it had before, and then unpatch the model"
        )
    for replacement in _replacements_in(model):
        if hasattr(replacement, "detach"):
            replacement.detach(model)
    for hook, owner in list(_hook_owners(model)):
        for key in [key for key, other in owner._forward_pre_hooks.items() if other is hook]:
            del owner._forward_pre_hooks[key], owner._forward_pre_hooks_with_kwargs[key]
    layers = [layer for _, layer in _attention_layers(model) if replacement_of(layer)]
    if _interface is not None:
        _interface.release(model)
    made: dict[type, type] = {}
    for layer in layers:
        _change_class(layer, replacement_of(layer), listed_class(layer), made)
    return model


def patch_report(model: nn.Module) -> PatchReport:
    """Which attention layers of a model are patched, and why the others are not.

    Args:
        model: a module, patched or not.

    Returns:
        The report; printed, it lists every attention layer.

    Raises:
        TypeError: `model` is not a module.
    """
    _check_module("patch_report", model)
    patched, skipped = {}, {}
    for name, layer in _attention_layers(model):
        if is_patched(layer):
            replacement = replacement_of(layer)
            patched[name] = replacement.__name__ if replacement else _interface.reported(layer)
        else:
            skipped[name] = _unsupported(layer) or "patch_model was not called for it"
    return PatchReport(patched, skipped)


def _check_module(function: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{function} expected a torch.nn.Module, got {type(model).__name__}; pass the model itself"
        )


def _shown(name: str) -> str:
    """A layer's name in messages: that of the root of `named_modules` is empty."""
    return name or "(the model itself)"


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer that there is a patch for; outside those, innermost, what else calls itself attention."""
    named = dict(model.named_modules())
    known = {name for name, layer in named.items() if listed_class(layer) or uses_interface(layer)}
    candidates = [name for name, layer in named.items() if name in known or _is_foreign_attention(layer)]
    for name in candidates:
        apart = not any(_lies_in(other, name) for other in candidates)
        if name in known or (apart and not any(_lies_in(name, other) for other in known)):
            yield name, named[name]


def _lies_in(name: str, other: str) -> bool:
    """Whether the module called `name` is inside the one called `other`."""
    return name != other and name.startswith(f"{other}." if other else "")


def _is_foreign_attention(layer: nn.Module) -> bool:
    """Whether a layer's class, or a base of it, calls itself attention, and none is this package's."""
    classes = type(layer).__mro__
    ours = any(cls.__module__.split(".")[0] == "streamattn" for cls in classes)
    return not ours and any(cls.__name__.endswith("Attention") for cls in classes)


def _hook_owners(model: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """The modules that prepare the arguments of a model's patched layers, each with the hook meant for it."""
    for replacement in _replacements_in(model):
        if hook := getattr(replacement, "decoder_hook", None):
            yield from ((hook, each) for each in model.modules() if isinstance(each, replacement.decoder))
        if hook := getattr(replacement, "holder_hook", None):
            for each in model.modules():
                if any(isinstance(child, replacement.decoder) for child in each.children()):
                    yield hook, each


def _replacements_in(model: nn.Module) -> set[Any]:
    """The classes of the table that a model's layers run on."""
    return {replacement_of(layer) for _, layer in _attention_layers(model)} - {None}


def _unsupported(layer: nn.Module) -> str | None:
    """The reason why an unpatched attention layer can't be patched, or None if it can."""
    for name in _DROPOUTS:
        dropout = getattr(layer, name, 0.0)
        dropout = getattr(dropout, "p", dropout)
        if isinstance(dropout, (int, float)) and not 0.0 <= dropout < 1.0:
            return f"its dropout must be a probability in [0, 1), got {dropout}; set it to 0.0 for none"
    if uses_interface(layer):
        return _interface.unsupported(layer)
    original = listed_class(layer)
    if original is None:
        return f"there is no patch for {path_of(type(layer))}"
    if (subclass := foreign_subclass(type(layer), original)) is not None:
        return (
            f"{path_of(subclass)} is a subclass of {original.__name__}, which may compute something else; "
            "patch before wrapping the layer"
        )
    if "forward" in layer.__dict__ and not any(_is_bound(layer, name, original) for name in _BOUND_FORWARDS):
        return "its forward has been replaced on the instance, so that a change of class would have no effect"
    return replacement_for(original).unsupported(layer)


def _is_bound(layer: nn.Module, attribute: str, cls: Any) -> bool:
    """Whether the instance itself holds `cls.forward`, bound, under `attribute`."""
    bound = layer.__dict__.get(attribute)
    return isinstance(bound, MethodType) and bound.__func__ is cls.forward


def _change_class(layer: nn.Module, old: Any, new: Any, made: dict[type, type]) -> None:
    """Let a layer that stands on `old` stand on `new`; `made` as in `made_of`."""
    for attribute in _BOUND_FORWARDS:
        if _is_bound(layer, attribute, old):
            layer.__dict__[attribute] = MethodType(new.forward, layer)
    layer.__class__ = made_of(new, old, type(layer), made)
