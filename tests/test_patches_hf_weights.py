"""Gradients at the attention weights that a patched model returns: those of eager layers, in training too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from patches import hf, patch_model
from streamattn import attention
from tests.hf_families import INSTALLED, inputs
from tests.hf_models import TOLERANCE, tokens
from tests.hf_wrapped import DEEP, pair, training

NAMES = list(DEEP)
if hf.MASKS_PASS_UNCHANGED:  # else only those with a patch of their own are served
    NAMES += [name for name in INSTALLED if name not in DEEP]


def weights_of(outputs: Any) -> list[Tensor]:
    names = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    return [weights for name in names for weights in getattr(outputs, name, None) or ()]


def with_gradients(model: Any, arguments: dict[str, Any]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits, and the gradients of their squares' mean at every layer's weights and at every parameter."""
    model.zero_grad()
    torch.manual_seed(1)  # of noise that some routers of experts add
    outputs = model(**arguments, output_attentions=True)
    weights = weights_of(outputs)
    for each in weights:
        each.retain_grad()
    outputs.logits.square().mean().backward()
    parameters = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [each.grad for each in weights]
    assert all(each is not None for each in gradients)
    return outputs.logits.detach(), gradients, parameters  # type: ignore[return-value]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    assert len(found) == len(expected) > 0
    return all(  # biases of keys have no gradient but for rounding
        float((a - b).abs().max() / b.abs().max().clamp(min=0.01)) < TOLERANCE
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_weights_keep_their_gradient(name: str) -> None:
    if name == "ViT" and hf._active_collector is None:
        pytest.skip("in this release its layers aren't told that weights are wanted")
    model, reference = pair(name)
    arguments = {"input_ids": tokens(2, 9)} if name in DEEP else inputs(name)[0]
    logits, weights, parameters = with_gradients(training(patch_model(model)), arguments)
    expected, others, theirs = with_gradients(training(reference), arguments)
    assert torch.allclose(logits, expected, atol=TOLERANCE)
    seen = [other.ne(0) for other in others]  # eager has a gradient at hidden keys too, which reaches nothing
    assert same(
        [w * s for w, s in zip(weights, seen, strict=True)],
        [o * s for o, s in zip(others, seen, strict=True)],
    )
    assert same(parameters, theirs)


Q, K, V = (torch.randn(2, heads, 6, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))


def test_without_gradients_the_output_is_the_kernels() -> None:
    options: dict[str, Any] = {"causal": True, "mask": None, "scale": None}
    found, weights = hf.attend(Q, K, V, **options, need_weights=True)
    assert weights is not None and not weights.requires_grad
    assert torch.equal(found, attention(Q, K, V, causal=True))
    q = Q.clone().requires_grad_()
    plain, nothing = hf.attend(q, K, V, **options)
    assert nothing is None
    assert torch.equal(plain, found)


def test_what_no_query_sees_reaches_neither_output_nor_gradient() -> None:
    """A NaN in a hidden value, and a query without keys."""
    q, k, v = (x.clone() for x in (Q, K, V))
    v[1, :, 0], k[1, :, 0] = torch.nan, torch.nan
    q.requires_grad_()
    v.requires_grad_()
    mask = torch.ones(2, 6)
    mask[1, 0] = 0
    found, weights = hf.attend(q, k, v, causal=True, mask=mask, scale=None, need_weights=True)
    assert weights is not None
    assert torch.equal(found[1, :, 0], torch.zeros(4, 8))
    expected = attention(q, k, v, causal=True, attn_mask=mask.bool()[:, None, None])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert found.transpose(1, 2).reshape(2, 6, -1).data_ptr() == found.data_ptr()  # heads merge as a view
    gradients = [torch.autograd.grad(out.square().sum(), (q, v)) for out in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_dropout_drops_weights_that_stay_whole() -> None:
    """Of ones as values a query gets what is left of its weights, which are those before dropout."""
    q, ones = Q.clone().requires_grad_(), torch.ones_like(V)
    torch.manual_seed(1)
    found, weights = hf.attend(
        q, K, ones, causal=False, mask=None, scale=None, dropout_p=0.5, need_weights=True
    )
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    torch.manual_seed(1)
    kept = torch.nn.functional.dropout(torch.ones_like(weights), 0.5)
    torch.testing.assert_close(found[..., 0], (weights * kept).sum(-1))


def test_in_half_precision() -> None:
    q, k, v = (x.bfloat16() for x in (Q, K, V))
    found, weights = hf.attend(
        q.requires_grad_(), k, v, causal=True, mask=None, scale=None, need_weights=True
    )
    assert weights is not None
    assert found.dtype == weights.dtype == torch.bfloat16
    expected = attention(q.float(), k.float(), v.float(), causal=True)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_sinks_that_scale_the_output() -> None:
    """The weights are those without sinks; the output is that with them, and so are its gradients."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    q = Q.clone().requires_grad_()
    options: dict[str, Any] = {"causal": True, "mask": None, "scale": None, "sinks": sinks}
    expected, _ = hf.attend(q, K, V, **options)
    found, weights = hf.attend(q, K, V, **options, need_weights=True, sinks_scale_output=True)
    assert weights is not None
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 6))
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), (q, sinks)) for out in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
