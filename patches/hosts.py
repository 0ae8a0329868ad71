"""What a patched layer knows of the model around it: whose masks it gets, and what these leave to the layer.

Contract. A model makes its masks in the way of the implementation that its configuration names. Masks of
eager and of torch's own attention say all that layers don't; those of a flash implementation say padding
alone, and windows and packed documents are for the layers to see.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from patches import code, compact, hf
from patches.registry import NAME
from patches.views import LayerConfig, ModelConfig

try:
    from transformers import masking_utils
except ImportError:  # older releases make masks in each model
    masking_utils = None

DENSE = ("eager", "sdpa")
"""Implementations whose masks are complete, and left out only where causality says it all."""

KNOWN = (*DENSE, NAME)
"""Implementations whose masks say all that layers don't."""

_field = object.__getattribute__
"""Reads a view's own field past `PretrainedConfig`, see `hf.setting`."""


def mask_maker(config: Any) -> str | None:
    """The implementation whose masks a layer gets, by its configuration: its model's."""
    while isinstance(config, LayerConfig):
        if isinstance(config, ModelConfig) and _field(config, "named"):
            return NAME
        config = _field(config, "shared")
    return config._attn_implementation


def leaves_documents_to_layers(config: Any) -> bool:
    """Whether a model makes masks of padding alone, as flash implementations do, or none.

    Args:
        config: the model's configuration, or that of a layer.
    """
    return mask_maker(config) not in (None, *KNOWN)


def documents_by_positions(
    module: nn.Module, mask: Tensor | None, arguments: dict[str, Any], q_len: int, kv_len: int
) -> Tensor | None:
    """A causal layer's mask, and documents packed into rows, where its model leaves it to layers to see them.

    Models of flash implementations do: their masks are of padding alone.

    Args:
        module: the layer.
        mask: None, or over keys [B, Tk].
        arguments: the layer's keyword arguments.
        q_len: Tq.
        kv_len: Tk.

    Returns:
        `mask`, or a compact one.

    Raises:
        ValueError: the model's implementation makes no masks, so that padding doesn't reach the layer.
    """
    if masking_utils is None or not leaves_documents_to_layers(module.config):
        return mask
    maker = mask_maker(module.config)
    if mask is None and maker not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"{type(module).__name__} is patched in a model whose implementation, {maker!r}, makes no masks, "
            "so that padding would be seen; call model.set_attn_implementation('sdpa'), or register a mask "
            "function for it with transformers.AttentionMaskInterface"
        )
    positions = arguments.get("position_ids")
    if q_len != kv_len or (mask is not None and mask.dim() != 2):
        return mask
    starts = hf.document_starts({"attention_mask": mask, "position_ids": positions})
    if starts is None or (compact.readable(mask, positions) and not bool(starts.any())):
        return mask
    return compact.of_documents(starts, mask)


def refuse_window_of_masks(module: nn.Module, kv_len: int) -> None:
    """Raise if a window is in masks alone, and those are a flash implementation's, which have none."""
    width = hf.setting(module.config, "sliding_window")
    if width is None or kv_len <= width or not leaves_documents_to_layers(module.config):
        return
    body = inspect.unwrap(type(module).forward).__code__
    if hf.setting(module.config, "layer_types") is None and "sliding_window" not in code.words(body):
        raise ValueError(
            f"{type(module).__name__} doesn't say whether it has the window of its configuration ({width} "
            "keys), nor do the masks that its model makes; call model.set_attn_implementation('sdpa')"
        )
