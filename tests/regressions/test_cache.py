"""Key-value caches under HuggingFace's generation and training."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

from patches import patch_model
from tests.hf_models import (
    FAMILIES,
    TOLERANCE,
    build,
    cache_argument,
    error_where,
    gradient_error,
    gradients,
    greedy,
    patched_pair,
    static_cache,
    takes_cache_objects,
    tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.parametrize("family", FAMILIES),
]


# Qwen#979: a cache of 2, then a chunk of 5
@pytest.mark.parametrize("sizes", [(2, 5), (1, 6), (5, 1, 1), (3, 3, 3)], ids=str)
def test_chunks_equal_token_by_token(family, sizes):
    patched, _ = patched_pair(family)
    ids = tokens(2, sum(sizes))
    name = cache_argument(patched)
    found = []
    with torch.no_grad():
        for parts in (sizes, (1,) * sum(sizes)):
            logits, past, start = [], {}, 0
            for size in parts:
                out = patched(ids[:, start : start + size], use_cache=True, **past)
                logits.append(out.logits)
                past, start = {name: out[name]}, start + size
            found.append(torch.cat(logits, 1))
    assert error_where(None, *found) < TOLERANCE


# huggingface/transformers#30414: a prompt of 7 in a static cache of 64 saw what was not filled
def test_a_static_cache_equals_a_dynamic_one(family):
    if not takes_cache_objects(family):
        pytest.skip("layers of this release take tuples")
    patched, reference = patched_pair(family)
    ids, name = tokens(2, 10), cache_argument(patched)
    cache = static_cache(patched, 2, 64)
    logits, start = [], 0
    with torch.no_grad():
        for stop in (7, 8, 10):
            positions = {"cache_position": torch.arange(start, stop)} if takes_positions(patched) else {}
            logits.append(patched(ids[:, start:stop], use_cache=True, **{name: cache}, **positions).logits)
            start = stop
    assert error_where(None, torch.cat(logits, 1), reference(ids).logits) < TOLERANCE


def takes_positions(model) -> bool:
    return "cache_position" in inspect.signature(model.forward).parameters


# huggingface/transformers#32487: new tokens on a cache were taken for packed documents
def test_positions_that_start_again_on_a_cache_pack_nothing(family):
    models, ids, found = patched_pair(family), tokens(2, 8), []
    for model in models:
        name = cache_argument(model)
        first = model(ids[:, :5], use_cache=True)
        positions = torch.tensor([[5, 0, 1]])
        second = model(ids[:, 5:], position_ids=positions, use_cache=True, **{name: first[name]})
        found.append(second.logits)
    assert error_where(None, *found) < TOLERANCE


# huggingface/transformers#28056, MemoryVLA#18: recomputation appended to the cache a second time
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("use_cache", [True, None])
def test_checkpointing_with_a_cache(family, reentrant, use_cache):
    plain, _ = patched_pair(family)
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    ids = tokens(2, 9)
    expected = gradients(plain.train(), ids)
    checkpointed.train()
    checkpointed(ids, labels=ids, use_cache=use_cache).loss.backward()
    found = {name: p.grad for name, p in checkpointed.named_parameters()}
    assert gradient_error(found, expected) < 1e-5


# huggingface/transformers#42586: `.train()`, then `generate()`
def test_generation_of_a_model_in_training(family):
    patched, reference = patched_pair(family)
    for module in patched.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    patched.train()
    ids = tokens(2, 6)
    assert torch.equal(greedy(patched, ids, count=16), greedy(reference, ids, count=16))


# huggingface/transformers#30019, Dao-AILab/flash-attention#732, SimpleTuner#3002: q, k float32, v bfloat16
@pytest.mark.parametrize("use_cache", [False, True])
def test_dtypes_are_aligned(family, use_cache):
    patched = patch_model(build(family).to(torch.bfloat16))
    norm = "ln_1" if family == "gpt2" else "q_norm"
    for name, module in patched.named_modules():
        if name.endswith((norm, "k_norm")) and family == "olmo2":
            module.register_forward_hook(lambda module, args, out: out.float())
    ids = tokens(1, 6)
    out = patched(ids, use_cache=use_cache)
    assert out.logits.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed = patch_model(build(family))(ids, use_cache=use_cache)
    exact = build(family)(ids).logits
    assert torch.isfinite(mixed.logits).all()
    assert error_where(None, mixed.logits.float(), exact) < 0.15 * exact.abs().max()
