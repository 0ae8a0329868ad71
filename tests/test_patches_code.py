"""Models whose code works on masks get dense ones, also where only the implementation's name was given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from patches import code, patch_model
from tests.hf_families import (
    FAMILIES,
    INSTALLED,
    LENGTH,
    WINDOW,
    build,
    dense_masks,
    inputs,
    makes_masks,
    spy_layers,
)
from tests.hf_models import TOLERANCE, left_padding, tokens

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")


def sees(attn: str) -> Any:
    """A tiny model of images with padding, whose pooler hands the mask to a layer of torch's."""
    options: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 64, "patch_size": 4, "num_patches": 16}
    config = transformers.Siglip2VisionConfig(**options, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.Siglip2VisionModel._from_config(config, attn_implementation=attn).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    return model


def pooled(model: Any) -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 9:] = 0
    pixels = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(1))
    shapes = torch.tensor([[4, 4], [3, 3]])
    with torch.no_grad():
        out = model(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=shapes)
    return out.last_hidden_state * mask[..., None], out.pooler_output


WAYS: dict[str, Callable[[], Any]] = {
    "by name": lambda: sees("streamattn"),
    "patched": lambda: patch_model(sees("eager")),
    "by name, patched": lambda: patch_model(sees("streamattn")),
    "by name, compiled": lambda: torch.compile(sees("streamattn"), backend="eager"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.skipif(not hasattr(transformers, "Siglip2VisionModel"), reason="this release has no such model")
@pytest.mark.parametrize("way", WAYS)
def test_a_pooler_that_hands_its_mask_to_torch(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = pooled(sees("eager"))
    calls = spy_layers(monkeypatch)
    torch.compiler.reset()
    found = pooled(WAYS[way]())
    assert len(calls) == 2 or "compiled" in way
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, atol=TOLERANCE)


@pytest.mark.skipif(not hasattr(transformers, "DogeForCausalLM"), reason="this release has no such model")
def test_layers_that_make_another_mask_by_name() -> None:
    """Doge's layers add what they compute from the values to the mask."""

    def tiny(attn: str) -> Any:
        torch.manual_seed(0)
        options = {**FAMILIES["Llama"].options, "sliding_window": WINDOW, "keep_window_size": 4}
        config = transformers.DogeConfig(**options)
        return transformers.DogeForCausalLM._from_config(config, attn_implementation=attn).eval()

    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    with torch.no_grad():
        found = tiny("streamattn")(ids, attention_mask=mask).logits
        expected = tiny("eager")(ids, attention_mask=mask).logits
    assert float(((found - expected).abs().amax(-1) * mask).max()) < TOLERANCE


@pytest.mark.parametrize(
    "name", [name for name in INSTALLED if makes_masks(name) and FAMILIES[name].kind != "vision"]
)
def test_families_that_hand_their_masks_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is dense by name, as none is by a patch."""
    assert not code.works_on_masks(getattr(transformers, FAMILIES[name].config))
    model = build(name, "streamattn")
    calls = spy_layers(monkeypatch)
    arguments, _ = inputs(name, "left")
    model(**arguments)
    assert calls
    if name != "T5":  # whose masks hold a bias
        assert dense_masks(calls) == []


def written(monkeypatch: pytest.MonkeyPatch, forward: str) -> Any:
    """A configuration's class of a user's, in a module with a layer that has such a `forward`."""
    module: Any = ModuleType("users_model")
    monkeypatch.setitem(sys.modules, "users_model", module)
    text = (
        "import torch, transformers\n"
        "ALL_ATTENTION_FUNCTIONS = {}\n"
        "class Config(transformers.LlamaConfig): pass\n"
        "class Attention(torch.nn.Module):\n"
        "    def forward(self, x, attention_mask=None):\n"
        f"        {forward}\n"
    )
    exec(compile(text, "users_model.py", "exec"), module.__dict__)
    return module.Config


@pytest.mark.parametrize(
    ("forward", "works"),
    [
        ("return ALL_ATTENTION_FUNCTIONS['a'](self, x, attention_mask)", False),
        ("return ALL_ATTENTION_FUNCTIONS['a'](self, x, attention_mask + x + attention_mask)", True),
        ("my_mask = x; return ALL_ATTENTION_FUNCTIONS['a'](self, x, my_mask)", True),
        ("return attention_mask + attention_mask", False),  # not by the interface
    ],
)
def test_a_users_model(forward: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code.works_on_masks(written(monkeypatch, forward)) is works
