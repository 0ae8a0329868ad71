"""The visibility rule, exhaustively on small sizes against the contract in plain Python; dropout's rate."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from streamattn import pattern

SIZES = [(0, 3), (3, 0), (1, 1), (1, 5), (5, 1), (3, 3), (3, 7), (7, 3), (6, 6)]
WINDOWS = [-1, 0, 1, 2, 5]


def width(side: int) -> int:
    """A contract's window side, -1 = unbounded, as the package's width."""
    return pattern.UNBOUNDED if side < 0 else side


def sees(i: int, j: int, q_len: int, kv_len: int, left: int, right: int) -> bool:
    """Query i stands at p = i + L - Tq and sees key j < L iff p - l <= j <= p + r, -1 = unbounded."""
    p = i + kv_len - q_len
    return j < kv_len and (left < 0 or p - left <= j) and (right < 0 or j <= p + right)


def cells(sizes: tuple[int, int], left: int, right: int) -> list[list[bool]]:
    q_len, kv_len = sizes
    return [[sees(i, j, q_len, kv_len, left, right) for j in range(kv_len)] for i in range(q_len)]


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_visible_equals_the_contract(q_len, kv_len):
    for left, right in product(WINDOWS, WINDOWS):
        for i, j in product(range(q_len), range(kv_len + 3)):
            got = pattern.visible(i, j, q_len, kv_len, width(left), width(right))
            assert bool(got) == sees(i, j, q_len, kv_len, left, right), (i, j, left, right)


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_visible_broadcasts_over_tensors(q_len, kv_len):
    i = torch.arange(q_len).unsqueeze(1)
    j = torch.arange(kv_len)
    for left, right in product(WINDOWS, WINDOWS):
        got = pattern.visible(i, j, q_len, kv_len, width(left), width(right))
        want = torch.tensor(cells((q_len, kv_len), left, right), dtype=torch.bool).view(q_len, kv_len)
        assert torch.equal(got.expand(q_len, kv_len), want), (left, right)


def test_visible_takes_one_length_per_batch():
    lengths = torch.tensor([0, 2, 5]).view(3, 1, 1)
    got = pattern.visible(torch.arange(3).view(3, 1), torch.arange(5), 3, lengths, 1, 0)
    for b, length in enumerate([0, 2, 5]):
        want = [[sees(i, j, 3, length, 1, 0) for j in range(5)] for i in range(3)]
        assert got[b].tolist() == want


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_a_side_that_reaches_past_every_key_is_open(q_len, kv_len):
    for left, right in product([*range(q_len + kv_len + 2), pattern.UNBOUNDED], repeat=2):
        opened = pattern.open_sides(q_len, kv_len, left, right)
        for side, given in zip(opened, (left, right), strict=True):
            assert side in (given, pattern.UNBOUNDED)
            assert (side == pattern.UNBOUNDED) == (given >= q_len + kv_len)
        for i, j, length in product(range(q_len), range(kv_len), range(kv_len + 1)):
            got = pattern.visible(i, j, q_len, length, *opened)
            assert got == pattern.visible(i, j, q_len, length, left, right)


@pytest.mark.parametrize(
    ("mask_dtype", "score_dtype", "limit"),
    [
        (torch.float16, torch.float32, -32752.0),
        (torch.float32, torch.float32, torch.finfo(torch.float32).min / 2),
        (torch.float64, torch.float32, torch.finfo(torch.float32).min),
        (torch.float64, torch.float64, torch.finfo(torch.float64).min / 2),
    ],
    ids=str,
)
def test_half_of_a_masks_minimum_hides_or_what_scores_can_not_hold(mask_dtype, score_dtype, limit):
    assert pattern.hiding_limit(torch.finfo(mask_dtype).min, torch.finfo(score_dtype).min) == limit


def test_unbounded_leaves_room_in_int32():
    assert 2 * pattern.UNBOUNDED < 2**31 + 1
    longest = 2**30 - 1
    assert longest + pattern.UNBOUNDED < 2**31


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_kv_span_is_what_some_query_sees(q_len, kv_len):
    for left, right in product(WINDOWS, WINDOWS):
        grid = cells((q_len, kv_len), left, right)
        for first in range(q_len):
            for last in range(first, q_len):
                start, stop = pattern.kv_span(first, last, q_len, kv_len, width(left), width(right))
                want = [j for j in range(kv_len) if any(grid[i][j] for i in range(first, last + 1))]
                assert list(range(start, stop)) == want, (first, last, left, right)


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_kv_span_full_is_what_every_query_sees(q_len, kv_len):
    for left, right in product(WINDOWS, WINDOWS):
        grid = cells((q_len, kv_len), left, right)
        for first in range(q_len):
            for last in range(first, q_len):
                start, stop = pattern.kv_span_full(first, last, q_len, kv_len, width(left), width(right))
                want = [j for j in range(kv_len) if all(grid[i][j] for i in range(first, last + 1))]
                assert list(range(start, stop)) == want, (first, last, left, right)


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_q_span_is_who_sees_some_key(q_len, kv_len):
    for left, right in product(WINDOWS, WINDOWS):
        grid = cells((q_len, kv_len), left, right)
        for first in range(kv_len):
            for last in range(first, kv_len + 2):  # a tile may hang over the end
                start, stop = pattern.q_span(first, last, q_len, kv_len, width(left), width(right))
                seen = range(first, min(last + 1, kv_len))
                want = [i for i in range(q_len) if any(grid[i][j] for j in seen)]
                assert list(range(start, stop)) == want, (first, last, left, right)


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_q_span_full_is_who_sees_every_key(q_len, kv_len):
    for left, right in product(WINDOWS, WINDOWS):
        grid = cells((q_len, kv_len), left, right)
        for first in range(kv_len):
            for last in range(first, kv_len):
                start, stop = pattern.q_span_full(first, last, q_len, kv_len, width(left), width(right))
                want = [i for i in range(q_len) if all(grid[i][j] for j in range(first, last + 1))]
                assert list(range(start, stop)) == want, (first, last, left, right)


@pytest.mark.parametrize(("q_len", "kv_len"), SIZES)
def test_count_pairs_counts_the_visible(q_len, kv_len):
    for left, right in product(WINDOWS, WINDOWS):
        want = sum(map(sum, cells((q_len, kv_len), left, right)))
        assert pattern.count_pairs(q_len, kv_len, width(left), width(right)) == want, (left, right)
    assert pattern.count_pairs(q_len, kv_len) == q_len * kv_len


def test_a_probability_close_to_one_still_keeps_something():
    threshold = pattern.drop_threshold(0.9999)
    assert threshold == 255
    assert pattern.drop_threshold(0.0) == 0
    assert pattern.drop_threshold(0.5) == 128
