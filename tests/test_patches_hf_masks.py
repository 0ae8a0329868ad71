"""A user's 4-D masks on GPT-2 and OLMo-2: complete, so that a patched model gives what it gave unpatched."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import patches.compact
import patches.hf
from patches import patch_model
from tests.hf_models import (
    FAMILIES,
    TOLERANCE,
    build,
    cache_argument,
    error_where,
    gradient_error,
    static_cache,
    takes_cache_objects,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

BATCH, LENGTH, HEADS = 2, 10, 4
LEAST = torch.finfo(torch.float32).min

IMPLEMENTATIONS = [(family, attn) for family in FAMILIES for attn in ("eager", "sdpa")]


@pytest.fixture(params=IMPLEMENTATIONS, ids="-".join)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(patched, unpatched) models of the same weights, loaded with the same implementation."""
    family, attn = request.param
    if not takes_cache_objects(family):
        pytest.skip("this release flattens a 4-D mask")
    return patch_model(build(family, attn)), build(family, attn)


def causal_under_any_mask(model: Any) -> bool:
    """Whether the unpatched layers are: GPT-2's eager ones were, by a buffer."""
    eager = model.config._attn_implementation == "eager"
    return eager and any(name.endswith("attn.bias") for name, _ in model.named_buffers())


def prefix(queries: int = LENGTH, keys: int = LENGTH, width: int = 6) -> Tensor:
    """Who sees whom of a prefix language model, bool [BATCH, 1, queries, keys].

    The prefix sees all of itself. The second row's is shorter, and its second key is hidden. No query is
    blind, not even if it is causal as well.
    """
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    widths = torch.tensor([width, width - 2])[:, None, None]
    seen = ((j <= i) | ((j < widths) & (i < widths)))[:, None]
    seen[1, :, :, 1] = False
    return seen


def of_heads(seen: Tensor) -> Tensor:
    """A mask of its own for each head."""
    seen = seen.repeat(1, HEADS, 1, 1)
    seen[:, 1, :, 3] = False
    return seen


FORMS = {
    "[B, 1, Tq, Tk]": prefix(),
    "[1, 1, Tq, Tk]": prefix()[:1],
    "[B, H, Tq, Tk]": of_heads(prefix()),
    "[B, 1, 1, Tk]": torch.arange(LENGTH) != torch.tensor([3, 5])[:, None, None, None],
    "[1, 1, 1, Tk]": (torch.arange(LENGTH) >= 0)[None, None, None],
}


def additive(seen: Tensor, hide: float = LEAST, bias: bool = False) -> Tensor:
    mask = torch.zeros(seen.shape).masked_fill(~seen, hide)
    generator = torch.Generator().manual_seed(3)
    return mask + torch.randn(seen.shape, generator=generator) * seen if bias else mask


KINDS = {
    "bool": lambda seen: seen,
    "finfo.min": additive,
    "-inf": lambda seen: additive(seen, -torch.inf),
    "bias": lambda seen: additive(seen, bias=True),
}


def step(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and gradients of the loss on all tokens."""
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=mask, labels=ids)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_gradients_equal_the_unpatched_model(
    models: tuple[Any, Any], form: str, kind: str
) -> None:
    patched, reference = models
    seen, ids = FORMS[form], tokens(BATCH, LENGTH)
    mask = KINDS[kind](seen)
    # eager adds a bool mask as ones, which hides nothing: here it means what it means everywhere else
    eager = reference.config._attn_implementation == "eager"
    expected, theirs = step(reference, ids, additive(seen) if kind == "bool" and eager else mask)
    found, ours = step(patched, ids, mask)
    assert error_where(None, found, expected) < TOLERANCE
    assert gradient_error(ours, theirs) < TOLERANCE
    with torch.no_grad():
        later = torch.full((LENGTH, LENGTH), LEAST).triu(1)
        causal = reference(ids, attention_mask=(mask if mask.is_floating_point() else additive(seen)) + later)
    assert (error_where(None, found, causal.logits) < TOLERANCE) == causal_under_any_mask(reference)


def test_a_mask_of_the_user_reaches_a_partly_patched_model(models: tuple[Any, Any]) -> None:
    reference = models[1]
    attn = reference.config._attn_implementation
    family = "gpt2" if hasattr(reference, "transformer") else "olmo2"
    partly = patch_model(build(family, attn), filter_fn=lambda module, name: ".1." in name)
    ids, mask = tokens(BATCH, LENGTH), additive(prefix())
    a, b = partly(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits
    assert error_where(None, a, b) < TOLERANCE


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prefix_and_steps_after_it(models: tuple[Any, Any], cache: str) -> None:
    """The prefix sees itself both ways; the steps' masks have one query, and the last steps have none."""
    ids, slots = tokens(BATCH, 11), 16
    outputs = []
    for model in models:
        name = cache_argument(model)
        kept = static_cache(model, BATCH, slots) if cache == "static" else None
        logits = []
        for start, end in ((0, 6), (6, 7), (7, 8), (8, 10), (10, 11)):
            seen = prefix(slots, slots)[:, :, start:end, : slots if cache == "static" else end]
            given: Any = additive(seen)
            if start == 10:
                given = torch.ones(BATCH, end, dtype=torch.long)
                given[1, 1] = 0
            options: dict[str, Any] = {name: kept, "use_cache": True, "attention_mask": given}
            if "cache_position" in inspect.signature(model.forward).parameters:
                options["cache_position"] = torch.arange(start, end)
            with torch.no_grad():
                out = model(ids[:, start:end], **options)
            kept = out[name]
            logits.append(out.logits)
        outputs.append(torch.cat(logits, dim=1))
    assert error_where(None, *outputs) < TOLERANCE


def test_weights_are_those_of_the_mask(models: tuple[Any, Any]) -> None:
    patched, _ = models
    family = "gpt2" if hasattr(patched, "transformer") else "olmo2"
    reference = build(family, "eager")
    ids, mask = tokens(BATCH, LENGTH), additive(prefix())
    if causal_under_any_mask(reference) and not causal_under_any_mask(patched):
        mask = mask + additive(torch.ones(LENGTH, LENGTH).tril().bool()) / 2
    out = patched(ids, attention_mask=mask, output_attentions=True)
    for found, wanted in zip(
        out.attentions, reference(ids, attention_mask=mask, output_attentions=True).attentions, strict=True
    ):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_a_mask_of_one_entry_hides(models: tuple[Any, Any]) -> None:
    """The smallest mask there is isn't taken for none."""
    patched, _ = models
    ids, hidden = tokens(BATCH, 1), torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    blind, seen = (patched(ids, attention_mask=mask).logits for mask in (hidden, ~hidden))
    assert error_where(None, seen, patched(ids).logits) < TOLERANCE
    assert error_where(None, blind, seen) > 0.1


def test_compiles_without_a_graph_break(models: tuple[Any, Any]) -> None:
    torch.compiler.reset()
    patched, reference = models
    ids, mask = tokens(BATCH, LENGTH), additive(prefix())
    options: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
    compiled = torch.compile(patched, backend="eager", fullgraph=True)
    assert error_where(None, compiled(ids, **options).logits, reference(ids, **options).logits) < TOLERANCE


# Masks over keys alone, and the patch's own


@pytest.mark.parametrize("where", [slice(6, None), slice(3, 5)], ids=["right", "hole"])
@pytest.mark.parametrize(("family", "attn"), IMPLEMENTATIONS)
def test_queries_of_padding_see_the_tokens_before_them(family: str, attn: str, where: slice) -> None:
    """As in the unpatched model, for labels of padding may be left in."""
    patched, reference = patch_model(build(family, attn)), build(family, attn)
    ids, mask = tokens(BATCH, LENGTH), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, where] = 0
    found, gradients = step(patched, ids, mask)
    expected, theirs = step(reference, ids, mask)
    assert error_where(None, found, expected) < TOLERANCE
    assert gradient_error(gradients, theirs) < TOLERANCE


@pytest.mark.parametrize(
    "mask",
    [
        None,
        torch.ones(2, 7),
        torch.ones(2, 7, dtype=torch.bool),
        patches.compact.write(None, None, causal=True, windowed=False, device=None),
        patches.compact.write(None, 3, causal=True, windowed=True, device=None),
    ],
    ids=lambda mask: "none" if mask is None else str(tuple(mask.shape)),
)
def test_what_is_not_complete(mask: Tensor | None) -> None:
    assert not patches.hf.is_complete(mask)


def test_an_integer_mask_over_pairs_is_refused() -> None:
    q = torch.randn(1, 2, 4, 8)
    for dtype in (torch.uint8, torch.int32, torch.int64):
        mask = torch.ones(1, 1, 4, 4, dtype=dtype)
        with pytest.raises(TypeError, match="integer"):
            patches.hf.attend(q, q, q, causal=not patches.hf.is_complete(mask), mask=mask, scale=1.0)


@pytest.mark.parametrize("shape", [(2, 1, 7, 7), (2, 4, 1, 7), (1, 1, 1, 1), (2, 2, 1, 7), (2, 3, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_what_is_complete(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Whatever its shape, a mask of a user is no compact one."""
    assert patches.hf.is_complete(torch.zeros(shape, dtype=dtype))
