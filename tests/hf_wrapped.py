"""Training steps of tiny models of several families, those with a patch of their own among them.

For the tests of what stands around a model: wrappers, tools and generation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from patches import patch_report
from tests import hf_families, hf_models
from tests.hf_families import LENGTH, present
from tests.hf_models import TOLERANCE, left_padding, tokens

NAMES = ["GPT-2", "OLMo-2", *present("Llama", "Gemma 2", "gpt-oss", "BART", "T5")]
DEEP = {"GPT-2": "gpt2", "OLMo-2": "olmo2"}


def pair(name: str, **config: Any) -> tuple[Any, Any]:
    """(model to patch, unpatched eager model) of the same weights, without dropout."""
    if name not in DEEP:
        return hf_families.pair(name, **config)
    model, reference = hf_models.build(DEEP[name], **config), hf_models.build(DEEP[name], **config)
    model.load_state_dict(reference.state_dict())
    return model, reference


def training(model: Any) -> Any:
    """`model` in training mode, without dropout, so that two models compute the same."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.__dict__["dropout"] = 0.0
    return model.train()


def call(name: str) -> dict[str, Tensor]:
    """Arguments of a training step: two rows, one with padding on its left, labels on what is valid."""
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    if name in present("BART", "T5"):
        labels = tokens(2, LENGTH - 4, seed=1)
    else:
        labels = ids.masked_fill(mask == 0, -100)
        labels[1, 7] = -100  # predicted by a row that sees nothing
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: Any, arguments: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a training step."""
    model.zero_grad()
    loss = model(**arguments).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_step(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> bool:
    """Whether two steps have the same loss and gradients of the same parameters, but for rounding."""
    assert len(found[1]) > 0
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        # Biases of keys have no gradient but for rounding.
        if float((found[1][name] - gradient).abs().max() / gradient.abs().max().clamp(min=0.01)) > TOLERANCE:
            return False
    return torch.allclose(found[0], expected[0], atol=TOLERANCE)


def layers(model: nn.Module) -> int:
    """How many layers of a model are patched."""
    return len(patch_report(model).patched)


def spared_square_masks(name: str, calls: list[dict[str, Any]]) -> bool:
    """Whether no mask of recorded calls is [B, 1, Tq, Tk], where transformers makes the masks of a family."""
    if name not in DEEP and not hf_families.makes_masks(name):
        return True
    masks = [call["mask"] for call in calls if isinstance(call["mask"], Tensor)]
    return all(mask.dim() < 4 or mask.shape[2] == 1 for mask in masks)
