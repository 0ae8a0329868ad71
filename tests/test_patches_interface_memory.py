"""Models patched through the attention interface make nothing of the size of a sequence's square."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import patches.hf
from patches import patch_model, patch_report
from tests.hf_families import FAMILIES, build, families, makes_masks, present
from tests.hf_models import cache_argument, left_padding, static_cache, tokens

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

LENGTH = 512  # its square is larger than any activation of the tiny models
NAMES = [
    name
    for name in present("Llama", "Mistral", "Gemma 2", "gpt-oss", "Llama 4", "BERT", "ModernBERT", "BART")
    if makes_masks(name)
]


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


def long(name: str) -> Any:
    return build(name, max_position_embeddings=2 * LENGTH)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_pass(name: str, padded: bool) -> None:
    ids, mask = left_padding(tokens(1, LENGTH), 100 if padded else 0)
    model = patch_model(long(name))
    assert largest(model, ids, attention_mask=mask) < LENGTH**2
    first = next(iter(patch_report(model).patched))
    part = patch_model(long(name), filter_fn=lambda module, path: path == first)
    assert largest(part, ids, attention_mask=mask) >= LENGTH**2  # as the other layers need it


@pytest.mark.parametrize("name", [name for name in families("pack") if name in NAMES])
def test_packed_documents(name: str) -> None:
    positions = torch.cat([torch.arange(200), torch.arange(LENGTH - 200)])[None]
    model = patch_model(long(name))
    assert largest(model, tokens(1, LENGTH), position_ids=positions) < LENGTH**2
    assert largest(model, tokens(1, LENGTH), position_ids=positions, use_cache=False) < LENGTH**2


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].kind == "decoder"])
def test_chunks_on_a_static_cache(name: str, padded: bool) -> None:
    model = patch_model(long(name))
    ids, mask = left_padding(tokens(1, LENGTH), 100 if padded else 0)
    cache = {cache_argument(model): static_cache(model, 1, LENGTH + 8)}
    half = LENGTH // 2
    for chunk in (slice(0, half), slice(half, LENGTH)):
        size = largest(model, ids[:, chunk], attention_mask=mask[:, : chunk.stop], **cache)
        assert size < half * (LENGTH + 8)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("name", [name for name in NAMES if FAMILIES[name].kind == "decoder"])
def test_generation(name: str, implementation: str) -> None:
    """generate makes the masks of static caches by itself."""
    model = patch_model(long(name))
    ids, mask = left_padding(tokens(1, LENGTH), 100)
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "cache_implementation": implementation}
    with torch.no_grad(), Largest() as seen:
        model.generate(ids, attention_mask=mask, do_sample=False, **options)
    assert seen.size < LENGTH**2
