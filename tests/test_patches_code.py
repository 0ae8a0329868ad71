"""Models whose code works on masks get dense ones, also where only the implementation's name was given."""

from __future__ import annotations

import copy
import linecache
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from patches import code, patch_model
from patches.registry import uses_interface
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


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_a_router_that_reads_the_mask_of_its_layer(length: int, masked: bool) -> None:
    """NLLB-MoE's leaves padding out by it, and calls it a padding mask."""
    options: dict[str, Any] = {"vocab_size": 61, "d_model": 48, "num_experts": 2, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        options |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
        options |= {f"{side}_sparse_step": 2, f"{side}_layerdrop": 0.0}
    config = transformers.NllbMoeConfig(**options)
    reference = transformers.NllbMoeForConditionalGeneration._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    model = copy.deepcopy(reference.eval())
    if not any(map(uses_interface, model.modules())):
        pytest.skip("this release's layers don't use transformers' attention interface")
    mask = None
    if masked:
        mask = torch.ones(3, length, dtype=torch.int64)
        mask[1, : length // 2] = 0
    ids = {"input_ids": tokens(3, length), "decoder_input_ids": tokens(3, 5, 1), "attention_mask": mask}
    with torch.no_grad():
        found, expected = patch_model(model)(**ids).logits, reference(**ids).logits
    assert float((found - expected).abs().max()) < TOLERANCE


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
    """A configuration's class of a user's, in a module without source that has a layer with a `forward`."""
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
        ("return attention_mask + attention_mask", True),  # not by the interface
    ],
)
def test_a_users_model(forward: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code.works_on_masks(written(monkeypatch, forward)) is works


HELPER = "def helper(x, attention_mask): return x + attention_mask"
BODIES = {
    "return self.layer(x, attention_mask=attention_mask)": False,
    "return None if attention_mask is None else self.layer(x, attention_mask['full'])": False,
    "return x + attention_mask": True,
    "return x.masked_fill(torch.all(~(attention_mask == 0.0), dim=2), 0.0)": True,
    "return x.masked_fill(attention_mask, 0.0)": True,
    "return self.layer(x, torch.cat([attention_mask, x], dim=-1))": True,
    "return self.layer(x, attention_mask[:, :, :, : x.shape[1]])": True,
    "return self.layer(x, attention_mask.to(x.dtype))": True,
    "return helper(x, attention_mask)": True,
    "other = attention_mask; return other * x": True,
    "attention_mask = x; return attention_mask * x": False,
    # over tokens, of which [B, 1, Tq, Tk] can't be one
    "return x * attention_mask[:, :, None]": False,
    "return x * attention_mask.bool().unsqueeze(-1)": False,
    "return x + attention_mask.cumsum(1)": False,
    # made there: what was given is the user's
    "mask = create_causal_mask(attention_mask=attention_mask * 1); return self.layer(x, mask)": False,
    "mask = create_causal_mask(attention_mask=attention_mask); return self.layer(x, x + mask)": True,
    "masks = {'full': create_causal_mask(x)}; return self.layer(x, masks['full'], **masks.get('a'))": False,
}


@pytest.mark.parametrize("body", BODIES)
def test_a_module_that_is_no_attention_layer(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoders, layers and convolutions may compute with a mask before it comes to the attention."""
    lines = ["import torch", HELPER, "class Layer(torch.nn.Module):"]
    lines += ["    def forward(self, x, attention_mask=None):", f"        {body}"]
    file = tmp_path / "users_layer.py"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    spec: Any = spec_from_file_location("users_layer", file)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "users_layer", module)
    linecache.checkcache()
    spec.loader.exec_module(module)
    assert code.works_on_mask_of(transformers.LlamaConfig, module.Layer) is BODIES[body]


def test_a_module_of_another_configuration() -> None:
    """What computes with masks in a model that hears doesn't make those of the text dense."""
    layer = type("Layer", (nn.Module,), {"forward": lambda self, x, attention_mask: x + attention_mask})

    def init(self: Any, config: Any) -> None:
        nn.Module.__init__(self)

    init.__annotations__ = {"config": transformers.BertConfig}
    other = type("Other", (layer,), {"__init__": init})
    assert code.works_on_mask_of(transformers.LlamaConfig, layer)
    assert code.works_on_mask_of(transformers.BertConfig, other)
    assert not code.works_on_mask_of(transformers.LlamaConfig, other)


# Models that work on their masks outside of attention layers, or have these not on the interface

_TEXT: dict[str, Any] = {"vocab_size": 99, "num_hidden_layers": 2, "intermediate_size": 64}
_BLOOM: dict[str, Any] = {"vocab_size": 99, "n_layer": 2}
_MVP: dict[str, Any] = {"vocab_size": 99, "d_model": 56, "encoder_layers": 1, "decoder_layers": 1}
_BEIT: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
_LASR: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 16,
    "conv_kernel_size": 9,
}
_DEEPSEEK: dict[str, Any] = {
    **_TEXT,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "sliding_window": 6,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_GEMMA: dict[str, Any] = {
    **_TEXT,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 6,
}
_GEMMAS = {"encoder": _GEMMA, "decoder": {**_GEMMA, "cross_attention_hidden_size": 64}}

# Number of heads: some are also numbers of rows of compact masks.
OWN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "BEiT, biases": (
        "BeitModel",
        {**_BEIT, "use_relative_position_bias": True, "hidden_size": 64, "num_attention_heads": 4},
        True,
    ),
    "BEiT, 13 heads": (
        "BeitModel",
        {**_BEIT, "use_relative_position_bias": True, "hidden_size": 104, "num_attention_heads": 13},
        True,
    ),
    "BEiT, one bias": (
        "BeitModel",
        {**_BEIT, "use_shared_relative_position_bias": True, "hidden_size": 104, "num_attention_heads": 13},
        True,
    ),
    "LASR": ("LasrEncoder", _LASR, True),
    "T5Gemma": ("T5GemmaForConditionalGeneration", _GEMMAS, True),  # cross-attention without the window
    "DeepSeek-V4": ("DeepseekV4ForCausalLM", _DEEPSEEK, True),
    "Bloom": ("BloomForCausalLM", {**_BLOOM, "hidden_size": 64, "n_head": 4}, False),
    "Bloom, 7 heads": ("BloomForCausalLM", {**_BLOOM, "hidden_size": 56, "n_head": 7}, False),
    "MPT, 7 heads": ("MptForCausalLM", {"vocab_size": 99, "d_model": 56, "n_layers": 2, "n_heads": 7}, False),
    "RoFormer, 13 heads": (
        "RoFormerForMaskedLM",
        {**_TEXT, "hidden_size": 104, "num_attention_heads": 13},
        False,
    ),
    "MVP, 7 heads": (
        "MvpForCausalLM",
        {**_MVP, "decoder_attention_heads": 7, "encoder_attention_heads": 7},
        False,
    ),
}


def own(name: str, attn: str) -> Any:
    """A model of `OWN`, whose weights make its attention count."""
    cls, options, _ = OWN[name]
    if not hasattr(transformers, cls):
        pytest.skip("this release has no such model")
    kind: Any = getattr(transformers, cls)
    torch.manual_seed(0)
    model = kind._from_config(kind.config_class(**options), attn_implementation=attn).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def computed(model: Any) -> Tensor:
    """What a model of `OWN` makes of inputs of uneven length, where they count."""
    generator = torch.Generator().manual_seed(1)
    kind = type(model).__name__
    with torch.no_grad():
        if kind == "BeitModel":
            return model(torch.randn(2, 3, 16, 16, generator=generator)).last_hidden_state
        if kind == "LasrEncoder":
            mask = torch.ones(2, 120, dtype=torch.int64)
            mask[1, 60:] = 0
            out = model(torch.randn(2, 120, 16, generator=generator), attention_mask=mask).last_hidden_state
            return out[:, :10]
        ids, mask = left_padding(tokens(2, 17), 0, 5)
        if kind == "T5GemmaForConditionalGeneration":
            return model(ids, attention_mask=mask, decoder_input_ids=ids[:, 5:]).logits
        return model(ids, attention_mask=mask).logits * mask[..., None]


@pytest.mark.parametrize("way", ["by name", "patched"])
@pytest.mark.parametrize("name", OWN)
def test_models_with_ways_of_their_own(name: str, way: str) -> None:
    """Right, whatever the number of heads; and refused by a patch where it can't serve the layers."""
    reference = own(name, "eager")
    if OWN[name][2] and not any(map(uses_interface, reference.modules())):
        pytest.skip("in this release its layers are not on the interface")
    expected = computed(reference)
    if way == "by name":
        model = own(name, "streamattn")
    elif not OWN[name][2]:
        with pytest.raises(ValueError, match="there is no patch for"):
            patch_model(own(name, "eager"))
        return
    else:
        model = patch_model(own(name, "eager"))
    found = computed(model)
    assert float((found - expected).abs().max()) < TOLERANCE * max(1.0, float(expected.abs().max()))


class Wrapper(nn.Module):
    """Holds a model and its configuration, and works on the user's mask, as adapters of prompts do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Any:
        mask = torch.cat([attention_mask.new_ones(len(ids), 1), attention_mask], dim=1)
        return self.model(nn.functional.pad(ids, (1, 0)), attention_mask=mask).logits


def test_what_wraps_a_model_may_work_on_the_mask_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(Wrapper(build("Llama")))
    calls = spy_layers(monkeypatch)
    model(*left_padding(tokens(2, LENGTH), 0, 7))
    assert calls
    assert dense_masks(calls) == []
