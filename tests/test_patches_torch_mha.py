"""Patched `nn.MultiheadAttention` against torch's own, alone and in torch's containers, and back again."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from patches import patch_model, patch_report, unpatch_model
from tests.mha import TOLERANCE, Call, assert_same, twins
from tests.pairwise import pairwise
from tests.torch_models import (
    BATCH,
    CAUSAL,
    HEADS,
    LENGTH,
    MODELS,
    PADDING,
    Build,
    E,
    assert_close,
    build,
    encoder,
    encoder_layer,
    inputs,
    outputs_and_gradients,
    pair_mask,
    ran,
    run_eval,
    spy_on_attention,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return spy_on_attention(monkeypatch)


# The layer


CASES = pairwise(
    {
        "dtype": [torch.float64, torch.float32],
        "training": [True, False],
        "batch_first": [False, True],
        "bias": [True, False],
        "add_bias_kv": [False, True],
        "add_zero_attn": [False, True],
        "widths": [{}, {"kdim": 5}, {"kdim": 5, "vdim": 7}],
        "inputs": ["self", "cross", "three"],
        "batch": [2, None],
        "lengths": [(5, 5), (3, 6), (1, 7)],
        "padding": ["none", "bool", "float", "trained"],
        "mask": ["none", "causal", "bool2", "float2", "bool3", "float3", "trained2"],
        "weights": ["none", "averaged", "per head"],
        "is_causal": [False, True],
    }
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch(case: dict[str, Any], calls: list[str]) -> None:
    widths = case["widths"]
    inputs = "three" if widths else case["inputs"]  # inputs of different widths can't be one tensor
    layer = {name: case[name] for name in ("batch_first", "bias", "add_bias_kv", "add_zero_attn")} | widths
    q_len, kv_len = case["lengths"]
    square = inputs == "self" or q_len == kv_len
    appended = case["add_bias_kv"] or case["add_zero_attn"]
    call = Call(
        layer=layer,
        inputs=inputs,
        batch=case["batch"],
        q_len=q_len,
        kv_len=kv_len,
        padding=case["padding"],
        mask=case["mask"],
        weights=case["weights"],
        # torch's hint is true of the causal mask only, means a square there, and hides appended keys
        is_causal=case["is_causal"] and case["mask"] == "causal" and square and not appended,
    )
    theirs, _ = twins(case["dtype"], **layer)
    ours = patch_model(copy.deepcopy(theirs.train(case["training"])))
    wanted = call.run(theirs, case["dtype"])
    assert "stream" not in ran(calls)
    assert_same(call.run(ours, case["dtype"]), wanted, TOLERANCE[case["dtype"]])
    assert ran(calls) == ["stream"]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", [None, "padding", "attn_mask"])
def test_the_layers_own_fast_path(mask: str | None, need_weights: bool, calls: list[str]) -> None:
    theirs = build(lambda: nn.MultiheadAttention(E, HEADS, batch_first=True))
    ours = patch_model(copy.deepcopy(theirs))
    x = torch.randn(BATCH, LENGTH, E)
    masks = {None: {}, "padding": {"key_padding_mask": PADDING}, "attn_mask": {"attn_mask": CAUSAL}}[mask]
    with torch.no_grad():
        wanted, wanted_weights = theirs(x, x, x, need_weights=need_weights, **masks)
        assert ran(calls) == ["torch"]
        out, weights = ours(x, x, x, need_weights=need_weights, **masks)
        assert ran(calls) == ["stream"]
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights, wanted_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    theirs = build(lambda: nn.MultiheadAttention(E, HEADS, batch_first=True), training=True)
    ours = patch_model(copy.deepcopy(theirs)).to(dtype)
    x = torch.randn(BATCH, LENGTH, E)
    wanted, wanted_weights = theirs(x, x, x, PADDING)
    half = x.to(dtype).requires_grad_()
    out, weights = ours(half, half, half, PADDING)
    assert (out.dtype, weights.dtype) == (dtype, dtype)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), wanted, rtol=0.0, atol=8 * eps * wanted.abs().max().item())
    torch.testing.assert_close(weights.float(), wanted_weights, rtol=0.0, atol=8 * eps)
    out.sum().backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


def test_a_query_that_sees_nothing_gives_zero() -> None:
    theirs = build(lambda: nn.MultiheadAttention(E, HEADS, batch_first=True), training=True)
    ours = patch_model(copy.deepcopy(theirs))
    x = torch.randn(BATCH, LENGTH, E, requires_grad=True)
    hidden = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    hidden[1] = True
    assert theirs(x, x, x, hidden)[0][1].isnan().all()
    out, weights = ours(x, x, x, hidden)
    assert torch.equal(out[1], ours.out_proj.bias.expand_as(out[1]))
    assert not weights[1].any()
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_dropout_follows_the_seed_and_the_mode() -> None:
    layer = build(lambda: nn.MultiheadAttention(E, HEADS, dropout=0.5, batch_first=True))
    x = torch.randn(BATCH, LENGTH, E)
    calm = layer(x, x, x)[0]
    patch_model(layer)
    torch.testing.assert_close(layer(x, x, x)[0], calm, atol=1e-5, rtol=1e-5)
    layer.train()
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(layer(x, x, x)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    draws = torch.stack([layer(x, x, x, need_weights=False)[0] for _ in range(400)]).detach()
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    assert ((draws.mean(dim=0) - calm).abs() < 5 * standard_error).all()


def test_autocast(calls: list[str]) -> None:
    model = patch_model(build())
    x = torch.randn(BATCH, LENGTH, E)
    wanted = unpatch_model(copy.deepcopy(model))(x)
    ran(calls)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert ran(calls) == ["stream"] * 2
    torch.testing.assert_close(out.float(), wanted, rtol=0.0, atol=0.05 * wanted.abs().max().item())


def test_initialises_anew_as_torch() -> None:
    """What materialises a model from the meta device calls this."""
    for options in ({}, {"kdim": 5, "add_bias_kv": True}):
        states = []
        for change in (lambda layer: layer, patch_model):
            layer = change(nn.MultiheadAttention(E, HEADS, **options, device="meta")).to_empty(device="cpu")
            torch.manual_seed(3)
            layer._reset_parameters()
            states.append({name: x for name, x in layer.state_dict().items() if name != "out_proj.weight"})
        torch.testing.assert_close(states[0], states[1], rtol=0.0, atol=0.0)


# torch's containers


OPTIONS = pairwise(
    {
        "training": [True, False],
        "batch_first": [True, False],
        "norm_first": [False, True],
        "bias": [True, False],
        "activation": ["relu", "gelu"],
        "padding": [False, True],
        "mask": [None, "hint", "no hint", "bias"],
    }
)


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("make", [encoder_layer, encoder])
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_encoders(make: Any, case: dict[str, Any], calls: list[str]) -> None:
    training, batch_first = case["training"], case["batch_first"]
    names = ("batch_first", "norm_first", "bias", "activation")
    theirs = build(lambda: make(**{name: case[name] for name in names}), training)
    ours = patch_model(copy.deepcopy(theirs))
    layers = 2 if make is encoder else 1
    mask_name = "mask" if make is encoder else "src_mask"
    options: dict[str, Any] = {"batch_first": batch_first, mask_name: pair_mask(case["mask"])}
    options["is_causal"] = case["mask"] == "hint"
    if case["padding"]:
        options["src_key_padding_mask"] = PADDING
    wanted = outputs_and_gradients(theirs, training, inputs(batch_first), **options)
    assert ran(calls) == ["torch"] * layers
    assert_close(outputs_and_gradients(ours, training, inputs(batch_first), **options), wanted)
    assert ran(calls) == ["stream"] * layers


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_a_whole_transformer(case: dict[str, Any], calls: list[str]) -> None:
    """Six attention layers: one in each of two encoder layers, two in each of two decoder layers."""
    training, batch_first = case["training"], case["batch_first"]
    names = ("batch_first", "norm_first", "bias", "activation")
    options = {name: case[name] for name in names}
    theirs = build(lambda: nn.Transformer(E, HEADS, 2, 2, 32, 0.0, **options), training)
    ours = patch_model(copy.deepcopy(theirs))
    assert len(patch_report(ours).patched) == 6
    arguments: dict[str, Any] = {"batch_first": batch_first, "tgt_mask": pair_mask(case["mask"])}
    arguments["tgt_is_causal"] = case["mask"] == "hint"
    if case["padding"]:
        source_padding = torch.zeros(BATCH, 9, dtype=torch.bool)
        source_padding[1, 6:] = True
        arguments |= {"src_key_padding_mask": source_padding, "memory_key_padding_mask": source_padding}
        arguments["tgt_key_padding_mask"] = PADDING
    source, target = inputs(batch_first, 9), inputs(batch_first, seed=1)
    wanted = outputs_and_gradients(theirs, training, source, target, **arguments)
    assert ran(calls) == ["torch"] * 6
    assert_close(outputs_and_gradients(ours, training, source, target, **arguments), wanted)
    assert ran(calls) == ["stream"] * 6


@pytest.mark.parametrize("training", [True, False])
def test_decoder_alone_with_cross_attention(training: bool, calls: list[str]) -> None:
    theirs = build(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(E, HEADS, 32, 0.0, batch_first=True), 2),
        training,
    )
    ours = patch_model(copy.deepcopy(theirs))
    ran(calls)
    arguments = {"batch_first": True, "tgt_mask": pair_mask("hint"), "tgt_is_causal": True}
    memory = inputs(True, 11, seed=2)
    wanted = outputs_and_gradients(theirs, training, inputs(True), memory, **arguments)
    ran(calls)
    assert_close(outputs_and_gradients(ours, training, inputs(True), memory, **arguments), wanted)
    assert ran(calls) == ["stream"] * 4


def test_inputs_without_a_batch(calls: list[str]) -> None:
    theirs = build()
    ours = patch_model(copy.deepcopy(theirs))
    x = torch.randn(LENGTH, E)
    with torch.no_grad():
        wanted = theirs(x)
        ran(calls)
        torch.testing.assert_close(ours(x), wanted, atol=1e-5, rtol=1e-5)
    assert ran(calls) == ["stream"] * 2


# In place, reversible


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_patch_and_unpatch_leave_nothing_behind(make: Build, padded: bool, calls: list[str]) -> None:
    """torch's fast paths are taken before, passed by nothing between, and taken again to the last bit."""
    model, untouched = build(make), build(make)
    state = [dict(module.__dict__) for module in model.modules()]
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    classes = [type(module) for module in model.modules()]
    parameters = list(model.parameters())
    keys = list(model.state_dict())
    x = inputs(True)
    before = run_eval(model, x, padded)
    fast = ran(calls)
    assert set(fast) == {"torch"}

    assert patch_model(model) is model
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    patched = run_eval(model, x, padded)
    assert ran(calls) == ["stream"] * len(fast)
    seen = ~PADDING if padded else torch.ones_like(PADDING)
    torch.testing.assert_close(patched[seen], before[seen], atol=2e-5, rtol=1e-5)
    assert torch.equal(run_eval(untouched, x, padded), before)
    assert ran(calls) == fast

    assert unpatch_model(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert [dict(module.__dict__) for module in model.modules()] == state
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert torch.equal(run_eval(model, x, padded), before)
    assert ran(calls) == fast


def test_is_idempotent() -> None:
    model = build()
    patch_model(patch_model(model))
    assert [len(m._forward_pre_hooks) for m in model.modules() if isinstance(m, nn.MultiheadAttention)] == [
        1,
        1,
    ]
    unpatch_model(unpatch_model(model))
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.use_nested_tensor is True


@pytest.mark.parametrize("before", [True, False])
def test_nested_tensors_are_as_the_user_left_them(before: bool) -> None:
    model = build()
    model.use_nested_tensor = before
    assert not patch_model(model).use_nested_tensor
    assert unpatch_model(model).use_nested_tensor is before


def test_a_choice_made_while_patched_stays() -> None:
    model = patch_model(build())
    model.use_nested_tensor = False
    assert unpatch_model(model).use_nested_tensor is False


def test_an_encoder_made_of_a_patched_layer() -> None:
    """It chose nested tensors at construction: they are refused with the remedy, which works."""
    layer = patch_model(build(encoder_layer))
    model = nn.TransformerEncoder(layer, 2).eval()
    x = inputs(True)
    with pytest.raises(TypeError, match="or give patch_model the whole encoder"):
        run_eval(model, x)
    wanted = run_eval(unpatch_model(copy.deepcopy(model)), x)
    torch.testing.assert_close(
        run_eval(patch_model(model), x)[~PADDING], wanted[~PADDING], atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("index", [0, 1])
def test_a_partial_patch(index: int, calls: list[str]) -> None:
    """One of two layers, the first too, whose kind decides about nested tensors."""
    theirs = build()
    ours = patch_model(
        copy.deepcopy(theirs), filter_fn=lambda module, name: name == f"layers.{index}.self_attn"
    )
    report = patch_report(ours)
    assert report.patched == {f"layers.{index}.self_attn": "StreamTorchMultiheadAttention"}
    assert list(report.skipped) == [f"layers.{1 - index}.self_attn"]
    x = inputs(True)
    wanted = run_eval(theirs, x)
    ran(calls)
    torch.testing.assert_close(run_eval(ours, x)[~PADDING], wanted[~PADDING], atol=1e-5, rtol=1e-5)
    assert sorted(ran(calls)) == ["stream", "torch"]
    unpatch_model(ours)
    assert torch.equal(run_eval(ours, x), wanted)


def test_other_encoders_in_the_model_keep_nested_tensors() -> None:
    model = nn.ModuleDict({"a": encoder(), "b": encoder()})
    patch_model(model, filter_fn=lambda module, name: name.startswith("a."))
    assert not model["a"].use_nested_tensor
    assert model["b"].use_nested_tensor is True


def test_a_layer_alone() -> None:
    layer = nn.MultiheadAttention(E, HEADS)
    assert patch_model(layer) is layer
    assert list(patch_report(layer).patched) == [""]
    assert isinstance(layer, nn.MultiheadAttention)
    assert unpatch_model(layer) is layer
    assert type(layer) is nn.MultiheadAttention


def test_a_layer_used_twice(calls: list[str]) -> None:
    layer = encoder_layer()
    model = build(lambda: nn.Sequential(layer, layer))
    x = inputs(True)
    wanted = model(x)
    patch_model(model)
    assert len(patch_report(model).patched) == 1
    ran(calls)
    torch.testing.assert_close(model(x), wanted, atol=2e-5, rtol=1e-5)
    assert ran(calls) == ["stream"] * 2
    assert torch.equal(unpatch_model(model)(x), wanted)


def test_attributes_keep_their_values() -> None:
    """Converters and adapters read how the projections are laid out."""
    options: dict[str, Any]
    for options in ({}, {"kdim": 5}, {"bias": False, "add_bias_kv": True}):
        layer = nn.MultiheadAttention(E, HEADS, **options)
        names = [name for name in vars(layer) if name != "_forward_pre_hooks"]
        names += list(layer._parameters)
        before = {name: getattr(layer, name) for name in names}
        patch_model(layer)
        assert all(getattr(layer, name) is value for name, value in before.items())


def test_repr_shows_the_patch() -> None:
    model = build()
    before = repr(model)
    assert "StreamTorchMultiheadAttention(\n        embed_dim=16, num_heads=4, batch_first=True" in repr(
        patch_model(model)
    )
    assert repr(unpatch_model(model)) == before
