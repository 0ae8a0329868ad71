"""Patched layers in models that make another implementation's masks: right, or an error that says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import patches.gpt2
from patches import code, patch_model, patch_report
from tests.hf_families import FAMILIES, INSTALLED, LENGTH, WINDOW, build, inputs
from tests.hf_models import TOLERANCE, cache_argument, left_padding, tokens
from tests.hf_wrapped import DEEP, pair

masking_utils: Any = pytest.importorskip(
    "transformers.masking_utils", reason="this release makes masks in each model"
)

FLASH = "flash_attention_2"
_NEEDS = {"PhiMoE": "its window is in the masks alone", "Llama 4": "flash attention has no chunks"}
NAMES = [name for name in dict.fromkeys([*DEEP, *INSTALLED]) if name not in _NEEDS]
DECODERS = [name for name in NAMES if name in DEEP or FAMILIES[name].kind == "decoder"]


def hosted(model: Any, name: str = FLASH) -> Any:
    """`model`, patched, with the masks of another implementation, which need not be installed for that."""
    patch_model(model)
    for module in model.modules():
        if "config" in module.__dict__:
            try:
                module.config._attn_implementation_internal = name
            except ValueError as error:
                pytest.skip(f"in this release: {error}")
    assert model.config._attn_implementation == name
    assert patch_report(model).patched
    return model


def call(name: str, padded: str | None) -> tuple[dict[str, Tensor], Tensor | None]:
    if name not in DEEP:
        return inputs(name, padded)
    ids, mask = tokens(2, LENGTH), None
    if padded is not None:
        ids, mask = left_padding(ids, 0, 7)
        if padded == "right":
            ids, mask = ids.flip(1), mask.flip(1)
    return {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}, mask


def error(a: Tensor, b: Tensor, valid: Tensor | None) -> float:
    difference = (a - b).abs().amax(-1)
    return float((difference if valid is None else difference * valid).max())


@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_a_flash_host(name: str, padded: str | None) -> None:
    """Its masks are of padding alone, over the keys."""
    model, reference = pair(name)
    arguments, valid = call(name, padded)
    with torch.no_grad():
        found, expected = hosted(model)(**arguments).logits, reference(**arguments).logits
    assert error(found, expected, valid) < TOLERANCE


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_documents_in_a_flash_host(name: str, use_cache: bool) -> None:
    """Flash hosts leave it to the layers to find them by their positions, and so to ours."""
    model, reference = pair(name)
    hosted(model)
    ids, cut = tokens(1, LENGTH), 8
    positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])[None]
    with torch.no_grad():
        if name == "GPT-2" and not patches.gpt2._TELLS_POSITIONS:
            with pytest.raises(ValueError, match="can't keep them apart"):
                model(ids, position_ids=positions, use_cache=use_cache)
            return
        found = model(ids, position_ids=positions, use_cache=use_cache).logits
        expected = torch.cat([reference(part).logits for part in (ids[:, :cut], ids[:, cut:])], dim=1)
    assert error(found, expected, None) < TOLERANCE


@pytest.mark.parametrize("name", DECODERS)
def test_a_cache_in_a_flash_host(name: str) -> None:
    """A second chunk, and generation with padding: positions that go on are no documents."""
    model, reference = pair(name)
    hosted(model)
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    with torch.no_grad():
        first = model(ids[:1, :9])
        second = model(ids[:1, 9:], **{cache_argument(model): first.past_key_values}).logits
        assert error(second, reference(ids[:1]).logits[:, 9:], None) < TOLERANCE
        options = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


@pytest.mark.skipif("PhiMoE" not in INSTALLED, reason="this release has no such model on the interface")
def test_a_window_that_only_masks_have() -> None:
    model, reference = pair("PhiMoE")
    hosted(model)
    ids = tokens(1, LENGTH)
    short = ids[:, :WINDOW]
    assert error(model(short).logits, reference(short).logits, None) < TOLERANCE
    with pytest.raises(ValueError, match=r"doesn't say whether it has the window .* \(5 keys\)"):
        model(ids)
    model.config._attn_implementation = "sdpa"
    assert error(model(ids).logits, reference(ids).logits, None) < TOLERANCE


@pytest.mark.parametrize("name", ["GPT-2", "OLMo-2", "Llama"])
def test_a_host_that_makes_no_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers drops the padding for an implementation without a mask function."""
    interface: Any = transformers.AttentionInterface
    interface.register("of a user", masking_utils.sdpa_mask)  # never called: the layers are ours
    try:
        model, reference = pair(name)
        if not code.mask_makers(type(model.base_model)):
            pytest.skip("in this release the model makes its masks itself")
        hosted(model, "of a user")
        ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
        with pytest.raises(ValueError, match=r"'of a user', makes no masks, so that padding would be seen"):
            model(ids, attention_mask=mask)
        mapping = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        monkeypatch.setitem(mapping, "of a user", masking_utils.sdpa_mask)
        with torch.no_grad():
            found = model(ids, attention_mask=mask).logits
            assert error(found, reference(ids, attention_mask=mask).logits, mask) < TOLERANCE
    finally:
        interface._global_mapping.pop("of a user", None)


def test_part_of_a_flash_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first layer is patched; the others' flash attention is stood in for, with the same masks."""

    def flash(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        assert mask is None or mask.dim() == 2
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        seen = causal if mask is None else causal & mask.bool()[:, None, None]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, FLASH, flash)
    model, reference = build("Llama"), build("Llama")
    first = next(iter(patch_report(model).skipped))
    patch_model(model, filter_fn=lambda layer, path: path == first)
    model.config._attn_implementation_internal = FLASH
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    with torch.no_grad():
        found = model(ids, attention_mask=mask).logits
        assert error(found, reference(ids, attention_mask=mask).logits, mask) < TOLERANCE
    assert list(patch_report(model).patched) == [first]
