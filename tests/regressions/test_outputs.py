"""Attention weights that a HuggingFace model is asked for."""

from __future__ import annotations

import pytest
import torch

from tests.hf_models import FAMILIES, left_padding, patched_pair, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.parametrize("family", FAMILIES),
]


# huggingface/transformers#38750: `output_attentions=True` off the eager path gave nothing, or None
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("pads", [0, 3])
def test_true_weights_whatever_the_implementation(family, attn, pads):
    patched, reference = patched_pair(family, attn)
    ids, mask = left_padding(tokens(2, 8), 0, pads)
    a = patched(ids, attention_mask=mask, output_attentions=True)
    b = reference(ids, attention_mask=mask, output_attentions=True)
    assert len(a.attentions) == 3
    for x, y in zip(a.attentions, b.attentions, strict=True):
        assert torch.allclose(x[0], y[0], atol=1e-5)
        assert torch.allclose(x[1, :, pads:], y[1, :, pads:], atol=1e-5)
        torch.testing.assert_close(x[0].sum(-1), torch.ones(4, 8))
    plain = patched(ids, attention_mask=mask)
    assert torch.allclose(plain.logits, a.logits, atol=1e-5)
    assert plain.attentions is None


# huggingface/transformers#38750: asked for by the configuration
def test_weights_asked_for_by_the_configuration(family):
    patched, reference = patched_pair(family, "eager")
    ids = tokens(1, 6)
    patched.config.output_attentions = True
    found = patched(ids).attentions
    expected = reference(ids, output_attentions=True).attentions
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(found, expected, strict=True))
