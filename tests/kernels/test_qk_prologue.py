"""QK-norm and rotary embedding in Triton's interpreter, against float64 and beside HuggingFace's steps."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import prologue
from tests.cases import TOLERANCE
from tests.pairwise import pairwise
from tests.prologue_cases import NAMES, Prologue, eager, error, ours, results

OPTIONS: dict[str, list[Any]] = {
    "heads": [(4, 4), (6, 2), (5, 1), (1, 1)],
    "head_dim": [16, 20, 6],
    "dtype": [torch.float32, torch.float16],
    "q_len": [7, 1, 5],
    "batch": [2, 1, 3],
    "norm": ["all", "each", "each + 1"],
    "rotary": [None, 4],
    "interleaved": [False, True],
    "half_angles": [False, True],
    "float_weights": [False, True],
    "layout": ["own", "fused", "sequence first"],
}
CASES = [
    (Prologue(**{name: value for name, value in row.items() if name != "dtype"}), row["dtype"])
    for row in pairwise(OPTIONS)
]


@functools.cache
def results_of(call: Any, case: Prologue, dtype: torch.dtype, exact: bool = False) -> list[Tensor]:
    return results(call, case, dtype, exact=exact)


@pytest.fixture(autouse=True)
def kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is left to PyTorch."""
    monkeypatch.setattr(prologue, "_plain_forward", None)
    monkeypatch.setattr(prologue, "_plain_backward", None)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_every_pair_of_options(case, dtype):
    got, want = results_of(ours, case, dtype), results_of(eager, case, dtype, exact=True)
    for name, left, right in zip(NAMES, got, want, strict=True):
        assert left.shape == right.shape and torch.isfinite(left).all(), name
        assert error(left, right) <= TOLERANCE[dtype][0], name


def test_one_head_of_q_beside_several_of_k():
    """Each norm is over all of its own columns."""
    case = Prologue(heads=(1, 3))
    got, want = results(ours, case, torch.float32), results(eager, case, torch.float32, exact=True)
    for name, left, right in zip(NAMES, got, want, strict=True):
        assert error(left, right) <= TOLERANCE[torch.float32][0], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_errors_are_no_larger_than_of_the_eager_steps(dtype):
    """Over all cases: most are too small to tell by themselves."""
    squares: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for case in (case for case, its in CASES if its == dtype):
        want = results_of(eager, case, dtype, exact=True)
        for at, call in enumerate((ours, eager)):
            for name, left, right in zip(NAMES, results_of(call, case, dtype), want, strict=True):
                squares[name][at] += error(left, right) ** 2
    allowed = {torch.float32: 2.0, torch.float16: 1.1}[dtype]
    for name, (mine, theirs) in squares.items():
        assert mine**0.5 <= allowed * theirs**0.5, name


@pytest.mark.parametrize("norm", ["all", "each"])
@pytest.mark.parametrize("half_angles", [False, True])
def test_half_precision_rounds_where_the_eager_steps_do(norm, half_angles):
    """All but a few numbers are the same bits: float32 sums of squares differ in their last ones."""
    case = Prologue(heads=(4, 2), head_dim=32, q_len=20, norm=norm, half_angles=half_angles)
    for left, right in zip(
        results(ours, case, torch.float16)[:2], results(eager, case, torch.float16)[:2], strict=True
    ):
        assert (left == right).double().mean() > 0.995


def test_the_same_bits_again_and_stored_for_the_attention():
    case = Prologue(heads=(4, 2), q_len=13)
    first, again = (results(ours, case, torch.float16) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert all(x.transpose(1, 2).is_contiguous() for x in first[:2])
    assert all(x.is_contiguous() for x in first[2:4])


def test_gradients_that_come_in_another_layout_or_not_at_all():
    case = Prologue(heads=(4, 2), head_dim=20, rotary=8)
    trained, angles, douts = case.build(torch.float32)
    outs = ours(case, *trained, *angles)
    want = torch.autograd.grad(outs, trained, douts, retain_graph=True)
    apart = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in douts]
    assert all(map(torch.equal, torch.autograd.grad(outs, trained, apart, retain_graph=True), want))
    dq, dk, dq_weight, dk_weight = torch.autograd.grad(outs[0], trained, douts[0])
    assert torch.equal(dq, want[0]) and torch.equal(dq_weight, want[2])
    assert not dk.any() and not dk_weight.any()


def test_tensors_whose_last_stride_is_not_one():
    case = Prologue(heads=(4, 2), norm="each")
    trained, angles, douts = case.build(torch.float32)
    want = results(ours, case, torch.float32)

    def turned(x: Tensor) -> Tensor:
        x = x.detach()
        return x.repeat_interleave(2)[::2] if x.dim() == 1 else x.mT.contiguous().mT

    for angles_too in (True, False):
        q, k, *weights = xs = [turned(x).requires_grad_() for x in trained]
        sin = turned(angles[1]) if angles_too else angles[1]
        outs = ours(case, q, k, weights[0], weights[1], turned(angles[0]), sin)
        got = [*outs, *torch.autograd.grad(outs, xs, [turned(x) for x in douts])]
        assert all(map(torch.equal, got, want))


def test_offsets_past_two_to_the_31st():
    """Sequences of q and k, and heads of the gradients that come, half as far apart."""
    torch.use_deterministic_algorithms(False)  # which would write to all that lies between
    case = Prologue(heads=(3, 3), batch=3, q_len=3)
    trained, angles, douts = case.build(torch.float16)
    want = results(ours, case, torch.float16)
    far = 2**30 + 64

    def apart(x: Tensor, *strides: int) -> Tensor:
        storage = torch.empty(2 * far + x.numel(), dtype=x.dtype)
        return storage.as_strided(x.shape, strides).copy_(x.detach())

    trained[:2] = [apart(x, far, 48, 1).requires_grad_() for x in trained[:2]]
    outs = ours(case, *trained, *angles)
    grads = torch.autograd.grad(outs, trained, [apart(x, 48, far, 16, 1) for x in douts])
    assert all(map(torch.equal, [*outs, *grads], want))
