"""The portable forward in Triton's interpreter against the oracle: out and lse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamattn import attention
from streamattn.pattern import UNBOUNDED
from tests.cases import LAYOUTS, MASKS, Case, Inputs, Result, expected, hidden_by_minimum, judge, keep_of
from tests.oracle import visible_pairs
from tests.pairwise import pairwise
from tests.rounding import rounded

# A pair of tiles costs some milliseconds. These sizes give few a head, ragged and round, below and above the
# diagonal. On GPUs tiles are square, wide and tall, so all of these are tried.
OPTIONS: dict[str, list[Any]] = {
    "tile": [(32, 32), (32, 32), (64, 64), (16, 64), (64, 32)],
    "heads": [(1, 1), (2, 1), (2, 2)],
    "sizes": [(33, 33), (32, 64), (5, 70), (70, 5), (1, 65)],
    "dims": [(16, 16), (32, 32), (20, 20), (24, 48), (64, 16)],
    "causal": [False, True],
    "window_size": [None, 1, 34, (3, 5), (-1, 2), (10, -1)],
    "mask": [mask for mask in MASKS if not mask.startswith("trained")],
    "segments": ["none", "ids", "pair"],
    "lengths": ["none", "ragged", "extreme"],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "scale": [None, 0.3, -0.2],
    "dropout_p": [0.0, 0.0, 0.3],
    "layout": list(LAYOUTS),
    "dtype": [torch.float32, torch.float32, torch.float16],
}


def case_of(row: dict[str, Any]) -> tuple[Case, torch.dtype]:
    row = {name: value for name, value in row.items() if name != "tile"}
    (q_heads, kv_heads), (q_len, kv_len), (head_dim, value_dim) = (
        row.pop(x) for x in ("heads", "sizes", "dims")
    )
    dtype = row.pop("dtype")
    if row["segments"] == "ids" and q_len != kv_len:
        row["segments"] = "pair"
    case = Case(
        batch=1 if row["lengths"] == row["segments"] == "none" else 2,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        **row,
    )
    return case, dtype


@torch.no_grad()
def forward(inputs: Inputs, seed: int = 0) -> Result:
    torch.manual_seed(seed)
    out, lse = attention(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, backend="triton")
    return Result({"out": out, "lse": lse})


def wanted(inputs: Inputs, keep: torch.Tensor | None = None) -> Result:
    result = expected(inputs, keep)
    return Result({name: result[name] for name in ("out", "lse")})


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    inputs = case.build(dtype)
    keep = keep_of(case, 11)
    judge(forward(inputs, seed=11), wanted(inputs, keep), dtype, case, peer=rounded(inputs, keep))


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options(row, use_tile):
    use_tile(*row["tile"])
    check(*case_of(row))


@pytest.mark.parametrize(
    "dims", [(1, 1), (3, 3), (17, 40), (80, 80), (96, 96), (128, 128), (160, 96), (256, 256)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_head_dim(dims, dtype):
    check(
        Case(batch=3, q_heads=1, kv_heads=1, q_len=35, kv_len=40, head_dim=dims[0], value_dim=dims[1]), dtype
    )


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 63, 65])
def test_any_length(size):
    check(Case(batch=1, q_heads=1, kv_heads=1, q_len=size, kv_len=size, causal=True))


@pytest.mark.parametrize("window_size", [2, (1, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(100, 40), (40, 100), (90, 90)], ids=str)
def test_a_window_smaller_than_a_tile(window_size, sizes):
    check(Case(batch=1, q_heads=1, kv_heads=1, q_len=sizes[0], kv_len=sizes[1], window_size=window_size))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "bool"},
        {"segments": "pair"},
        {"lengths": "extreme", "window_size": 3},
        {"window_size": 3},
        {"q_len": 70, "kv_len": 40, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_unseen_keys_values_and_blind_queries_reach_nothing(options, poison):
    case = Case(**{"q_len": 40, "kv_len": 70, **options})
    inputs = case.build()
    want = wanted(inputs)
    named = {name: inputs.options[name] for name in inputs.options if name != "softcap"}
    seen = visible_pairs(2, case.q_len, case.kv_len, **named).expand(2, 2, case.q_len, case.kv_len)
    assert not bool(seen.any(2).all()) or not bool(seen.any(3).all())
    with torch.no_grad():
        inputs.k[~seen.any(2)] = poison
        inputs.v[~seen.any(2)] = poison
        inputs.q[~seen.any(3)] = poison
    judge(forward(inputs), want, torch.float32, case)


def test_memory_between_rows_is_never_read():
    """q, k and v sit in storages full of NaN; so do the tails of their last tiles."""
    inputs = Case(batch=1, q_len=35, kv_len=50, head_dim=20, causal=True).build()
    padded = []
    for x in (inputs.q, inputs.k, inputs.v):
        storage = torch.full((1, 2, x.shape[2] + 40, 64), float("nan"))
        view = storage[:, :, 5 : 5 + x.shape[2], 7:27]
        view.copy_(x.detach())
        padded.append(view)
    out = attention(*padded, causal=True, backend="triton")
    judge(Result({"out": out}), Result({"out": wanted(inputs)["out"]}), torch.float32)


def test_extreme_scores():
    inputs = Case(batch=1, q_len=40, kv_len=70, scale=60.0).build()
    got, want = forward(inputs), wanted(inputs)
    torch.testing.assert_close(got["out"].double(), want["out"], rtol=0, atol=2e-3)
    torch.testing.assert_close(got["lse"].double(), want["lse"], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 1e-3, 0.2, 0.25, 3.0, 1e4])
def test_softcap_is_tanh_to_float32_accuracy(value):
    """One key: lse is the capped score itself."""
    for sign in (1.0, -1.0):
        q, k = torch.full((1, 16), sign * value), torch.ones(1, 16)
        _, lse = attention(q, k, k, scale=1 / 16, softcap=1.5, return_lse=True, backend="triton")
        want = 1.5 * torch.tanh(torch.tensor(sign * value, dtype=torch.float64) / 1.5)
        torch.testing.assert_close(lse[0].double(), want, rtol=3e-7, atol=1e-12)


def test_lengths_on_the_way_to_the_kernel_are_clamped():
    """Past the validation, as on a GPU: the kernel itself clamps to [0, Tk]."""
    inputs = Case(kv_len=40, causal=True).build()
    arguments = [inputs.q, inputs.k, inputs.v, None, None, None, torch.tensor([-5, 1000]), None, None]
    with torch.no_grad():
        out, lse = torch.ops.streamattn.attention_forward(
            *arguments, 0.25, 1 << 30, 0, 0.0, 0.0, "triton", None
        )
    inputs.options["kv_lengths"] = torch.tensor([0, 40])
    judge(Result({"out": out, "lse": lse}), wanted(inputs), torch.float32)


def test_out_is_stored_token_major():
    inputs = Case(q_len=33, kv_len=33).build()
    out = forward(inputs)["out"]
    assert out.transpose(1, 2).reshape(2, 33, 32).data_ptr() == out.data_ptr()


@pytest.mark.parametrize("dropout_p", [0.001, 0.1, 0.5, 0.999])
def test_dropout_mask_is_keep_mask_bit_by_bit(dropout_p):
    """With the identity as values and equal scores, out shows which weights were kept."""
    case = Case(batch=2, q_heads=2, kv_heads=1, q_len=40, kv_len=130, dropout_p=dropout_p)
    eye = torch.eye(130).expand(2, 1, 130, 130)
    torch.manual_seed(3)
    q, k = torch.zeros(2, 2, 40, 16), torch.zeros(2, 1, 130, 16)
    got = attention(q, k, eye, dropout_p=dropout_p, backend="triton")
    keep = keep_of(case, 3)
    assert keep is not None
    assert torch.equal(got != 0, keep)


def test_a_key_hidden_by_an_additive_mask_is_hidden_from_rows_past_the_end_too():
    q, k, v = (torch.randn(1, 1, length, 16) for length in (6, 64, 64))
    mask = torch.zeros(6, 64)
    mask[:, 3] = -torch.inf
    k[:, :, 3], v[:, :, 3] = torch.nan, torch.nan
    q.requires_grad_()
    out = attention(q, k, v, attn_mask=mask, backend="triton")
    assert out.isfinite().all()
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_lengths_beyond_int32_are_clamped():
    q, k, v = (torch.randn(1, 1, length, 16) for length in (6, 64, 64))
    lengths = torch.tensor([2**32 + 3])
    options = (None, None, None, lengths, None, None, 0.25, UNBOUNDED, UNBOUNDED, 0.0, 0.0, "triton", None)
    out, _ = torch.ops.streamattn.attention_forward(q, k, v, *options)
    torch.testing.assert_close(out, attention(q, k, v, scale=0.25, backend="reference"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-40, 2.2e-309, -1e-40, 0.0])
def test_a_scale_that_float32_loses_makes_the_mean_of_what_is_seen(scale):
    check(Case(q_len=5, kv_len=40, causal=True, scale=scale))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # float64's minimum, in numpy
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lowest", ["min", "half", "inf"])
def test_an_additive_mask_of_any_dtype_hides_by_its_own_minimum(dtype, lowest):
    inputs = hidden_by_minimum(dtype, lowest)
    want = wanted(inputs)
    with torch.no_grad():
        inputs.k[:, :, 7] = inputs.v[:, :, 7] = torch.nan
    got = forward(inputs)
    assert not got["out"][:, :, 1].any()
    judge(got, want, torch.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_an_entry_too_low_for_float32_hides():
    q, k, v = (torch.randn(1, 1, length, 16) for length in (3, 40, 40))
    mask = torch.zeros(3, 40, dtype=torch.float64)
    mask[1] = mask[2, 5] = -1e39
    v[:, :, 5] = torch.nan
    mask[0, 5] = -1e39
    out, lse = attention(q, k, v, attn_mask=mask, backend="triton", return_lse=True)
    want, want_lse = attention(q, k, v, attn_mask=mask > -1.0, backend="reference", return_lse=True)
    assert lse[0, 0, 1] == -torch.inf
    torch.testing.assert_close((out, lse), (want, want_lse), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_a_nan_in_a_mask_shows_in_its_row(dtype):
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for length in (8, 40, 40))
    mask = torch.zeros(8, 40, dtype=dtype)
    mask[2, 5] = torch.nan
    out, lse = attention(q, k, v, attn_mask=mask, backend="triton", return_lse=True)
    dq, dv = torch.autograd.grad(out.sum(), (q, v))
    for x in (out.isnan().all(-1), lse.isnan(), dq.isnan().all(-1)):
        assert x[0, 0].nonzero().flatten().tolist() == [2]
    assert dv.isnan().all()


def test_the_running_maximum_starts_below_every_score():
    """From 0 instead of -inf, the exponentials of scores around -400 would all vanish."""
    inputs = Case(q_len=40, kv_len=70).build()
    plain = forward(inputs)
    inputs.options["attn_mask"] = torch.full((1, 1), -400.0)
    got = forward(inputs)
    torch.testing.assert_close(got["out"], plain["out"], rtol=0, atol=1e-4)
    torch.testing.assert_close(got["lse"], plain["lse"] - 400.0, rtol=0, atol=1e-4)


LIMITED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "short window": {"window_size": 20},
    "two sides": {"window_size": (40, 3), "q_heads": 2},
    "top": {"causal": True, "q_len": 150, "kv_len": 70},
    "bottom": {"causal": True, "q_len": 70, "kv_len": 150},
    "lengths": {"causal": True, "q_len": 40, "batch": 2},
    "documents": {"causal": True, "batch": 2},
}


def limited(name: str) -> Inputs:
    """Tiles of 32; lengths and documents end where a tile does."""
    inputs = Case(
        **{"batch": 1, "q_heads": 1, "kv_heads": 1, "q_len": 160, "kv_len": 160, **LIMITED[name]}
    ).build()
    if name == "lengths":
        inputs.options["kv_lengths"] = torch.tensor([64, 160])
    if name == "documents":
        ids = torch.tensor([[0, 1, 1, 2, -1], [0, 0, 0, 1, 1]], dtype=torch.int32)
        inputs.options["segment_ids"] = ids.repeat_interleave(32, dim=1)
    return inputs


def visible_tiles(inputs: Inputs) -> int:
    """Pairs of 32 queries and 32 keys with something visible in them, over all query heads."""
    (batch, heads, q_len, _), kv_len = inputs.q.shape, inputs.k.shape[2]
    seen = visible_pairs(batch, q_len, kv_len, **inputs.options).expand(batch, heads, q_len, kv_len)
    tiles = torch.nn.functional.max_pool2d(seen.float(), 32, ceil_mode=True)
    return int(tiles.sum())


@pytest.mark.parametrize("name", LIMITED)
def test_tiles_that_no_query_can_see_are_not_visited(name, use_tile, products):
    use_tile(32, 32)
    inputs = limited(name)
    forward(inputs)
    assert len(products) == 2 * visible_tiles(inputs)
