"""Which attention class is served by which patch: a literal table, and its reader.

Layers of no listed class that use transformers' attention interface are served by `patches.interface`.

Both sides are ``"module:Class"`` strings, so that looking a model over imports nothing: a layer whose class
is listed here has its library loaded already. A new kind of layer is one more file and one more row. A
replacement

- subclasses the class it stands in for and adds no state, so that an instance changes sides by its
  ``__class__``;
- lives at module level under its own name, so that patched models pickle;
- has a static ``unsupported(module) -> str | None``, the reason why this instance can't be served;
- may name a ``decoder``, the class of the module that hides nothing but later keys from the layers, and a
  static ``decoder_hook``, a forward pre-hook for it in releases where it makes its masks itself, None where
  transformers' functions make them (`patches.interface.makes_masks`);
- may have a static ``holder_hook``, such a hook for the modules that hold a decoder as a child;
- may have static ``attach(model)`` and ``detach(model)``, which settle what stands around the layers: run
  after they have changed sides, any number of times, and before they change back.

torch gives a layer a class of its own where it shards (`fully_shard`) or parametrizes it, made of the layer's
class at run time. Such a class changes sides too: `made_of` makes another like it.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import Any

from torch import nn

REPLACEMENTS = {
    "transformers.models.gpt2.modeling_gpt2:GPT2Attention": "patches.gpt2:StreamGPT2Attention",
    "transformers.models.olmo2.modeling_olmo2:Olmo2Attention": "patches.olmo2:StreamOlmo2Attention",
    "torch.nn.modules.activation:MultiheadAttention": "patches.torch_mha:StreamTorchMultiheadAttention",
}
"""Attention class -> the subclass that runs on `streamattn.attention`."""

NAME = "streamattn"
"""What HuggingFace's models call this implementation of attention."""

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name under which HuggingFace's layers look an implementation up."""

LAYER_CONFIG = "patches.views:LayerConfig"
"""The configuration of a layer that is patched through the interface."""


def path_of(cls: type) -> str:
    """The name of a class as `REPLACEMENTS` spells it."""
    return f"{cls.__module__}:{cls.__qualname__}"


def listed_class(module: nn.Module) -> type | None:
    """The class of `REPLACEMENTS`, patched or not, that `module` is an instance of; None if there is none."""
    return next((cls for cls in type(module).__mro__ if path_of(cls) in REPLACEMENTS), None)


def uses_interface(module: nn.Module) -> bool:
    """Whether `module` is of no listed class and calls what transformers' attention interface says."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and INTERFACE in code.co_names and listed_class(module) is None


def replacement_of(module: nn.Module) -> Any:
    """The class of the table that `module` runs on, whatever wrapped it since; None if there is none."""
    paths = REPLACEMENTS.values()
    return next((cls for cls in type(module).__mro__ if path_of(cls) in paths), None)


def is_patched(module: nn.Module) -> bool:
    """Whether `module` runs on a replacement of the table, or asks the interface for this implementation."""
    if replacement_of(module) is not None:
        return True
    config = getattr(module, "__dict__", {}).get("config")
    return path_of(type(config)) == LAYER_CONFIG and uses_interface(module)


def foreign_subclass(cls: type, base: type) -> type | None:
    """What lies between a layer's class and the one of the table, and may compute something else.

    Args:
        cls: the layer's class.
        base: the class of the table.

    Returns:
        The first subclass of `base` in `cls` that torch didn't make at run time; None if there is none.
    """
    between = (each for each in cls.__mro__ if issubclass(each, base) and each is not base)
    return next((each for each in between if not _is_made_by_torch(each)), None)


def _is_made_by_torch(cls: type) -> bool:
    """Whether `cls` is of a function of torch's: it can't be found under its name."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__.split(".")[0] == "torch" and not hasattr(module, cls.__name__)


def made_of(new: type, old: type, cls: type, made: dict[type, type]) -> type:
    """`cls`, which is `old` or was made of it by torch, as torch would have made it of `new`.

    Methods and properties stay, so that what wraps the layer finds them. `cls` itself stays as it is, for
    other layers may have it.

    Args:
        new: the class to stand on.
        old: the class that `cls` stands on.
        cls: the class of a layer; see `foreign_subclass`.
        made: what was made so far, so that layers that shared a class go on sharing one.
    """
    if cls is old:
        return new
    if not issubclass(cls, old):
        return cls
    if cls not in made:
        body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        bases = tuple(made_of(new, old, base, made) for base in cls.__bases__)
        made[cls] = type(cls)(cls.__name__.replace(old.__name__, new.__name__), bases, body)
    return made[cls]


def replacement_for(cls: type) -> Any:
    """The class that stands in for a listed `cls`; imports the file it lives in."""
    module, name = REPLACEMENTS[path_of(cls)].split(":")
    return getattr(import_module(module), name)
