"""Documents packed into rows, beside padding, holes and masks that end early: the same eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import patches.gpt2
import patches.hf
from patches import compact, patch_model, unpatch_model
from tests import hf_families, hf_models

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

NAMES = ["gpt2", "olmo2", *hf_families.present("Llama")]


@pytest.fixture(params=NAMES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """(patched, unpatched) models of the same weights."""
    family = request.param
    deep = family in hf_models.FAMILIES
    if deep and not patches.hf.MASKS_PASS_UNCHANGED:
        pytest.skip("this release can't keep packed documents apart")
    if not deep and not hf_families.makes_masks(family):
        pytest.skip("this release makes masks in each model")
    model = hf_models.build(family) if deep else hf_families.build(family)
    return patch_model(copy.deepcopy(model)), model


def generated_positions(mask: Tensor) -> Tensor:
    """Positions as transformers' generation makes them: hidden tokens have position 1."""
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


def in_a_graph(model: Any) -> Any:
    """What is traced is run as it is: what becomes of the op in a graph is tested elsewhere."""
    torch._dynamo.reset()
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrapped", [lambda model: model, in_a_graph], ids=["eager", "compiled"])
def test_positions_of_hidden_tokens_start_no_document(models: tuple[Any, Any], wrapped: Any) -> None:
    patched, model = models
    ids = hf_models.tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 3] = mask[1, :2] = mask[1, 5] = 0
    call = {"attention_mask": mask, "position_ids": generated_positions(mask), "use_cache": False}
    got, want = wrapped(patched)(ids, **call).logits, model(ids, **call).logits
    assert hf_models.error_where(mask, got, want) < hf_models.TOLERANCE


@pytest.mark.parametrize("wrapped", [lambda model: model, in_a_graph], ids=["eager", "compiled"])
def test_documents_stay_apart_beside_padding(models: tuple[Any, Any], wrapped: Any) -> None:
    """Without padding, with some in their own row, and in another one."""
    patched = wrapped(models[0])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(9))])
    ids = hf_models.tokens(2, 9)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % 50
    for hidden in (None, (0, 8), (1, 8)):
        mask = torch.ones(2, 9, dtype=torch.long)
        if hidden is not None:
            mask[hidden] = 0
        call = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        got, moved = patched(ids, **call).logits, patched(other, **call).logits
        assert torch.equal(got[0, 4:8], moved[0, 4:8]), hidden
        assert not torch.equal(got[0, :4], moved[0, :4]), hidden


@pytest.mark.parametrize("wrapped", [lambda model: model, in_a_graph], ids=["eager", "compiled"])
def test_one_row_of_positions_serves_all_rows(models: tuple[Any, Any], wrapped: Any) -> None:
    patched, model = models
    ids = hf_models.tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    call = {"attention_mask": mask, "position_ids": torch.arange(9)[None], "use_cache": False}
    got, want = wrapped(patched)(ids, **call).logits, model(ids, **call).logits
    assert hf_models.error_where(mask, got, want) < hf_models.TOLERANCE


def test_a_mask_shorter_than_the_keys_hides_the_rest(models: tuple[Any, Any]) -> None:
    """Whether it is all ones or not."""
    patched, model = models
    ids = hf_models.tokens(2, 9)
    for mask in (torch.ones(2, 5).long(), torch.tensor([[1] * 5, [1] * 4 + [0]])):
        try:
            want = model(ids, attention_mask=mask).logits
        except (RuntimeError, ValueError):  # older releases know no such mask
            with pytest.raises((RuntimeError, ValueError)):
                patched(ids, attention_mask=mask)
            continue
        got = patched(ids, attention_mask=mask).logits
        assert hf_models.error_where(torch.ones(2, 4).long(), got[:, :4], want[:, :4]) < hf_models.TOLERANCE
        assert hf_models.error_where(None, got, want) < hf_models.TOLERANCE


def test_starts() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 0], [1, 1, 0, 1, 0, 1], [5, 6, 7, 1, 8, 3]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 0]])
    want = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    assert torch.equal(compact.document_starts(positions, mask), want)
    assert torch.equal(compact.document_starts(positions[:1], None), want[:1])


@pytest.mark.parametrize("wrapped", [lambda model: model, in_a_graph], ids=["eager", "compiled"])
def test_a_width_that_a_model_does_not_use(models: tuple[Any, Any], wrapped: Any) -> None:
    """Some configurations have a window's width, and their models no windows."""
    patched, model = models
    for each in models:
        each.config.sliding_window = 3
    ids = hf_models.tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    got = wrapped(patched)(ids, position_ids=positions, use_cache=False).logits
    want = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :4], ids[:, 4:])], dim=1)
    assert hf_models.error_where(None, got, want) < hf_models.TOLERANCE


def bounds_of(*lengths: int) -> dict[str, Any]:
    """As `DataCollatorWithFlattening` gives them."""
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def test_bounds_of_documents_and_padding_both_hold(models: tuple[Any, Any]) -> None:
    """Over both rows, one after the other: 9 tokens behind padding; 4, and 5 with padding at the end."""
    patched, model = models
    ids = hf_models.tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = mask[1, 7:] = 0
    if type(patched).__name__ == "GPT2LMHeadModel" and not patches.gpt2._TELLS_POSITIONS:
        # such a release's model keeps bounds to itself
        with pytest.raises(ValueError, match="pass position_ids that start again with each document"):
            patched(ids, attention_mask=mask, use_cache=False, **bounds_of(9, 4, 5))
        positions = torch.tensor([list(range(9)), [*range(4), *range(5)]])
        told = patched(
            ids, attention_mask=mask, position_ids=positions, use_cache=False, **bounds_of(9, 4, 5)
        )
        only_by_positions = patched(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        assert torch.equal(told.logits, only_by_positions.logits)
        unpatch_model(patched)
        patched(ids, attention_mask=mask, use_cache=False, **bounds_of(9, 4, 5))
        return
    documents = torch.tensor([[0] * 9, [1] * 4 + [2] * 5])
    seen = (documents[:, :, None] == documents[:, None, :]) & mask.bool()[:, None, :]
    seen = (seen & torch.ones(9, 9, dtype=torch.bool).tril()).unsqueeze(1)
    hiding = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    got = patched(ids, attention_mask=mask, use_cache=False, **bounds_of(9, 4, 5)).logits
    want = model(ids, attention_mask=hiding, use_cache=False).logits
    assert hf_models.error_where(mask, got, want) < hf_models.TOLERANCE


@pytest.mark.parametrize("family", hf_families.present("Llama 4", "Mistral"))
def test_bounds_of_documents_and_what_masks_hide_both_hold(family: str) -> None:
    """Chunks are of masks, windows of layers."""
    if not hf_families.makes_masks(family):
        pytest.skip("this release makes masks in each model")
    model = patch_model(hf_families.build(family))
    ids = hf_models.tokens(1, 17)
    want = model(ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, use_cache=False, **bounds_of(17)).logits, want)
    got = model(ids, use_cache=False, **bounds_of(12, 5)).logits
    torch.testing.assert_close(got[:, :12], want[:, :12])
    assert not torch.allclose(got[:, 12:], want[:, 12:])
