"""Kernels for wide heads in Triton's interpreter against the oracle: out, lse and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from streamattn import attention
from streamattn.kernels import tiles
from streamattn.kernels.wide_launch import Chunk, chunks
from streamattn.kernels.wide_short import parts_of
from tests.cases import Case, Inputs, Result, expected, judge, keep_of, run
from tests.kernels.test_forward import LIMITED, case_of, visible_tiles
from tests.oracle import visible_pairs
from tests.pairwise import pairwise
from tests.rounding import rounded


@pytest.fixture
def use_wide_tile(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], None]:
    """Makes all kernels for wide heads use tiles of so many queries, keys and columns."""

    def use(block_m: int, block_n: int, block_d: int) -> None:
        monkeypatch.setattr(tiles, "_WIDE_INTERPRETED", tiles.WideTile(block_m, block_n, block_d, 4, 1))

    return use


def wide(inputs: Inputs, seed: int = 0) -> Result:
    torch.manual_seed(seed)
    return run(lambda *a, **o: attention(*a, **o, return_lse=True, backend="wide"), inputs)


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    inputs = case.build(dtype)
    keep = keep_of(case, 11)
    judge(wide(inputs, seed=11), expected(inputs, keep), dtype, case, peer=rounded(inputs, keep))


# few programs and up to 64 keys are served by parts of the head, the others by tiles of weights
OPTIONS: dict[str, list[Any]] = {
    "heads": [(1, 1), (2, 1), (2, 2)],
    "sizes": [(17, 17), (5, 70), (40, 5), (16, 40)],
    "dims": [(264, 264), (257, 40), (24, 300)],
    "causal": [False, True],
    "window_size": [None, 10, (3, 5), (-1, 2)],
    "mask": ["none", "none", "bool", "bool_keys", "additive", "additive_keys"],
    "segments": ["none", "ids", "pair"],
    "lengths": ["none", "ragged", "extreme"],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "scale": [None, -0.2],
    "dropout_p": [0.0, 0.3],
    "layout": ["bhtd", "bthd", "sliced", "strided"],
    "dtype": [torch.float32, torch.float32, torch.float16],
}


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options(row):
    case, dtype = case_of(row)
    inputs, keep = case.build(dtype), keep_of(case, 11)
    judge(wide(inputs, seed=11), expected(inputs, keep), dtype, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(320, 320), (512, 512), (1030, 257), (8192, 64), (64, 8192)], ids=str)
def test_any_head_dim(dims, dtype):
    case = Case(batch=1, q_heads=2, kv_heads=1, q_len=5, kv_len=9, head_dim=dims[0], value_dim=dims[1])
    inputs = case.build(dtype)
    judge(wide(inputs), expected(inputs), dtype, case)


@pytest.mark.parametrize("tile", [(16, 32, 128), (64, 16, 256), (32, 64, 512)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_error_over_several_tiles_is_that_of_the_least_rounding(tile, dtype, use_wide_tile):
    use_wide_tile(*tile)
    check(Case(batch=1, q_heads=1, kv_heads=1, q_len=64, kv_len=68, head_dim=272, causal=True), dtype)


def test_a_weight_that_outweighs_the_others_is_not_rounded():
    """Each query sees hardly more than one key, whose weight of almost 1 is no number of 16 bits."""
    inputs = Case(batch=1, q_heads=1, kv_heads=1, q_len=16, kv_len=80, head_dim=264).build(torch.float16)
    inputs.options["scale"] = 1.013
    with torch.no_grad():
        got = attention(inputs.q, inputs.k, inputs.v, scale=1.013, backend="wide")
    judge(
        Result({"out": got}),
        Result({"out": expected(inputs)["out"]}),
        torch.float16,
        peer=rounded(inputs),
    )


@pytest.mark.parametrize("kv_len", [9, 70])
def test_infinite_inputs_give_what_plain_products_give(kv_len):
    """Each float32 is split in two, of which the lesser of an infinity is NaN and that of 1 is 0."""
    case = Case(batch=1, q_heads=1, kv_heads=1, q_len=16, kv_len=kv_len, head_dim=264)
    with torch.no_grad():
        inputs = case.build()
        q, k, v = inputs.q.clone(), inputs.k.clone(), inputs.v.clone()
        q[..., 3] = -1.0
        k[0, 0, 5, 3] = torch.inf  # a score of -inf, so that this key weighs nothing
        v[0, 0, 2, 9] = torch.inf
        v[0, 0, 3, 10] = torch.nan
        v[0, 0, 4:7, 11] = torch.tensor([torch.inf, 1.0, -torch.inf])
        v[0, 0, 7, 12] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # another NaN
        got = attention(q, k, v, backend="wide")
        want = (q @ k.mT * 264**-0.5).softmax(-1) @ v
    assert want.isinf().any()
    assert want[..., :9].isfinite().all()
    torch.testing.assert_close(got, want, equal_nan=True)


def test_cutting_queries_and_heads_changes_nothing(monkeypatch):
    """One head at a time, and one tile of queries at a time, whose dk and dv are summed up."""
    case = Case(batch=2, q_heads=2, kv_heads=1, q_len=35, kv_len=65, head_dim=260, causal=True)
    inputs = case.build(torch.float16)
    whole, want = wide(inputs), expected(inputs)
    for cap in (40_000, 1):
        monkeypatch.setattr(tiles, "WIDE_WORKSPACE_BYTES", cap)
        got = wide(inputs)
        judge(got, want, torch.float16, cap)
        for name in ("out", "lse", "dq"):
            assert torch.equal(got[name], whole[name]), (cap, name)


def test_chunks_hold_every_query_once_and_keep_the_workspace(monkeypatch):
    monkeypatch.setattr(tiles, "WIDE_WORKSPACE_BYTES", 1 << 20)
    sizes = [(6, 1, 100, 256), (6, 3, 1000, 2048), (4, 2, 70, 1 << 20), (5, 1, 1, 64)]
    for heads, unit, q_len, keys in sizes:
        parts = chunks(heads, unit, q_len, keys, 2, 32)
        seen = torch.zeros(heads, q_len, dtype=torch.int32)
        for part in parts:
            assert part.heads % unit == part.head_start % unit == part.row_start % 32 == 0
            seen[part.head_start : part.head_start + part.heads, part.row_start : part.row_stop] += 1
            rows = -(-(part.row_stop - part.row_start) // 32) * 32
            assert part.heads * rows * keys * 2 <= max(1 << 20, unit * 32 * keys * 2)
            assert part.heads <= parts[0].heads
        assert torch.equal(seen, torch.ones_like(seen))
    assert chunks(6, 1, 100, 256, 2, 128) == [Chunk(0, 6, 0, 100)]


def test_few_programs_sum_scores_in_parts():
    def parts(heads: int, q_len: int, kv_len: int, head_dim: int) -> int:
        q, k = torch.empty(1, heads, q_len, head_dim), torch.empty(1, heads, kv_len, head_dim)
        return parts_of(q, k)

    assert parts(2, 16, 64, 4096) == 4  # 8 multiprocessors
    assert parts(2, 16, 65, 4096) == 1
    assert parts(8, 16, 64, 4096) == 1
    assert parts(1, 16, 64, 600) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "bool", "kv_len": 70},
        {"segments": "pair"},
        {"lengths": "extreme", "window_size": 3},
        {"q_len": 70, "kv_len": 33, "causal": True},
    ],
    ids=str,
)
def test_unseen_keys_values_and_blind_queries_reach_nothing(options):
    case = Case(**{"q_heads": 1, "kv_heads": 1, "q_len": 20, "kv_len": 50, "head_dim": 258, **options})
    inputs = case.build()
    want = expected(inputs)
    seen = visible_pairs(2, case.q_len, case.kv_len, **inputs.options).expand(2, 1, case.q_len, case.kv_len)
    assert not bool(seen.any(2).all()) or not bool(seen.any(3).all())
    with torch.no_grad():
        inputs.k[~seen.any(2)] = torch.nan
        inputs.v[~seen.any(2)] = torch.inf
        for x in (inputs.q, inputs.dout, inputs.dlse):
            x[~seen.any(3)] = torch.nan
    judge(wide(inputs), want, torch.float32, case)


def test_memory_between_rows_is_never_read():
    """q, k, v and dout sit in storages full of NaN; so do the tails of their last tiles."""
    inputs = Case(batch=1, q_len=35, kv_len=50, head_dim=270, causal=True).build()
    want = expected(inputs)

    def apart(x: torch.Tensor) -> torch.Tensor:
        storage = torch.full((1, 2, x.shape[2] + 40, 300), float("nan"))
        view = storage[:, :, 5 : 5 + x.shape[2], 7:277]
        view.copy_(x.detach())
        return view

    judge(wide(inputs.mapped(apart, dout=apart(inputs.dout))), want, torch.float32)


def test_a_nan_in_a_mask_shows_in_its_row():
    q, k, v = (torch.randn(1, 1, length, 260, requires_grad=True) for length in (8, 70, 70))
    mask = torch.zeros(8, 70)
    mask[2, 5] = torch.nan
    out, lse = attention(q, k, v, attn_mask=mask, backend="wide", return_lse=True)
    (dq,) = torch.autograd.grad(out.sum(), q)
    for x in (out.isnan().all(-1), lse.isnan(), dq.isnan().all(-1)):
        assert x[0, 0].nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("mask", ["trained", "trained_keys"])
def test_a_trained_mask_gets_its_gradient(mask):
    check(Case(batch=2, q_len=9, kv_len=17, head_dim=260, mask=mask, dropout_p=0.3, softcap=3.0))


@pytest.mark.parametrize("name", ["two sides", "top", "lengths"])
def test_tiles_that_no_query_can_see_are_not_visited(name, use_wide_tile, products):
    """Where the columns fit one step: two products forward and five backward, none of them made twice.

    In float16, for each of float32's is made in three steps.
    """
    use_wide_tile(32, 32, 512)
    sizes: dict[str, Any] = {
        "batch": 1,
        "q_heads": 1,
        "kv_heads": 1,
        "q_len": 96,
        "kv_len": 96,
        "head_dim": 257,
    }
    top = {"causal": True, "q_len": 100, "kv_len": 70}
    inputs = Case(**sizes | (top if name == "top" else LIMITED[name])).build(torch.float16)
    if name == "lengths":
        inputs.options["kv_lengths"] = torch.tensor([40, 96])
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend="wide")
    assert len(products) == 2 * visible_tiles(inputs)
    products.clear()
    torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    assert len(products) == 5 * visible_tiles(inputs)
