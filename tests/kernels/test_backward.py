"""The portable backward in Triton's interpreter against the oracle, beside a trained mask's gradient too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from streamattn import attention
from streamattn.pattern import UNBOUNDED
from tests.cases import MASKS, Beside, Case, Inputs, Result, expected, hidden_by_minimum, judge, keep_of, run
from tests.gpu.peers import compare
from tests.kernels.test_forward import LIMITED, OPTIONS, case_of, limited, visible_tiles
from tests.oracle import visible_pairs
from tests.pairwise import pairwise
from tests.rounding import rounded

BACKWARD_OPTIONS: dict[str, list[Any]] = {
    **OPTIONS,
    "sizes": [(33, 33), (32, 64), (5, 50), (50, 5)],
    "mask": list(MASKS),
    "with_lse": [False, True],
}


PAIRS = pairwise(BACKWARD_OPTIONS)


def three(case: Case, dtype: torch.dtype, *, with_lse: bool = True) -> tuple[Result, Result, Result]:
    """Ours, what is wanted, and the peer's."""
    inputs = case.build(dtype)
    if not with_lse:
        inputs.dlse.zero_()
    keep = keep_of(case, 11)
    return backward(inputs, seed=11), expected(inputs, keep), rounded(inputs, keep)


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    got, want, peer = three(case, dtype)
    judge(got, want, dtype, case, peer=peer)


def backward(inputs: Inputs, seed: int = 0) -> Result:
    torch.manual_seed(seed)
    return run(lambda *a, **o: attention(*a, **o, return_lse=True, backend="triton"), inputs)


@functools.cache
def of_pair(at: int) -> tuple[Result, Result, Result]:
    """`three` of a row of `PAIRS`; the tile must have been chosen."""
    case, dtype = case_of({name: value for name, value in PAIRS[at].items() if name != "with_lse"})
    return three(case, dtype, with_lse=PAIRS[at]["with_lse"])


@pytest.mark.parametrize("at", range(len(PAIRS)), ids=lambda at: "-".join(map(str, PAIRS[at].values())))
def test_every_pair_of_options(at, use_tile):
    row = PAIRS[at]
    use_tile(*row["tile"])
    got, want, peer = of_pair(at)
    judge(got, want, row["dtype"], row, peer=peer)


def test_float32_error_over_all_pairs_is_that_of_the_least_rounding(use_tile):
    """Most of them are too small to tell by themselves."""
    beside = Beside(torch.float32)
    for at, row in enumerate(PAIRS):
        if row["dtype"] == torch.float32:
            use_tile(*row["tile"])
            beside.add(*of_pair(at))
    beside.judge()


MANY_QUERIES: dict[str, Any] = {"q_len": 64, "kv_len": 128, "head_dim": 32}
OF_SDPA: list[dict[str, Any]] = [
    {"causal": True},
    {"window_size": (20, 30)},
    {"segments": "pair"},
    {"mask": "bool"},
    {"mask": "additive"},
    {"mask": "additive_keys"},
]
OF_OUR_OWN: list[dict[str, Any]] = [
    {"q_heads": 4, "causal": True},
    {"head_dim": 20, "value_dim": 40},
    {"lengths": "ragged", "causal": True},
    {"mask": "trained_full"},
    {"softcap": 2.0},
    {"sinks": True},
    {"dropout_p": 0.3},
    {"softcap": 2.0, "mask": "trained", "window_size": 40, "dropout_p": 0.3},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, *OF_SDPA, *OF_OUR_OWN], ids=str)
def test_error_is_that_of_the_least_rounding(options, dtype, use_tile):
    use_tile(64, 64)
    check(Case(**MANY_QUERIES | options), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, *OF_SDPA], ids=str)
def test_error_is_that_of_pytorchs_own(options, dtype, use_tile):
    """Math in float32, and in float16 flash, which on the CPU takes masks too."""
    use_tile(64, 64)
    peer = SDPBackend.MATH if dtype == torch.float32 else SDPBackend.FLASH_ATTENTION
    compare(Case(**MANY_QUERIES | options).build(dtype), backward, peer, options)


@pytest.mark.parametrize("dims", [(1, 1), (17, 40), (80, 80), (96, 64), (128, 128), (256, 256)], ids=str)
def test_any_head_dim(dims):
    check(Case(batch=3, q_heads=1, kv_heads=1, q_len=35, kv_len=40, head_dim=dims[0], value_dim=dims[1]))


@pytest.mark.parametrize("size", [1, 31, 32, 33, 65])
def test_any_length(size):
    check(Case(batch=1, q_heads=1, kv_heads=1, q_len=size, kv_len=size, causal=True))


@pytest.mark.parametrize("group_bytes", [1, 40_000, 60_000])
def test_every_order_of_programs(group_bytes, monkeypatch):
    """Heads start in groups whose rows fit into a cache; here in groups of one and of some."""
    from streamattn.kernels import launch

    monkeypatch.setattr(launch, "GROUP_BYTES", group_bytes)
    check(Case(batch=2, q_heads=2, kv_heads=1, q_len=65, kv_len=65, head_dim=32, causal=True))


def test_gradients_of_grouped_heads_are_summed():
    check(Case(batch=1, q_heads=6, kv_heads=2, q_len=33, kv_len=33, causal=True))


@pytest.mark.parametrize("window_size", [2, (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(90, 40), (40, 90)], ids=str)
def test_a_window_smaller_than_a_tile(window_size, sizes):
    check(Case(batch=1, q_heads=1, kv_heads=1, q_len=sizes[0], kv_len=sizes[1], window_size=window_size))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": "bool"},
        {"segments": "pair"},
        {"lengths": "extreme", "window_size": 3},
        {"window_size": 3},
        {"q_len": 70, "kv_len": 33, "causal": True},
        {"mask": "trained", "softcap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_unseen_keys_values_and_blind_queries_reach_no_gradient(options, poison):
    case = Case(**{"q_heads": 1, "kv_heads": 1, "q_len": 33, "kv_len": 50, **options})
    inputs = case.build()
    want = expected(inputs)
    named = {name: inputs.options[name] for name in inputs.options if name != "softcap"}
    seen = visible_pairs(2, case.q_len, case.kv_len, **named).expand(2, 1, case.q_len, case.kv_len)
    assert not bool(seen.any(2).all()) or not bool(seen.any(3).all())
    with torch.no_grad():
        inputs.k[~seen.any(2)] = poison
        inputs.v[~seen.any(2)] = poison
        for x in (inputs.q, inputs.dout, inputs.dlse):
            x[~seen.any(3)] = poison
    judge(backward(inputs), want, torch.float32, case)


def test_only_some_gradients_are_asked_for():
    inputs = Case(batch=1, q_len=33, kv_len=33, causal=True).build()
    want = expected(
        Inputs(inputs.q, inputs.k, inputs.v, inputs.options, inputs.dout, torch.zeros_like(inputs.dlse))
    )
    for name in "qkv":
        leaves = {x: getattr(inputs, x).detach().requires_grad_(x == name) for x in "qkv"}
        attention(**leaves, causal=True, backend="triton").backward(inputs.dout)
        got = leaves[name].grad
        assert got is not None
        torch.testing.assert_close(got.double(), want[f"d{name}"].double(), rtol=0, atol=2e-5)


def test_a_cotangent_of_any_strides():
    """sum().backward() hands an expanded cotangent, a transposed consumer a transposed one."""
    inputs = Case(batch=1, q_len=33, kv_len=40).build()
    for dout in (torch.ones(()).expand(1, 2, 33, 16), torch.randn(1, 16, 33, 2).transpose(1, 3)):
        out = attention(inputs.q, inputs.k, inputs.v, backend="triton")
        got = torch.autograd.grad(out, [inputs.q, inputs.k, inputs.v], dout)
        plain = Inputs(inputs.q, inputs.k, inputs.v, {}, dout, torch.zeros(1, 2, 33))
        want = expected(plain)
        for x, name in zip(got, ("dq", "dk", "dv"), strict=True):
            torch.testing.assert_close(x.double(), want[name].double(), rtol=0, atol=2e-5)


def test_only_lse_is_differentiated():
    inputs = Case(batch=1, q_len=33, kv_len=40, causal=True).build()
    _, lse = attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, backend="triton")
    got = torch.autograd.grad(lse, [inputs.q, inputs.k], inputs.dlse)
    want = expected(
        Inputs(inputs.q, inputs.k, inputs.v, inputs.options, torch.zeros_like(inputs.dout), inputs.dlse)
    )
    for x, name in zip(got, ("dq", "dk"), strict=True):
        torch.testing.assert_close(x.double(), want[name].double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "bool"}, {"lengths": "extreme"}], ids=str)
@pytest.mark.parametrize("logit", [18.0, 30.0])
def test_gradients_survive_a_sink_far_above_the_scores(logit, options):
    inputs = Case(q_len=40, kv_len=70, sinks=True, **options).build()
    inputs.options["sinks"] = torch.full((2,), logit).requires_grad_()
    inputs.dlse.zero_()
    got, want = backward(inputs), expected(inputs)
    for name in ("out", "dq", "dk", "dv", "dsinks"):
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert error < 1e-3, (name, float(error))


def test_values_that_memory_does_not_hold_are_made_first():
    """A lazy negative, and a gradient that is zero without memory."""
    q, k, v, dout = (torch.randn(1, 2, 5, 16) for _ in range(4))
    plain, lazy = ([f(x) for x in (q, k, v)] for f in (torch.neg, torch.ops.aten._neg_view))
    leaves = [x.clone().requires_grad_() for x in plain]
    out = attention(*leaves, backend="triton")
    assert torch.equal(attention(*lazy, backend="triton"), out)
    want = torch.autograd.grad(out, leaves, -dout, retain_graph=True)
    got = torch.autograd.grad(out, leaves, torch.ops.aten._neg_view(dout), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    zero = torch.autograd.grad(out, leaves, torch.ops.aten._efficientzerotensor(out.shape))
    assert all(not x.any() for x in zero)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # float64's minimum, in numpy
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lowest", ["min", "half", "inf"])
def test_an_additive_mask_of_any_dtype_hides_by_its_own_minimum(dtype, lowest):
    inputs = hidden_by_minimum(dtype, lowest)
    # the interpreter reads bfloat16 as it is, but cuts off where it should round
    inputs.options["attn_mask"].requires_grad_(dtype != torch.bfloat16)
    want = expected(inputs)
    with torch.no_grad():
        inputs.k[:, :, 7] = inputs.v[:, :, 7] = torch.nan
    judge(backward(inputs), want, torch.float32)


@pytest.mark.parametrize("name", LIMITED)
def test_tiles_that_no_query_can_see_are_not_visited(name, use_tile, products):
    """Three products for dq and four for dk and dv, as each makes the scores and dp anew."""
    use_tile(32, 32)
    inputs = limited(name)
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend="triton")
    products.clear()
    torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    assert len(products) == 7 * visible_tiles(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "q_heads": 4, "layout": "fused"},
        {"mask": "trained_keys", "lengths": "ragged", "value_dim": 24, "kv_len": 11},
        {"segments": "ids", "softcap": 3.0, "sinks": True, "layout": "sliced"},
    ],
    ids=str,
)
def test_opcheck(options, dtype):
    """The fake kernels and schemas tell the truth of these kernels too."""
    case = Case(**options)
    inputs = case.build(dtype)
    q, k, v = (
        x.detach().contiguous() if x.stride(-1) != 1 else x.detach() for x in (inputs.q, inputs.k, inputs.v)
    )
    given = inputs.options
    segments, mask, sinks = given.get("segment_ids"), given.get("attn_mask"), given.get("sinks")
    rest = (
        None if mask is None else mask.detach(),
        segments,
        segments,
        given.get("kv_lengths"),
        None,
        None if sinks is None else sinks.detach(),
        0.25,
        UNBOUNDED,
        0 if case.causal else UNBOUNDED,
        case.softcap or 0.0,
        0.0,
        "triton",
        None,
    )
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.streamattn.attention_forward.default, (q, k, v, *rest), test_utils=utils)
    out, lse = torch.ops.streamattn.attention_forward(q, k, v, *rest)
    gradients = (inputs.dout, inputs.dlse, q, k, v, out, lse, *rest, mask is not None, sinks is not None)
    torch.library.opcheck(torch.ops.streamattn.attention_backward.default, gradients, test_utils=utils)
