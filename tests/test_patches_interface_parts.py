"""Models that are patched in part, by whatever means: each gets masks that all its layers can read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from patches import patch_model, patch_report, unpatch_model
from tests import hf_families, hf_models
from tests.hf_models import TOLERANCE, cache_argument, error_where, left_padding, static_cache, tokens

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

NAMES = [*hf_models.FAMILIES, *hf_families.present("Llama", "OLMo-3")]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def build(name: str, attn: str = "eager") -> Any:
    return (hf_models if name in hf_models.FAMILIES else hf_families).build(name, attn)


def blocks(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def sibling_of(model: Any) -> Any:
    """Another model on the same configuration, of the same weights."""
    made = type(model)(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


def error(model: Any, reference: Any) -> float:
    """Of logits, with padding and without."""
    ids, mask = left_padding(tokens(2, 9), 0, 3)
    padded = error_where(
        mask, model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits
    )
    return max(padded, error_where(None, model(ids).logits, reference(ids).logits))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_an_unpatched_model_beside_a_patched_one(name: str, attn: str) -> None:
    """Of one configuration, and looked at together."""
    patched = build(name, attn)
    other = sibling_of(patched)
    reference = copy.deepcopy(other)
    config = patched.config
    patch_model(patched)
    implementation = patched.config._attn_implementation
    both = nn.ModuleList([patched, other])
    patch_model(both, filter_fn=lambda module, path: path.startswith("0."))
    assert other.config is config
    assert patched.config._attn_implementation == implementation
    assert error(patched, reference) < TOLERANCE
    assert torch.equal(other(tokens(2, 9)).logits, reference(tokens(2, 9)).logits)
    assert error(other, reference) < TOLERANCE

    first = next(path for path in patch_report(both).skipped)
    patch_model(both, filter_fn=lambda module, path: path == first)  # a layer of the other
    assert error(patched, reference) < TOLERANCE
    assert error(other, reference) < TOLERANCE
    patch_model(both)
    assert not patch_report(both).skipped
    assert error(patched, reference) < TOLERANCE
    assert error(other, reference) < TOLERANCE
    unpatch_model(both)
    assert patched.config is other.config is config
    assert config._attn_implementation == attn


def test_layers_that_turn_up_later_get_masks_that_they_know(name: str) -> None:
    """A block put in since the patch, and left out when patching again."""
    patched, reference = patch_model(build(name)), build(name)
    blocks(patched)[1] = copy.deepcopy(blocks(reference)[1])
    patch_model(patched, filter_fn=lambda module, path: ".1." not in path)
    assert patched.config._attn_implementation == "eager"
    assert error(patched, reference) < TOLERANCE


class Mean(nn.Module):
    """Every token looks at all that the mask shows it, alike; by whatever name it goes, it is attention."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        mask = kwargs["attention_mask"][..., : hidden_states.shape[1]]  # some releases' reach further
        return (mask.softmax(-1)[:, 0] @ hidden_states), None


def test_unknown_attention_gets_masks_that_it_knows(name: str) -> None:
    """A module of the user's in the place of a layer, whose mask it adds to its scores."""
    reference = build(name)
    setattr(blocks(reference)[1], "attn" if name == "gpt2" else "self_attn", Mean())
    patched = patch_model(copy.deepcopy(reference))
    assert len(patch_report(patched).patched) == len(blocks(reference)) - 1
    assert patched.config._attn_implementation == "eager"
    assert error(patched, reference) < TOLERANCE


class Around(nn.Module):
    """What wraps a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs)


def test_a_wrapped_layer_is_known(name: str) -> None:
    patched, reference = build(name), build(name)
    whole = copy.deepcopy(patched)
    slot = "attn" if name == "gpt2" else "self_attn"
    setattr(blocks(patched)[1], slot, Around(getattr(blocks(patched)[1], slot)))
    patch_model(patched)
    assert patched.config._attn_implementation == patch_model(whole).config._attn_implementation
    assert error(patched, reference) < TOLERANCE


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_a_patched_block_in_another_model(name: str, attn: str) -> None:
    """sdpa leaves the mask out for an empty static cache; a donor's configuration doesn't say so."""
    donor, model, reference = patch_model(build(name)), build(name, attn), build(name)
    blocks(model)[1] = blocks(donor)[1]
    ids, length = tokens(2, 9), 16
    caches = [static_cache(reference, 2, length) for _ in range(2)]
    with torch.no_grad():
        for part in (slice(0, 5), slice(5, 9)):
            found, expected = (
                each(ids[:, part], **{cache_argument(each): cache}).logits
                for each, cache in zip((model, reference), caches, strict=True)
            )
            assert error_where(None, found, expected) < TOLERANCE
    assert error(model, reference) < TOLERANCE


@pytest.mark.skipif(not hasattr(transformers, "Siglip2VisionModel"), reason="this release has no Siglip2")
def test_a_head_of_torch_gets_a_mask_that_it_can_work_on() -> None:
    """Siglip2's pooling head makes a mask and reshapes it for `nn.MultiheadAttention`."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_patches": 16,
        "patch_size": 4,
    }
    config = transformers.Siglip2VisionConfig(hidden_size=48, intermediate_size=64, **sizes)
    torch.manual_seed(0)
    reference = transformers.Siglip2VisionModel._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.25)
    patched = patch_model(copy.deepcopy(reference))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    arguments = {
        "pixel_values": torch.randn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [5, 2]]),
    }
    found, expected = patched(**arguments), reference(**arguments)
    assert error_where(mask, found.last_hidden_state, expected.last_hidden_state) < TOLERANCE
    assert torch.allclose(found.pooler_output, expected.pooler_output, atol=TOLERANCE)
