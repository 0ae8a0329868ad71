"""Tiny models of the families that patches serve, and what tests prove of each: README's table.

A family says what its model has; a test marked with `proves` runs on each family that has a column of the
table. GPT-2 and OLMo-2 have patches of their own, the others reach `streamattn.attention` through
transformers' attention interface. Windows and chunks are smaller than the sequences of the tests,
initialisation is wide (see `tests.hf_models`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import patches.compact
import patches.hf
from tests.hf_models import PAD, VOCABULARY, left_padding, tokens

LENGTH = 19
WINDOW = 5
PADS = (0, 7)  # of the two rows of a padded batch

_SPECIAL = {"bos_token_id": 1, "eos_token_id": VOCABULARY - 1, "pad_token_id": PAD}
_DECODER = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,  # a tied head repeats the last token for ever
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.25,
    **_SPECIAL,
}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    **_SPECIAL,
}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "init_std": 0.25,
    **_SPECIAL,
}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        model: class of the model, in transformers.
        config: class of its configuration.
        options: what the configuration is made with.
        kind: "decoder", "encoder", "vision" or "seq2seq" (with text or audio going in).
        mask: what of a mask it has: "window", "chunk", "" for none.
        has: further things that its attention needs, for README.
    """

    model: str
    config: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    mask: str = ""
    has: str = ""


FAMILIES = {
    "GPT-2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        "decoder",
        {
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": False,
            "n_positions": 160,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 4,
            "initializer_range": 0.25,
            **_SPECIAL,
        },
        has="fused projection, a patch of its own",
    ),
    "OLMo-2": Family(
        "Olmo2ForCausalLM", "Olmo2Config", "decoder", _DECODER, has="QK-norm, a patch of its own"
    ),
    "Llama": Family("LlamaForCausalLM", "LlamaConfig", "decoder", _DECODER, has="grouped heads"),
    "Qwen2": Family(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        "decoder",
        {**_DECODER, **_ALTERNATING, "use_sliding_window": True},
        mask="window",
    ),
    "Qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3Config", "decoder", {**_DECODER, "head_dim": 16}, has="QK-norm"
    ),
    "Mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        "decoder",
        {**_DECODER, "sliding_window": WINDOW},
        mask="window",
    ),
    "Phi-3": Family(
        "Phi3ForCausalLM", "Phi3Config", "decoder", {**_DECODER, "sliding_window": WINDOW}, mask="window"
    ),
    "PhiMoE": Family(
        "PhimoeForCausalLM",
        "PhimoeConfig",
        "decoder",
        {**_DECODER, "sliding_window": WINDOW, "num_local_experts": 2},
        mask="window",
    ),
    "Gemma 2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "decoder",
        {
            **_DECODER,
            **_ALTERNATING,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 4.0,
        },
        mask="window",
        has="softcap",
    ),
    "Gemma 3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        "decoder",
        {**_DECODER, **_ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 16},
        mask="window",
        has="QK-norm",
    ),
    "OLMo-3": Family(
        "Olmo3ForCausalLM",
        "Olmo3Config",
        "decoder",
        {**_DECODER, **_ALTERNATING},
        mask="window",
        has="QK-norm",
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        "decoder",
        {**_DECODER, **_ALTERNATING, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
        mask="window",
        has="sinks",
    ),
    "Llama 4": Family(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        "decoder",
        {
            **_DECODER,
            "head_dim": 16,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
        },
        mask="chunk",
    ),
    "BERT": Family("BertForMaskedLM", "BertConfig", "encoder", _ENCODER),
    "ModernBERT": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        "encoder",
        {**_ENCODER, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
        mask="window",
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        "vision",
        {
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "initializer_range": 0.25,
        },
    ),
    "BART": Family(
        "BartForConditionalGeneration", "BartConfig", "seq2seq", {**_SEQ2SEQ, "max_position_embeddings": 160}
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "seq2seq",
        {
            **_SEQ2SEQ,
            "num_mel_bins": 8,
            "max_source_positions": LENGTH,
            "max_target_positions": 160,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
    ),
    "T5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        "seq2seq",
        {
            "vocab_size": VOCABULARY,
            "d_model": 48,
            "d_kv": 12,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            "initializer_factor": 1.0,
            "decoder_start_token_id": 0,
            "tie_word_embeddings": False,
            **_SPECIAL,
        },
        has="position bias",
    ),
}


def _module(name: str) -> Any:
    """The module of a family's model in this release; None if it has no such model."""
    model = getattr(transformers, FAMILIES[name].model, None)
    return None if model is None else sys.modules[model.__module__]


INSTALLED = [name for name in FAMILIES if hasattr(_module(name), "ALL_ATTENTION_FUNCTIONS")]
"""Families that this release of transformers has, on its attention interface."""


def present(*names: str) -> list[str]:
    """Those of some families that are among the installed ones."""
    return [name for name in names if name in INSTALLED]


def makes_masks(name: str) -> bool:
    """Whether a family's masks come from transformers' mask functions in this release."""
    return any(hasattr(_module(name), f"create_{kind}_mask") for kind in ("causal", "bidirectional"))


COLUMNS = ("train", "pad", "pack", "window", "cache", "compile")
"""What README's table says of a family."""

PROVERS: dict[str, list[str]] = {column: [] for column in COLUMNS}
"""The tests behind each column."""

OUTCOMES: dict[tuple[str, str, str], list[bool]] = {}
"""By column, family and test of this process: whether each of its runs has passed."""

README = Path(__file__).parents[1] / "README.md"


def families(column: str) -> list[str]:
    """The families that have what a column is about, where the release has them."""
    kinds = {"pad": ("decoder", "encoder", "seq2seq"), "pack": ("decoder",), "cache": ("decoder", "seq2seq")}
    if column == "window":
        return [name for name in INSTALLED if FAMILIES[name].mask]
    return [name for name in INSTALLED if FAMILIES[name].kind in kinds.get(column, (FAMILIES[name].kind,))]


def complete() -> bool:
    """Whether this release has all families: README's table is written for such ones."""
    return set(INSTALLED) == set(FAMILIES)


def proves(column: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a test of the parameter `name`, which it runs on the `families` of a column.

    A test that skips proves nothing, so it fails where README counts on it.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def noted(**arguments: Any) -> None:
            passed = OUTCOMES.setdefault((column, arguments["name"], test.__name__), [])
            passed.append(False)
            try:
                test(**arguments)
            except pytest.skip.Exception as skipped:
                if complete():
                    pytest.fail(f"README says that this is served, and the test skips: {skipped}")
                raise
            passed[-1] = True

        PROVERS[column].append(test.__name__)
        return pytest.mark.parametrize("name", families(column))(noted)

    return decorate


def proved(column: str, name: str) -> bool:
    """Whether every test behind a column has run on a family in this process, and passed."""
    outcomes = [OUTCOMES.get((column, name, test), [False]) for test in PROVERS[column]]
    return bool(outcomes) and all(map(all, outcomes))


def exists(column: str, name: str) -> bool:
    """Whether there is a test behind a column that runs on a family."""
    return bool(PROVERS[column]) and name in families(column)


def table(served: Callable[[str, str], bool]) -> str:
    """README's table in Markdown; `served` tells of a column and a family."""
    rows = [["family", *COLUMNS, "with"]]
    for name in INSTALLED:
        family = FAMILIES[name]
        cells = {column: "yes" if served(column, name) else "-" for column in COLUMNS}
        if cells["window"] == "yes":
            cells["window"] = family.mask
        rows.append([name, *cells.values(), family.has or "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def split_readme() -> tuple[str, str, str]:
    """README before its table, the table, and what comes behind it."""
    text = README.read_text(encoding="utf-8")
    start = "<!-- families: written by WRITE_FAMILIES=1 pytest tests/test_patches_interface_models.py -->\n"
    end = "\n<!-- end of families -->"
    assert text.count(start) == text.count(end) == 1
    before, rest = text.split(start)
    written, after = rest.split(end)
    return before + start, written, end + after


def build(name: str, attn: str = "eager", seed: int = 0, **config: Any) -> Any:
    """A tiny model of a family, in eval mode without dropout; `config` overrides its configuration."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    settings = getattr(transformers, family.config)(**{**family.options, **config})
    model = getattr(transformers, family.model)._from_config(settings, attn_implementation=attn)
    with torch.no_grad():  # zero biases, sinks at zero and equal norms would hide where they act
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(parameter.nan_to_num() + 0.2 * torch.randn_like(parameter))
            elif "experts" in parameter_name or "sinks" in parameter_name:
                parameter.normal_(std=0.25)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def pair(name: str, attn: str = "eager", **config: Any) -> tuple[Any, Any]:
    """(model to patch, unpatched eager model) of the same weights."""
    reference, model = build(name, **config), build(name, attn, **config)
    model.load_state_dict(reference.state_dict())
    return model, reference


def inputs(name: str, padded: str | None = None, seed: int = 0) -> tuple[dict[str, Tensor], Tensor | None]:
    """Arguments of a call of a model, and which positions of its logits are valid, bool [B, T].

    `padded` is "left" or "right", of the tokens, or of what the encoder reads.
    """
    kind = FAMILIES[name].kind
    if kind == "vision":
        generator = torch.Generator().manual_seed(seed)
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}, None
    ids, mask = tokens(2, LENGTH, seed), None
    if padded == "left":
        ids, mask = left_padding(ids, *PADS)
    elif padded == "right":
        ids, mask = left_padding(ids.flip(1), *PADS)
        ids, mask = ids.flip(1), mask.flip(1)
    arguments = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    if kind != "seq2seq":
        return arguments, mask
    decoder = {"decoder_input_ids": tokens(2, LENGTH - 4, seed + 1)}
    if name == "Whisper":  # twice as many frames as places of the encoder
        generator = torch.Generator().manual_seed(seed)
        arguments = {"input_features": torch.randn(2, 8, 2 * LENGTH, generator=generator)}
        if mask is not None:
            arguments["decoder_attention_mask"] = mask[:, : LENGTH - 4]
            mask = mask[:, : LENGTH - 4]
    else:
        mask = None
    return {**arguments, **decoder}, mask


def spy_layers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record what every patched layer hands to the kernels."""
    calls: list[dict[str, Any]] = []
    original = patches.hf.attend

    def recording(*args: Any, **options: Any) -> Any:
        calls.append({"q": args[0], "k": args[1], **options})
        return original(*args, **options)

    monkeypatch.setattr(patches.hf, "attend", recording)
    return calls


def dense_masks(calls: list[dict[str, Any]]) -> list[Any]:
    """The shapes of the masks of recorded calls that are not compact."""
    return [
        getattr(call["mask"], "shape", call["mask"])
        for call in calls
        if call["mask"] is not None and not patches.compact.is_compact(call["mask"])
    ]
