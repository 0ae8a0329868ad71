"""OLMo-2's norms of q and k."""

from __future__ import annotations

import pytest
import torch

from tests.hf_models import TOLERANCE, error_where, patched_pair, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


# vllm-metal#691: the norm was applied head by head
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_norm_acts_over_the_full_projection(kv_heads):
    """Heads of very different size: a norm of each would make them alike."""
    patched, reference = patched_pair("olmo2", num_key_value_heads=kv_heads)
    with torch.no_grad():
        for model in (patched, reference):
            for layer in model.model.layers:
                for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                    projection.weight[:12] *= 20
    ids = tokens(2, 9)
    expected = reference(ids).logits
    assert error_where(None, patched(ids).logits, expected) < TOLERANCE
    for layer in patched.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.register_forward_pre_hook(lambda module, args: normalised_by_head(args[0]))
    if kv_heads > 1:
        assert error_where(None, patched(ids).logits, expected) > 0.05


def normalised_by_head(x):
    heads = x.unflatten(-1, (-1, 12))
    return (heads * heads.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).flatten(-2)
