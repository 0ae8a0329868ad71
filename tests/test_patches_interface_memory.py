"""Patched models, GPT-2 and OLMo-2 among them, make nothing of the size of a sequence's square.

But T5, whose own position bias is [1, H, Tq, Tk]: there nothing is made of it for each row of a batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import patches.hf
from patches import patch_model, patch_report
from tests import hf_models
from tests.hf_families import FAMILIES, build, families, makes_masks, present
from tests.hf_models import cache_argument, left_padding, static_cache, tokens

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

LENGTH = 512  # its square is larger than any activation of the tiny models
_IMAGE = 4 * 23  # pixels to a side: 529 patches
_LISTED = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "Mistral",
    "Phi-3",
    "Gemma 2",
    "Gemma 3",
    "OLMo-3",
    "gpt-oss",
    "Llama 4",
)
_OTHERS = ("BERT", "ModernBERT", "ViT", "BART", "Whisper")
INTERFACE = [name for name in present(*_LISTED, *_OTHERS) if makes_masks(name) or name == "ViT"]
NAMES = [*INTERFACE, *hf_models.FAMILIES]
DECODERS = [name for name in NAMES if name not in FAMILIES or FAMILIES[name].kind == "decoder"]
COMPILED = [name for name in NAMES if name in ("Llama", "BERT") or name in hf_models.FAMILIES]
PACKED = [name for name in NAMES if name not in FAMILIES or name in families("pack")]


class Largest(TorchDispatchMode):
    """Remembers the largest number of elements that a tensor of a program had, views included."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self.size = max(self.size, each.numel())
        return out


@pytest.fixture(autouse=True)
def attention_of_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands around the attention is looked at, not the backend of this machine."""

    def nothing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(patches.hf, "attention", nothing)


def largest(model: Any, *args: Any, **arguments: Any) -> int:
    with torch.no_grad(), Largest() as seen:
        model(*args, **arguments)
    return seen.size


def long(name: str, attn: str = "eager") -> Any:
    if name == "gpt2":
        return hf_models.build(name, attn, n_positions=2 * LENGTH)
    if name == "ViT":
        return build(name, attn, image_size=_IMAGE)
    if name == "Whisper":
        return build(name, attn, max_source_positions=LENGTH, max_target_positions=2 * LENGTH)
    make = hf_models.build if name in hf_models.FAMILIES else build
    return make(name, attn, max_position_embeddings=2 * LENGTH)


def call(name: str, padded: bool) -> dict[str, Tensor]:
    """A pass over `LENGTH` tokens, or patches of an image, or frames."""
    ids, mask = left_padding(tokens(1, LENGTH), 100 if padded else 0)
    if name == "ViT":
        return {"pixel_values": torch.randn(1, 3, _IMAGE, _IMAGE)}
    if name == "Whisper":
        frames = torch.randn(1, 8, 2 * LENGTH)
        return {"input_features": frames, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    if name == "BART":
        return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    return {"input_ids": ids, "attention_mask": mask}


def makes_static_masks(model: Any) -> bool:
    """Whether it isn't left to a function of the model's own that makes dense ones for generation."""
    return not hasattr(model.base_model, "_prepare_4d_causal_attention_mask_with_cache_position")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass(name: str, padded: bool) -> None:
    arguments = call(name, padded)
    model = patch_model(long(name))
    assert largest(model, **arguments) < LENGTH**2
    first = next(iter(patch_report(model).patched))
    part = patch_model(long(name), filter_fn=lambda module, path: path == first)
    assert largest(part, **arguments) >= LENGTH**2  # as the other layers need it


@pytest.mark.skipif(not makes_masks("T5") or not present("T5"), reason="this release's T5 makes masks itself")
@pytest.mark.parametrize("padded", [False, True])
def test_a_bias_of_the_model_is_the_largest(padded: bool) -> None:
    """T5's, [1, H, Tq, Tk]: neither a mask nor a bias is made for each of the batch's rows."""
    batch, heads, length = 5, 4, LENGTH
    ids, mask = left_padding(tokens(batch, length), *(7 * padded * row for row in range(batch)))
    model = patch_model(build("T5"))
    size = largest(model, input_ids=ids, attention_mask=mask, decoder_input_ids=ids)
    assert size == heads * length**2 < batch * length**2


@pytest.mark.parametrize("name", PACKED)
def test_packed_documents(name: str) -> None:
    positions = torch.cat([torch.arange(200), torch.arange(LENGTH - 200)])[None]
    model = patch_model(long(name))
    assert largest(model, tokens(1, LENGTH), position_ids=positions) < LENGTH**2
    assert largest(model, tokens(1, LENGTH), position_ids=positions, use_cache=False) < LENGTH**2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "attn"),
    [*((name, "eager") for name in DECODERS), *((name, "sdpa") for name in hf_models.FAMILIES)],
)
def test_chunks_on_a_static_cache(name: str, attn: str, padded: bool) -> None:
    model = patch_model(long(name, attn))
    ids, mask = left_padding(tokens(1, LENGTH), 100 if padded else 0)
    cache = {cache_argument(model): static_cache(model, 1, LENGTH + 8)}
    half = LENGTH // 2
    for chunk in (slice(0, half), slice(half, LENGTH)):
        size = largest(model, ids[:, chunk], attention_mask=mask[:, : chunk.stop], **cache)
        assert size < half * (LENGTH + 8)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation(name: str, implementation: str) -> None:
    """generate makes the masks of static caches by itself."""
    model = patch_model(long(name))
    if implementation == "static" and not makes_static_masks(model):
        pytest.skip("in this release generate asks the model for a dense mask")
    ids, mask = left_padding(tokens(1, LENGTH), 100)
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "cache_implementation": implementation}
    with torch.no_grad(), Largest() as seen:
        model.generate(ids, attention_mask=mask, do_sample=False, **options)
    assert seen.size < LENGTH**2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_pass(name: str, padded: bool) -> None:
    """transformers takes every row for a packed one in a graph, if there is neither a cache nor a mask."""
    torch.compiler.reset()
    ids, mask = left_padding(tokens(1, LENGTH), 100)
    sizes: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made = (node.meta.get("example_value") for node in graph.graph.nodes)
        sizes.extend(int(each.numel()) for each in made if isinstance(each, Tensor))
        return graph.forward

    given = {"attention_mask": mask} if padded else {}
    options = {} if name == "BERT" else {"use_cache": False}
    model = patch_model(long(name))
    with torch.no_grad():
        torch.compile(model, backend=backend)(ids, **given, **options)
    assert LENGTH < max(sizes) < LENGTH**2
