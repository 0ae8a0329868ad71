"""Which attention class is served by which patch: a literal table, and its reader.

Layers of no listed class that use transformers' attention interface are served by `patches.interface`.

Both sides are ``"module:Class"`` strings, so that looking a model over imports nothing: a layer whose class
is listed here has its library loaded already. A new kind of layer is one more file and one more row. A
replacement

- subclasses the class it stands in for and adds no state, so that an instance changes sides by its
  ``__class__``;
- lives at module level under its own name, so that patched models pickle;
- has a static ``unsupported(module) -> str | None``, the reason why this instance can't be served;
- may name a ``model_hook``: (class of the module that prepares the layers' arguments, forward pre-hook for
  it);
- may have static ``attach(model)`` and ``detach(model)``, which settle what stands around the layers: run
  after they have changed sides, any number of times, and before they change back.
"""

from __future__ import annotations

import inspect
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

LAYER_CONFIG = "patches.interface:LayerConfig"
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


def is_patched(module: nn.Module) -> bool:
    """Whether `module` runs on a replacement of the table, or asks the interface for this implementation."""
    if path_of(type(module)) in REPLACEMENTS.values():
        return True
    config = getattr(module, "__dict__", {}).get("config")
    return path_of(type(config)) == LAYER_CONFIG and uses_interface(module)


def replacement_for(cls: type) -> Any:
    """The class that stands in for a listed `cls`; imports the file it lives in."""
    module, name = REPLACEMENTS[path_of(cls)].split(":")
    return getattr(import_module(module), name)
