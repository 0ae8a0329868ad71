"""Which tokens a rank holds, and that its calls see exactly what the whole sequence's queries would."""

from __future__ import annotations

import itertools

import pytest
import torch

from streamattn.parallel import layout as module
from streamattn.parallel.layout import Layout, as_shards, in_order, layout_of, positions, shard, unshard
from streamattn.pattern import UNBOUNDED, visible

SIZES, LENGTHS = (1, 2, 3, 4), (1, 2, 7, 8, 9, 16, 17)
WINDOWS = [
    *((UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (3, 0), (0, 0), (2, 4), (UNBOUNDED, 2), (4, UNBOUNDED)),
]  # fmt: skip


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(module, "rank_and_size", lambda group: (rank, size))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_token_is_on_one_rank_and_padding_comes_last(
    monkeypatch: pytest.MonkeyPatch, size: int, length: int
) -> None:
    tokens = torch.arange(length).unsqueeze(0)
    shards = []
    for rank in range(size):
        as_rank(monkeypatch, rank, size)
        own, layout = shard(tokens, fill=-1), Layout(rank, size, length)
        assert own.shape == (1, layout.length)
        assert (own[0, : layout.tokens()] >= 0).all()
        assert (own[0, layout.tokens() :] == -1).all()
        assert positions(length).tolist() == own[0].where(own[0] >= 0, length - 1).tolist()
        assert layout_of(layout.length, length, None) == layout
        shards.append(own[0])
    layout = Layout(0, size, length)
    together = torch.cat(shards)
    assert in_order(together, layout)[:length].tolist() == tokens[0].tolist()
    back = as_shards(tokens[0], layout)
    assert torch.equal(back, together.where(together >= 0, 0))


@pytest.mark.parametrize("window", WINDOWS)
def test_calls_see_what_the_sequence_does(window: tuple[int, int]) -> None:
    """Exhaustively, with and without lengths, each pair once."""
    for size, length, cut in itertools.product(SIZES, LENGTHS, (None, 0, 1, 5)):
        lengths = length if cut is None else max(length - cut, 0)
        i, j = torch.arange(length).unsqueeze(1), torch.arange(length)
        expected = visible(i, j, length, lengths, *window)
        found = torch.zeros(length, length, dtype=torch.int)
        for rank in range(size):
            layout = Layout(rank, size, length)
            places = [c * layout.chunk + t for c in layout.chunks() for t in range(layout.chunk)]
            spans = layout.spans(*window, has_lengths=cut is not None)
            assert len(spans) <= (1 if window == (UNBOUNDED, UNBOUNDED) else 2)
            assert sorted(t for s in spans for t in range(s.rows.start, s.rows.stop)) == [
                *range(layout.tokens())
            ]
            for s in spans:
                queries, keys = s.rows.stop - s.rows.start, s.keys.stop - s.keys.start
                filled = keys if cut is None else max(lengths - s.cut, 0)
                own = visible(
                    torch.arange(queries).unsqueeze(1),
                    torch.arange(keys),
                    queries,
                    filled,
                    s.window_left,
                    s.window_right,
                )
                assert filled <= keys
                rows = torch.tensor(places[s.rows])
                found[rows, s.keys] += own
        assert torch.equal(found, expected.int()), (size, length, cut)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_causal_work_is_equal(size: int) -> None:
    pairs = []
    for rank in range(size):
        spans = Layout(rank, size, 8 * size).spans(UNBOUNDED, 0, has_lengths=False)
        counts = [
            int(visible(torch.arange(n).unsqueeze(1), torch.arange(m), n, m, UNBOUNDED, 0).sum())
            for n, m in ((s.rows.stop - s.rows.start, s.keys.stop - s.keys.start) for s in spans)
        ]
        pairs.append(sum(counts))
    assert len(set(pairs)) == 1


def test_shards_are_differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1, 2)
    x = torch.randn(7, requires_grad=True)
    shard(x, dim=0).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0, 1, 1, 1, 1, 0]


def test_a_length_that_no_sequence_has(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 0, 2)
    with pytest.raises(ValueError, match="expected an even number of tokens on each rank, got 3"):
        layout_of(3, None, None)
    with pytest.raises(ValueError, match="seq_len=9 over 2 ranks makes shards of 6 tokens, got 4"):
        layout_of(4, 9, None)


def test_unshard_drops_no_gradient_silently() -> None:
    with pytest.raises(ValueError, match=r"no gradient, and x requires one; pass x.detach"):
        unshard(torch.zeros(2, requires_grad=True), dim=0)
