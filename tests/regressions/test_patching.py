"""Faults of libraries that patch models, as a user meets them."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import patches.hf
from patches import patch_model, patch_report
from tests.hf_models import (
    FAMILIES,
    TOLERANCE,
    build,
    error_where,
    greedy,
    left_padding,
    patched_pair,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


# linkedin/Liger-Kernel#170: the class was patched after the model was built, to no effect
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_built_before_is_patched(family):
    model = build(family)
    assert not patch_report(model).patched
    patch_model(model)
    assert len(patch_report(model).patched) == 3


# unslothai/unsloth#1713: another model of the process changed as well
@pytest.mark.parametrize("family", FAMILIES)
def test_models_before_and_after_are_untouched(family):
    before = build(family)
    ids = tokens(2, 8)
    expected = before(ids).logits
    patch_model(build(family))
    after = build(family)
    assert torch.equal(before(ids).logits, expected)
    assert torch.equal(after(ids).logits, expected)
    assert not patch_report(before).patched
    assert not patch_report(after).patched


# unslothai/unsloth-zoo#281: HuggingFace renamed an argument, and the patch was called with the new name
@pytest.mark.parametrize("name", ["cache", "past_key_values", "past_key_value", "layer_past"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_name_of_the_cache_is_understood(family, name):
    from transformers import DynamicCache

    layer = patch_model(build(family)).get_submodule(
        "transformer.h.0.attn" if family == "gpt2" else "model.layers.0.self_attn"
    )
    x, angles = torch.randn(1, 3, 48), torch.ones(1, 3, 12)
    rest = {} if family == "gpt2" else {"position_embeddings": (angles.cos(), angles.sin())}
    cache = DynamicCache()
    first = layer(x, attention_mask=None, **rest, **{name: cache})[0]
    assert cache.get_seq_length(0) == 3
    second = layer(x, attention_mask=None, **rest, **{name: cache})[0]
    assert cache.get_seq_length(0) == 6
    assert not torch.allclose(first, second, atol=1e-3)


# intel/neural-compressor#525: heads pruned after the patch
@pytest.mark.skipif(not hasattr(GPT2Attention, "prune_heads"), reason="this release can't prune heads")
def test_heads_pruned_after_the_patch():
    model, reference = patch_model(build("gpt2")), build("gpt2")
    for each in (model, reference):
        each.prune_heads({0: [0, 2], 1: [3]})
    ids = tokens(2, 9)
    assert error_where(None, model(ids).logits, reference(ids).logits) < TOLERANCE
    assert model.transformer.h[0].attn.num_heads == 2


# unslothai/unsloth-zoo#281: told from the signature, never from a version number
def test_no_version_number_decides():
    from patches import gpt2, olmo2

    for module in (patches, gpt2, patches.hf, olmo2):
        assert "__version__" not in inspect.getsource(module)


# huggingface/transformers#45811, optimum-executorch#82: no mask reaches an attention without a mask function
@pytest.mark.skipif(
    not patches.hf.MASKS_PASS_UNCHANGED, reason="models of this release make masks themselves"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_holds_where_no_mask_function_is_registered(family):
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("maskless", sdpa_attention_forward)
    patched, reference = patched_pair(family, "maskless")
    ids, mask = left_padding(tokens(2, 10), 0, 4)
    options = {"attention_mask": mask}
    assert error_where(mask, patched(ids, **options).logits, reference(ids, **options).logits) < TOLERANCE
    assert torch.equal(greedy(patched, ids, mask, count=12), greedy(reference, ids, mask, count=12))
