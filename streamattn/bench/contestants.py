"""HuggingFace's models with one attention or another: the contestants of the benchmarks of whole models.

``eager``: as HuggingFace wrote it. ``sdpa``: HuggingFace's way to PyTorch's attention, as shipped.
``sdpa_cudnn``: PyTorch's attention, cuDNN preferred, and no mask handed to it but causality. ``streamattn``:
`patch_model`. ``removed``: out = q + k + v, which reads and writes what any attention must and does nothing
else: the ceiling of any attention layer. It is no attention, so it is never judged.

All contestants share one set of weights: a model is copied but for its parameters and buffers, so that five
of them need the memory of one, and one optimizer moves them all. Left out on purpose: padding, packed
documents.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from patches import patch_model
from streamattn.bench.providers import Unsupported
from streamattn.job import load_shape

CONTESTANTS = ("eager", "sdpa", "sdpa_cudnn", "streamattn", "removed")
NAMED = {"sdpa_cudnn": "cudnn"}
"""Contestants whose name promises a backend that PyTorch may leave for another, and that backend."""
ON_DEMAND = ("flex_attention", "flash_attention_2", "flash_attention_3")
"""HuggingFace's other implementations, which compile by themselves or need a package."""
PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def cudnn_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of transformers' interface on PyTorch's, whatever mask comes.

    Returns:
        out [B, T, H, D], and no weights.
    """
    with sdpa_kernel(PREFERRED, set_priority=True):
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            scale=scaling,
            is_causal=query.shape[2] > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


def no_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """q + k + v in place of attention; of a longer cache only the first keys.

    Returns:
        [B, T, H, D], and no weights.
    """
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    sums = (key[:, :, :length] + value[:, :, :length]).unsqueeze(2)
    out = (query.unflatten(1, (-1, group)) + sums).flatten(1, 2)
    return out.transpose(1, 2).contiguous(), None


def register(name: str, function: Callable[..., tuple[Tensor, None]]) -> None:
    """Makes an attention function known to transformers, which then makes no masks for it.

    Raises:
        Unsupported: this release of transformers can't.
    """
    try:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise Unsupported("this transformers has no interface for masks; 4.53 is the first") from error
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)


WITHOUT_MASKS = {"sdpa_cudnn": cudnn_attention, "removed": no_attention}


def configuration(shape: str, layers: int | None, positions: int, dropout: float) -> Any:
    """The configuration of a shape.

    Args:
        shape: a file in configs/shapes, or a path.
        layers: how many; None = the shape's.
        positions: tokens that a row must have room for.
        dropout: probability of dropping an attention weight; every other dropout is 0.

    Raises:
        ValueError: no such shape.
    """
    config = load_shape(shape)
    if layers is not None:
        config.num_hidden_layers = layers
    config.max_position_embeddings = max(positions, config.max_position_embeddings)
    for name in ("attn_pdrop", "attention_dropout", "resid_pdrop", "embd_pdrop"):
        if hasattr(config, name):
            setattr(config, name, dropout if name.startswith("att") else 0.0)
    config.use_cache = False
    return config


def base_model(config: Any, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model with random weights, on PyTorch's attention."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.loss_type = "ForCausalLM"  # GPT-2's name doesn't say so, and the warning about that breaks a graph
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    return model


def contestant(model: Any, name: str) -> Any:
    """A copy of a model that shares its weights.

    Args:
        model: as `base_model` makes it; it is left alone.
        name: of the attention, one of `CONTESTANTS`.

    Raises:
        Unsupported: this release of transformers can't, or the model isn't where that attention runs.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise Unsupported("this transformers can't change a model's attention; 4.54 is the first")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    if name in NAMED and model.device.type == "cpu":
        raise Unsupported(f"{NAMED[name]} needs an NVIDIA GPU")
    if name == "streamattn":
        return patch_model(copied)
    if name in WITHOUT_MASKS:
        register(name, WITHOUT_MASKS[name])
    copied.set_attn_implementation(name)
    return copied
