"""Spans of keys for each block of queries, against the rule itself, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from streamattn.pattern import UNBOUNDED

pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import segments as module
from streamattn.kernels.primitives import ORDER
from streamattn.kernels.segments import BLOCK, WHOLE, longest_first, query_spans

TILE = 128  # keys of the longest one that a kernel reads
WINDOWS = [(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (30, 0), (40, 70)]


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCAN", 2)


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


def seen(q_ids: Tensor, kv_ids: Tensor, window: tuple[int, int]) -> Tensor:
    """bool [Tq, Tk] of one sequence."""
    place = torch.arange(len(q_ids)) + len(kv_ids) - len(q_ids)
    offset = torch.arange(len(kv_ids))[None, :] - place[:, None]
    alike = (q_ids[:, None] == kv_ids[None, :]) & (q_ids >= 0)[:, None]
    return alike & (offset >= -window[0]) & (offset <= window[1])


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 200, 300])
@pytest.mark.parametrize("kind", ["documents", "random", "padded", "padding"])
def test_no_seen_key_is_outside_and_no_hidden_one_in_the_whole(kind, size, window):
    segments = drawn(kind, size)
    check_spans(segments, segments, window)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("sizes", [(1, 70), (100, 65), (64, 64), (200, 300), (500, 130)], ids=str)
@pytest.mark.parametrize("kinds", [("documents", "documents"), ("padded", "padded"), ("random", "documents")])
def test_pairs(kinds, sizes, window):
    """Queries and keys have segments of their own; a key that no query sees is padding."""
    q_segments, kv_segments = (drawn(kind, size) for kind, size in zip(kinds, sizes, strict=True))
    q_ids, kv_ids = check_spans(q_segments, kv_segments, window)
    assert torch.equal(q_ids[:, : sizes[0]], q_segments.clamp(min=-1))
    for b in range(2):
        some = seen(q_segments[b], kv_segments[b], window).any(0)
        assert torch.equal(kv_ids[b, : sizes[1]], torch.where(some, kv_segments[b], -1))
    assert (q_ids[:, sizes[0] :] >= 0).all()
    assert (kv_ids[:, sizes[1] :] >= 0).all()


def check_spans(q_segments: Tensor, kv_segments: Tensor, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Spans hold every key that their queries see, and whole ones no other; returns the ids."""
    spans, q_ids, kv_ids = query_spans(q_segments, kv_segments, *window)
    size = q_segments.shape[1]
    shift = kv_segments.shape[1] - size
    assert spans.shape == (2, -(-size // BLOCK), 8)
    for b in range(2):
        visible = seen(q_segments[b], kv_segments[b], window)
        for block, (first, end, whole_first, whole_end, padded, *_) in enumerate(spans[b].tolist()):
            rows = range(block * BLOCK, min(block * BLOCK + BLOCK, size))
            keys = visible[rows].any(0).nonzero().flatten().tolist()
            if keys:
                assert first <= keys[0]
                assert keys[-1] < end
                near = kv_ids[b, first // TILE * TILE : -(-end // TILE) * TILE]
                assert padded or (near >= 0).all()
            # what the window hides from some of the rows is the caller's to leave out
            low, high = rows[-1] + shift - window[0], rows[0] + shift + window[1]
            inside = [j for j in range(whole_first, whole_end) if low <= j <= high]
            assert visible[rows][:, inside].all()
    return q_ids, kv_ids


def test_spans_of_documents_are_tight():
    segments = torch.tensor([0] * 100 + [3] * 156 + [4] * 64, dtype=torch.int32)[None]
    spans, _, _ = query_spans(segments, segments, UNBOUNDED, UNBOUNDED)
    assert spans[0, :, :5].tolist() == [
        [0, 128, 0, 64, 0],
        [0, 256, 128, 0, 0],
        *[[64, 256, 128, 256, 0]] * 2,
        [256, 320, 256, 320, 0],
    ]


def test_only_tiles_beside_padding_are_called_padded():
    segments = torch.zeros(1, 1024, dtype=torch.int32)
    segments[0, 512:] = 1
    segments[0, 1000:] = -1
    spans, _, _ = query_spans(segments, segments, UNBOUNDED, 0)
    assert spans[0, :, 4].tolist() == [0] * 14 + [1] * 2
    spans, _, _ = query_spans(segments, segments, UNBOUNDED, UNBOUNDED)
    assert spans[0, :, 4].tolist() == [0] * 8 + [1] * 8
    assert spans[0, :, 0].tolist() == [0] * 8 + [512] * 8


def test_padding_sees_nothing():
    segments = drawn("padding", 100)
    spans, _, _ = query_spans(segments, segments, UNBOUNDED, UNBOUNDED)
    assert (spans[..., 1] <= spans[..., 0]).all()
    assert (spans[..., 3] <= spans[..., 2]).all()


@pytest.mark.parametrize("size", [1, 767, 768, 769])
def test_ids_can_be_read_in_whole_tiles(size):
    segments = torch.randint(-5, 5, (2, 2 * size)).int()[:, ::2]
    _, ids, same = query_spans(segments, segments, UNBOUNDED, 0)
    assert same is ids
    assert ids.shape == (2, -(-size // WHOLE) * WHOLE)
    assert torch.equal(ids[:, :size], segments.clamp(min=-1))
    assert (ids[:, size:] >= 0).all()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("rows", "block_n"), [(128, 128), (192, 128), (256, 64)])
@pytest.mark.parametrize("size", [70, 1000, 2100])
def test_the_longest_items_come_first(size, rows, block_n, window, monkeypatch):
    monkeypatch.setattr(module, "COMPARED", 4)
    segments = drawn("documents", size)
    segments[0, :50] = -1
    spans, _, _ = query_spans(segments, segments, *window)
    left, right = window
    draws = longest_first(spans, size, size, left, right, rows, block_n).tolist()
    items = -(-size // rows)
    assert draws[0] == 0
    assert len(draws) == ORDER.value + 2 * items * 4
    for b in range(2):
        listed = draws[ORDER.value + b * items * 4 :][: items * 4]
        assert sorted(listed[::4]) == list(range(0, size, rows))
        tiles = []
        for i_first, n_start, n_stop, padded in zip(*(listed[c::4] for c in range(4)), strict=True):
            item = i_first // rows
            blocks = spans[b, item * rows // BLOCK :][: rows // BLOCK]
            start = max(blocks[:, 0].min().item(), item * rows - window[0], 0)
            stop = min(blocks[:, 1].max().item(), min(item * rows + rows, size) + window[1], size)
            tiles.append(max(-(-stop // block_n) - start // block_n, 0))
            assert n_start == start // block_n
            assert n_stop == n_start + tiles[-1]
            assert padded == blocks[:, 4].any()
        assert tiles == sorted(tiles, reverse=True)
