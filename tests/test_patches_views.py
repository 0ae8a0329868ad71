"""The configurations of a model that is patched through the attention interface: live views."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from patches import patch_model, patch_report, unpatch_model
from tests import hf_families, hf_models
from tests.hf_families import FAMILIES, LENGTH, build, dense_masks, pair, present, spy_layers
from tests.hf_models import TOLERANCE, error_where, left_padding, tokens

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

FIRST = "model.layers.0.self_attn"


def same_weights(found: Any, expected: Any) -> bool:
    """Whether two outputs hold the same attention weights."""
    assert len(found.attentions) == len(expected.attentions) > 0
    return all(
        torch.allclose(a, b, atol=1e-5) for a, b in zip(found.attentions, expected.attentions, strict=True)
    )


# One configuration


def test_a_configuration_kept_from_before_reaches_the_model() -> None:
    model = build("Llama")
    config = model.config
    patch_model(model)
    assert model(tokens(1, 6)).past_key_values is not None
    config.use_cache = False
    assert model(tokens(1, 6)).past_key_values is None
    model.config.use_cache = True
    model.config.some_setting = 5
    assert config.use_cache
    assert config.some_setting == 5
    assert model.model.layers[1].self_attn.config.some_setting == 5
    assert unpatch_model(model).config is config


def test_the_name_is_seen_by_this_model_only() -> None:
    config = transformers.LlamaConfig(**FAMILIES["Llama"].options)
    first, second = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    name = config._attn_implementation
    patch_model(first)
    assert first.config._attn_implementation == "streamattn"
    assert second.config is config
    assert config._attn_implementation == second.config._attn_implementation == name


def test_it_is_a_configuration_of_its_class() -> None:
    model = build("Llama")
    config = model.config
    patch_model(model)
    for each in (model.config, model.get_submodule(FIRST).config):
        assert isinstance(each, transformers.LlamaConfig)
        assert type(each).__name__ == "LlamaConfig"
        assert type(each) == transformers.LlamaConfig  # noqa: E721
        assert type(each) != transformers.MistralConfig  # noqa: E721
        assert each == config
        assert config == each
        assert str(each) == str(config)
        assert each.to_dict() == config.to_dict()
        assert each.to_json_string() == config.to_json_string()
        assert each != transformers.LlamaConfig()
        assert type(type(each)(hidden_size=32)) is transformers.LlamaConfig
    other = transformers.AutoModelForCausalLM.from_config(model.config)
    assert type(other) is transformers.LlamaForCausalLM
    assert not patch_report(other).patched


SIBLINGS: dict[str, Callable[[Any, Path], Any]] = {
    "class": lambda config, saved: saved_class(saved)(config),
    "from_pretrained": lambda config, saved: saved_class(saved).from_pretrained(saved, config=config),
    "auto": lambda config, saved: transformers.AutoModelForCausalLM.from_config(config),
    "copy": lambda config, saved: saved_class(saved)(copy.deepcopy(config)),
}


def saved_class(saved: Path) -> Any:
    return getattr(transformers, json.loads((saved / "config.json").read_text())["architectures"][0])


@pytest.mark.parametrize("how", SIBLINGS)
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [*hf_models.FAMILIES, *present("Llama", "OLMo-3")])
def test_a_model_made_of_a_patched_ones_configuration(name: str, attn: str, how: str, tmp_path: Path) -> None:
    """transformers writes the name that a new model reads in it back to it."""
    model: Any = (hf_models if name in hf_models.FAMILIES else hf_families).build(name, attn)
    model.save_pretrained(tmp_path)
    config = model.config
    other = type(model)(config).eval()
    arguments = {"input_ids": tokens(2, 9), "attention_mask": left_padding(tokens(2, 9), 0, 3)[1]}
    before = other(**arguments).logits
    expected = model(**arguments).logits
    patch_model(model)
    patched = model(**arguments).logits

    made = SIBLINGS[how](model.config, tmp_path).eval()
    made.load_state_dict(model.state_dict())
    assert config._attn_implementation == other.config._attn_implementation == attn
    assert torch.equal(other(**arguments).logits, before)
    assert torch.equal(model(**arguments).logits, patched)
    mask = arguments["attention_mask"]
    assert error_where(mask, made(**arguments).logits, expected) < TOLERANCE
    assert not patch_report(made).patched

    assert unpatch_model(model).config is config
    assert config._attn_implementation == attn
    assert torch.equal(model(**arguments).logits, expected)
    assert error_where(mask, made(**arguments).logits, expected) < TOLERANCE


def test_a_layers_configuration_makes_a_model_too() -> None:
    model = patch_model(build("Llama"))
    transformers.LlamaForCausalLM(model.get_submodule(FIRST).config)
    assert unpatch_model(model).config._attn_implementation == "eager"


def test_copies_are_independent() -> None:
    model = patch_model(build("Llama"))
    for each in (model.config, model.get_submodule(FIRST).config):
        for other in (copy.copy(each), copy.deepcopy(each), pickle.loads(pickle.dumps(each))):
            assert isinstance(other, transformers.LlamaConfig)
            assert other == each
            other.some_setting = 5
            assert not hasattr(model.config, "some_setting")


def test_copies_of_a_model_keep_their_parts_together() -> None:
    options = FAMILIES["Gemma 3"].options
    vision = {**FAMILIES["ViT"].options, "num_channels": 3, "vision_use_head": False}
    config: Any = transformers.Gemma3Config(text_config=options, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    if model.config.text_config is not model.model.language_model.config:
        pytest.skip("this release parts them itself")
    kept: Any = config.text_config
    patch_model(model)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each.config.text_config is each.model.language_model.config
        text: Any = each.config.text_config
        text.some_setting = id(each)
        assert each.model.language_model.layers[0].self_attn.config.some_setting == id(each)
        other = transformers.Gemma3TextConfig()
        each.config.text_config = other
        assert each.config.text_config is other
    assert kept.some_setting == id(model)


# Weights that the configuration asks for


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_weights_by_configuration(
    attn: str, before: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers takes the setting under "eager" only, and checks it again when saving."""
    model, reference = pair("Mistral", attn)
    if before:
        model.config._attn_implementation = "eager"
        model.config.output_attentions = True
    patch_model(model)
    calls = spy_layers(monkeypatch)
    if not before:
        assert model(tokens(2, LENGTH)).attentions is None
        model.config.output_attentions = True
    found, expected = model(tokens(2, LENGTH)), reference(tokens(2, LENGTH), output_attentions=True)
    assert same_weights(found, expected)
    assert dense_masks(calls) == []

    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["output_attentions"] is True
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert same_weights(loaded(tokens(2, LENGTH)), expected)

    unpatch_model(model)
    assert same_weights(model(tokens(2, LENGTH)), expected)
    model.save_pretrained(tmp_path)
    patch_model(model).config.output_attentions = False
    assert model(tokens(2, LENGTH)).attentions is None


def test_weights_by_the_configuration_kept_from_before() -> None:
    model, reference = pair("Llama")
    config = model.config
    patch_model(model)
    config.output_attentions = True
    assert same_weights(model(tokens(1, 6)), reference(tokens(1, 6), output_attentions=True))


@pytest.mark.parametrize("why", ["part", "renamed"])
def test_weights_of_layers_that_give_none_are_refused(why: str) -> None:
    """As transformers does, where it decides."""
    model = build("Llama", "sdpa")
    if why == "part":
        patch_model(model, filter_fn=lambda module, name: name == FIRST)
    else:
        patch_model(model).config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="output_attentions"):
        model.config.output_attentions = True
