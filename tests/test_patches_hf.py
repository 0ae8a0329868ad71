"""Patched models against unpatched eager ones: masks, caches, generation, weights, compilation."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

import patches.hf
from patches import patch_model, unpatch_model
from tests.hf_models import (
    FAMILIES,
    TOLERANCE,
    build,
    cache_argument,
    error_where,
    gradient_error,
    gradients,
    greedy,
    left_padding,
    patched_pair,
    spy_attention,
    static_cache,
    takes_cache_objects,
    tokens,
)

ATTENTIONS = ("eager", "sdpa")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=ATTENTIONS)
def attn(request: pytest.FixtureRequest) -> str:
    """The implementation that the model is configured for, which decides what masks its layers get."""
    return request.param


# Logits and gradients


@pytest.mark.parametrize("padding", ["none", "all ones", "left", "right", "hole"])
def test_logits_and_gradients_equal_eager(family: str, attn: str, padding: str) -> None:
    patched, reference = patched_pair(family, attn)
    ids = tokens(2, 21)
    mask = None
    if padding != "none":
        mask = torch.ones_like(ids)
        where = {"left": slice(0, 6), "right": slice(15, None), "hole": slice(7, 10)}.get(padding)
        if where is not None:
            mask[1, where] = 0
    with torch.no_grad():
        a = patched(input_ids=ids, attention_mask=mask).logits
        b = reference(input_ids=ids, attention_mask=mask).logits
    assert error_where(mask, a, b) < TOLERANCE
    keep = None if mask is None else mask
    assert gradient_error(gradients(patched, ids, keep), gradients(reference, ids, keep)) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 33])
def test_short_and_odd_lengths(family: str, length: int) -> None:
    patched, reference = patched_pair(family)
    ids = tokens(2, length)
    assert error_where(None, patched(ids).logits, reference(ids).logits) < TOLERANCE


def test_masks_stay_unmaterialised(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask serves all heads, and one a user gives for all rows those too, as broadcast dimensions."""
    patched, _ = patched_pair(family, "sdpa")
    calls = spy_attention(monkeypatch)
    ids, mask = left_padding(tokens(2, 8), 0, 3)
    with torch.no_grad():
        patched(ids, attention_mask=mask)
    assert len(calls) == 3
    if not patches.hf.MASKS_PASS_UNCHANGED:
        assert all(call["attn_mask"].shape == (2, 1, 8, 8) for call in calls)
    if takes_cache_objects(family):  # else the release flattens a 4-D mask
        with torch.no_grad():
            patched(ids, attention_mask=torch.ones(1, 1, 1, 8, dtype=torch.bool))
        assert all(call["attn_mask"].shape == (1, 1, 1, 8) for call in calls[3:])
        assert not any(call["causal"] for call in calls[3:])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_two_dimensional_masks_over_keys(dtype: torch.dtype) -> None:
    """What a model configured for flash attention hands down."""
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    out, _ = patches.hf.attend(q, k, v, causal=True, mask=mask.to(dtype), scale=0.5)
    expected, _ = patches.hf.attend(q, k, v, causal=True, mask=mask[:, None, None].bool(), scale=0.5)
    assert torch.equal(out, expected)
    alone, _ = patches.hf.attend(q[1:, :, 2:], k[1:, :, 2:], v[1:, :, 2:], causal=True, mask=None, scale=0.5)
    assert torch.allclose(out[1:, :, 2:], alone, atol=1e-6)


def test_masks_of_another_kind_raise() -> None:
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="a str"):
        patches.hf.attend(q, q, q, causal=True, mask="flex", scale=1.0)
    with pytest.raises(ValueError, match="3 dimensions"):
        patches.hf.attend(q, q, q, causal=True, mask=torch.ones(1, 3, 3), scale=1.0)


def test_v_decides_the_dtype() -> None:
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    out, _ = patches.hf.attend(q, k, v, causal=True, mask=None, scale=1.0)
    assert out.dtype == torch.bfloat16


# Caches


def test_chunked_prefill_equals_one_pass(family: str, attn: str) -> None:
    patched, _ = patched_pair(family, attn)
    ids = tokens(2, 12)
    name = cache_argument(patched)
    with torch.no_grad():
        whole = patched(ids).logits
        first = patched(ids[:, :5], use_cache=True)
        second = patched(ids[:, 5:11], use_cache=True, **{name: first[name]})
        third = patched(ids[:, 11:], use_cache=True, **{name: second[name]})
    chunks = torch.cat([first.logits, second.logits, third.logits], dim=1)
    assert error_where(None, chunks, whole) < TOLERANCE


@pytest.mark.parametrize("pads", [(0, 0), (0, 4)])
def test_static_cache_prefill_and_steps(family: str, attn: str, pads: tuple[int, int]) -> None:
    """An empty static cache comes with more keys than queries, and sometimes without a mask."""
    if not takes_cache_objects(family):
        pytest.skip("GPT-2 takes no cache objects in this release")
    patched, reference = patched_pair(family, attn)
    ids, mask = left_padding(tokens(2, 12), *pads)
    given = (lambda end: mask[:, :end]) if any(pads) else (lambda end: None)
    cache = static_cache(patched, 2, 40)
    name = cache_argument(patched)
    logits = []
    with torch.no_grad():
        for start, end in ((0, 7), (7, 10), (10, 11), (11, 12)):
            options: dict[str, Any] = {name: cache, "use_cache": True, "attention_mask": given(end)}
            if "cache_position" in inspect.signature(patched.forward).parameters:
                options["cache_position"] = torch.arange(start, end)
            logits.append(patched(ids[:, start:end], **options).logits)
        expected = reference(ids, attention_mask=given(12)).logits
    assert error_where(mask, torch.cat(logits, dim=1), expected) < TOLERANCE


def test_static_length_on_a_device_equals_the_slice() -> None:
    """Where reading the fill level would stall a device it stays a tensor: the same result."""
    q, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 1, 9, 8), torch.randn(2, 1, 9, 8)
    mask = torch.ones(2, 1, 3, 9, dtype=torch.bool)
    mask[1, ..., 0] = False
    for given in (None, mask):
        sliced, weights = patches.hf.attend(
            q, k, v, causal=True, mask=given, scale=0.3, filled=5, need_weights=True
        )
        out, long = patches.hf.attend(
            q, k, v, causal=True, mask=given, scale=0.3, filled=torch.tensor(5), need_weights=True
        )
        assert torch.allclose(out, sliced, atol=1e-6)
        assert weights is not None and long is not None
        assert torch.allclose(long[..., :5], weights, atol=1e-6)
        assert not long[..., 5:].any()


def test_a_foreign_cache_raises(family: str) -> None:
    patched, _ = patched_pair(family)
    layer = patched.get_submodule("transformer.h.0.attn" if family == "gpt2" else "model.layers.0.self_attn")
    angles = torch.ones(1, 3, 12)
    rest = {} if family == "gpt2" else {"position_embeddings": (angles, angles)}
    with pytest.raises(ValueError, match=r"expected a transformers\.Cache, got object"):
        layer(torch.randn(1, 3, 48), past_key_values=object(), attention_mask=None, **rest)


def test_a_cache_keeps_the_dtype_of_v() -> None:
    """Some caches take the dtype of the first keys for both."""
    k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    keys, values, filled = patches.hf.update_cache(DynamicCache(), k, v, 0)
    assert keys.dtype == values.dtype == torch.bfloat16
    assert filled is None


# Generation


# huggingface/transformers#30414: a static cache differed from a dynamic one
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pads", [(0, 0), (0, 9)])
def test_greedy_generation_token_for_token(family: str, attn: str, cache: str, pads: tuple[int, int]) -> None:
    patched, reference = patched_pair(family, attn)
    ids, mask = left_padding(tokens(2, 16), *pads)
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
    assert torch.equal(greedy(patched, ids, mask, **options), greedy(reference, ids, mask))


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "top_k": 20}, {"use_cache": False}]
)
def test_other_generation(family: str, options: dict[str, Any]) -> None:
    patched, reference = patched_pair(family)
    ids, mask = left_padding(tokens(2, 10), 0, 4)
    found = []
    for model in (patched, reference):
        torch.manual_seed(7)
        found.append(greedy(model, ids, mask, count=24, **options))
    assert torch.equal(*found)


# Attention weights


@pytest.mark.parametrize("pads", [(0, 0), (0, 3)])
def test_weights_equal_eager(family: str, attn: str, pads: tuple[int, int]) -> None:
    patched, reference = patched_pair(family, attn)
    ids, mask = left_padding(tokens(2, 9), *pads)
    given = mask if any(pads) else None
    a = patched(ids, attention_mask=given, output_attentions=True).attentions
    b = reference(ids, attention_mask=given, output_attentions=True).attentions
    assert len(a) == len(b) == 3
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape == (2, 4, 9, 9)
        assert error_where(mask, x.transpose(1, 2), y.transpose(1, 2)) < 1e-5


def test_weights_of_cached_steps_equal_eager(family: str) -> None:
    patched, reference = patched_pair(family, "eager")
    ids, mask = left_padding(tokens(2, 8), 0, 3)
    found = []
    for model in (patched, reference):
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=4,
                max_new_tokens=4,
                output_attentions=True,
                return_dict_in_generate=True,
            )
        found.append(out.attentions)
    for step, (a, b) in enumerate(zip(*found, strict=True)):
        for x, y in zip(a, b, strict=True):
            keep = mask if step == 0 else None
            assert x.shape == y.shape
            assert error_where(keep, x.transpose(1, 2), y.transpose(1, 2)) < 1e-5


def test_weights_are_differentiable(family: str) -> None:
    patched, reference = patched_pair(family, "eager")
    ids = tokens(1, 7)
    found = []
    for model in (patched, reference):
        weights = model(ids, output_attentions=True).attentions
        probe = torch.randn(weights[0].shape, generator=torch.Generator().manual_seed(1))
        torch.stack([(w * probe).sum() for w in weights]).sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()})
    common = {n: found[1][n] for n in found[0]}
    assert len(common) > 10
    assert gradient_error(found[0], common) < TOLERANCE


def test_weights_are_computed_only_when_asked_for(
    family: str, attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched, _ = patched_pair(family, attn)
    calls: list[int] = []
    original = patches.hf.attention_weights
    counted = lambda *args, **options: calls.append(1) or original(*args, **options)  # noqa: E731
    monkeypatch.setattr(patches.hf, "attention_weights", counted)
    ids = tokens(1, 5)
    patched(ids)
    assert not calls
    patched(ids, output_attentions=True)
    assert len(calls) == 3
    patched(ids)
    assert len(calls) == 3


# torch.compile


@pytest.mark.parametrize("padded", [False, True])
def test_compiles_without_a_graph_break(family: str, padded: bool) -> None:
    torch.compiler.reset()
    patched, reference = patched_pair(family)
    ids, mask = left_padding(tokens(2, 12), 0, 4 if padded else 0)
    options = {"attention_mask": mask if padded else None, "use_cache": False}
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    logits = compiled(ids, **options).logits
    assert error_where(mask, logits, reference(ids, **options).logits) < TOLERANCE
    logits.square().mean().backward()
    assert all(p.grad is not None for p in patched.parameters())


def test_a_step_on_a_static_cache_compiles(family: str) -> None:
    """`generate` compiles the steps on a static cache by itself where there is a GPU."""
    if not takes_cache_objects(family):
        pytest.skip("GPT-2 takes no cache objects in this release")
    torch.compiler.reset()
    patched, reference = patched_pair(family)
    ids, mask = left_padding(tokens(2, 9), 0, 3)
    cache, name = static_cache(patched, 2, 16), cache_argument(patched)
    step = torch.compile(patched.forward, backend="eager", fullgraph=True)
    logits = []
    with torch.no_grad():
        for start, end in ((0, 7), (7, 8), (8, 9)):
            visible = torch.arange(16) <= torch.arange(start, end)[:, None]
            visible = visible & torch.nn.functional.pad(mask.bool(), (0, 7), value=True)[:, None, None]
            options = {name: cache, "use_cache": True, "attention_mask": visible if start else mask[:, :end]}
            if "cache_position" in inspect.signature(patched.forward).parameters:
                options["cache_position"] = torch.arange(start, end)
            logits.append((step if start else patched)(ids[:, start:end], **options).logits)
        expected = reference(ids, attention_mask=mask).logits
    assert error_where(mask, torch.cat(logits, 1), expected) < TOLERANCE


def test_patching_a_compiled_model_takes_effect(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    model = build(family, "sdpa")
    compiled: Any = torch.compile(model, backend="eager")
    ids = tokens(1, 6)
    before = compiled(ids, use_cache=False).logits
    patch_model(compiled)
    calls = spy_attention(monkeypatch)
    with torch.no_grad():
        after = compiled(ids, use_cache=False).logits
    assert len(calls) >= 3
    assert math.isclose(error_where(None, before, after), 0.0, abs_tol=TOLERANCE)


# The compact mask of a wholly patched model

needs_unchanged_masks = pytest.mark.skipif(
    not patches.hf.MASKS_PASS_UNCHANGED, reason="models of this release make their masks themselves"
)


@needs_unchanged_masks
def test_no_square_mask_is_made(family: str, attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched, _ = patched_pair(family, attn)
    calls = spy_attention(monkeypatch)
    ids, mask = left_padding(tokens(2, 9), 0, 4)
    name = cache_argument(patched)
    with torch.no_grad():
        for given in (None, torch.ones_like(mask), mask):
            first = patched(
                ids[:, :8], attention_mask=None if given is None else given[:, :8], use_cache=True
            )
            patched(ids[:, 8:], attention_mask=given, use_cache=True, **{name: first[name]})
    assert all(call.get("attn_mask") is None and call["causal"] for call in calls)
    segments = [[tuple(each.shape) for each in call.get("segment_ids") or ()] for call in calls]
    assert segments == [[]] * 12 + [[(2, 8), (2, 8)]] * 3 + [[(2, 1), (2, 9)]] * 3


@needs_unchanged_masks
def test_no_mask_is_compiled_in(family: str) -> None:
    """Compiled models get a mask tensor from HuggingFace even where there is nothing to mask."""
    torch.compiler.reset()
    patched, _ = patched_pair(family)
    masks: list[Any] = []

    def inspecting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            if "attention_forward" in str(node.target):
                masks.append(node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask"))
        return graph.forward

    with torch.no_grad():
        torch.compile(patched, backend=inspecting, fullgraph=True)(tokens(1, 6), use_cache=False)
    assert masks == [None] * 3


@needs_unchanged_masks
def test_a_gap_starts_no_document_where_transformers_thinks_so(family: str) -> None:
    """Without a cache, too: training on stretched positions makes gaps."""
    patched, reference = patched_pair(family)
    ids, positions = tokens(2, 7), torch.tensor([[0, 1, 2, 9, 10, 20, 21]])
    options = {"position_ids": positions, "use_cache": False}
    expected = reference(ids, attention_mask=torch.ones_like(ids), **options).logits
    assert error_where(None, patched(ids, **options).logits, expected) < TOLERANCE


@pytest.mark.parametrize("padded", [False, True])
def test_an_unpatched_layer_gets_its_whole_mask(family: str, attn: str, padded: bool) -> None:
    """Layers that a filter left out, or that were restored later, don't know causality."""
    ids, mask = left_padding(tokens(2, 9), 0, 3 if padded else 0)
    given = mask if padded else None
    expected = build(family)(ids, attention_mask=given).logits
    filtered = patch_model(build(family, attn), filter_fn=lambda module, name: ".1." in name)
    restored = patch_model(build(family, attn))
    unpatch_model(restored.get_submodule("transformer.h.2" if family == "gpt2" else "model.layers.2"))
    for model in (filtered, restored):
        assert error_where(mask, model(ids, attention_mask=given).logits, expected) < TOLERANCE


def test_a_block_that_has_no_attention(family: str) -> None:
    """Users exchange blocks."""
    patched = patch_model(build(family))
    ids = tokens(1, 6)
    before = patched(ids).logits

    class Nothing(torch.nn.Module):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (hidden_states, None) if plain_tuple else hidden_states

    blocks = patched.transformer.h if family == "gpt2" else patched.model.layers
    plain_tuple = isinstance(blocks[0](torch.randn(1, 2, 48), **block_arguments(family)), tuple)
    blocks[2] = Nothing()
    assert error_where(None, patched(ids, use_cache=False).logits, before) > 0.1


@needs_unchanged_masks
@pytest.mark.parametrize("heads", [2, 4])
def test_a_block_of_another_model_raises(family: str, attn: str, heads: int) -> None:
    """With as many heads as a compact mask has rows, it could add them to its scores."""
    names = {"gpt2": ["n_head"], "olmo2": ["num_attention_heads", "num_key_value_heads"]}
    sizes: dict[str, Any] = dict.fromkeys(names[family], heads)
    patched, other = patch_model(build(family, attn, **sizes)), build(family, attn, **sizes)
    ids, mask = left_padding(tokens(2, 9), 0, 3)
    for model in (patched, other):
        assert torch.isfinite(model(ids, attention_mask=mask).logits).all()
    blocks, others = (
        each.transformer.h if family == "gpt2" else each.model.layers for each in (patched, other)
    )
    blocks[1] = others[1]
    with pytest.raises((RuntimeError, ValueError)):
        patched(ids, attention_mask=mask)


@needs_unchanged_masks
@pytest.mark.parametrize("padded", [False, True])
def test_a_block_made_later_understands_the_masks(family: str, padded: bool) -> None:
    """Of the model's configuration, without a patch: it asks for this implementation by its name."""
    patched, reference = patched_pair(family)
    ids, mask = left_padding(tokens(2, 9), 0, 3 if padded else 0)
    for model in (patched, reference):
        blocks = model.transformer.h if family == "gpt2" else model.model.layers
        made = type(blocks[1])(model.config, layer_idx=1).eval()
        made.load_state_dict(blocks[1].state_dict())
        blocks[1] = made
    found, expected = (each(ids, attention_mask=mask).logits for each in (patched, reference))
    assert error_where(mask, found, expected) < TOLERANCE


def block_arguments(family: str) -> dict[str, Any]:
    angles = torch.ones(1, 2, 12)
    return {} if family == "gpt2" else {"position_embeddings": (angles, angles), "attention_mask": None}


def test_unpatching_removes_the_hook(family: str) -> None:
    model = build(family)
    hooks = [sum(len(m._forward_pre_hooks) for m in patch_model(model).modules()) for _ in "12"]
    assert hooks[0] == hooks[1] > 0
    unpatch_model(model)
    assert all(not m._forward_pre_hooks and not m._forward_pre_hooks_with_kwargs for m in model.modules())


def test_arguments_of_the_decoder_by_position(family: str) -> None:
    """The hook finds the mask wherever it comes."""
    patched, reference = patched_pair(family)
    ids, mask = left_padding(tokens(2, 9), 0, 3)
    body = patched.transformer if family == "gpt2" else patched.model
    names = list(inspect.signature(body.forward).parameters)
    given = {"input_ids": ids, "attention_mask": mask}
    args = [given.get(name) for name in names[: names.index("attention_mask") + 1]]
    plain = reference.transformer if family == "gpt2" else reference.model
    a, b = body(*args).last_hidden_state, plain(**given).last_hidden_state
    assert error_where(mask, a, b) < TOLERANCE


def test_embeddings_instead_of_tokens(family: str) -> None:
    patched, reference = patched_pair(family)
    embeddings = torch.randn(2, 6, 48)
    a, b = patched(inputs_embeds=embeddings).logits, reference(inputs_embeds=embeddings).logits
    assert error_where(None, a, b) < TOLERANCE


def test_a_bidirectional_configuration_is_refused(family: str) -> None:
    model = build(family)
    model.config.is_causal = False
    with pytest.raises(ValueError, match=r"config\.is_causal is False"):
        patch_model(model)


def test_a_nan_in_a_hidden_key_reaches_neither_weights_nor_gradients() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    hidden = torch.zeros(1, 1, 4, 1).index_fill_(2, torch.tensor([3]), torch.nan)
    mask = torch.tensor([True, True, True, False]).view(1, 1, 1, 4)
    out, weights = patches.hf.attend(
        q, k + hidden, v + hidden, causal=False, mask=mask, scale=0.3, need_weights=True
    )
    assert weights is not None
    grads = torch.autograd.grad(out.sum() + weights.square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, weights, *grads))


@pytest.mark.skipif(
    patches.hf.StaticLayer is patches.hf.StaticCache, reason="this release has no caches of layers"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_of_static_layers_is_read_as_far_as_it_is_filled(family: str) -> None:
    patched, reference = patched_pair(family)
    ids = tokens(2, 12)
    cache = Cache(layers=[patches.hf.StaticLayer(max_cache_len=32) for _ in range(3)])
    with torch.no_grad():
        patched(ids[:, :8], **{cache_argument(patched): cache})
        got = patched(ids[:, 8:], **{cache_argument(patched): cache}).logits
        assert (got - reference(ids).logits[:, 8:]).abs().max() < TOLERANCE


@pytest.mark.skipif(
    not patches.hf.MASKS_PASS_UNCHANGED, reason="this release can't keep packed documents apart"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_stay_apart_when_compiled(family: str) -> None:
    patched, _ = patched_pair(family)
    ids, positions = tokens(2, 12), torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
    with torch.no_grad():
        want = patched(ids, position_ids=positions).logits
        got = torch.compile(patched, backend="eager")(ids, position_ids=positions).logits
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.filterwarnings("ignore")  # tracing warns of every condition on a shape
def test_a_traced_model_still_reads_its_mask() -> None:
    patched, reference = patched_pair("gpt2")
    ids, mask = left_padding(tokens(2, 9), 3, 0)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = patched

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return self.model(ids, attention_mask=mask, use_cache=False).logits

    traced: Any = torch.jit.trace(Logits(), (ids, torch.ones_like(ids)), check_trace=False)
    want = reference(ids, attention_mask=mask, use_cache=False).logits
    assert error_where(mask, traced(ids, mask), want) < TOLERANCE


def test_hooks_of_the_decoder_see_the_arguments_as_they_were_passed(family: str) -> None:
    patched, _ = patched_pair(family)
    seen: list[int] = []
    decoder = patched.transformer if family == "gpt2" else patched.model
    decoder.register_forward_hook(lambda module, args, output: seen.append(len(args)))
    ids = tokens(1, 5)
    decoder(ids)
    assert seen == [1]


def test_meta_tensors_pass_with_positions() -> None:
    # with a padding token, old releases read the tokens for a warning
    patched, _ = patched_pair("gpt2", pad_token_id=None)
    ids = tokens(2, 5).to("meta")
    positions = torch.arange(5, device="meta").expand(2, -1)
    assert patched.to("meta")(ids, position_ids=positions).logits.shape[:2] == (2, 5)
