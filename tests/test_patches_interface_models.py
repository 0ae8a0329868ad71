"""Every family of `tests.hf_families`, patched, against its own eager attention.

README's table of families is written by these tests, from what passed:
``WRITE_FAMILIES=1 pytest tests/test_patches_interface_models.py``. Without that they fail where README says
anything else than what there are tests for.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

import patches.hf
from patches import patch_model, patch_report, unpatch_model
from tests.hf_families import (
    FAMILIES,
    INSTALLED,
    LENGTH,
    README,
    build,
    complete,
    dense_masks,
    exists,
    families,
    inputs,
    makes_masks,
    pair,
    present,
    proved,
    proves,
    split_readme,
    spy_layers,
    table,
)
from tests.hf_models import TOLERANCE, cache_argument, tokens

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")


def logits_error(a: Tensor, b: Tensor, valid: Tensor | None) -> float:
    """Largest difference of [B, ...] logits at the positions `valid` [B, T], of a scale of 5."""
    difference = (a - b).abs().amax(-1)
    return float((difference if valid is None else difference * valid).max())


def served_compactly(name: str, calls: list[Any], model: Any) -> None:
    """Every patched layer ran, and none of them on a dense mask."""
    assert len(calls) >= len(patch_report(model).patched) > 0
    if makes_masks(name):
        assert dense_masks(calls) == []


# Logits and gradients


@proves("train")
def test_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair(name)
    arguments, valid = inputs(name)
    calls = spy_layers(monkeypatch)
    found = patch_model(model)(**arguments).logits
    served_compactly(name, calls, model)
    assert logits_error(found, reference(**arguments).logits, valid) < TOLERANCE


@proves("pad")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair(name)
    arguments, valid = inputs(name, side)
    calls = spy_layers(monkeypatch)
    found = patch_model(model)(**arguments).logits
    served_compactly(name, calls, model)
    expected = reference(**arguments).logits
    assert logits_error(found, expected, valid) < TOLERANCE
    if side == "left" or FAMILIES[name].kind == "encoder":  # else nobody is hidden from a valid position
        arguments.pop("attention_mask", None)
        arguments.pop("decoder_attention_mask", None)
        assert logits_error(reference(**arguments).logits, expected, valid) > 0.1


@proves("train")
def test_gradients(name: str) -> None:
    """Of every parameter, with padding where the family has it: sinks, biases of positions and norms too."""
    model, reference = pair(name)
    arguments, valid = inputs(name, "left" if name in families("pad") else None)
    found = parameter_gradients(patch_model(model), arguments, valid)
    expected = parameter_gradients(reference, arguments, valid)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        # A bias of keys has no gradient but for rounding.
        scale = gradient.abs().max().clamp(min=0.05)
        assert float((found[parameter] - gradient).abs().max() / scale) < TOLERANCE, parameter


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", [name for name in families("pad") if name != "Whisper"])
def test_a_single_token(name: str, masked: bool) -> None:
    model, reference = pair(name)
    arguments = {argument: x[:, :1] for argument, x in inputs(name)[0].items()}
    if masked:
        arguments["attention_mask"] = torch.ones(2, 1, dtype=torch.int64)
    found, expected = patch_model(model)(**arguments).logits, reference(**arguments).logits
    assert logits_error(found, expected, None) < TOLERANCE


def parameter_gradients(model: Any, arguments: dict[str, Tensor], valid: Tensor | None) -> dict[str, Tensor]:
    """Gradients of a smooth function of the logits at valid positions."""
    logits = model(**arguments).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))
    loss = (weight * torch.tanh(logits / 4) * (1.0 if valid is None else valid.unsqueeze(-1))).sum()
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", INSTALLED)
def test_unpatched_it_is_as_before(name: str) -> None:
    model, before = build(name, "eager"), build(name, "eager")
    arguments, _ = inputs(name)
    patch_model(model)(**arguments)
    assert unpatch_model(model) is model
    assert torch.equal(model(**arguments).logits, before(**arguments).logits)
    for (path, module), other in zip(model.named_modules(), before.modules(), strict=True):
        assert set(module.__dict__) == set(other.__dict__), path
        config = module.__dict__.get("config")
        if config is not None:
            assert type(config) is type(other.config)
            assert config._attn_implementation == other.config._attn_implementation
            assert config.to_dict() == other.config.to_dict()
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("name", INSTALLED)
def test_by_name_without_patching(name: str) -> None:
    arguments, _ = inputs(name, "left" if name in families("pad") else None)
    named, patched = build(name, "streamattn"), patch_model(build(name))
    assert not patch_report(named).patched
    assert torch.equal(named(**arguments).logits, patched(**arguments).logits)


TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "Falcon": ({"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}, "self_attention"),
    "GPTNeo": (
        {"hidden_size": 32, "num_heads": 4, "num_layers": 1, "attention_types": [[["global"], 1]]},
        "attn.attention",
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_layers_that_are_chosen_from_a_table(name: str) -> None:
    """transformers' table has no other implementation; a patch says which layers it can't serve, and why."""
    options, layer = TABLES[name]
    config = getattr(transformers, f"{name}Config")(vocab_size=50, **options)
    kind: Any = getattr(transformers, f"{name}Model")
    with pytest.raises(KeyError, match="streamattn"):
        kind._from_config(config, attn_implementation="streamattn")
    model = kind._from_config(config, attn_implementation="eager")
    with pytest.raises(ValueError, match=rf"h\.0\.{re.escape(layer)}: there is no patch for .*Attention"):
        patch_model(model)


# Windows, packed documents


@proves("window")
def test_windows_hide(name: str) -> None:
    """The windows of the tests are smaller than the sequences: without them the logits would differ."""
    family = FAMILIES[name]
    wide: dict[str, Any] = {"window": {"sliding_window": 64}, "chunk": {"attention_chunk_size": 64}}[
        family.mask
    ]
    if name == "ModernBERT":
        wide = {"local_attention": 128}
    arguments, _ = inputs(name)
    narrow, other = patch_model(build(name)), patch_model(build(name, "eager", **wide))
    assert logits_error(narrow(**arguments).logits, other(**arguments).logits, None) > 0.1


PACKED: dict[str, dict[str, Any]] = {
    "cache by default": {},
    "mask of ones": {"attention_mask": torch.ones(2, LENGTH, dtype=torch.int64)},
    "no cache": {"use_cache": False},
}


@proves("pack")
@pytest.mark.parametrize("how", PACKED)
def test_packed_documents_do_not_see_each_other(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/transformers#46634: a cache, made by default, or a mask of ones hid the packing."""
    model, reference = pair(name)
    ids, cuts = tokens(2, LENGTH), (8, 3)
    positions = torch.stack([torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]) for cut in cuts])
    calls = spy_layers(monkeypatch)
    found = patch_model(model)(ids, position_ids=positions, **PACKED[how]).logits
    served_compactly(name, calls, model)
    for row, cut in enumerate(cuts):
        alone = [reference(part[None]).logits[0] for part in (ids[row, :cut], ids[row, cut:])]
        assert logits_error(found[row], torch.cat(alone), None) < TOLERANCE


# Generation


@proves("cache")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of uneven length, 32 tokens; the windows slide out of the prompt."""
    model, reference = pair(name)
    expected = generated(reference, name)
    calls = spy_layers(monkeypatch)
    options = {} if cache == "dynamic" else {"cache_implementation": cache}  # which is the default
    found = generated(patch_model(model), name, **options)
    served_compactly(name, calls, model)
    assert torch.equal(found, expected)
    assert found.shape[1] >= 32
    assert len(set(found.flatten().tolist())) > 6  # it says something


def generated(model: Any, name: str, **options: Any) -> Tensor:
    """32 tokens after the inputs of a family."""
    arguments, _ = inputs(name, "left")
    arguments = {key: value for key, value in arguments.items() if "decoder" not in key}
    with torch.no_grad():
        lengths = {"min_new_tokens": 32, "max_new_tokens": 32, "no_repeat_ngram_size": 2}
        found = model.generate(**arguments, **lengths, do_sample=False, **options)
    return found[:, LENGTH:] if FAMILIES[name].kind == "decoder" else found


@pytest.mark.parametrize("name", present("Llama", "Gemma 2", "T5"))
def test_beams(name: str) -> None:
    model, reference = pair(name)
    expected = generated(reference, name, num_beams=3)
    assert torch.equal(generated(patch_model(model), name, num_beams=3), expected)


@pytest.mark.parametrize("name", families("pack"))
def test_chunked_prefill(name: str) -> None:
    """Several queries on a cache that holds keys already: aligned with the last key."""
    model, reference = pair(name)
    ids = tokens(2, LENGTH)
    expected = reference(ids).logits
    patch_model(model)
    argument = cache_argument(model)
    first = model(ids[:, :6])
    second = model(ids[:, 6:9], **{argument: first.past_key_values})
    third = model(ids[:, 9:], **{argument: second.past_key_values})
    found = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert logits_error(found, expected, None) < TOLERANCE


# Weights, compilation


@pytest.mark.parametrize("name", INSTALLED)
def test_true_weights_when_asked_for(name: str) -> None:
    model, reference = pair(name)
    arguments, _ = inputs(name)
    found = patch_model(model)(**arguments, output_attentions=True)
    expected = reference(**arguments, output_attentions=True)
    if patches.hf._active_collector is None and name == "ViT":
        pytest.skip("in this release its layers aren't told that weights are wanted")
    keys = [key for key in expected if key.endswith("attentions") and expected[key]]
    assert keys
    for key in keys:
        assert len(found[key]) == len(expected[key])
        for a, b in zip(found[key], expected[key], strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    assert logits_error(found.logits, expected.logits, None) < TOLERANCE


def compiles_whole(model: Any, arguments: dict[str, Tensor]) -> bool:
    try:
        torch.compile(model, fullgraph=True, backend="eager")(**arguments)
    except TorchDynamoException:
        return False
    return True


@proves("compile")
def test_compiled_whole(name: str) -> None:
    """Without a graph break, padded where the family has it."""
    torch._dynamo.reset()
    model, reference = pair(name)
    arguments, valid = inputs(name, "left" if name in families("pad") else None)
    with torch.no_grad():
        compiled = torch.compile(patch_model(model), fullgraph=True, backend="eager")
        try:
            found = compiled(**arguments).logits
        except TorchDynamoException:
            if compiles_whole(reference, arguments):
                raise
            pytest.skip("in this release the unpatched model breaks the graph too")
        assert logits_error(found, reference(**arguments).logits, valid) < TOLERANCE


@pytest.mark.parametrize("name", present("Llama", "Gemma 2", "Llama 4"))
def test_packed_documents_compiled(name: str) -> None:
    torch._dynamo.reset()
    model, reference = pair(name)
    ids = tokens(1, LENGTH)
    positions = torch.cat([torch.arange(8), torch.arange(LENGTH - 8)])[None]
    alone = torch.cat([reference(ids[:, :8]).logits, reference(ids[:, 8:]).logits], dim=1)
    compiled = torch.compile(patch_model(model), fullgraph=True, backend="eager")
    for options in PACKED.values():
        options = {key: value[:1] if key == "attention_mask" else value for key, value in options.items()}
        assert logits_error(compiled(ids, position_ids=positions, **options).logits, alone, None) < TOLERANCE


@pytest.mark.parametrize("name", present("Llama"))
def test_nothing_to_hide_compiles_to_no_mask(name: str) -> None:
    """Nor to segments, though transformers takes every row for a packed one in a graph."""
    torch._dynamo.reset()
    given: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        calls = [node for node in graph.graph.nodes if "attention_forward" in str(node.target)]
        given.extend(node.args[3:7] for node in calls)
        return graph.forward

    with torch.no_grad():
        torch.compile(patch_model(pair(name)[0]), fullgraph=True, backend=backend)(
            tokens(1, LENGTH), use_cache=False
        )
    assert given == [(None,) * 4] * 2


@pytest.mark.skipif(not complete(), reason="README is written for a release that has all families")
def test_the_readme_says_what_is_tested() -> None:
    before, written, after = split_readme()
    if os.environ.get("WRITE_FAMILIES") == "1":
        README.write_text(before + table(proved) + after, encoding="utf-8")
        assert table(proved) == table(exists), "not every test ran and passed in this process; README says so"
    else:
        wanted = table(exists)
        assert written == wanted, f"see this file's docstring; the table in README.md should read\n{wanted}"
