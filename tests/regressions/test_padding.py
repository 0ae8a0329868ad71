"""Padding of HuggingFace batches: on whichever side, it changes nothing for the real tokens."""

from __future__ import annotations

import pytest
import torch

from tests.hf_models import FAMILIES, PAD, TOLERANCE, error_where, greedy, left_padding, patched_pair, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.parametrize("family", FAMILIES),
    pytest.mark.parametrize("attn", ["eager", "sdpa"]),
]


# huggingface/transformers#29075: a short prompt generated something else beside a long one
@pytest.mark.parametrize("lengths", [(5, 50), (1, 17), (16, 16), (3, 4, 33)], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_batch_generates_what_each_prompt_does_alone(family, attn, lengths, cache):
    patched, reference = patched_pair(family, attn)
    longest = max(lengths)
    ids, mask = left_padding(tokens(len(lengths), longest), *(longest - n for n in lengths))
    options = {} if cache == "dynamic" else {"cache_implementation": "static"}
    together = greedy(patched, ids, mask, count=20, **options)
    for row, length in enumerate(lengths):
        alone = greedy(reference, ids[row : row + 1, longest - length :], count=20)
        assert torch.equal(together[row : row + 1], alone)


# huggingface/transformers#41966: with padding on the left the mask was no longer causal
@pytest.mark.parametrize("pads", [0, 3])
def test_causality_and_padding_both_hold(family, attn, pads):
    patched, _ = patched_pair(family, attn)
    ids, mask = left_padding(tokens(2, 12), 0, pads)
    before = patched(ids, attention_mask=mask).logits
    for changed in range(pads, 12):
        other = ids.clone()
        other[1, changed] = 2 + (ids[1, changed] - 1) % 57
        difference = (patched(other, attention_mask=mask).logits - before).abs().amax(-1)[1]
        assert not difference[pads:changed].any()
        assert difference[changed] > 0


# huggingface/transformers#29419, #27050: the same tokens padded on either side
@pytest.mark.parametrize("length", [1, 7, 11])
def test_left_and_right_padding_agree(family, attn, length):
    patched, reference = patched_pair(family, attn)
    real = tokens(1, length)
    padding = torch.full((1, 12 - length), PAD)
    left, right = torch.cat([padding, real], 1), torch.cat([real, padding], 1)
    places = torch.arange(12).expand(1, 12)
    from_left = patched(
        left,
        attention_mask=(places >= 12 - length).long(),
        position_ids=(places - (12 - length)).clamp(min=0),
    ).logits[:, 12 - length :]
    from_right = patched(right, attention_mask=(places < length).long()).logits[:, :length]
    alone = reference(real).logits
    assert error_where(None, from_left, alone) < TOLERANCE
    assert error_where(None, from_right, alone) < TOLERANCE


# huggingface/transformers#29419: what stands in the padding must not matter
def test_padding_tokens_do_not_matter(family, attn):
    patched, _ = patched_pair(family, attn)
    ids, mask = left_padding(tokens(2, 10), 4, 0)
    other = torch.where(mask.bool(), ids, 17)
    a, b = patched(ids, attention_mask=mask).logits, patched(other, attention_mask=mask).logits
    assert error_where(mask, a, b) == 0
