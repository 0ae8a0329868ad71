"""Compact masks: the mask function of "streamattn" against transformers' dense one, and their layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import patches.compact
from streamattn.pattern import visible

masking_utils = pytest.importorskip(
    "transformers.masking_utils", reason="this release makes masks in each model"
)

if not hasattr(masking_utils, "blockwise_overlay"):
    pytest.skip("the calls here are written as newer releases make them", allow_module_level=True)

from patches.masks import compact_mask  # noqa: E402  it needs that module

WINDOW = 3


class Config:
    """What a mask function reads of a configuration."""

    is_causal = True
    sliding_window = WINDOW
    attention_chunk_size = 4


class Case:
    """One call of a mask function."""

    def __init__(
        self, kind: str, queries: int, past: int, slots: int | None, padding: str, tensor_offset: bool = False
    ) -> None:
        self.kind, self.queries, self.past = kind, queries, past
        self.keys = queries + past if slots is None else slots
        self.offset: Any = torch.tensor(past) if tensor_offset else past
        self.mask: Tensor | None = None
        if padding != "none":
            self.mask = torch.ones(2, queries + past, dtype=torch.bool)
            self.mask[1, : 3 if padding == "left" else 0] = False
            if padding == "right":
                self.mask[1, -2:] = False
        self.positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])[:, :queries]

    def arguments(self) -> dict[str, Any]:
        """As `transformers.masking_utils` passes them."""
        utils: Any = masking_utils
        pads = torch.tensor([0, 3 if self.mask is not None and not self.mask[1, 0] else 0])
        function: Callable[..., Any] = {
            "causal": lambda: utils.causal_mask_function,
            "window": lambda: utils.sliding_window_causal_mask_function(WINDOW),
            "chunks": lambda: utils.chunked_causal_mask_function(4, pads),
            "documents": lambda: utils.causal_mask_function,
            "documents and window": lambda: utils.sliding_window_causal_mask_function(WINDOW),
            "full": lambda: utils.bidirectional_mask_function,
            "full window": lambda: utils.sliding_window_bidirectional_mask_function(WINDOW),
        }[self.kind]()
        if "documents" in self.kind:
            ids = (self.positions.diff(dim=-1, prepend=self.positions[:, :1] - 1) != 1).cumsum(-1)
            function = utils.remap_positions_for_packed_sequence(function, self.positions)
            function = utils.and_masks(function, utils.packed_sequence_mask_function(ids))
        local = {"window": WINDOW, "full window": WINDOW, "documents and window": WINDOW, "chunks": 4}
        return {
            "batch_size": 2,
            "q_length": self.queries,
            "kv_length": self.keys,
            "q_offset": self.offset,
            "kv_offset": 0,
            "mask_function": function,
            "attention_mask": self.mask,
            "allow_is_causal_skip": "documents" not in self.kind and "full" not in self.kind,
            "local_size": local.get(self.kind),
            "dtype": torch.float32,
            "config": Config(),
            "use_vmap": False,
            "device": torch.device("cpu"),
            **({"allow_is_bidirectional_skip": True} if "full" in self.kind else {}),
        }


def dense(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Which pairs a layer that holds `mask` lets see each other, bool [2, Tq, Tk]."""
    assert patches.compact.is_compact(mask)
    seen = patches.compact.read(mask, 2, queries, keys)
    causal, windowed = patches.compact.is_causal(mask), patches.compact.is_windowed(mask)
    left = WINDOW - 1 if windowed else 1 << 30
    right = 0 if causal else (WINDOW if windowed else 1 << 30)
    left = left if causal or not windowed else WINDOW
    lengths = torch.full((2,), keys) if seen.kv_lengths is None else seen.kv_lengths
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    pairs = torch.stack([visible(i, j, queries, int(length), left, right) for length in lengths])
    if seen.segment_ids is not None:
        of_queries, of_keys = seen.segment_ids
        pairs &= (of_queries[:, :, None] == of_keys[:, None]) & (of_keys >= 0)[:, None]
    return pairs


KINDS = ("causal", "window", "chunks", "documents", "documents and window", "full", "full window")
CASES = [
    Case(kind, queries, past, slots, padding, tensor)
    for kind, (queries, past, slots, tensor), padding in itertools.product(
        KINDS,
        [
            (7, 0, None, False),
            (1, 0, None, False),
            (1, 6, None, False),
            (3, 4, None, False),
            (4, 0, 11, False),
            (3, 4, 11, True),
        ],
        ("none", "left", "right"),
    )
    if (slots is None and past == 0) or not ("documents" in kind or "full" in kind)
    if not ("documents" in kind and padding != "none")
]


@pytest.mark.parametrize("readable", [True, False], ids=["eager", "while compiling"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c.kind}-{c.queries}-{c.past}-{c.keys}-{c.mask is not None}"
)
def test_same_pairs_as_the_dense_mask(case: Case, readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not readable:
        monkeypatch.setattr(patches.compact, "readable", lambda *tensors: False)
    arguments = case.arguments()
    utils: Any = masking_utils
    expected = utils.sdpa_mask(
        **{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    )
    found = dense(compact_mask(**arguments), case.queries, case.keys)
    valid = torch.ones(2, case.queries, dtype=torch.bool)
    if case.mask is not None:
        valid = case.mask[:, case.past :]
    assert torch.equal(found[valid], expected[:, 0][valid])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", ["left", "of ones", "none"])
def test_size(kind: str, padding: str) -> None:
    """At most a few numbers for each key; none where nothing but causality and a window hides."""
    if "documents" in kind and padding == "left":
        return
    case = Case(kind, 7, 0, None, "left" if padding == "left" else "none")
    if padding == "of ones" and "documents" not in kind:
        case.mask = torch.ones(2, 7, dtype=torch.bool)
    mask = compact_mask(**case.arguments())
    segmented = "documents" in kind or kind == "chunks" or padding == "left"
    assert mask.shape[0] == (2 if segmented else 1)
    assert mask.shape[2:] == (1, 7 if segmented else 1)


def test_a_static_cache_without_padding_is_a_few_numbers() -> None:
    """Places that no token has come to are told by the length, not hidden one by one."""
    case = Case("causal", 1, 6, 11, "none", tensor_offset=True)
    case.mask = torch.ones(2, 7, dtype=torch.bool)
    mask = compact_mask(**case.arguments())
    assert mask.shape[3] == 1
    assert patches.compact.read(mask, 2, 1, 11).kv_lengths.tolist() == [7, 7]  # type: ignore[union-attr]


def test_a_mask_that_ends_before_the_keys_hides_the_rest() -> None:
    case = Case("causal", 3, 4, None, "none")
    case.mask = torch.ones(2, 5, dtype=torch.bool)
    arguments = case.arguments()
    utils: Any = masking_utils
    expected = utils.sdpa_mask(**{**arguments, "allow_is_causal_skip": False})[:, 0]
    found = dense(compact_mask(**arguments), 3, 7)
    assert torch.equal(found[:, 0], expected[:, 0])  # the other queries are hidden themselves
    assert not found[..., 5:].any()


def everything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A user's own mask function."""
    return (query >= 0) & (key >= 0)


@pytest.mark.parametrize("how", ["alone", "or", "and", "blocks", "other window", "asked for"])
def test_what_has_no_structure_stays_dense(how: str) -> None:
    utils: Any = masking_utils
    causal = utils.causal_mask_function
    arguments = Case("causal", 5, 0, None, "left").arguments()
    arguments["mask_function"] = {
        "alone": lambda: everything,
        "or": lambda: utils.or_masks(causal, everything),
        "and": lambda: utils.and_masks(causal, everything),
        "blocks": lambda: utils.or_masks(
            causal, utils.blockwise_overlay(torch.zeros(2, 5, dtype=torch.int64))
        ),
        "other window": lambda: utils.sliding_window_causal_mask_function(WINDOW + 1),
        "asked for": lambda: causal,
    }[how]()
    if how in ("or", "and", "asked for"):
        arguments["allow_is_causal_skip"] = False
    expected = utils.sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    found = compact_mask(**arguments)
    assert found.dtype == torch.bool
    assert torch.equal(found, expected)


def test_blocks_in_packed_rows_raise_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can't be looked for there, and would be lost."""
    utils: Any = masking_utils
    monkeypatch.setattr(patches.compact, "readable", lambda *tensors: False)
    case = Case("documents", 7, 0, None, "none")
    arguments = case.arguments()
    blocks = utils.blockwise_overlay(torch.tensor([[-1, 0, 0, -1, -1, -1, -1]] * 2))
    documents = utils.packed_sequence_mask_function(torch.zeros(2, 7, dtype=torch.int64))
    arguments["mask_function"] = utils.and_masks(
        utils.or_masks(utils.causal_mask_function, blocks), documents
    )
    with pytest.raises(RuntimeError, match="some tokens see later ones"):
        compact_mask(**arguments)


def test_a_mask_of_another_size_raises() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int32)
    mask = patches.compact.write(ids, None, causal=True, windowed=False, device=None)
    with pytest.raises(ValueError, match="the layer holds 3 sequences"):
        patches.compact.read(mask, 3, 5, 5)
    with pytest.raises(ValueError, match="the layer holds 6 keys"):
        patches.compact.read(mask, 2, 6, 6)
    with pytest.raises(ValueError, match="7 queries on only 5 keys"):
        patches.compact.read(mask, 2, 7, 5)


@pytest.mark.parametrize("shape", [(2, 1, 4, 4), (2, 1, 1, 4), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_masks_of_users_are_no_compact_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert not patches.compact.is_compact(torch.ones(shape, dtype=dtype))


def test_a_place_whose_key_is_hidden_keeps_its_document() -> None:
    """As a query it sees what its document holds before it, and nothing of the first one."""
    starts = torch.tensor([[False, True, False, False]])
    padding = torch.tensor([[1, 1, 1, 0, 1]])
    seen = patches.compact.read(patches.compact.of_documents(starts, padding), 1, 5, 5)
    assert seen.segment_ids is not None
    queries, keys = seen.segment_ids
    assert queries.tolist() == [[0, 0, 1, 1, 1]]
    assert keys[padding == 1].tolist() == [0, 0, 1, 1]
    assert int(keys[padding == 0]) < 0
