"""Documents packed into one row of a HuggingFace model."""

from __future__ import annotations

import inspect

import pytest
import torch

import patches.hf
from tests.hf_models import FAMILIES, TOLERANCE, cache_argument, error_where, gradients, patched_pair, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.parametrize("family", FAMILIES),
]

needs_packing = pytest.mark.skipif(
    not patches.hf.MASKS_PASS_UNCHANGED, reason="this release can't separate packed documents"
)


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)


# huggingface/transformers#46634: positions [0..3, 0..2] with a mask of ones and the default cache
@needs_packing
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("use_cache", [None, False, True])
def test_packed_documents_equal_each_alone(family, attn, ones, use_cache):
    patched, reference = patched_pair(family, attn)
    ids = tokens(1, 7)
    logits = patched(
        ids,
        position_ids=positions_of(4, 3),
        attention_mask=torch.ones_like(ids) if ones else None,
        use_cache=use_cache,
    ).logits
    alone = torch.cat([reference(ids[:, :4]).logits, reference(ids[:, 4:]).logits], 1)
    assert error_where(None, logits, alone) < TOLERANCE


# huggingface/transformers#46634: one set of positions for the whole batch, and one a row
@needs_packing
def test_packed_batches(family):
    patched, reference = patched_pair(family)
    ids = tokens(2, 9)
    shared = patched(ids, position_ids=positions_of(5, 4)).logits
    own = patched(ids, position_ids=torch.cat([positions_of(5, 4), positions_of(2, 3, 4)])).logits
    first = torch.cat([reference(ids[:, :5]).logits, reference(ids[:, 5:]).logits], 1)
    second = torch.cat([reference(ids[1:, a:b]).logits for a, b in ((0, 2), (2, 5), (5, 9))], 1)
    assert error_where(None, shared, first) < TOLERANCE
    assert error_where(None, own, torch.cat([first[:1], second])) < TOLERANCE


# huggingface/transformers#46634: a release that can't keep them apart must say so
@pytest.mark.skipif(patches.hf.MASKS_PASS_UNCHANGED, reason="this release can separate packed documents")
def test_packing_that_cannot_be_served_raises(family):
    patched, _ = patched_pair(family)
    with pytest.raises(ValueError, match="packed documents"):
        patched(tokens(1, 7), position_ids=positions_of(4, 3))


# inclusionAI/AReaL#1442: packed lengths given, no mask
def test_perturbing_one_document_leaves_the_other_alone(family):
    patched, reference = patched_pair(family)
    body = patched.transformer if family == "gpt2" else patched.model
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(body).forward).parameters.values()):
        pytest.skip("models of this release hand no packed lengths on")
    ids = tokens(1, 9)
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    options = {
        "position_ids": torch.arange(9)[None],  # alone they would tell of one document
        "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths,
        "max_length_q": 5,
        "max_length_k": 5,
    }
    before = body(ids, **options).last_hidden_state
    other = ids.clone()
    other[0, 2] = 2 + (ids[0, 2] - 1) % 57
    after = body(other, **options).last_hidden_state
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.allclose(before[:, 2], after[:, 2], atol=1e-3)
    options["position_ids"] = positions_of(4, 5)
    body_alone = reference.transformer if family == "gpt2" else reference.model
    if patches.hf.MASKS_PASS_UNCHANGED:
        packed = body(ids, **options).last_hidden_state
        assert error_where(None, packed[:, 4:], body_alone(ids[:, 4:]).last_hidden_state) < TOLERANCE


# huggingface/transformers#32487: 3 new tokens on a cache of 5 were taken for packing
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_new_tokens_on_a_cache_are_not_packed(family, attn):
    patched, reference = patched_pair(family, attn)
    ids = tokens(2, 8)
    first = patched(ids[:, :5], use_cache=True)
    name = cache_argument(patched)
    second = patched(ids[:, 5:], position_ids=torch.arange(5, 8)[None], use_cache=True, **{name: first[name]})
    assert error_where(None, second.logits, reference(ids).logits[:, 5:]) < TOLERANCE


# Training on stretched positions (PoSE, arXiv:2309.10400): a gap starts no document
@pytest.mark.parametrize("ones", [False, True])
def test_gaps_in_the_positions_separate_nothing(family, ones):
    patched, _ = patched_pair(family)
    ids = tokens(1, 7)
    options = {
        "position_ids": torch.tensor([[0, 1, 2, 9, 10, 20, 21]]),
        "attention_mask": torch.ones_like(ids) if ones else None,
    }
    before = patched(ids, **options).logits
    other = ids.clone()
    other[0, 0] = 2 + (ids[0, 0] - 1) % 57
    assert not torch.allclose(patched(other, **options).logits[:, 3:], before[:, 3:], atol=1e-3)


# huggingface/transformers#46634: training on packed rows
@needs_packing
def test_gradients_of_packed_documents(family):
    patched, reference = patched_pair(family)
    ids = tokens(1, 7)
    labels = ids.clone()
    labels[0, 4] = -100  # the first token of a document is no continuation
    patched(ids, position_ids=positions_of(4, 3), labels=labels).loss.backward()
    found = {name: p.grad for name, p in patched.named_parameters()}
    a, b = gradients(reference, ids[:, :4]), gradients(reference, ids[:, 4:])
    for name, gradient in found.items():
        expected = (3 * a[name] + 2 * b[name]) / 5
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
