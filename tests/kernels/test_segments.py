"""Spans of keys for each block of queries, against the rule itself, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamattn.pattern import UNBOUNDED

pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import segments as module
from streamattn.kernels.segments import BLOCK, WHOLE, query_spans

WINDOWS = [(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (30, 0), (40, 70)]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCAN", 128)


def drawn(kind: str, size: int) -> Tensor:
    """Segment ids int32 [2, size]."""
    ids = torch.randint(-1, 3, (2, size))
    if kind == "documents":
        ids = torch.sort(torch.randint(0, 4, (2, size)))[0]
    elif kind == "padded":
        ids = torch.zeros(2, size)
        ids[0, : size // 3], ids[1, size - size // 4 :] = -1, -5
    elif kind == "padding":
        ids = torch.full((2, size), -7)
    return ids.int()


def seen(ids: Tensor, window: tuple[int, int]) -> Tensor:
    """bool [T, T] of one sequence."""
    at = torch.arange(len(ids))
    offset = at[None, :] - at[:, None]
    return (
        (ids[:, None] == ids[None, :]) & (ids >= 0)[:, None] & (offset >= -window[0]) & (offset <= window[1])
    )


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 200, 300])
@pytest.mark.parametrize("kind", ["documents", "random", "padded", "padding"])
def test_no_seen_key_is_outside_and_no_hidden_one_in_the_whole(kind, size, window):
    segments = drawn(kind, size)
    spans, _ = query_spans(segments, *window)
    assert spans.shape == (2, -(-size // BLOCK), 4)
    for b in range(2):
        visible = seen(segments[b], window)
        for block, (first, end, whole_first, whole_end) in enumerate(spans[b].tolist()):
            rows = range(block * BLOCK, min(block * BLOCK + BLOCK, size))
            keys = visible[rows].any(0).nonzero().flatten().tolist()
            if keys:
                assert first <= keys[0]
                assert keys[-1] < end
            # what the window hides from some of the rows is the caller's to leave out
            inside = [
                j for j in range(whole_first, whole_end) if rows[-1] - window[0] <= j <= rows[0] + window[1]
            ]
            assert visible[rows][:, inside].all()


def test_spans_of_documents_are_tight():
    segments = torch.tensor([0] * 100 + [3] * 156 + [4] * 64, dtype=torch.int32)[None]
    spans, _ = query_spans(segments, UNBOUNDED, UNBOUNDED)
    assert spans[0].tolist() == [
        [0, 100, 0, 100],
        [0, 256, 64, 0],
        *[[100, 256, 100, 256]] * 2,
        [256, 320, 256, 320],
    ]


def test_padding_sees_nothing():
    spans, _ = query_spans(drawn("padding", 100), UNBOUNDED, UNBOUNDED)
    assert (spans[..., 1] <= spans[..., 0]).all()
    assert (spans[..., 3] <= spans[..., 2]).all()


@pytest.mark.parametrize("size", [1, 767, 768, 769])
def test_ids_can_be_read_in_whole_tiles(size):
    segments = torch.randint(-5, 5, (2, 2 * size)).int()[:, ::2]
    _, ids = query_spans(segments, UNBOUNDED, 0)
    assert ids.shape == (2, -(-size // WHOLE) * WHOLE)
    assert torch.equal(ids[:, :size], segments.clamp(min=-1))
    assert (ids[:, size:] >= 0).all()
