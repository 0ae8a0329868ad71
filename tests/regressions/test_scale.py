"""GPT-2's scale flags."""

from __future__ import annotations

import pytest

from tests.hf_models import TOLERANCE, build, error_where, greedy, patched_pair, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


# huggingface/transformers#44380: `scale_attn_by_inverse_layer_idx` was lost off the eager path
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "flags",
    [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    ],
    ids=str,
)
def test_scale_flags_equal_eager(attn, flags):
    patched, _ = patched_pair("gpt2", attn, n_layer=2, **flags)
    # `reorder_and_upcast_attn` changes nothing mathematically, and some releases fail with it.
    reference = build("gpt2", n_layer=2, **{**flags, "reorder_and_upcast_attn": False})
    ids = tokens(2, 10)
    expected = reference(ids).logits
    assert error_where(None, patched(ids).logits, expected) < TOLERANCE
    assert error_where(None, build("gpt2", n_layer=2)(ids).logits, expected) > 0.1
    assert (greedy(patched, ids, count=16) == greedy(reference, ids, count=16)).all()
