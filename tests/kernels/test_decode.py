"""The decode kernel in Triton's interpreter against the oracle: splits, options, paged caches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import attention
from streamattn.kernels import decode, tiles
from streamattn.pattern import UNBOUNDED
from tests.cases import Case, Inputs, Result, expected, judge, paged
from tests.oracle import visible_pairs
from tests.pairwise import pairwise
from tests.rounding import rounded

OPTIONS: dict[str, list[Any]] = {
    "splits": [1, 2, 5],
    "heads": [(1, 1), (4, 1), (8, 1)],
    "sizes": [(1, 133), (3, 96), (9, 40), (2, 1), (5, 3)],
    "dims": [(16, 16), (20, 20), (24, 48), (64, 16)],
    "causal": [False, True],
    "window_size": [None, 1, 34, (40, 3), (-1, 2), (10, -1)],
    "mask": ["none", "bool_keys", "bool_rows", "additive_keys", "additive_expanded"],
    "segments": ["none", "pair"],
    "lengths": ["none", "ragged", "extreme"],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "scale": [None, 0.3, -0.2],
    "layout": ["bhtd", "bthd", "sliced", "expanded"],
    "dtype": [torch.float32, torch.float32, torch.float16],
}


@pytest.fixture
def use_splits(monkeypatch: pytest.MonkeyPatch):
    """Makes the kernel use so many splits, whatever the number of keys."""

    def use(splits: int) -> None:
        monkeypatch.setattr(decode, "split_count", lambda *given: splits)

    return use


@torch.no_grad()
def decoded(inputs: Inputs, **more: Any) -> Result:
    options = {**inputs.options, **more}
    out, lse = attention(inputs.q, inputs.k, inputs.v, **options, return_lse=True, backend="decode")
    return Result({"out": out, "lse": lse})


def wanted(inputs: Inputs) -> Result:
    result = expected(inputs)
    return Result({name: result[name] for name in ("out", "lse")})


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    inputs = case.build(dtype)
    judge(decoded(inputs), wanted(inputs), dtype, case, peer=rounded(inputs, None))


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options(row: dict[str, Any], use_splits) -> None:
    row = dict(row)
    use_splits(row.pop("splits"))
    (q_heads, kv_heads), (q_len, kv_len), (head_dim, value_dim) = (
        row.pop(x) for x in ("heads", "sizes", "dims")
    )
    dtype = row.pop("dtype")
    sizes = {"q_len": q_len, "kv_len": kv_len, "head_dim": head_dim, "value_dim": value_dim}
    check(Case(q_heads=q_heads, kv_heads=kv_heads, **sizes, **row), dtype)


@pytest.mark.parametrize("dims", [(1, 1), (17, 40), (96, 96), (128, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_head_dim(dims: tuple[int, int], dtype: torch.dtype, use_splits) -> None:
    use_splits(2)
    check(Case(1, 4, 2, 1, 75, dims[0], value_dim=dims[1]), dtype)


@pytest.mark.parametrize("kv_len", [1, 31, 32, 33, 64, 97])
@pytest.mark.parametrize("splits", [1, 2, 20])
def test_any_length_in_any_number_of_splits(kv_len: int, splits: int, use_splits) -> None:
    use_splits(splits)
    check(Case(1, 2, 1, 1, kv_len, causal=True, sinks=True))


@pytest.mark.parametrize("mask", ["bool", "additive", "additive_heads"])
def test_masks_of_each_head_where_heads_share_no_keys(mask: str, use_splits) -> None:
    use_splits(3)
    check(Case(q_len=3, kv_len=100, mask=mask))
    with pytest.raises(ValueError, match="differs from head to head"):
        check(Case(q_heads=4, q_len=3, kv_len=100, mask=mask))


def test_rows_of_a_group_that_fill_several_tiles(use_splits) -> None:
    use_splits(2)
    check(Case(1, 6, 2, 16, 40, causal=True))  # 48 rows a group, 32 a tile


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "bool_keys"},
        {"segments": "pair"},
        {"lengths": "extreme", "window_size": 3},
        {"lengths": "ragged"},
        {"q_len": 1, "window_size": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_unseen_keys_and_values_reach_nothing(options: dict[str, Any], poison: float, use_splits) -> None:
    use_splits(3)
    case = Case(**{"q_heads": 4, "q_len": 6, "kv_len": 130, **options})
    inputs = case.build()
    want = wanted(inputs)
    seen = visible_pairs(2, case.q_len, case.kv_len, **inputs.options).expand(2, 2, case.q_len, case.kv_len)
    assert not bool(seen.any(2).all())
    with torch.no_grad():
        inputs.k[~seen.any(2)] = poison
        inputs.v[~seen.any(2)] = poison
    judge(decoded(inputs), want, torch.float32, case)


def test_memory_between_rows_is_never_read() -> None:
    inputs = Case(batch=1, q_heads=4, q_len=3, kv_len=50, head_dim=20, causal=True).build()
    padded = []
    for x in (inputs.q, inputs.k, inputs.v):
        storage = torch.full((1, x.shape[1], x.shape[2] + 40, 64), float("nan"))
        view = storage[:, :, 5 : 5 + x.shape[2], 7:27]
        view.copy_(x.detach())
        padded.append(view)
    out = attention(*padded, causal=True, backend="decode")
    judge(Result({"out": out}), Result({"out": wanted(inputs)["out"]}), torch.float32)


def test_a_long_cache_that_holds_little_is_split_as_finely_as_a_full_one(monkeypatch) -> None:
    """Each of the splits has a tile of what the window shows of the keys that are there."""
    left: list[Tensor] = []
    original = decode._combine

    def keep(out: Tensor, lse: Tensor, parts: Tensor, splits: int) -> None:
        left.append(parts[-2 * splits : -splits].clone())
        original(out, lse, parts, splits)

    monkeypatch.setattr(decode, "_combine", keep)
    monkeypatch.setattr(decode, "split_count", lambda *given: 4)
    q, k, v = torch.randn(1, 1, 1, 16), *torch.randn(2, 1, 1, 4096, 16)
    options: dict[str, Any] = {"kv_lengths": torch.tensor([1000]), "window_size": 128}
    attention(q, k, v, **options, backend="decode")
    maxima = left[0]
    scores = 0.25 * (q @ k.mT).flatten() / torch.log(torch.tensor(2.0))
    edges = [872, 896 + 32, 928 + 32, 960 + 32, 1000]  # five tiles: the first split has two of them
    want = torch.stack([scores[a:b].max() for a, b in itertools.pairwise(edges)])
    torch.testing.assert_close(maxima, want, rtol=1e-5, atol=1e-5)


def test_splits_follow_the_work_and_the_multiprocessors(monkeypatch) -> None:
    monkeypatch.setattr(decode, "multiprocessor_count", lambda device: 132)
    tile = tiles.Tile(32, 64, 4, 3)

    def splits(batch: int, heads: int, kv_heads: int, kv_len: int, q_len: int = 1, left: int = UNBOUNDED):
        q: Any = SimpleNamespace(is_cuda=True, get_device=lambda: 0, shape=(batch, heads, q_len, 128))
        return decode.split_count(decode.most_splits(q, kv_heads, tile), q_len, kv_len, left)

    slots = tiles.DECODE_PROGRAMS * 132
    assert splits(1, 32, 32, 4096) == slots // 32
    assert splits(1, 32, 8, 32768) == slots // 8
    assert splits(64, 12, 12, 1024) == 1
    assert splits(1, 1, 1, 1 << 20) == tiles.MAX_DECODE_SPLITS
    assert splits(1, 32, 8, 32768, left=511) == 512 // tiles.DECODE_SPLIT
    assert splits(1, 32, 8, 40) == 1
    assert splits(1, 64, 8, 32768, q_len=8) == slots // 16  # two tiles of rows


# Paged caches


@pytest.mark.parametrize("page", [1, 7, 64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_len": 4, "causal": True, "sinks": True},
        {"window_size": 30, "softcap": 2.0},
        {"segments": "pair", "mask": "bool_keys", "q_len": 2},
    ],
    ids=str,
)
def test_a_paged_cache_is_the_cache_in_pieces(page: int, options: dict[str, Any], use_splits) -> None:
    use_splits(2)
    case = Case(
        q_heads=4, kv_len=448 // 4 if page != 64 else 128, **{"q_len": 1, "lengths": "ragged", **options}
    )
    inputs = case.build()
    want = wanted(inputs)
    k, v, table = paged(inputs, page)
    lengths = inputs.options["kv_lengths"]
    for row, length in zip(table, lengths.tolist(), strict=True):
        row[-(-length // page) :] = torch.iinfo(torch.int32).min  # not used
    got = decoded(replace(inputs, k=k, v=v), block_table=table)
    judge(got, want, torch.float32, case)
    with torch.no_grad():
        out = attention(inputs.q, k, v, **inputs.options, block_table=table, backend="reference")
    judge(Result({"out": out}), Result({"out": want["out"]}), torch.float32, case)


def test_a_page_that_is_none_is_read_nowhere_else() -> None:
    inputs = Case(1, 1, 1, 1, 64).build()
    k, v, table = paged(inputs, 16, spare=0)
    table[0, 0], table[0, 2] = -5, 1000
    lengths = torch.tensor([64])
    got = attention(inputs.q.detach(), k, v, kv_lengths=lengths, block_table=table, backend="decode")
    named = attention(
        inputs.q.detach(), k, v, kv_lengths=lengths, block_table=table.clamp(0, 3), backend="decode"
    )
    assert torch.equal(got, named)


# Gradients and numbers


def test_the_portable_backward_follows() -> None:
    inputs = Case(q_len=3, kv_len=90, q_heads=4, causal=True, sinks=True, lengths="ragged").build()
    out, lse = attention(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, backend="decode")
    wanted_tensors = (inputs.q, inputs.k, inputs.v, inputs.options["sinks"])
    cotangents = (inputs.dout, inputs.dlse)
    got = torch.autograd.grad((out, lse), wanted_tensors, cotangents)
    want = expected(inputs)
    names = ("dq", "dk", "dv", "dsinks")
    floors = {name: want.floors[name] for name in want.floors if name in names}
    judge(
        Result(dict(zip(names, got, strict=True))),
        Result({name: want[name] for name in names}, floors),
        torch.float32,
    )


def test_scores_far_apart_are_weighed_exactly(use_splits) -> None:
    """Parts hold maxima and denominators; from lse rounded to float32 the weights would be off by 1e-4."""
    use_splits(4)
    inputs = Case(1, 1, 1, 1, 128).build()
    inputs.options["attn_mask"] = torch.full((1, 128), 3000.0)
    inputs.options["attn_mask"][0, 40:] -= 1.0
    got, want = decoded(inputs), wanted(inputs)
    torch.testing.assert_close(got["out"].double(), want["out"], rtol=0, atol=3e-4)
    plain = Case(1, 1, 1, 1, 128).build()
    judge(decoded(plain), wanted(plain), torch.float32)


def test_nothing_is_nan_where_no_key_is_seen(use_splits) -> None:
    use_splits(3)
    inputs = Case(q_len=2, kv_len=64).build()
    inputs.options["kv_lengths"] = torch.tensor([0, 64])
    got = decoded(inputs)
    assert not got["out"][0].any()
    assert bool((got["lse"][0] == -torch.inf).all())
    inputs.options["sinks"] = torch.tensor([0.5, -1.0])
    assert torch.equal(decoded(inputs)["lse"][0], torch.tensor([[0.5, 0.5], [-1.0, -1.0]]))


def test_the_same_bits_every_time(use_splits) -> None:
    use_splits(5)
    inputs = Case(1, q_len=2, kv_len=170).build()
    first, second = decoded(inputs), decoded(inputs)
    assert torch.equal(first["out"], second["out"])
    assert torch.equal(first["lse"], second["lse"])


def test_out_is_stored_token_major(use_splits) -> None:
    for splits in (1, 2):
        use_splits(splits)
        out = decoded(Case(q_len=3, kv_len=70).build())["out"]
        assert out.transpose(1, 2).reshape(2, 3, 32).data_ptr() == out.data_ptr()
