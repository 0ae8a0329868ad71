"""Models of a user's that work on the masks that transformers' functions make: an error, or what was meant.

On a patched model those masks are compact, and a change of theirs would have no effect, or a wrong one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from patches import compact, hf, patch_model, patch_report
from tests.hf_families import FAMILIES
from tests.hf_models import TOLERANCE, left_padding, tokens

masking_utils = pytest.importorskip(
    "transformers.masking_utils", reason="this release makes masks in each model"
)

PREFIX = 4
LENGTH = 11
Change = Callable[[Tensor], Tensor]


def shown(mask: Tensor) -> Tensor:
    """A prefix that every token sees, in whatever a dense mask is made of."""
    mask[..., :, :PREFIX] = True if mask.dtype == torch.bool else 0
    return mask


def shown_to_one_head(mask: Tensor) -> Tensor:
    mask[:, 0, :, :PREFIX] = True if mask.dtype == torch.bool else 0
    return mask


def biased(mask: Tensor) -> Tensor:
    return mask + torch.linspace(-1, 0, mask.shape[-1])


def filled(mask: Tensor) -> Tensor:
    return mask.masked_fill(torch.arange(mask.shape[-1]) < PREFIX, 0)


CHANGES = {change.__name__: change for change in (shown, shown_to_one_head, biased, filled)}


_ASKED = tuple(inspect.signature(masking_utils.create_causal_mask).parameters)


class Prefix(transformers.LlamaModel):
    """Makes its mask by transformers' function and changes it, as a user's model does."""

    change: Change

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        embeds = self.embed_tokens(input_ids)
        options = {
            "config": self.config,
            "inputs_embeds": embeds,
            "input_embeds": embeds,
            "attention_mask": attention_mask,
            "cache": None,
            "past_key_values": None,
            "cache_position": torch.arange(input_ids.shape[1]),
        }
        mask = masking_utils.create_causal_mask(**{name: options[name] for name in _ASKED if name in options})
        mask = type(self).change(mask)
        return super().forward(inputs_embeds=embeds, attention_mask=mask, use_cache=False, **kwargs)


def prefix_pair(change: Change) -> tuple[Any, Any]:
    kind = type("Prefix", (Prefix,), {"change": staticmethod(change), "__module__": __name__})
    config = transformers.LlamaConfig(**FAMILIES["Llama"].options)
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind._from_config(config, attn_implementation="eager").eval())
    return models[0], models[1]


def outputs(model: Any, padded: bool) -> Tensor:
    ids, mask = left_padding(tokens(2, LENGTH), 0, 3)
    return model(ids, attention_mask=mask if padded else None).last_hidden_state


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_mask_raises(change: str, padded: bool, inference: bool) -> None:
    model, _ = prefix_pair(CHANGES[change])
    patch_model(model)
    context: Any = torch.inference_mode if inference else torch.no_grad
    with context(), pytest.raises(ValueError, match=r"model\.set_attn_implementation\('sdpa'\) after patch"):
        outputs(model, padded)


@pytest.mark.parametrize("change", ["shown", "biased"])
def test_dense_masks_are_made_where_the_user_says_so(change: str) -> None:
    """What the error says to do."""
    model, reference = prefix_pair(CHANGES[change])
    patch_model(model)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    else:
        model.config._attn_implementation = "eager"
    assert len(patch_report(model).patched) == 2
    expected = outputs(reference, padded=False)
    assert torch.allclose(outputs(model, padded=False), expected, atol=TOLERANCE)
    plain, _ = prefix_pair(lambda mask: mask)
    assert not torch.allclose(outputs(plain, padded=False), expected, atol=0.1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("change", ["shown", "filled"])
def test_a_mask_changed_in_a_graph_raises(change: str, padded: bool) -> None:
    """By the device, when the graph runs; the message is the same."""
    torch.compiler.reset()
    model, _ = prefix_pair(CHANGES[change])
    compiled: Any = torch.compile(patch_model(model), backend="aot_eager")
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match="something changed this one"):
        outputs(compiled, padded)


@pytest.mark.parametrize("padded", [False, True])
def test_an_unchanged_mask_runs_in_a_graph(padded: bool) -> None:
    torch.compiler.reset()
    model, reference = prefix_pair(lambda mask: mask)
    compiled: Any = torch.compile(patch_model(model), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        found, expected = outputs(compiled, padded), outputs(reference, padded)
    _, mask = left_padding(tokens(2, LENGTH), 0, 3)
    difference = (found - expected).abs().amax(-1)
    assert float((difference * mask if padded else difference).max()) < TOLERANCE


# By itself


def made(padded: bool = True) -> Tensor:
    ids = torch.tensor([[-1, -1, 0, 0, 1], [0, 0, 0, 1, 1]], dtype=torch.int32)
    return compact.write(ids if padded else None, 5, causal=True, windowed=False, device=None)


def copies() -> dict[str, Change]:
    """What stands around layers may do to a mask without changing it."""
    return {
        "nothing": lambda mask: mask,
        "clone": lambda mask: mask.clone(),
        "detach": lambda mask: mask.detach(),
        "view": lambda mask: mask[:, :, :, :5],
        "other rows": lambda mask: mask.flip(0).flip(0),
        "expand": lambda mask: mask.expand(2, -1, -1, -1),
        "repeat": lambda mask: mask.expand(2, -1, -1, -1).repeat_interleave(2, dim=0)[::2],
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", copies())
def test_copies_are_read(how: str, padded: bool) -> None:
    found = compact.read(copies()[how](made(padded)), 2, 5, 5)
    expected = compact.read(made(padded), 2, 5, 5)
    assert found.kv_lengths is not None and expected.kv_lengths is not None
    assert torch.equal(found.kv_lengths, expected.kv_lengths)
    assert (found.segment_ids is None) == (not padded)
    for a, b in zip(found.segment_ids or (), expected.segment_ids or (), strict=True):
        assert torch.equal(a, b)


OUT_OF_PLACE: dict[str, Change] = {
    "~": lambda mask: ~mask,
    "+ 1": lambda mask: mask + 1,
    "* 2": lambda mask: mask * 2,
    "-": lambda mask: -mask,
    "& True": lambda mask: mask & torch.tensor(True),
    "| True": lambda mask: mask | torch.tensor(True),
    "masked_fill": lambda mask: mask.masked_fill(torch.arange(mask.shape[-1]) == 0, 1),
    "where": lambda mask: torch.where(torch.arange(mask.shape[-1]) == 0, 0, mask),
    "pad": lambda mask: F.pad(mask, (2, 0), value=1)[..., :5],
    "a clone's head": lambda mask: shown_to_one_head(mask.clone()),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("how", OUT_OF_PLACE)
def test_other_tensors_are_not(how: str, padded: bool) -> None:
    changed = OUT_OF_PLACE[how](made(padded))
    assert compact.is_compact(changed)  # it looks like one
    with pytest.raises(ValueError, match="something changed this one"):
        compact.read(changed, 2, 5, 5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_what_was_computed_from_one_is_told(dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 5, 8)
    options: dict[str, Any] = {"causal": False, "scale": None}
    with pytest.raises(ValueError, match="something changed this one"):
        hf.attend(q, q, q, mask=made().expand(-1, -1, 5, -1).to(dtype), **options)
    q = torch.randn(2, made().shape[1], 5, 8)  # a model with as many heads has masks of its own
    mask = torch.ones(2, made().shape[1], 5, 5, dtype=torch.bool)
    hf.attend(q, q, q, mask=mask, **options)


def test_a_layer_of_another_model_raises_in_a_graph() -> None:
    """nn.Module around a read, compiled by itself: the mask comes from outside the graph."""

    class Layer(nn.Module):
        def forward(self, q: Tensor, mask: Tensor) -> Tensor:
            return hf.attend(q, q, q, causal=True, mask=mask, scale=None)[0]

    torch.compiler.reset()
    layer: Any = torch.compile(Layer(), backend="aot_eager", fullgraph=True)
    q = torch.randn(2, 4, 5, 8)
    assert torch.allclose(layer(q, made()), Layer()(q, made()), atol=1e-5)
    with pytest.raises(RuntimeError, match="something changed this one"):
        layer(q, shown(made()))


@pytest.mark.parametrize("causal", [False, True])
def test_the_weights_are_of_the_causality_that_the_mask_says(causal):
    """Whatever the layer says: the mask goes before, for the output and for the weights."""
    q, k, v = torch.randn(3, 2, 2, 5, 16)
    mask = compact.write(None, 5, causal=causal, windowed=False, device=None)
    out, weights = hf.attend(q, k, v, causal=not causal, mask=mask, scale=None, need_weights=True)
    assert weights is not None
    scores = q @ k.transpose(2, 3) / 4.0
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), float("-inf"))
    want = scores.softmax(3)
    torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, want @ v, rtol=1e-4, atol=1e-5)
