"""The tiled reference: its tile walk, its backward, `merge`, and the dropout mask bit by bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import reference
from streamattn.pattern import UNBOUNDED
from tests.cases import Case, Inputs, Result, expected, judge
from tests.pairwise import pairwise


def arguments(case: Case, inputs: Inputs, seed: Tensor | None = None) -> tuple[Any, ...]:
    """What follows q, k, v in a forward: the resolved options of a case, as the ops pass them on."""
    options = inputs.options
    window = options.get("window_size")
    left, right = (window - 1, 0) if isinstance(window, int) else window or (-1, -1)
    left, right = (UNBOUNDED if side < 0 else side for side in (left, right))
    if options.get("causal"):
        right = min(right, 0)
    segments = options.get("segment_ids")
    q_segments, kv_segments = segments if isinstance(segments, tuple) else (segments, segments)
    mask = options.get("attn_mask")
    return (
        mask if mask is None else mask[(None,) * (4 - mask.dim())],
        q_segments,
        kv_segments,
        options.get("kv_lengths"),
        seed,
        options.get("sinks"),
        options.get("scale", case.head_dim**-0.5),
        left,
        right,
        options.get("softcap", 0.0),
        case.dropout_p,
    )


@torch.no_grad()
def run_reference(case: Case, inputs: Inputs, seed: Tensor | None = None) -> Result:
    args = arguments(case, inputs, seed)
    out, lse = reference.attention_forward(inputs.q, inputs.k, inputs.v, *args)
    mask = inputs.options.get("attn_mask")
    trained = mask is not None and mask.requires_grad
    dq, dk, dv, dmask = reference.attention_backward(
        inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse, *args, mask_grad=trained
    )
    result = Result({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
    if trained:
        assert dmask is not None
        result.tensors["dmask"] = dmask
    if case.sinks:
        delta = reference.row_delta(inputs.dout, inputs.dlse, out)
        result.tensors["dsinks"] = reference.sink_gradient(delta, lse, inputs.options["sinks"])
    return result


TILED = pairwise(
    {
        "heads": [(2, 2), (4, 2)],
        "sizes": [(11, 11), (5, 13), (13, 5)],
        "causal": [False, True],
        "window_size": [None, 3, (1, 2)],
        "mask": ["none", "bool", "trained", "trained_keys", "additive_expanded"],
        "segments": ["none", "pair"],
        "lengths": ["none", "ragged", "extreme"],
        "softcap": [None, 1.5],
        "sinks": [False, True],
        "dropout_p": [0.0, 0.3],
    }
)


@pytest.mark.parametrize("row", TILED, ids=str)
def test_many_small_tiles_equal_the_definition(row, monkeypatch):
    """Tiles of 4 x 3: every case walks several, ragged at both ends."""
    monkeypatch.setattr(reference, "BLOCK_M", 4)
    monkeypatch.setattr(reference, "BLOCK_N", 3)
    row = dict(row)
    (q_heads, kv_heads), (q_len, kv_len) = row.pop("heads"), row.pop("sizes")
    case = Case(
        q_heads=q_heads, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, head_dim=8, value_dim=6, **row
    )
    inputs = case.build(torch.float64)
    seed = torch.tensor([1234567890123456789])
    keep = None
    if case.dropout_p:
        keep = reference.keep_mask(seed, case.dropout_p, case.batch, q_heads, (0, q_len), (0, kv_len))
    judge(run_reference(case, inputs, seed), expected(inputs, keep), torch.float64, case)


def test_default_tiles_equal_the_definition():
    case = Case(batch=1, q_len=300, kv_len=700, causal=True)
    inputs = case.build()
    judge(run_reference(case, inputs), expected(inputs), torch.float32)


def test_lse_is_float32_for_half_precision_and_float64_for_float64():
    for dtype, lse_dtype in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        inputs = Case().build(dtype)
        out, lse = reference.attention_forward(inputs.q, inputs.k, inputs.v, *arguments(Case(), inputs))
        assert (out.dtype, lse.dtype) == (dtype, lse_dtype)


@torch.no_grad()
def split_forward(inputs: Inputs, case: Case, start: int, stop: int) -> tuple[Tensor, Tensor]:
    k, v = inputs.k[:, :, start:stop], inputs.v[:, :, start:stop]
    return reference.attention_forward(inputs.q, k, v, *arguments(case, inputs))


def test_merge_of_disjoint_keys_is_attention_over_all():
    case = Case(q_len=4, kv_len=12)
    inputs = case.build(torch.float64)
    whole = expected(inputs)
    a, b, c = (split_forward(inputs, case, *span) for span in [(0, 5), (5, 6), (6, 12)])
    left = reference.merge(*reference.merge(*a, *b), *c)
    right = reference.merge(*c, *reference.merge(*b, *a))
    for out, lse in (left, right):
        torch.testing.assert_close(out, whole["out"], rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, whole["lse"], rtol=0, atol=1e-12)


def test_merge_ignores_a_side_that_saw_nothing():
    out, lse = torch.randn(3, 4), torch.randn(3)
    nothing, minus_inf = torch.zeros(3, 4), torch.full((3,), -math.inf)
    for merged in (
        reference.merge(out, lse, nothing, minus_inf),
        reference.merge(nothing, minus_inf, out, lse),
    ):
        torch.testing.assert_close(merged, (out, lse))
    both_out, both_lse = reference.merge(nothing, minus_inf, nothing, minus_inf)
    assert torch.equal(both_out, nothing)
    assert torch.equal(both_lse, minus_inf)


def test_merge_keeps_the_output_dtype_and_survives_far_apart_lse():
    out_a, out_b = torch.ones(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.bfloat16)
    out, lse = reference.merge(out_a, torch.tensor([1e4, -1e4]), out_b, torch.tensor([-1e4, 1e4]))
    assert out.dtype == torch.bfloat16
    assert out[:, 0].tolist() == [1.0, 0.0]
    assert lse.tolist() == [1e4, 1e4]


def philox(key: tuple[int, int], counter: tuple[int, int, int, int], rounds: int) -> tuple[int, ...]:
    """Philox-4x32 in Python integers (Salmon et al. 2011, section 3.3)."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def test_philox_of_this_test_gives_the_published_answers():
    """Known answers of Random123 for 7 rounds."""
    f = 0xFFFFFFFF
    assert philox((0, 0), (0, 0, 0, 0), 7) == (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    assert philox((f, f), (f, f, f, f), 7) == (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**62 + 12345, -1, -(2**63)])
def test_keep_mask_is_philox_on_seed_head_query_key(seed):
    batch, heads, q_len, kv_len, p = 2, 3, 5, 150, 0.25
    got = reference.keep_mask(torch.tensor([seed]), p, batch, heads, (0, q_len), (0, kv_len))
    assert got.shape == (batch, heads, q_len, kv_len)
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    for head in range(batch * heads):
        for i in range(q_len):
            for j in range(kv_len):
                block, within = divmod(j, 64)
                eighth, within = divmod(within, 8)
                call, e = divmod(within, 2)
                words = philox(key, (i, 4 * block + call, head, 0), 7)
                byte = 2 * eighth + e
                octet = (words[byte // 4] >> (8 * (byte % 4))) & 255
                assert bool(got[head // heads, head % heads, i, j]) == (octet >= 64), (head, i, j)


def test_keep_mask_of_a_part_is_the_part_of_the_mask():
    seed = torch.tensor([99])
    whole = reference.keep_mask(seed, 0.5, 2, 2, (0, 40), (0, 300))
    for rows, cols in [((0, 1), (0, 1)), ((7, 23), (63, 65)), ((39, 40), (128, 300)), ((3, 3), (5, 9))]:
        part = reference.keep_mask(seed, 0.5, 2, 2, rows, cols)
        assert torch.equal(part, whole[:, :, rows[0] : rows[1], cols[0] : cols[1]]), (rows, cols)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_mask_keeps_the_rounded_share(p):
    kept = reference.keep_mask(torch.tensor([7]), p, 2, 4, (0, 128), (0, 1024)).double()
    share = 1 - round(p * 256) / 256
    sigma = math.sqrt(share * (1 - share) / kept.numel())
    assert abs(float(kept.mean()) - share) < 5 * sigma
    for dims in [(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)]:  # no batch, head, query or key is special
        means = kept.mean(dims)
        deviation = math.sqrt(share * (1 - share) / (kept.numel() / means.numel()))
        assert float((means - share).abs().max()) < 6 * deviation, dims


def test_keep_mask_differs_between_heads_rows_and_seeds():
    a = reference.keep_mask(torch.tensor([1]), 0.5, 2, 2, (0, 8), (0, 256))
    b = reference.keep_mask(torch.tensor([2]), 0.5, 2, 2, (0, 8), (0, 256))
    rows = torch.cat([a.flatten(0, 2), b.flatten(0, 2)])
    assert len(torch.unique(rows, dim=0)) == len(rows)


@pytest.mark.parametrize("poisoned", [None, "k", "v"])
def test_heads_of_a_group_share_finite_keys(poisoned, monkeypatch):
    """A mask that tells heads apart costs no copies of k and v, unless there is a NaN to keep apart."""
    case = Case(q_heads=4, kv_heads=2, mask="bool_heads")
    inputs = case.build()
    inputs.dlse.zero_()
    assert inputs.options["attn_mask"].shape[-3] == case.q_heads
    if poisoned is not None:
        with torch.no_grad():
            getattr(inputs, poisoned)[0, 0, 0, 0] = math.nan
    heads: list[int] = []
    original = reference._Tiling.kv_tile

    def recording(self: Any, *args: Any) -> Tensor:
        tile = original(self, *args)
        heads.append(tile.shape[1])
        return tile

    monkeypatch.setattr(reference._Tiling, "kv_tile", recording)
    run_reference(case, inputs)
    # forward: k and v; backward: k for the scores, k and v
    assert heads == [4 if poisoned else 2] * 5


@pytest.mark.parametrize(
    ("options", "tiles"),
    [
        ({}, 25),
        ({"causal": True}, 15),
        ({"window_size": 4}, 9),
        ({"window_size": (2, 5)}, 16),
        ({"q_len": 40, "kv_len": 12, "causal": True}, 6),
        ({"q_len": 8, "causal": True}, 9),
    ],
    ids=str,
)
def test_tiles_that_no_query_can_see_are_not_visited(options, tiles, monkeypatch):
    """20 queries and keys in tiles of 4: forward and backward make the scores of so many."""
    monkeypatch.setattr(reference, "BLOCK_M", 4)
    monkeypatch.setattr(reference, "BLOCK_N", 4)
    case = Case(**{"q_len": 20, "kv_len": 20, **options})
    made: list[int] = []
    original = reference._Tiling.tile

    def counting(self: Any, *args: Any) -> Any:
        made.append(1)
        return original(self, *args)

    monkeypatch.setattr(reference._Tiling, "tile", counting)
    run_reference(case, case.build())
    assert len(made) == 2 * tiles
