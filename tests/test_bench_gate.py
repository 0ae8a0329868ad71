"""Wrong results are found, right ones pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamattn import attention
from streamattn.bench.cases import Case
from streamattn.bench.gate import Gate, WrongResult
from streamattn.bench.providers import PROVIDERS, Call

CPU = torch.device("cpu")
CASE = Case("sweep", "float32", 3, 4, 2, 64, 16, True)
PATTERNS = [
    CASE,
    replace(CASE, causal=False),
    replace(CASE, window=5),
    replace(CASE, document=16),
    replace(CASE, dropout_p=0.1),
    replace(CASE, dtype="bfloat16"),
]
bind = PROVIDERS["streamattn"]().bind


class Spoil(torch.autograd.Function):
    """The identity, but for what is done to the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradients[0].clone()), None


def at(*place: int | slice, value: float) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[place] += value
        return x

    return change


def judge(case: Case, call: Call, backward: bool) -> None:
    gate = Gate(case, case.tensors(CPU))
    gate.check(lambda case, device: call, call, backward)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: f"{case.label} {case.dtype}")
def test_right_results_pass(case: Case, backward: bool) -> None:
    gate = Gate(case, case.tensors(CPU))
    assert 0.0 < gate.check(bind, bind(case, CPU), backward) < gate.limit


def test_tf32_may_be_off_by_more() -> None:
    case = replace(CASE, dtype="tf32")
    right = bind(case, CPU)
    gate = Gate(case, case.tensors(CPU))
    assert gate.check(bind, lambda q, k, v: right(q, k, v) * 1.001, False) == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at(0, 0, 5, value=1.0), "out is off by"),
        (at(0, 1, value=0.1), "out is off by"),
        (at(-1, -1, 63, 0, value=1.0), "out is off by"),
        (at(1, 2, 7, 3, value=float("nan")), "out has NaN"),
        (lambda x: x.double(), "not torch.float32"),
        (lambda x: x[:, :, 1:], "out is torch.float32"),
    ],
)
def test_a_wrong_forward_is_found(change: Callable[[Tensor], Tensor], words: str) -> None:
    right = bind(CASE, CPU)
    with pytest.raises(WrongResult, match=words):
        judge(CASE, lambda q, k, v: change(right(q, k, v)), backward=False)


@pytest.mark.parametrize("wrong", range(3))
def test_a_wrong_gradient_is_found(wrong: int) -> None:
    right = bind(CASE, CPU)

    def call(*qkv: Tensor) -> Tensor:
        spoiled = [Spoil.apply(x, at(0, 0, 3, value=0.5)) if i == wrong else x for i, x in enumerate(qkv)]
        return right(*spoiled)

    judge(CASE, call, backward=False)
    with pytest.raises(WrongResult, match=f"d{'qkv'[wrong]} is off by"):
        judge(CASE, call, backward=True)


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (CASE, replace(CASE, causal=False)),
        (replace(CASE, window=5), replace(CASE, window=6)),
        (replace(CASE, document=16), CASE),
        (replace(CASE, document=16), replace(CASE, document=32)),
    ],
)
def test_another_pattern_is_found(case: Case, other: Case) -> None:
    with pytest.raises(WrongResult):
        judge(case, bind(other, CPU), backward=False)


def test_rows_that_nothing_wrote_are_found() -> None:
    """Memory handed out is poisoned where the allocator gives the same block again, as CUDA's does."""
    right = bind(CASE, CPU)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = right(q, k, v).clone()
        out[1] = torch.nan
        return out

    with pytest.raises(WrongResult, match="out has NaN"):
        judge(CASE, call, backward=False)


DROPPING = replace(CASE, dropout_p=0.1)


def dropping(*, scale: float = 1.0, drops: bool = True, same_mask: bool = True) -> Call:
    """Dropout by hand on top of dense attention."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = (q @ k.mT / 4.0).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
        keep = [(torch.rand_like(scores) >= 0.1) / 0.9 if drops else torch.ones(()) for _ in range(2)]
        weights = scores.softmax(-1) * scale
        out = (weights * keep[0]) @ v
        if same_mask:
            return out
        other = (weights * keep[1]) @ v
        return other + (out - other).detach()

    return call


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 0.9}, r"sum up to 0\.(89|90)"),
        ({"drops": False}, "changes out by 0.00 of its size, not by 0.33"),
        ({"same_mask": False}, "another dropout mask"),
    ],
)
def test_wrong_dropout_is_found(options: dict, words: str) -> None:
    gate = Gate(DROPPING, DROPPING.tensors(CPU))
    gate.check(bind, dropping(), True)
    with pytest.raises(WrongResult, match=words):
        gate.check(bind, dropping(**options), True)


def test_dropout_needs_right_values_without_it() -> None:
    gate = Gate(DROPPING, DROPPING.tensors(CPU))
    with pytest.raises(WrongResult, match="out is off by"):
        gate.check(lambda case, device: lambda q, k, v: attention(q, k, v), dropping(), False)
