"""`StreamMultiHeadAttention` against `torch.nn.MultiheadAttention`: outputs, weights and all gradients."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import streamattn.module
from streamattn import StreamMultiHeadAttention
from tests.mha import EMBED_DIM, NUM_HEADS, Call, assert_same, check_against_torch, twins
from tests.pairwise import pairwise

KDIM, VDIM = 5, 7

CASES = pairwise(
    {
        "dtype": [torch.float64, torch.float32],
        "batch_first": [False, True],
        "bias": [True, False],
        "add_bias_kv": [False, True],
        "add_zero_attn": [False, True],
        "widths": [
            {},
            {"kdim": KDIM},
            {"vdim": VDIM},
            {"kdim": KDIM, "vdim": VDIM},
            {"kdim": KDIM, "vdim": KDIM},
        ],
        "inputs": ["self", "cross", "three"],
        "batch": [2, None, 1],
        "lengths": [(5, 5), (3, 6), (6, 4), (1, 7), (300, 270)],
        "padding": ["none", "bool", "float", "trained"],
        "mask": ["none", "causal", "bool2", "float2", "bool3", "float3", "trained2", "trained3"],
        "weights": ["none", "averaged", "per head"],
        "is_causal": [False, True],
    }
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_torch(case: dict[str, Any]):
    widths, inputs = case["widths"], case["inputs"]
    if widths:  # inputs of different widths can't be one tensor
        inputs = "cross" if widths.get("kdim") == widths.get("vdim") else "three"
    names = ("batch_first", "bias", "add_bias_kv", "add_zero_attn")
    layer = {name: case[name] for name in names} | widths
    q_len, kv_len = case["lengths"]
    kv_len = q_len if inputs == "self" else kv_len
    # torch's hint is true of the causal mask only, means a square there, and hides appended keys.
    hint = case["mask"] == "causal" and q_len == kv_len and not (case["add_bias_kv"] or case["add_zero_attn"])
    call = Call(
        layer=layer,
        inputs=inputs,
        batch=case["batch"],
        q_len=q_len,
        kv_len=kv_len,
        padding=case["padding"],
        mask=case["mask"],
        weights=case["weights"],
        is_causal=case["is_causal"] and hint,
    )
    check_against_torch(call, case["dtype"])


@given(data=st.data())
def test_equals_torch_at_any_size(data: st.DataObject):
    inputs = data.draw(st.sampled_from(["self", "cross", "three"]))
    q_len = data.draw(st.integers(1, 40))
    call = Call(
        layer={
            name: data.draw(st.booleans()) for name in ("batch_first", "bias", "add_bias_kv", "add_zero_attn")
        },
        inputs=inputs,
        batch=data.draw(st.sampled_from([None, 1, 2, 3])),
        q_len=q_len,
        kv_len=data.draw(st.integers(1, 40)),
        padding=data.draw(st.sampled_from(["none", "bool", "float", "trained"])),
        mask=data.draw(st.sampled_from(["none", "causal", "bool2", "float2", "bool3", "float3", "trained3"])),
        weights=data.draw(st.sampled_from(["none", "averaged", "per head"])),
        seed=data.draw(st.integers(0, 1000)),
    )
    check_against_torch(call, data.draw(st.sampled_from([torch.float64, torch.float32])))


@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("weights", ["none", "averaged"])
def test_causal_hint_equals_torch(padding: str, weights: str):
    call = Call(mask="causal", is_causal=True, padding=padding, weights=weights)
    check_against_torch(call, torch.float64)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 6), (6, 4)])
@pytest.mark.parametrize("weights", ["none", "per head"])
def test_hint_beside_a_rectangular_mask_leaves_the_mask_in_charge(q_len: int, kv_len: int, weights: str):
    """A mask aligned top-left, as torch's hint means it."""
    call = Call(inputs="cross", mask="causal", q_len=q_len, kv_len=kv_len, weights=weights)
    theirs, ours = twins(torch.float64)
    hinted = copy.copy(call)
    hinted.is_causal = True
    assert_same(hinted.run(ours, torch.float64), call.run(theirs, torch.float64), 1e-10)


def hidden_by_position(q_len: int, kv_len: int, left: int, right: int) -> Tensor:
    """torch's mask (True = hidden) for a bottom-right window of the given widths."""
    position = torch.arange(q_len).unsqueeze(1) + kv_len - q_len
    distance = torch.arange(kv_len) - position
    return (distance < -left) | (distance > right)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (3, 6), (1, 8)])
@pytest.mark.parametrize("extras", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({"causal": True}, 100, 0),
        ({"window_size": 2}, 1, 0),
        ({"window_size": (1, 2)}, 1, 2),
        ({"window_size": (-1, 1)}, 100, 1),
        ({"window_size": (2, 2), "causal": True}, 2, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
def test_causal_and_window_equal_the_explicit_mask(
    q_len: int,
    kv_len: int,
    extras: dict[str, bool],
    options: dict[str, Any],
    left: int,
    right: int,
    padding: str,
):
    theirs, _ = twins(torch.float64, **extras)
    ours = StreamMultiHeadAttention(EMBED_DIM, NUM_HEADS, **extras, **options, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    call = Call(inputs="cross", q_len=q_len, kv_len=kv_len, padding=padding, weights="per head")
    tensors = call.tensors(torch.float64)
    query, key = tensors["query"], tensors["key"]
    padding_mask = tensors.get("key_padding_mask")
    mask = hidden_by_position(q_len, kv_len, left, right)
    float_mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)
    same_type = mask if padding == "bool" else float_mask
    wanted, wanted_weights = theirs(
        query, key, key, padding_mask, attn_mask=same_type, average_attn_weights=False
    )
    out, weights = ours(query, key, key, padding_mask, average_attn_weights=False)
    assert weights is not None
    alive = ~wanted.isnan()  # padding may leave a query nothing to see
    torch.testing.assert_close(out[alive], wanted[alive])
    torch.testing.assert_close(weights, wanted_weights.nan_to_num(0.0))
    alone, none = ours(query, key, key, padding_mask, need_weights=False)
    assert none is None
    torch.testing.assert_close(alone, out)


@pytest.mark.parametrize(("q_len", "kv_len"), [(5, 5), (2, 5), (5, 2)])
def test_is_causal_needs_no_mask(q_len: int, kv_len: int):
    """Bottom-right, as `causal=True`; the queries before the first key see nothing."""
    _, ours = twins(torch.float64)
    call = Call(inputs="cross", q_len=q_len, kv_len=kv_len, weights="averaged", is_causal=True)
    causal = copy.deepcopy(ours)
    causal.causal = True
    hinted = call.run(ours, torch.float64)
    call.is_causal = False
    assert_same(hinted, call.run(causal, torch.float64), 0.0)
    hidden = hidden_by_position(q_len, kv_len, 100, 0)
    assert not hinted["weights"][:, hidden].any()
    assert hinted["weights"][:, ~hidden].all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("weights", ["none", "averaged", "per head"])
def test_grouped_heads_equal_repeated_heads(fused: bool, extras: bool, weights: str):
    """Key and value heads shared by a group are torch's heads with equal weights; their gradients add up."""
    num_heads, num_kv_heads, head_dim = 6, 2, 2
    options: dict[str, Any] = {"add_bias_kv": extras, "dtype": torch.float64, "batch_first": True}
    options |= {} if fused else {"kdim": KDIM}
    ours = StreamMultiHeadAttention(EMBED_DIM, num_heads, **options, num_kv_heads=num_kv_heads)
    theirs = nn.MultiheadAttention(EMBED_DIM, num_heads, **options)
    kv_dim = num_kv_heads * head_dim
    if fused:
        assert ours.in_proj_weight is not None
        assert ours.in_proj_weight.shape == (EMBED_DIM + 2 * kv_dim, EMBED_DIM)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)

    def repeated(x: Tensor, dim: int) -> Tensor:
        heads = x.unflatten(dim, (num_kv_heads, head_dim))
        return heads.repeat_interleave(num_heads // num_kv_heads, dim=dim).flatten(dim, dim + 1)

    def folded(x: Tensor, dim: int) -> Tensor:
        return x.unflatten(dim, (num_kv_heads, -1, head_dim)).sum(dim + 1).flatten(dim, dim + 1)

    def map_state(state: dict[str, Tensor], change: Any, q_dim: int, kv_dim: int) -> dict[str, Tensor]:
        mapped = {}
        for name, x in state.items():
            if name.startswith("in_proj"):
                q, k, v = x.split([q_dim, kv_dim, kv_dim])
                mapped[name] = torch.cat([q, change(k, 0), change(v, 0)])
            elif name in ("k_proj_weight", "v_proj_weight"):
                mapped[name] = change(x, 0)
            elif name in ("bias_k", "bias_v"):
                mapped[name] = change(x, 2)
            else:
                mapped[name] = x
        return mapped

    theirs.load_state_dict(map_state(ours.state_dict(), repeated, EMBED_DIM, kv_dim))
    layer = {"batch_first": True} | ({} if fused else {"kdim": KDIM})
    call = Call(
        layer=layer,
        inputs="self" if fused else "three",
        padding="bool",
        mask="none",
        weights=weights,
    )
    actual, expected = call.run(ours, torch.float64), call.run(theirs, torch.float64)
    names = [name for name, _ in theirs.named_parameters()]
    grads = {name: expected.pop(f"grad of {name}") for name in names}
    grads = map_state(grads, folded, EMBED_DIM, EMBED_DIM)
    assert_same(actual, expected | {f"grad of {name}": x for name, x in grads.items()}, 1e-10)


@pytest.mark.parametrize("hide", ["bool", "-inf", "finfo.min"])
@pytest.mark.parametrize("how", ["padding", "mask"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_query_that_sees_nothing_gives_zero(hide: str, how: str, need_weights: bool):
    _, ours = twins(torch.float32, batch_first=True)
    query = torch.randn(2, 4, EMBED_DIM, requires_grad=True)
    hidden = torch.zeros((2, 4) if how == "padding" else (4, 4), dtype=torch.bool)
    hidden[1] = True  # all keys of sequence 1, or all keys of query 1
    mask = hidden
    if hide != "bool":
        low = -math.inf if hide == "-inf" else torch.finfo(torch.float32).min
        mask = torch.zeros(hidden.shape).masked_fill(hidden, low)
    masks = {"key_padding_mask" if how == "padding" else "attn_mask": mask}
    out, weights = ours(query, query, query, need_weights=need_weights, **masks)
    blind = (1, slice(None)) if how == "padding" else (slice(None), 1)
    torch.testing.assert_close(out[blind], ours.out_proj.bias.expand_as(out[blind]))
    if weights is not None:
        assert not weights[blind].any()
        out = out.sum() + weights.square().sum()
    out.sum().backward()
    for x in (query, *ours.parameters()):
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("need_weights", [False, True])
def test_nan_in_a_hidden_key_reaches_nothing(need_weights: bool):
    _, ours = twins(torch.float32, batch_first=True)
    query = torch.randn(2, 3, EMBED_DIM, requires_grad=True)
    key = torch.randn(2, 5, EMBED_DIM)
    key[1, 3:] = math.nan
    hidden = key.isnan().any(dim=-1)
    out, weights = ours(query, key, key, hidden, need_weights=need_weights)
    total = out.square().sum() if weights is None else out.square().sum() + weights.square().sum()
    total.backward()
    assert total.isfinite()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_dropout_is_reproducible_and_only_in_training():
    theirs, ours = twins(torch.float32, batch_first=True, dropout=0.5)
    x = torch.randn(2, 16, EMBED_DIM)
    ours.eval()
    calm, weights = ours(x, x, x)
    torch.testing.assert_close(calm, theirs.eval()(x, x, x)[0])
    ours.train()
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        out, dropped = ours(x, x, x)
        torch.testing.assert_close(dropped, weights)  # the weights are those before dropout
        outs.append(out)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert not torch.allclose(outs[0], calm)
    draws = torch.stack([ours(x, x, x, need_weights=False)[0] for _ in range(400)]).detach()
    standard_error = draws.std(dim=0) / math.sqrt(len(draws))
    assert ((draws.mean(dim=0) - calm).abs() < 5 * standard_error).all()


@pytest.mark.parametrize("batch_first", [False, True])
def test_heads_are_views(batch_first: bool, monkeypatch: pytest.MonkeyPatch):
    """Self-attention projects once and attends in place; the output projection reads the heads in place."""
    _, ours = twins(torch.float32, batch_first=batch_first)
    seen = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any):
        out, lse = streamattn.attention(q, k, v, **options)
        seen.update(q=q, k=k, v=v, out=out, mask=options["attn_mask"])
        return out, lse

    monkeypatch.setattr(streamattn.module, "attention", attention)
    ours.out_proj.register_forward_pre_hook(lambda module, args: seen.update(projected=args[0]))
    batch, length = 3, 7
    x = torch.randn((batch, length, EMBED_DIM) if batch_first else (length, batch, EMBED_DIM))
    padding = torch.zeros(batch, length, dtype=torch.bool)
    with torch.no_grad():
        out, _ = ours(x, x, x, padding, need_weights=False)
    storages = {name: seen[name].untyped_storage() for name in "qkv"}
    assert storages["q"].data_ptr() == storages["k"].data_ptr() == storages["v"].data_ptr()
    assert storages["q"].nbytes() == 4 * 3 * x.numel()
    assert seen["projected"].data_ptr() == seen["out"].data_ptr()
    assert seen["mask"].shape == (batch, 1, 1, length)
    assert out.is_contiguous()
    memory = torch.randn(x.shape)
    with torch.no_grad():
        ours(x, memory, memory, need_weights=False)
    storages = {name: seen[name].untyped_storage() for name in "qkv"}
    assert storages["q"].data_ptr() != storages["k"].data_ptr() == storages["v"].data_ptr()
    assert storages["k"].nbytes() == 4 * 2 * x.numel()


def test_masks_stay_broadcast(monkeypatch: pytest.MonkeyPatch):
    """A padding mask beside a shared mask forms neither [B, H, T, S] nor [B, 1, T, S]."""
    _, ours = twins(torch.float32)
    options: dict[str, Any] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor, **given: Any):
        options.update(given)
        return streamattn.attention(q, k, v, **given)

    monkeypatch.setattr(streamattn.module, "attention", attention)
    x = torch.randn(7, 3, EMBED_DIM)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    ours.requires_grad_(False)
    ours(x, x, x, padding, attn_mask=torch.zeros(7, 7), need_weights=False)
    assert options["attn_mask"].shape == (1, 1, 7, 7)
    assert [tuple(ids.shape) for ids in options["segment_ids"]] == [(3, 7), (3, 7)]
    ours(x, x, x, attn_mask=torch.zeros(7, 7), need_weights=False, is_causal=True)
    assert options["attn_mask"] is None
    assert options["causal"]


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "masks", [{}, {"src_key_padding_mask"}, {"src_mask"}, {"src_key_padding_mask", "src_mask"}]
)
def test_encoder_layer_calls_us(activation: str, training: bool, masks: set[str]):
    """Swapped into torch's encoder layer it is used in both modes: the inference path doesn't pass it by."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, activation, batch_first=True).train(training)
    attn = StreamMultiHeadAttention(16, 4, batch_first=True)
    attn.load_state_dict(layer.self_attn.state_dict())
    swapped = copy.deepcopy(layer)
    swapped.self_attn = attn.train(training)  # type: ignore[assignment]
    calls = []
    forward = attn.forward
    attn.forward = lambda *args, **options: calls.append(1) or forward(*args, **options)  # type: ignore[method-assign]
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    options = {"src_key_padding_mask": padding, "src_mask": torch.ones(6, 6, dtype=torch.bool).triu(1)}
    options = {name: options[name] for name in masks}
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(swapped(x, **options), layer(x, **options), atol=1e-5, rtol=1e-4)
    assert calls


def test_encoder_in_eval_makes_no_nested_tensors():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 2).eval()
    layer.self_attn = StreamMultiHeadAttention(16, 4, batch_first=True)  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        ours = nn.TransformerEncoder(layer, 2).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 16)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype", category=UserWarning)
        wanted = theirs(x, src_key_padding_mask=padding)
    with torch.no_grad():
        out = ours(x, src_key_padding_mask=padding)
    torch.testing.assert_close(out[~padding], wanted[~padding], atol=1e-5, rtol=1e-4)


def test_decoder_layer():
    theirs = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0)
    ours = copy.deepcopy(theirs)
    for name in ("self_attn", "multihead_attn"):
        attn = StreamMultiHeadAttention(16, 4)
        attn.load_state_dict(getattr(theirs, name).state_dict())
        setattr(ours, name, attn)
    target, memory = torch.randn(5, 2, 16), torch.randn(8, 2, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    options = {"tgt_mask": mask, "tgt_is_causal": True}
    torch.testing.assert_close(ours(target, memory, **options), theirs(target, memory, **options))


@pytest.mark.parametrize("layer", [{}, {"bias": False, "add_bias_kv": True}, {"kdim": KDIM}], ids=str)
def test_same_seed_and_state_dict_as_torch(layer: dict[str, Any]):
    states = []
    for kind in (nn.MultiheadAttention, StreamMultiHeadAttention):
        torch.manual_seed(3)
        module = kind(EMBED_DIM, NUM_HEADS, **layer)
        states.append((module.state_dict(), [name for name, _ in module.named_parameters()]))
    (theirs, their_order), (ours, our_order) = states
    assert our_order == their_order
    assert list(ours) == list(theirs)
    for name, x in theirs.items():
        assert torch.equal(ours[name], x), name


@pytest.mark.parametrize("layer", [{}, {"add_bias_kv": True, "kdim": KDIM}], ids=str)
def test_meta_device_and_reset_parameters(layer: dict[str, Any]):
    module = StreamMultiHeadAttention(64, 4, **layer, device="meta", num_kv_heads=2)
    x = torch.empty(3, 2, 64, device="meta")
    k = torch.empty(3, 2, layer.get("kdim", 64), device="meta")
    out, weights = module(x, k, x)
    assert weights is not None
    assert (out.shape, out.device.type, weights.shape[:2]) == (x.shape, "meta", (2, 3))
    module = module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, math.nan)
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        assert parameter.isfinite().all(), name
        assert (parameter.std() > 0.0) != (name in ("in_proj_bias", "out_proj.bias")), name


@pytest.mark.parametrize("need_weights", [False, True])
def test_survives_deepcopy_pickle_and_save(need_weights: bool):
    module = StreamMultiHeadAttention(EMBED_DIM, NUM_HEADS, add_bias_kv=True, window_size=(2, 1))
    x = torch.randn(5, 2, EMBED_DIM)
    wanted = module(x, x, x, need_weights=need_weights)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ]
    for other in copies:
        assert repr(other) == repr(module)
        torch.testing.assert_close(other(x, x, x, need_weights=need_weights), wanted, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "layer", [{}, {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}], ids=str
)
def test_half_precision(dtype: torch.dtype, layer: dict[str, Any]):
    theirs, ours = twins(torch.float32, **layer)
    ours = ours.to(dtype)
    x = torch.randn(4, 4, EMBED_DIM)
    wanted, wanted_weights = theirs(x, x, x, average_attn_weights=False)
    half = x.to(dtype).requires_grad_()
    out, weights = ours(half, half, half, average_attn_weights=False)
    assert weights is not None
    assert out.dtype == weights.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), wanted, rtol=0.0, atol=tolerance * wanted.abs().max().item())
    torch.testing.assert_close(weights.float(), wanted_weights, rtol=0.0, atol=tolerance)
    (out.sum() + weights.square().sum()).backward()
    assert half.grad is not None
    assert half.grad.isfinite().all()


@pytest.mark.parametrize("extras", [False, True])
def test_autocast(extras: bool):
    theirs, ours = twins(torch.float32, add_bias_kv=extras, add_zero_attn=extras)
    x = torch.randn(6, 2, EMBED_DIM)
    wanted, wanted_weights = theirs(x, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = ours(x, x, x)
        torch_out, torch_weights = theirs(x, x, x)
    assert weights is not None
    assert (out.dtype, weights.dtype) == (torch_out.dtype, x.dtype)
    assert torch_weights.dtype == torch.bfloat16  # a documented difference
    torch.testing.assert_close(out.float(), wanted, rtol=0.0, atol=0.03 * wanted.abs().max().item())
    torch.testing.assert_close(weights, wanted_weights, rtol=0.0, atol=0.03)
    # Scores in bfloat16 would not match the float32 lse: their rows sum to one only roughly.
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]), rtol=0.0, atol=1e-4)
    (out.sum() + weights.sum()).backward()
    assert ours.out_proj.weight.grad is not None
    assert ours.out_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    "call",
    [
        Call(),
        Call(weights="averaged", padding="bool", mask="bool2"),
        Call(
            inputs="cross",
            layer={"add_bias_kv": True, "add_zero_attn": True},
            weights="per head",
            mask="float3",
        ),
        Call(inputs="three", layer={"kdim": KDIM, "vdim": VDIM, "batch_first": True}, padding="trained"),
        Call(batch=None, is_causal=True),
    ],
    ids=str,
)
def test_compiles_without_a_graph_break(call: Call):
    torch._dynamo.reset()
    _, ours = twins(torch.float32, **call.layer)
    wanted = call.run(ours, torch.float32)
    compiled: Any = torch.compile(ours, fullgraph=True, backend="aot_eager")
    result = call.run(compiled, torch.float32)
    assert_same({name.replace("_orig_mod.", ""): x for name, x in result.items()}, wanted, 1e-6)


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel():
    _, ours = twins(torch.float64)
    call = Call(weights="averaged", padding="bool")
    wanted = call.run(ours, torch.float64)
    result = call.run(DistributedDataParallel(ours), torch.float64)
    assert_same({name.replace("module.", ""): x for name, x in result.items()}, wanted, 1e-12)


def test_zero_length_and_empty_batch():
    _, ours = twins(torch.float32, batch_first=True)
    for batch, q_len, kv_len in ((2, 0, 3), (2, 3, 0), (0, 3, 4)):
        query = torch.randn(batch, q_len, EMBED_DIM, requires_grad=True)
        key = torch.randn(batch, kv_len, EMBED_DIM)
        out, weights = ours(query, key, key)
        assert weights is not None
        assert out.shape == query.shape
        assert weights.shape == (batch, q_len, kv_len)
        torch.testing.assert_close(out, ours.out_proj.bias.expand_as(out))
        out.sum().backward()


def test_extra_repr_shows_what_is_not_default():
    assert StreamMultiHeadAttention(8, 2).extra_repr() == "embed_dim=8, num_heads=2"
    module = StreamMultiHeadAttention(
        8, 4, 0.1, False, True, True, 3, 5, True, num_kv_heads=2, causal=True, window_size=4
    )
    assert module.extra_repr() == (
        "embed_dim=8, num_heads=4, num_kv_heads=2, kdim=3, vdim=5, dropout=0.1, bias=False, "
        "add_bias_kv=True, add_zero_attn=True, batch_first=True, causal=True, window_size=4"
    )
