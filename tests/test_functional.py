"""The contract of `attention` on the CPU: values, lse, gradients, options, layouts, special values."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamattn import attention, flash_attention
from streamattn.dispatch import Backend, Masks, unsupported
from streamattn.pattern import UNBOUNDED
from tests.cases import LAYOUTS, MASKS, Case, Inputs, Result, expected, judge, run
from tests.oracle import attend, kept_probability, visible_pairs
from tests.pairwise import pairwise

BACKENDS = ("auto", "reference", "sdpa")


def run_attention(inputs: Inputs, *, backend: str = "auto", lse: bool = True, **extra) -> Result:
    """`attention` with and without `return_lse`; without it, lse is absent and has no cotangent."""
    if lse:
        return run(attention, inputs, backend=backend, return_lse=True, **extra)
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend=backend, **extra)
    wanted = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    mask = inputs.options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        wanted["dmask"] = mask
    if "sinks" in inputs.options:
        wanted["dsinks"] = inputs.options["sinks"]
    grads = torch.autograd.grad(out, list(wanted.values()), inputs.dout.to(out.dtype), retain_graph=True)
    return Result({"out": out.detach(), **dict(zip(wanted, grads, strict=True))})


def expected_without_lse(inputs: Inputs) -> Result:
    blank = Inputs(inputs.q, inputs.k, inputs.v, inputs.options, inputs.dout, torch.zeros_like(inputs.dlse))
    result = expected(blank)
    del result.tensors["lse"]
    return result


def serves(backend: str, inputs: Inputs) -> bool:
    """Whether the package says that an explicit backend takes the call."""
    if backend == "auto":
        return True
    options = inputs.options
    reason = unsupported(
        Backend(backend),
        inputs.q,
        inputs.k,
        inputs.v,
        Masks(),
        scale=1.0,
        window_left=UNBOUNDED,
        softcap=options.get("softcap", 0.0),
        dropout_p=options.get("dropout_p", 0.0),
    )
    return reason is None


def check(case: Case, backend: str, dtype: torch.dtype = torch.float32) -> None:
    """Both ways of calling equal the oracle, or the backend says beforehand that it can't serve the call."""
    inputs = case.build(dtype)
    note = f"backend={backend}, {dtype}, {case}"
    if not serves(backend, inputs):
        with pytest.raises(ValueError, match=backend):
            attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend=backend)
        return
    judge(run_attention(inputs, backend=backend), expected(inputs), dtype, note)
    judge(run_attention(inputs, backend=backend, lse=False), expected_without_lse(inputs), dtype, note)


def case_of(row: dict) -> Case:
    row = dict(row)
    q_heads, kv_heads = row.pop("heads")
    q_len, kv_len = row.pop("lengths_qk")
    head_dim, value_dim = row.pop("dims")
    if row["segments"] == "ids" and q_len != kv_len:
        row["segments"] = "pair"
    return Case(
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        **row,
    )


OPTIONS = pairwise(
    {
        "heads": [(2, 2), (6, 2), (4, 1)],
        "lengths_qk": [(8, 8), (5, 12), (12, 5), (1, 9), (9, 1)],
        "dims": [(16, 16), (20, 20), (8, 24), (40, 16)],
        "causal": [False, True],
        "window_size": [None, 1, 3, (2, 1), (0, -1), (-1, 0), (3, -1), (0, 0)],
        "mask": list(MASKS),
        "segments": ["none", "ids", "pair"],
        "lengths": ["none", "ragged", "extreme"],
        "softcap": [None, 2.0],
        "sinks": [False, True],
        "scale": [None, 0.3, -0.2],
        "layout": list(LAYOUTS),
    }
)


@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: "-".join(map(str, row.values())))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pair_of_options(row, backend):
    check(case_of(row), backend)


def test_sdpa_serves_what_pytorchs_fused_attention_can():
    """The pairwise cases are no empty promise for this backend."""
    served = sum(serves("sdpa", case_of(row).build()) for row in OPTIONS)
    assert served >= len(OPTIONS) / 8
    for case in (Case(), Case(causal=True), Case(mask="bool"), Case(q_heads=4, kv_heads=2, causal=True)):
        assert serves("sdpa", case.build())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", OPTIONS[::4], ids=lambda row: "-".join(map(str, row.values())))
def test_every_dtype(row, dtype):
    inputs = case_of(row).build(dtype)
    got = run_attention(inputs)
    assert got["out"].dtype == dtype
    assert got["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    judge(got, expected(inputs), dtype, row)


@pytest.mark.parametrize("row", OPTIONS[1::4], ids=lambda row: "-".join(map(str, row.values())))
def test_three_and_two_dimensional_inputs_are_the_same_unbatched(row):
    """[H, T, D] with kv_lengths 0-d and segment_ids [T]; [T, D] is one head of it."""
    row = {**row, "heads": (2, 2) if row["heads"] == (6, 2) else row["heads"]}
    case = case_of(row)
    batched = case.build(torch.float64)
    options = dict(batched.options)
    if "segment_ids" in options:
        ids = options["segment_ids"]
        options["segment_ids"] = (ids[0][1], ids[1][1]) if isinstance(ids, tuple) else ids[1]
    if "kv_lengths" in options:
        options["kv_lengths"] = options["kv_lengths"][1]
    mask = options.get("attn_mask")
    if mask is not None and mask.dim() == 4:
        options["attn_mask"] = mask = (
            mask[1 if mask.shape[0] > 1 else 0].detach().requires_grad_(mask.requires_grad)
        )
    three = batched.mapped(lambda x: x[1], options=options, dout=batched.dout[1], dlse=batched.dlse[1])
    judge(run_attention(three), expected(three), torch.float64, case)
    if case.q_heads == case.kv_heads:
        if mask is not None and mask.dim() == 3:
            options = {**options, "attn_mask": mask[0].detach().requires_grad_(mask.requires_grad)}
        if case.sinks:
            options = {**options, "sinks": options["sinks"][0].detach().requires_grad_()}
        two = three.mapped(lambda x: x[0], options=options, dout=three.dout[0], dlse=three.dlse[0])
        got = run_attention(two)
        assert got["out"].shape == two.dout.shape
        assert got["lse"].shape == two.dlse.shape
        judge(got, expected(two), torch.float64, case)


def test_flash_attention_takes_two_dimensional_tensors():
    q, k, v = torch.randn(16, 128), torch.randn(1024, 128), torch.randn(1024, 128)
    out = flash_attention(q, k, v)
    assert out.shape == (16, 128)
    torch.testing.assert_close(out.double(), attend(q, k, v)[0], rtol=0, atol=1e-6)
    assert torch.equal(out, attention(q, k, v))


def test_flash_attention_takes_all_options():
    q, k, v = torch.randn(16, 128), torch.randn(1024, 128), torch.randn(1024, 64)
    options = {"window_size": 30, "softcap": 3.0, "attn_mask": torch.rand(16, 1024) < 0.7}
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    want, want_lse = attention(q[None, None], k[None, None], v[None, None], return_lse=True, **options)
    assert torch.equal(out, want[0, 0])
    assert torch.equal(lse, want_lse[0, 0])


def test_causal_flash_attention_is_bottom_right():
    q, k, v = torch.randn(2, 8), torch.randn(5, 8), torch.randn(5, 8)
    out = flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), attend(q, k, v, causal=True)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": 4}, {"mask": "bool"}], ids=str)
def test_out_is_stored_token_major(layout, backend, options):
    inputs = Case(q_heads=3, kv_heads=3, q_len=10, kv_len=10, layout=layout, **options).build()
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend=backend)
    merged = out.transpose(1, 2).reshape(2, 10, 3 * 16)
    assert merged.data_ptr() == out.data_ptr()
    assert merged.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "additive"}], ids=str)
def test_inputs_are_left_alone(backend, options):
    inputs = Case(layout="fused", **options).build()
    before = [x.detach().clone() for x in (inputs.q, inputs.k, inputs.v)]
    run_attention(inputs, backend=backend)
    for x, old in zip((inputs.q, inputs.k, inputs.v), before, strict=True):
        assert torch.equal(x, old)


def test_gradients_of_a_fused_projection_arrive_in_one_tensor():
    qkv = torch.randn(2, 6, 3 * 4 * 8, dtype=torch.float64, requires_grad=True)

    def through(fn) -> Tensor:
        q, k, v = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in qkv.split(32, dim=-1))
        out = fn(q, k, v, causal=True)
        return torch.autograd.grad(out.square().sum(), qkv)[0]

    want = through(lambda *a, **o: attend(*a, **o)[0])
    torch.testing.assert_close(through(attention), want, rtol=0, atol=1e-11)


def test_gradient_of_an_expanded_key_is_summed():
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    kv = torch.randn(1, 1, 4, 8, dtype=torch.float64, requires_grad=True)

    def through(fn) -> Tensor:
        k = kv.expand(3, 2, 4, 8)
        return torch.autograd.grad(fn(q, k, k).square().sum(), kv)[0]

    torch.testing.assert_close(through(attention), through(lambda *a: attend(*a)[0]), rtol=0, atol=1e-11)


@pytest.mark.parametrize("needs", list(product([False, True], repeat=3))[1:], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_only_where_asked_for(needs, backend):
    inputs = Case(causal=True).build()
    leaves = [
        x.detach().requires_grad_(need) for x, need in zip((inputs.q, inputs.k, inputs.v), needs, strict=True)
    ]
    attention(*leaves, causal=True, backend=backend).backward(inputs.dout)
    want = expected_without_lse(inputs)
    for x, need, name in zip(leaves, needs, ("dq", "dk", "dv"), strict=True):
        if need:
            assert x.grad is not None
            torch.testing.assert_close(x.grad.double(), want[name].double(), rtol=0, atol=1e-5)
        else:
            assert x.grad is None


def test_only_the_mask_requires_grad():
    inputs = Case(mask="trained").build()
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    mask = inputs.options["attn_mask"]
    (got,) = torch.autograd.grad(attention(q, k, v, attn_mask=mask), mask, inputs.dout)
    torch.testing.assert_close(
        got.double(), expected_without_lse(inputs)["dmask"].double(), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_lse_is_differentiated(backend):
    inputs = Case(q_len=3, kv_len=7, causal=True).build()
    _, lse = attention(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True, backend=backend)
    got = torch.autograd.grad(lse, [inputs.q, inputs.k], inputs.dlse)
    _, want_lse = attend(inputs.q, inputs.k, inputs.v, causal=True)
    want = torch.autograd.grad(want_lse, [inputs.q, inputs.k], inputs.dlse.double())
    for left, right in zip(got, want, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)


def test_no_grad_and_inference_mode():
    inputs = Case(causal=True).build()
    want = expected(inputs)["out"]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            out = attention(inputs.q, inputs.k, inputs.v, causal=True)
            assert not out.requires_grad
            torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": 2}, {"segments": "pair"}], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_zero_sized_sequences(q_len, kv_len, options, backend):
    options = {} if options.get("segments") and not min(q_len, kv_len) else options
    inputs = Case(q_len=q_len, kv_len=kv_len, **options).build()
    got = run_attention(inputs, backend=backend)
    assert got["out"].shape == (2, 2, q_len, 16)
    assert not got["out"].any()
    assert (got["lse"] == -torch.inf).all()
    for name, x in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        assert got[name].shape == x.shape
        assert not got[name].any()


BLINDING = {
    "bool": {"mask": "bool"},
    "additive": {"mask": "additive"},
    "lengths": {"lengths": "extreme"},
    "lengths_causal": {"lengths": "ragged", "causal": True},
    "window": {"q_len": 12, "kv_len": 5, "window_size": 2},
    "top": {"q_len": 12, "kv_len": 5, "causal": True},
    "segments": {"segments": "ids", "causal": True},
    "pair": {"segments": "pair", "q_len": 6, "kv_len": 11},
    "grouped": {"mask": "bool_keys", "q_heads": 4, "window_size": (1, 1)},
    "softcap": {"lengths": "ragged", "softcap": 2.0},
    "sinks": {"mask": "bool", "sinks": True},
    "trained": {"mask": "trained", "causal": True},
}


@pytest.mark.parametrize("name", BLINDING)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unseen_keys_values_and_blind_queries_reach_nothing(name, poison, backend):
    case = Case(**BLINDING[name])
    inputs = case.build()
    if not serves(backend, inputs):
        backend = "auto"
    want = expected(inputs)
    options = {
        option: value
        for option, value in inputs.options.items()
        if option in ("causal", "window_size", "attn_mask", "segment_ids", "kv_lengths")
    }
    seen = visible_pairs(case.batch, case.q_len, case.kv_len, **options)
    seen = seen.expand(case.batch, case.q_heads, case.q_len, case.kv_len)
    per_kv_head = seen.unflatten(1, (case.kv_heads, -1)).any(2).any(2)  # [B, Hkv, Tk]
    blind = ~seen.any(-1)  # [B, Hq, Tq]
    assert bool(blind.any()) or not bool(per_kv_head.all()), "the case poisons nothing"
    with torch.no_grad():
        inputs.k[~per_kv_head] = poison
        inputs.v[~per_kv_head] = poison
        for x in (inputs.q, inputs.dout):
            x[blind] = poison
        if not case.sinks:  # there lse is the sink
            inputs.dlse[blind] = poison
    got = run_attention(inputs, backend=backend)
    judge(got, want, torch.float32, case)
    assert not got["out"][blind].any()
    assert not got["dq"][blind].any()
    assert not got["dk"][~per_kv_head].any()
    assert not got["dv"][~per_kv_head].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_additive_masks_of_any_float_dtype(dtype, mask_dtype):
    inputs = Case().build(dtype)
    mask = torch.randn(8, 8).to(mask_dtype)
    mask[0, 1:] = torch.finfo(mask_dtype).min
    mask[1, 2] = torch.finfo(mask_dtype).min / 2
    mask[2] = -torch.inf
    inputs.options["attn_mask"] = mask
    got = run_attention(inputs)
    assert not got["out"][:, :, 2].any()
    judge(got, expected(inputs), dtype)


def test_large_finite_entries_of_a_float32_mask_hide_nothing():
    """-40000 hides in float16, whose minimum is -65504; in float32 it is a bias like any other."""
    inputs = Case(mask="none").build()
    plain = run_attention(inputs)["out"]
    out, lse = attention(inputs.q, inputs.k, inputs.v, attn_mask=torch.full((8, 8), -4e4), return_lse=True)
    torch.testing.assert_close(out, plain, rtol=0, atol=2e-2)
    assert (lse < -3.9e4).all()
    assert lse.isfinite().all()
    out = attention(inputs.q, inputs.k, inputs.v, attn_mask=torch.full((8, 8), -4e4, dtype=torch.float16))
    assert not out.any()


def test_a_mask_in_half_precision_is_added_in_float32():
    """A bias of 1000 rounds the score away in float16, where it would be added before the softmax."""
    inputs = Case().build(torch.float16)
    inputs.options["attn_mask"] = torch.full((8, 8), 1000.0, dtype=torch.float16)
    judge(run_attention(inputs), expected(inputs), torch.float16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 8, 300])
def test_scores_far_apart_neither_overflow_nor_vanish(size, causal):
    inputs = Case(batch=1, q_len=size, kv_len=size, scale=60.0, causal=causal).build()
    got = run_attention(inputs)
    want = expected(inputs)
    torch.testing.assert_close(got["out"].double(), want["out"], rtol=0, atol=2e-3)
    torch.testing.assert_close(got["lse"].double(), want["lse"], rtol=1e-6, atol=1e-4)
    for name in ("dq", "dk", "dv"):
        assert got[name].isfinite().all()


def test_kv_lengths_of_either_integer_dtype():
    inputs = Case(kv_len=12, causal=True).build()
    for dtype in (torch.int32, torch.int64):
        inputs.options["kv_lengths"] = torch.tensor([9, 12], dtype=dtype)
        judge(run_attention(inputs), expected(inputs), torch.float32)


def test_a_window_of_w_is_w_visible_keys():
    ones = torch.ones(1, 1, 10, 4)
    values = torch.arange(10.0).view(1, 1, 10, 1).expand(1, 1, 10, 4)
    out = attention(ones, ones, values, window_size=4)
    want = [sum(range(max(0, i - 3), i + 1)) / min(i + 1, 4) for i in range(10)]
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor(want))
    assert torch.equal(out, attention(ones, ones, values, window_size=(3, 0)))
    assert torch.equal(out, attention(ones, ones, values, window_size=4, causal=True))


def test_numbers_of_numpy_are_numbers():
    """As PyTorch's own functions take them."""
    inputs = Case().build()
    scale: Any = np.float32(0.5)
    given: Any
    for given, want in ((np.int64(3), 3), ((np.int32(2), np.int64(-1)), (2, -1)), ([np.int64(2), 1], (2, 1))):
        got = attention(inputs.q, inputs.k, inputs.v, window_size=given, scale=scale)
        assert torch.equal(got, attention(inputs.q, inputs.k, inputs.v, window_size=want, scale=0.5))


def test_causal_cuts_a_two_sided_window_on_the_right():
    inputs = Case().build()
    both = attention(inputs.q, inputs.k, inputs.v, window_size=(2, 3), causal=True)
    assert torch.equal(both, attention(inputs.q, inputs.k, inputs.v, window_size=(2, 0)))


def dropped(inputs: Inputs, dropout_p: float, seed: int, **extra) -> Tensor:
    """The keep mask of a call: with the identity as values, out is the dropped weights themselves."""
    kv_len = inputs.k.shape[2]
    eye = torch.eye(kv_len, dtype=inputs.v.dtype, device=inputs.v.device).expand(*inputs.k.shape[:2], -1, -1)
    torch.manual_seed(seed)
    return attention(inputs.q, inputs.k, eye, dropout_p=dropout_p, **inputs.options, **extra).detach() != 0


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("row", OPTIONS[2::12], ids=lambda row: "-".join(map(str, row.values())))
def test_dropout_equals_the_oracle_with_the_same_mask(row, dropout_p, backend):
    inputs = case_of({**row, "scale": 0.1}).build(torch.float64)
    keep = dropped(inputs, dropout_p, 5, backend=backend)
    inputs.options["dropout_p"] = dropout_p
    torch.manual_seed(5)
    got = run_attention(inputs, backend=backend)
    judge(got, expected(inputs, keep), torch.float64, row)


def test_dropout_share_and_mean():
    inputs = Case(batch=4, q_heads=4, kv_heads=4, q_len=64, kv_len=64).build()
    keep = dropped(inputs, 0.3, 0)
    share = kept_probability(0.3)
    sigma = (share * (1 - share) / keep.numel()) ** 0.5
    assert abs(float(keep.double().mean()) - share) < 5 * sigma
    with torch.no_grad():
        plain = attention(inputs.q, inputs.k, inputs.v)
        outs = [attention(inputs.q, inputs.k, inputs.v, dropout_p=0.3) for _ in range(60)]
        mean = torch.stack(outs).mean(0)
    assert float((mean - plain).square().mean().sqrt()) < 0.25 * float(plain.square().mean().sqrt())


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_causal_scale_that_is_not_positive(scale: float) -> None:
    case = Case(q_len=300, kv_len=300, causal=True, scale=scale)
    inputs = case.build()
    judge(run(attention, inputs, return_lse=True), expected(inputs), torch.float32, case)


def test_autocast_does_not_reach_the_references_products() -> None:
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    q, k = q * 120, k * 120  # products beyond float16
    with torch.autocast("cpu", dtype=torch.float16):
        out = attention(q, k, v, softcap=1e6)
    want = attention(q.half(), k.half(), v.half(), softcap=1e6)
    assert torch.equal(out, want)
    assert out.isfinite().all()


# A sink far above the scores rounds them out of lse, and the rows still have their gradients.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"q_len": 12, "kv_len": 5, "causal": True}], ids=str
)
@pytest.mark.parametrize("logit", [16.0, 18.0, 30.0])
def test_gradients_survive_a_sink_far_above_the_scores(logit, options, backend):
    case = Case(sinks=True, **options)
    inputs = case.build()
    inputs.options["sinks"] = torch.full((2,), logit).requires_grad_()
    inputs.dlse.zero_()
    got, want = run_attention(inputs, backend=backend), expected(inputs)
    for name in ("out", "dq", "dk", "dv", "dsinks"):
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert error < 1e-3, (name, float(error))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_mask_beside_a_larger_sink_is_finite(backend):
    q, k, v = (torch.randn(1, 1, 2, 16, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([120.0], requires_grad=True)
    out = attention(q, k, v, sinks=sinks, attn_mask=torch.full((2, 2), 100.0), backend=backend)
    for grad in torch.autograd.grad(out.sum(), [q, k, v, sinks]):
        assert grad.isfinite().all()


@pytest.mark.parametrize("options", [{"window_size": 2}, {"mask": "bool"}, {"lengths": "ragged"}], ids=str)
def test_a_default_device_elsewhere_is_no_matter(options):
    inputs = Case(causal=True, **options).build()
    want = run_attention(inputs)
    with torch.device("meta"):
        got = run_attention(inputs)
    for name, x in want.tensors.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_float64_entry_too_low_for_float32_hides(backend, sinks):
    """It is above half of float64's minimum, and -inf once it is added in float32."""
    inputs = Case(sinks=sinks).build()
    mask = torch.zeros(8, 8, dtype=torch.float64)
    mask[1] = mask[:, 3] = -1e39
    inputs.options["attn_mask"] = mask > -1.0
    want = expected(inputs)
    inputs.options["attn_mask"] = mask
    with torch.no_grad():
        inputs.k[:, :, 3] = inputs.v[:, :, 3] = torch.nan
    got = run_attention(inputs, backend=backend)
    assert sinks or (got["lse"][:, :, 1] == -torch.inf).all()
    judge(got, want, torch.float32)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_nan_in_a_mask_shows_in_its_row(mask_dtype, sinks, backend):
    inputs = Case(sinks=sinks).build()
    mask = torch.zeros(8, 8, dtype=mask_dtype)
    mask[2, 5] = torch.nan
    inputs.options["attn_mask"] = mask
    got = run_attention(inputs, backend=backend)
    for name in ("out", "lse", "dq"):
        rows = got[name].isnan() if name == "lse" else got[name].isnan().all(-1)
        assert rows[..., 2].all(), name
        assert not rows[..., [0, 1, 3, 4, 5, 6, 7]].any(), name
    assert got["dv"].isnan().all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("segmented", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"lengths": "ragged"}, {"mask": "trained"}, {"sinks": True}], ids=str
)
def test_an_empty_batch(options, segmented, backend):
    inputs = Case(batch=0, causal=True, **options).build()
    if segmented:
        inputs.options["segment_ids"] = torch.zeros(0, 8, dtype=torch.int32)
    got = run_attention(inputs, backend=backend)
    assert got["out"].shape == inputs.q.shape
    assert got["lse"].shape == (0, 2, 8)
    assert (got["dq"].shape, got["dk"].shape) == (inputs.q.shape, inputs.k.shape)
