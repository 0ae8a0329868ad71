"""Tiny HuggingFace models for the tests of the patches, on every supported release.

The default initialisation (0.02) makes every softmax nearly uniform and hides a wrong mask or scale: 0.25
here. Rows of padding differ legitimately between implementations: compare with `error_where`.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    PreTrainedModel,
    StaticCache,
)

import patches.hf
from patches import patch_model

FAMILIES = ("gpt2", "olmo2")
VOCABULARY = 61
PAD = 0
TOLERANCE = 1e-4  # of float32 logits

_SPECIAL = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": PAD}


def build(family: str, attn: str = "eager", seed: int = 0, **config: Any) -> Any:
    """A tiny causal language model in eval mode; `config` overrides its configuration."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "initializer_range": 0.25,
        **_SPECIAL,
    }
    if family == "gpt2":
        sizes = {"n_positions": 160, "n_embd": 48, "n_layer": 3, "n_head": 4}
        cls, settings = GPT2LMHeadModel, GPT2Config(**{**options, **sizes, **config})
    else:
        sizes = {
            "max_position_embeddings": 160,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        cls, settings = Olmo2ForCausalLM, Olmo2Config(**{**options, **sizes, **config})
    model = cls._from_config(settings, attn_implementation=attn)
    with torch.no_grad():  # norms at one and biases at zero would hide where they act
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.1))
    return model.eval()


def patched_pair(family: str, attn: str = "sdpa", **config: Any) -> tuple[Any, Any]:
    """(patched, unpatched eager) models of the same weights."""
    reference = build(family, "eager", **config)
    patched = build(family, attn, **config)
    patched.load_state_dict(reference.state_dict())
    return patch_model(patched), reference


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """int64 [batch, length] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY - 1, (batch, length), generator=generator)


def left_padding(ids: Tensor, *pads: int) -> tuple[Tensor, Tensor]:
    """`ids` with the first ``pads[b]`` tokens of row b turned into padding, and its attention mask."""
    mask = torch.arange(ids.shape[1]) >= torch.tensor(pads).unsqueeze(1)
    return torch.where(mask, ids, PAD), mask.long()


def error_where(mask: Tensor | None, a: Tensor, b: Tensor) -> float:
    """Largest difference of [B, T, ...] tensors over the positions that `mask` [B, T] keeps."""
    difference = (a - b).abs().flatten(2).amax(2)
    return float((difference if mask is None else difference * mask).max())


def gradients(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Gradients of every parameter of the language-modelling loss on the positions that `mask` keeps."""
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    if mask is not None:
        # The last padding position predicts the first real token, from a row that sees nothing.
        first = mask.argmax(1, keepdim=True)
        labels = labels.scatter(1, first, -100)
    model.zero_grad()
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.named_parameters()))
    return found


def gradient_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference of two sets of gradients, relative to the largest entry of each of them."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-3)) for name in b)


def greedy(model: Any, ids: Tensor, mask: Tensor | None = None, count: int = 64, **options: Any) -> Tensor:
    """The `count` tokens that follow `ids`; greedy unless `options` say otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    settings: dict[str, Any] = {
        "do_sample": False,
        "min_new_tokens": count,
        "max_new_tokens": count,
        **options,
    }
    with torch.no_grad():
        return model.generate(ids, attention_mask=mask, **settings)[:, ids.shape[1] :]


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache argument of a model's forward in this release, which is also the output's."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in parameters)


def takes_cache_objects(family: str) -> bool:
    """Whether the family's layers take a `Cache` in this release; GPT-2's took tuples of tensors."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    return family != "gpt2" or "layer_past" not in inspect.signature(GPT2Attention.forward).parameters


def static_cache(model: PreTrainedModel, batch: int, length: int) -> StaticCache:
    """An empty static cache of `length` places."""
    parameters = inspect.signature(StaticCache.__init__).parameters
    sizes: dict[str, Any] = {"max_batch_size": batch} if "max_batch_size" in parameters else {}
    return StaticCache(config=model.config, max_cache_len=length, **sizes)


def spy_attention(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the arguments of every call of `attention` by a patched layer."""
    calls: list[dict[str, Any]] = []
    original = patches.hf.attention

    def recording(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        result = original(q, k, v, **options)
        calls.append({"q": q, "k": k, "v": v, "result": result, **options})
        return result

    monkeypatch.setattr(patches.hf, "attention", recording)
    return calls
