"""What patching through the attention interface does to a model, and what it leaves alone."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import patches.compact
from patches import interface, patch_model, patch_report, unpatch_model
from patches.views import LayerConfig
from streamattn import attention
from tests.hf_families import FAMILIES, LENGTH, WINDOW, build, dense_masks, inputs, pair, present, spy_layers
from tests.hf_models import TOLERANCE, VOCABULARY, cache_argument, left_padding, static_cache, tokens

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

attention_function: Any = interface.attention_function  # called with arguments by name from a table

LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def error(a: Tensor, b: Tensor, mask: Tensor | None = None) -> float:
    difference = (a - b).abs().amax(-1)
    return float((difference if mask is None else difference * mask).max())


def runs(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many layers of a model call `streamattn.attention` in one forward pass."""
    with monkeypatch.context() as patch:
        calls = spy_layers(patch)
        model(tokens(1, 6))
        return len(calls)


# Isolation


def test_other_models_of_the_same_configuration_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(**FAMILIES["Llama"].options)
    first, second = (transformers.LlamaForCausalLM(config).eval() for _ in range(2))
    before = second(tokens(1, 6)).logits
    name = config._attn_implementation
    patch_model(first)
    assert runs(first, monkeypatch) == 2
    assert runs(second, monkeypatch) == 0
    assert second.config is config
    assert config._attn_implementation == name
    assert runs(transformers.LlamaForCausalLM(config), monkeypatch) == 0
    assert torch.equal(second(tokens(1, 6)).logits, before)


def test_the_configuration_stays_one_object() -> None:
    """What is set on the model reaches every module, patched or not, before and after."""
    model = build("Llama")
    for change in (lambda m: m, patch_model, unpatch_model):
        change(model)
        assert model.config is model.model.config
        for number, value in enumerate(("a", "b")):
            model.config.some_setting = value
            assert model.model.layers[number].self_attn.config.some_setting == value
            model.model.layers[number].self_attn.config.some_setting = "c"
            assert model.config.some_setting == "c"


def test_composite_models_keep_their_parts_together() -> None:
    model = composite()
    if model.config.text_config is not model.model.language_model.config:
        pytest.skip("this release parts them itself")
    patch_model(model)
    assert model.config.text_config is model.model.language_model.config
    assert model.config.vision_config is model.model.vision_tower.config
    assert len(patch_report(model).patched) == 4
    for part in (model.config, model.config.text_config, model.config.vision_config):
        assert part._attn_implementation == "streamattn"
    unpatch_model(model)
    assert model.config.text_config is model.model.language_model.config
    assert model.config.text_config._attn_implementation == "eager"


def composite() -> Any:
    """A tiny model that sees: a text model and a vision model under one configuration."""
    text = {**FAMILIES["Gemma 3"].options, "initializer_range": 0.1}
    vision = {**FAMILIES["ViT"].options, "num_channels": 3, "vision_use_head": False}
    options: dict[str, Any] = {"mm_tokens_per_image": 4, "image_token_id": VOCABULARY - 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, **options)
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("compiled", [False, True])
def test_image_tokens_that_see_each_other(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask without structure stays dense, and complete."""
    model, reference = composite(), composite()
    ids = tokens(2, LENGTH).masked_fill(tokens(2, LENGTH) == VOCABULARY - 2, 5)
    ids[:, 4:8] = VOCABULARY - 2
    ids, mask = left_padding(ids, 0, 3)
    ids[1, 4:8] = VOCABULARY - 2
    arguments = {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "token_type_ids": (ids == VOCABULARY - 2).long(),
    }
    expected = reference(**arguments).logits
    calls = spy_layers(monkeypatch)
    patch_model(model)
    run: Callable[..., Any] = torch.compile(model, backend="eager") if compiled else model
    assert error(run(**arguments).logits, expected, mask) < TOLERANCE
    if not compiled:
        assert len(dense_masks(calls)) == 2  # of the text model


@pytest.mark.parametrize("name", present("Llama", "Mistral"))
def test_a_decoder_that_sees_both_ways(name: str) -> None:
    """Its layers still say that they are causal; a window is one to both sides."""
    model, reference = pair(name, is_causal=False)
    if error(reference(tokens(2, LENGTH)).logits, build(name)(tokens(2, LENGTH)).logits) < 0.1:
        pytest.skip("this release is causal whatever the configuration says")
    patch_model(model)
    for padded in (None, "left"):
        arguments, valid = inputs(name, padded)
        assert error(model(**arguments).logits, reference(**arguments).logits, valid) < TOLERANCE


@pytest.mark.parametrize("side", ["left", "right", "within"])
@pytest.mark.parametrize("name", present("Llama", "Mistral", "gpt-oss", "BART"))
def test_places_of_padding_see_what_is_before_them(name: str, side: str) -> None:
    """Labels may count there, where the padding is an ordinary token; only rows that see nothing differ."""
    model, reference = pair(name)
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, {"left": slice(0, 7), "right": slice(12, LENGTH), "within": slice(5, 9)}[side]] = 0
    seen = mask.cumsum(1) > 0
    key = "decoder_attention_mask" if name == "BART" else "attention_mask"
    ids = {"decoder_input_ids": tokens(2, LENGTH)} if name == "BART" else {}
    found = patch_model(model)(tokens(2, LENGTH), **{key: mask}, **ids).logits
    expected = reference(tokens(2, LENGTH), **{key: mask}, **ids).logits
    if name in ("Mistral", "gpt-oss"):
        seen = mask.unfold(1, WINDOW, 1).sum(-1) > 0  # of the last WINDOW places
        seen = torch.cat([mask[:, : WINDOW - 1].cumsum(1) > 0, seen], dim=1)
    assert error(found, expected, seen) < TOLERANCE


# Part of a model


@pytest.mark.parametrize("maker", ["eager", "sdpa"])
@pytest.mark.parametrize("name", present("Llama", "Mistral", "OLMo-3", "T5"))
def test_part_of_a_model(name: str, maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other layers get the masks that they know; the patched ones take them."""
    model, reference = pair(name, maker)
    first = next(iter(patch_report(model).skipped))
    patch_model(model, filter_fn=lambda module, layer: layer == first)
    assert list(patch_report(model).patched) == [first]
    assert model.config._attn_implementation == maker
    for padded in (None, "left"):
        arguments, valid = inputs(name, padded)
        assert error(model(**arguments).logits, reference(**arguments).logits, valid) < TOLERANCE
    if name != "T5":
        ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
        options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
        expected = reference.generate(ids, **options)
        for cache in ("dynamic", "static"):
            found = model.generate(ids, cache_implementation=cache, **options)
            assert torch.equal(found, expected)


@pytest.mark.skipif(not hasattr(transformers, "DogeForCausalLM"), reason="this release has no such model")
def test_layers_that_make_another_mask_get_dense_ones() -> None:
    """Doge's layers add what they compute from the values to the mask, so that it can't be compact."""

    def tiny() -> Any:
        torch.manual_seed(0)
        options = {**FAMILIES["Llama"].options, "sliding_window": WINDOW, "keep_window_size": 4}
        config = transformers.DogeConfig(**options)
        return transformers.DogeForCausalLM._from_config(config, attn_implementation="eager").eval()

    model, reference = tiny(), tiny()
    patch_model(model)
    assert len(patch_report(model).patched) == 2
    assert model.config._attn_implementation == "eager"
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    options = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


@pytest.mark.parametrize("maker", ["eager", "sdpa", "streamattn"])
def test_an_empty_static_cache(maker: str) -> None:
    """huggingface/transformers#30414: only what is filled counts, also where no mask says so."""
    model, reference = pair("Llama", maker)
    patch_model(model, filter_fn=lambda module, layer: layer == LAYERS[0])
    ids = tokens(2, 7)
    cache = {cache_argument(model): static_cache(model, 2, 24)}
    with torch.no_grad():
        first = model(ids, **cache).logits
        second = model(ids[:, :3], **cache).logits
    expected = reference(torch.cat([ids, ids[:, :3]], dim=1)).logits
    assert error(torch.cat([first, second], dim=1), expected) < TOLERANCE


def test_the_rest_can_follow() -> None:
    model, reference = pair("Llama")
    config = model.config
    patch_model(model, filter_fn=lambda module, layer: layer == LAYERS[1])
    assert model.config is config  # nothing to keep apart yet
    patch_model(model)
    assert list(patch_report(model).patched) == LAYERS
    assert model.config._attn_implementation == "streamattn"
    own = model.config
    assert patch_model(model).config is own
    unpatch_model(model)
    assert model.config._attn_implementation == config._attn_implementation == "eager"
    ids = tokens(1, 9)
    assert torch.equal(model(ids).logits, reference(ids).logits)


@pytest.mark.parametrize("name", present("Mistral", "T5"))
def test_a_part_that_is_unpatched_gets_masks_that_it_knows(name: str) -> None:
    model, reference = pair(name)
    patch_model(model)
    first, *others = patch_report(model).patched
    unpatch_model(model.get_submodule(first))
    assert list(patch_report(model).patched) == others
    arguments, valid = inputs(name, "left")
    with torch.no_grad():
        difference = (model(**arguments).logits - reference(**arguments).logits).abs().amax(-1)
    assert float((difference if valid is None else difference * valid).max()) < TOLERANCE
    patch_model(model)
    assert list(patch_report(model).patched) == [first, *others]
    assert unpatch_model(model).config._attn_implementation == "eager"


def test_a_single_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Llama")
    layer = model.get_submodule(LAYERS[0])
    assert patch_model(layer) is layer
    assert list(patch_report(layer).patched) == [""]
    assert layer.config.shared is model.config
    assert runs(model, monkeypatch) == 1
    unpatch_model(layer)
    assert layer.config is model.config


# What the model must not lose


def test_the_report_and_the_names() -> None:
    model = build("Llama")
    assert set(patch_report(model).skipped.values()) == {"patch_model was not called for it"}
    patch_model(model)
    assert patch_report(model).patched == dict.fromkeys(LAYERS, "LlamaAttention (attention=streamattn)")
    assert f"  {LAYERS[1]}: LlamaAttention (attention=streamattn)\n" in f"{patch_report(model)}\n"
    assert "LlamaConfig" in repr(model.get_submodule(LAYERS[0]).config)


def test_printed_it_shows_the_patch() -> None:
    model, plain = pair("Llama")
    patch_model(model, filter_fn=lambda module, name: name == LAYERS[0])
    assert repr(model).count("attention=streamattn") == 1
    assert repr(patch_model(model)).count("attention=streamattn") == 1  # of two layers that are alike
    assert repr(model.get_submodule(LAYERS[0])).count("attention=streamattn") == 1
    assert repr(unpatch_model(model)) == repr(plain)


@pytest.mark.parametrize("after", ["eager", "sdpa"])
def test_set_attn_implementation_does_not_undo_the_patch(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = pair("Mistral")
    patch_model(model)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(after)
    else:
        model.config._attn_implementation = after
    assert model.config._attn_implementation == after
    assert runs(model, monkeypatch) == 2
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    expected = reference(ids, attention_mask=mask).logits
    assert error(model(ids, attention_mask=mask).logits, expected, mask) < TOLERANCE
    unpatch_model(model)
    assert model.config._attn_implementation == after  # the last word is the user's
    assert runs(model, monkeypatch) == 0


@pytest.mark.parametrize("name", present("Llama", "Gemma 2", "T5"))
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model, plain = pair(name)
    patch_model(model)
    model.save_pretrained(tmp_path / "patched")
    plain.save_pretrained(tmp_path / "plain")
    saved, expected = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("patched", "plain"))
    assert saved == expected
    assert "streamattn" not in (tmp_path / "patched" / "config.json").read_text()
    assert list(model.state_dict()) == list(plain.state_dict())
    arguments, _ = inputs(name)
    loaded = type(model).from_pretrained(tmp_path / "patched").eval()
    assert not patch_report(loaded).patched
    assert torch.equal(patch_model(loaded)(**arguments).logits, model(**arguments).logits)
    named = type(model).from_pretrained(tmp_path / "patched", attn_implementation="streamattn").eval()
    assert torch.equal(named(**arguments).logits, model(**arguments).logits)


def roundtrip(model: nn.Module, how: str) -> Any:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build("Llama"))
    other = roundtrip(model, how)
    assert runs(other, monkeypatch) == 2
    assert other.config is not model.config
    for path in LAYERS:
        view = other.get_submodule(path).config
        assert isinstance(view, LayerConfig)
        assert view.shared is other.config
    ids = tokens(1, 7)
    assert torch.equal(other(ids).logits, model(ids).logits)
    unpatch_model(other)
    assert other.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "streamattn"
    assert runs(other, monkeypatch) == 0
    assert runs(model, monkeypatch) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, reference = pair("Gemma 2")
    patch_model(model).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ids, mask = left_padding(tokens(2, LENGTH), 0, 7)
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 7] = -100
    for m in (model, reference):
        m(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None, name
        assert float((a.grad - b.grad).abs().max() / b.grad.abs().max().clamp(min=1e-3)) < TOLERANCE, name


def test_through_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Adapter(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.base_model = nn.ModuleDict({"model": model})
            self.config = model.config

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.base_model["model"](*args, **kwargs)

    wrapped = patch_model(Adapter(build("Llama")))
    assert wrapped.config is wrapped.base_model["model"].config
    assert runs(wrapped, monkeypatch) == 2
    assert runs(unpatch_model(wrapped), monkeypatch) == 0


# What can't be served


def test_a_layer_that_chooses_keys_by_index_is_refused() -> None:
    class SparseAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.LlamaConfig()

        def forward(self, x: Tensor) -> Any:
            function: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
            return function(self, x, x, x, None, scaling=1.0, indices=x)

    model = nn.Sequential(SparseAttention())
    with pytest.raises(ValueError, match="0: it passes indices: it chooses keys by index"):
        patch_model(model)
    assert not patch_report(model).patched
    with pytest.raises(ValueError, match="SparseAttention passed indices"):
        attention_function(model[0], *[torch.zeros(1, 1, 2, 4)] * 3, None, indices=torch.zeros(1))


ALL_ATTENTION_FUNCTIONS = interface.modeling_utils.AttentionInterface()


def test_a_layer_without_a_configuration_is_refused() -> None:
    model = build("Llama")
    model.get_submodule(LAYERS[0]).config = None
    with pytest.raises(ValueError, match=rf"{LAYERS[0]}: it has no configuration"):
        patch_model(model)
    assert not patch_report(model).patched
    patch_model(model, strict=False)
    assert list(patch_report(model).patched) == LAYERS[1:]


def test_attention_without_the_interface_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=r"there is no patch for .*BloomAttention"):
        patch_model(transformers.BloomForCausalLM(config))


def test_a_subclass_with_a_forward_of_its_own_is_refused() -> None:
    model = build("Llama")
    layer = model.get_submodule(LAYERS[0])
    forward = type(layer).forward
    layer.__class__ = type(
        "Mine", (type(layer),), {"forward": lambda *args, **named: forward(*args, **named)}
    )
    with pytest.raises(ValueError, match=rf"{LAYERS[0]}: there is no patch for .*Mine"):
        patch_model(model)
    report = patch_report(patch_model(model, strict=False))
    assert (list(report.patched), list(report.skipped)) == (LAYERS[1:], LAYERS[:1])


def test_a_dropout_of_everything_is_refused() -> None:
    with pytest.raises(ValueError, match=r"its dropout must be a probability in \[0, 1\), got 1\.0"):
        patch_model(build("Llama", attention_dropout=1.0))


def test_packed_bounds_on_a_cache_raise() -> None:
    layer = build("Llama").get_submodule(LAYERS[0])
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 5, 8)
    with pytest.raises(ValueError, match="packed documents"):
        attention_function(layer, q, k, k, None, cu_seq_lens_q=torch.tensor([0, 2]))


# The attention function by itself


class Layer(nn.Module):
    """The least that an attention function asks of a layer."""

    def __init__(self, name: str = "streamattn", causal: bool = True, **config: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"attn_implementation": name, **config}
        self.config = transformers.LlamaConfig(**options)
        self.is_causal = causal
        self.layer_idx = 0


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = random(2, 4, 6, 8), random(2, 2, 6, 8, seed=1), random(2, 2, 6, 8, seed=2)


def test_windows_to_one_side_and_both() -> None:
    for causal, window in ((True, (2, 0)), (False, (2, 2))):
        found, weights = attention_function(Layer(causal=causal), Q, K, V, None, sliding_window=3)
        assert weights is None
        assert torch.equal(found, attention(Q, K, V, window_size=window).transpose(1, 2))


def test_a_sliding_layer_without_a_window_raises() -> None:
    layer = Layer(layer_types=["sliding_attention"], num_hidden_layers=1)
    with pytest.raises(
        ValueError, match=r"Layer is a sliding layer .* neither it nor its mask gave the window"
    ):
        attention_function(layer, Q, K, V, None)
    layer.config.sliding_window = WINDOW
    mask = patches.compact.write(None, None, causal=True, windowed=True, device=None)
    found, _ = attention_function(layer, Q, K, V, mask)
    assert torch.equal(found, attention(Q, K, V, window_size=WINDOW).transpose(1, 2))


def test_what_the_call_says_of_causality_counts() -> None:
    found, _ = attention_function(Layer(), Q, K, V, None, is_causal=False)
    assert torch.equal(found, attention(Q, K, V).transpose(1, 2))


def test_a_dense_mask_is_complete() -> None:
    """Neither causality nor the window come on top: they are in it."""
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(5)) < 0.7
    mask[..., 0] = True
    found, _ = attention_function(Layer(), Q, K, V, mask, sliding_window=2)
    assert torch.equal(found, attention(Q, K, V, attn_mask=mask).transpose(1, 2))


@pytest.mark.parametrize("kind", ["none", "bool", "float", "compact"])
def test_position_bias(kind: str) -> None:
    """With causality or with any mask, and with its gradient."""
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, :2] = True
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    seen = causal & ~hidden[:, None, None]
    lowest = torch.finfo(torch.float32).min
    mask = {
        "none": None,
        "bool": seen,
        "float": torch.zeros(seen.shape).masked_fill(~seen, lowest),
        "compact": patches.compact.write(
            -hidden.to(torch.int32), None, causal=True, windowed=False, device=None
        ),
    }[kind]
    biases = [random(1, 4, 6, 6, seed=4).requires_grad_() for _ in range(2)]
    found, _ = attention_function(Layer(), Q, K, V, mask, position_bias=biases[0], scaling=1.0)
    seen = causal if kind == "none" else seen
    dense = biases[1].masked_fill(~seen, lowest).expand(2, -1, -1, -1)
    expected = attention(Q, K, V, attn_mask=dense, scale=1.0).transpose(1, 2)
    valid = torch.ones(2, 6, 1, 1) if kind == "none" else (~hidden).float()[..., None, None]
    assert float(((found - expected) * valid).abs().max()) < 1e-5
    for out in (found, expected):
        (out * valid * random(2, 6, 4, 8, seed=6)).sum().backward()
    assert biases[0].grad is not None and biases[1].grad is not None
    assert torch.allclose(biases[0].grad, biases[1].grad, atol=1e-5)


def test_learned_queries_without_a_batch() -> None:
    found, _ = attention_function(Layer(causal=False), Q[:1], K, V, None)
    assert torch.equal(found, attention(Q[:1].expand(2, -1, -1, -1), K, V).transpose(1, 2))


def test_one_encoded_text_for_a_whole_batch() -> None:
    found, _ = attention_function(Layer(causal=False), Q, K[:1], V[:1], None)
    assert torch.equal(found, attention(Q, *(x[:1].expand(2, -1, -1, -1) for x in (K, V))).transpose(1, 2))


@pytest.mark.parametrize("argument", ["s_aux", "sinks"])
def test_sinks_by_either_name(argument: str) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    found, _ = attention_function(Layer(), Q, K, V, None, **{argument: sinks})
    assert torch.equal(found, attention(Q, K, V, causal=True, sinks=sinks).transpose(1, 2))


@pytest.mark.parametrize("kind", ["GptOss", "GraniteSWA", "GraniteMoeSWA"])
def test_weights_beside_sinks(kind: str) -> None:
    """Granite's are those before the sinks scale the output, gpt-oss's leave the sink's share out."""
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip("this release has no such model")
    options = {**FAMILIES["gpt-oss"].options, "sliding_window": WINDOW}
    config = getattr(transformers, f"{kind}Config")(**options)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    reference, model = (cls._from_config(config, attn_implementation="eager").eval() for _ in range(2))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "sinks" in name:
                parameter.normal_(std=2.0)
            parameter.nan_to_num_()
    model.load_state_dict(reference.state_dict())
    found = patch_model(model)(tokens(2, LENGTH), output_attentions=True)
    expected = reference(tokens(2, LENGTH), output_attentions=True)
    for weights, want in zip(found.attentions, expected.attentions, strict=True):
        assert torch.allclose(weights, want, atol=1e-5)
    assert float((found.logits - expected.logits).abs().max()) < TOLERANCE
    share = 1 - found.attentions[0].sum(-1)
    assert float(share.abs().max()) < 1e-5 or kind == "GptOss"
    assert interface._sinks_scale_the_output(model.get_submodule(LAYERS[0])) is (kind != "GptOss")


def test_a_flash_mask_of_two_dimensions() -> None:
    """As models of a flash implementation hand it to layers: over the keys, or over those that are filled."""
    layer = Layer()
    layer.config._attn_implementation_internal = "flash_attention_2"
    mask = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    found, _ = attention_function(layer, Q, K, V, mask)
    expected = attention(Q, K, V, causal=True, attn_mask=mask[:, None, None])
    assert torch.equal(found, expected.transpose(1, 2))
    longer = [torch.cat([x, torch.full_like(x, 9.0)], dim=2) for x in (K, V)]
    found, _ = attention_function(layer, Q, *longer, mask)
    assert torch.equal(found, expected.transpose(1, 2))


def test_mixed_dtypes_become_those_of_the_values() -> None:
    found, _ = attention_function(Layer(), Q, K, V.bfloat16(), None)
    assert found.dtype == torch.bfloat16


def test_bounds_of_packed_documents() -> None:
    """As `DataCollatorWithFlattening` gives them."""
    bounds = torch.tensor([0, 2, 6, 9, 12], dtype=torch.int32)
    found, _ = attention_function(Layer(), Q, K, V, None, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1], [2, 2, 2, 3, 3, 3]], dtype=torch.int32)
    assert torch.equal(found, attention(Q, K, V, causal=True, segment_ids=segments).transpose(1, 2))
