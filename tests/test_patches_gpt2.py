"""GPT-2's own matters: scale flags, the fused projection, cross-attention, masked and pruned heads."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import patches.hf
from patches import patch_model
from patches.gpt2 import StreamGPT2Attention
from tests.hf_models import (
    TOLERANCE,
    build,
    cache_argument,
    error_where,
    gradient_error,
    gradients,
    greedy,
    left_padding,
    patched_pair,
    takes_cache_objects,
    tokens,
)

ARGUMENTS = inspect.signature(GPT2Attention.forward).parameters

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

needs_cache_objects = pytest.mark.skipif(
    not takes_cache_objects("gpt2"), reason="cross-attention has no cache in this release"
)
needs_head_masks = pytest.mark.skipif("head_mask" not in ARGUMENTS, reason="this release has no head masks")
needs_pruning = pytest.mark.skipif(
    not hasattr(GPT2Attention, "prune_heads"), reason="this release can't prune heads"
)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(("head_dim", "inverse", "upcast"), list(product([True, False], repeat=3)))
def test_every_scale_flag_equals_eager(attn: str, head_dim: bool, inverse: bool, upcast: bool) -> None:
    """huggingface/transformers#44380: `scale_attn_by_inverse_layer_idx`."""
    flags = {
        "scale_attn_weights": head_dim,
        "scale_attn_by_inverse_layer_idx": inverse,
        "reorder_and_upcast_attn": upcast,
    }
    patched, reference = patched_pair("gpt2", attn, **flags)
    ids, mask = left_padding(tokens(2, 11), 0, 3)
    a, b = patched(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits
    assert error_where(mask, a, b) < TOLERANCE
    assert gradient_error(gradients(patched, ids, mask), gradients(reference, ids, mask)) < TOLERANCE


def test_the_fused_projection_is_read_and_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v are views of `c_attn`'s output; `c_proj` reads a view of attention's output."""
    patched = patch_model(build("gpt2", "sdpa", n_layer=1))
    layer = patched.transformer.h[0].attn
    seen: dict[str, Any] = {}
    layer.c_attn.register_forward_hook(lambda module, args, out: seen.update(fused=out))
    layer.c_proj.register_forward_pre_hook(lambda module, args: seen.update(merged=args[0]))
    original = patches.hf.attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        out = original(q, k, v, **options)
        seen.update(qkv=(q, k, v), out=out)
        return out

    monkeypatch.setattr(patches.hf, "attention", spy)
    with torch.no_grad():
        patched(tokens(2, 7), use_cache=False)
    fused = seen["fused"]
    for x, part in zip(seen["qkv"], range(3), strict=True):
        assert x.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
        assert x.shape == (2, 4, 7, 12)
        assert x.stride() == (7 * 144, 12, 144, 1)
        assert x.storage_offset() == part * 48
    assert seen["merged"].data_ptr() == seen["out"].data_ptr()


def test_the_residual_dropout_is_applied() -> None:
    patched = patch_model(build("gpt2", resid_pdrop=0.5))
    x, layer = torch.randn(1, 4, 48), patched.transformer.h[0].attn.train()
    kept = []
    layer.c_proj.register_forward_hook(lambda module, args, out: kept.append(out))
    out = layer(x)[0]
    assert 0 < (out == 0).sum() < out.numel()
    assert torch.equal(out[out != 0], 2 * kept[0][out != 0])


# Cross-attention


def encoder(batch: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    """States [batch, length, 48] and a mask that hides the end of the last row's."""
    states = torch.randn(batch, length, 48, generator=torch.Generator().manual_seed(5))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, 6:] = 0
    return states, mask


def call(model: PreTrainedModel, ids: Tensor, masked: bool = True, **options: Any) -> Any:
    states, mask = encoder(ids.shape[0])
    return model(
        ids, encoder_hidden_states=states, encoder_attention_mask=mask if masked else None, **options
    )


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_cross_attention_equals_eager(attn: str, masked: bool, inverse: bool) -> None:
    flags = {"add_cross_attention": True, "scale_attn_by_inverse_layer_idx": inverse}
    patched, reference = patched_pair("gpt2", attn, **flags)
    assert sum(isinstance(m, StreamGPT2Attention) for m in patched.modules()) == 6
    ids = tokens(2, 5)
    found = []
    for model in (patched, reference):
        out = call(model, ids, masked, labels=ids)
        out.loss.backward()
        found.append((out.logits, {name: p.grad for name, p in model.named_parameters()}))
    assert error_where(None, found[0][0], found[1][0]) < TOLERANCE
    assert gradient_error(found[0][1], found[1][1]) < TOLERANCE


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_cross_attention_weights_equal_eager(attn: str) -> None:
    patched, reference = patched_pair("gpt2", attn, add_cross_attention=True)
    ids = tokens(2, 5)
    a, b = call(patched, ids, output_attentions=True), call(reference, ids, output_attentions=True)
    for x, y in zip(a.attentions, b.attentions, strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    for x, y in zip(a.cross_attentions, b.cross_attentions, strict=True):
        assert x.shape == (2, 4, 5, 9)
        assert torch.allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_cached_cross_attention_equals_one_pass(attn: str) -> None:
    """The encoder's keys are computed once and read back at every later step."""
    patched, reference = patched_pair("gpt2", attn, add_cross_attention=True)
    ids = tokens(2, 6)
    name = cache_argument(patched)
    computed: list[int] = []
    projection = patched.transformer.h[0].crossattention.c_attn
    projection.register_forward_hook(lambda module, args, out: computed.append(1))
    with torch.no_grad():
        first = call(patched, ids[:, :4], use_cache=True)
        second = call(patched, ids[:, 4:5], use_cache=True, **{name: first[name]})
        third = call(patched, ids[:, 5:], use_cache=True, **{name: second[name]})
        whole = call(reference, ids, use_cache=False).logits
    logits = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert error_where(None, logits, whole) < TOLERANCE
    if isinstance(first[name], EncoderDecoderCache):  # older releases return tuples, which tell less
        assert len(computed) == 1


def test_cross_attention_generates_what_eager_does() -> None:
    patched, reference = patched_pair("gpt2", "eager", add_cross_attention=True)
    ids = tokens(2, 4)
    found = []
    for model in (patched, reference):
        kept = ids
        for _ in range(12):  # without a cache: some releases can't cache cross-attention
            logits = call(model, kept, use_cache=False).logits[:, -1]
            kept = torch.cat([kept, logits.argmax(-1, keepdim=True)], dim=1)
        found.append(kept)
    assert torch.equal(*found)


@pytest.mark.parametrize(("rows", "texts"), [(3, 1), (1, 3)])
@pytest.mark.parametrize("length", [1, 7])
def test_one_text_serves_a_whole_batch_of_the_other(rows: int, texts: int, length: int) -> None:
    patched, reference = patched_pair("gpt2", add_cross_attention=True)
    ids, text = tokens(rows, 6), torch.randn(texts, length, patched.config.n_embd)
    for mask in (None, torch.ones(texts, length, dtype=torch.long)):
        a, b = (
            model(ids, encoder_hidden_states=text, encoder_attention_mask=mask).logits
            for model in (patched, reference)
        )
        assert error_where(None, a, b) < TOLERANCE


@needs_cache_objects
def test_cross_attention_with_a_plain_cache_says_what_to_pass() -> None:
    patched, _ = patched_pair("gpt2", "eager", add_cross_attention=True)
    options: dict[str, Any] = {cache_argument(patched): DynamicCache()}
    with pytest.raises(ValueError, match="EncoderDecoderCache"):
        call(patched, tokens(2, 3), use_cache=False, **options)
    options = {cache_argument(patched): EncoderDecoderCache(DynamicCache(), DynamicCache())}
    call(patched, tokens(2, 3), use_cache=True, **options)


def test_encoder_states_for_a_self_attention_layer_raise() -> None:
    layer = patch_model(build("gpt2")).transformer.h[0].attn
    with pytest.raises(ValueError, match="add_cross_attention"):
        layer(torch.randn(1, 2, 48), encoder_hidden_states=torch.randn(1, 2, 48))


# Masked and pruned heads


@needs_head_masks
def test_head_masks_equal_eager() -> None:
    patched, reference = patched_pair("gpt2", "eager")
    ids = tokens(2, 7)
    head_mask = torch.tensor([[1.0, 0.0, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.25]])
    a = patched(ids, head_mask=head_mask, output_attentions=True)
    b = reference(ids, head_mask=head_mask, output_attentions=True)
    assert error_where(None, a.logits, b.logits) < TOLERANCE
    for x, y in zip(a.attentions, b.attentions, strict=True):
        assert torch.allclose(x, y, atol=1e-5)


def test_a_head_mask_that_is_not_one_factor_a_head_raises() -> None:
    layer = patch_model(build("gpt2")).transformer.h[0].attn
    with pytest.raises(ValueError, match="one factor a head"):
        layer(torch.randn(1, 3, 48), head_mask=torch.ones(1, 4, 3, 3))


@needs_pruning
@pytest.mark.parametrize("before", [False, True])
def test_pruned_heads_equal_eager(before: bool) -> None:
    """intel/neural-compressor#525: heads pruned before or after the patch."""
    heads = {0: [1], 2: [0, 3]}
    model, reference = build("gpt2"), build("gpt2")
    reference.prune_heads(heads)
    if before:
        model.prune_heads(heads)
        patch_model(model)
    else:
        patch_model(model)
        model.prune_heads(heads)
    ids, mask = left_padding(tokens(2, 9), 0, 4)
    a, b = model(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits
    assert error_where(mask, a, b) < TOLERANCE
    assert torch.equal(greedy(model, ids, mask, count=8), greedy(reference, ids, mask, count=8))


def test_arguments_by_position() -> None:
    """The layer keeps the positional order of the installed release."""
    original = build("gpt2").transformer.h[0].attn
    patched = patch_model(build("gpt2")).transformer.h[0].attn
    x = torch.randn(1, 4, 48)
    names = list(ARGUMENTS)[1:]
    hidden = torch.zeros(1, 1, 1, 4)
    hidden[..., 0] = torch.finfo(torch.float32).min
    given = {"hidden_states": x, "attention_mask": hidden}
    args = [given.get(name) for name in names[: names.index("attention_mask") + 1]]
    assert torch.equal(patched(*args)[0], patched(x, attention_mask=hidden)[0])
    assert torch.allclose(patched(*args)[0][:, 1:], original(*args)[0][:, 1:], atol=1e-5)
