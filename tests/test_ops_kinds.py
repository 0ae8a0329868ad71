"""Kinds of calls: which calls skip the checks and the choice of a backend, and what must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from streamattn import attention, ops
from streamattn.pattern import UNBOUNDED

FAKE = FakeTensorMode()


def fake(*shape: int, strides: tuple[int, ...] | None = None, **options) -> Tensor:
    """A tensor without memory, on a GPU that need not be there."""
    options = {"device": "cuda", "dtype": torch.bfloat16, **options}
    with FAKE:
        return (
            torch.empty(shape, **options)
            if strides is None
            else torch.empty_strided(shape, strides, **options)
        )


def decoding(kv_len: int = 100, *, q_len: int = 1, head_dim: int = 64, **options) -> dict[str, Any]:
    """Arguments of `ops.kind_of_call` of a step."""
    tensors = {"q": fake(1, 4, q_len, head_dim), **{name: fake(1, 2, kv_len, head_dim) for name in "kv"}}
    sides = {"window_left": UNBOUNDED, "window_right": 0}
    return {**tensors, "scale": None, **sides, "softcap": 0.0, "backend": "auto", **options}


@pytest.fixture
def fake_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_PLAIN", (FakeTensor,))


@pytest.mark.usefixtures("fake_is_plain")
def test_a_kind_of_call_is_of_any_number_of_keys():
    kinds = {ops.kind_of_call(**decoding(kv_len)) for kv_len in range(1, 200)}
    assert len(kinds) == 1
    assert None not in kinds
    assert len({ops.kind_of_call(**decoding(kv_len, window_left=40)) for kv_len in range(1, 200)}) == 2
    other: list[dict[str, Any]] = [
        {"scale": 0.3},
        {"softcap": 1.0},
        {"backend": "triton"},
        {"q_len": 2},
        {"head_dim": 80},
    ]
    kinds |= {ops.kind_of_call(**decoding(**each)) for each in other}
    assert len(kinds) == 1 + len(other)


@pytest.mark.usefixtures("fake_is_plain")
def test_what_a_kind_does_not_hold_makes_none():
    assert ops.kind_of_call(**decoding(kv_len=0)) is None
    assert ops.kind_of_call(**decoding(q_len=64)) is None
    assert ops.kind_of_call(**decoding(7, head_dim=72)) is None  # heads 7 * 72 apart
    with torch.autocast("cpu"):
        assert ops.kind_of_call(**decoding()) is None
    given, shape = decoding(), (1, 2, 100, 64)
    wrong = {
        "type": [1.0],
        "none": None,
        "dtype": fake(*shape, dtype=torch.float16),
        "device": fake(*shape, device="cpu"),
        "rank": fake(*shape[1:]),
        "keys": fake(1, 2, 101, 64),
        "stride": fake(*shape, strides=(12800, 6400, 1, 100)),
        "gradient": fake(*shape, requires_grad=True),
    }
    for why, x in wrong.items():
        for name in ("q", "k", "v") if why != "keys" else ("k", "v"):
            assert ops.kind_of_call(**{**given, name: x}) is None, (name, why)
    q, v = given["q"], given["v"]
    assert ops.kind_of_call(**{**given, "k": v}) is None  # one tensor twice
    with pytest.raises(TypeError, match="k must be a"):
        attention(q, None, v)  # pyright: ignore[reportArgumentType]


class FunctionMode(TorchFunctionMode):
    """Listens, and changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class DispatchMode(TorchDispatchMode):
    """Listens, and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@contextmanager
def below_autograd() -> Iterator[None]:
    with torch._C._AutoDispatchBelowAutograd():
        yield


@pytest.mark.usefixtures("fake_is_plain")
@pytest.mark.parametrize(
    "listener",
    [
        FunctionMode,
        DispatchMode,
        forward_ad.dual_level,
        torch.autograd.profiler.profile,
        lambda: torch.autocast("cpu", torch.bfloat16),
        below_autograd,
    ],
    ids=["function mode", "dispatch mode", "tangents", "profiler", "autocast", "below autograd"],
)
def test_a_known_kind_is_another_where_something_listens(listener):
    """The guards of a kind hear of some of these, others are asked beside them."""
    given = decoding()
    kind = ops.kind_of_call(**given)
    assert kind is not None
    assert ops.kind_of_call(**given) is kind
    with listener():
        assert ops.kind_of_call(**given) is not kind
    assert ops.kind_of_call(**given) is kind


@pytest.mark.usefixtures("fake_is_plain")
def test_a_known_kind_is_none_under_transforms_and_while_compiling(monkeypatch):
    given = decoding()
    kind, heard = ops.kind_of_call(**given), []
    torch.vmap(lambda x: heard.append(ops.kind_of_call(**given)) or x)(torch.zeros(3))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    heard.append(ops.kind_of_call(**given))
    assert kind is not None
    assert heard == [None, None]


@pytest.mark.usefixtures("fake_is_plain")
def test_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(ops, "KINDS", {})
    monkeypatch.setattr(ops, "_MAX_KINDS", 4)
    monkeypatch.setattr(ops, "_MAX_ALIKE", 3)
    for scale in range(1, 9):
        assert ops.kind_of_call(**decoding(scale=float(scale))) is not None
        assert len(ops.KINDS) <= 4
    for row in range(64, 128, 8):  # of keys
        keys = fake(1, 2, 100, 64, strides=(25600, 12800, row, 1))
        kind = ops.kind_of_call(**{**decoding(), "k": keys})
        assert kind is not None
        assert ops.kind_of_call(**{**decoding(), "k": keys}) is kind
    assert max(map(len, ops.KINDS.values())) == 3
