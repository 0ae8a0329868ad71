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

from streamattn import attention, kinds
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
    """Arguments of `kinds.kind_of_call` of a step."""
    tensors = {"q": fake(1, 4, q_len, head_dim), **{name: fake(1, 2, kv_len, head_dim) for name in "kv"}}
    sides = {"window_left": UNBOUNDED, "window_right": 0}
    return {**tensors, "scale": None, **sides, "softcap": 0.0, "backend": "auto", **options}


@pytest.fixture
def fake_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_PLAIN", (FakeTensor,))


@pytest.mark.usefixtures("fake_is_plain")
def test_a_kind_of_call_is_of_any_number_of_keys():
    seen = {kinds.kind_of_call(**decoding(kv_len)) for kv_len in range(1, 200)}
    assert len(seen) == 1
    assert None not in seen
    assert len({kinds.kind_of_call(**decoding(kv_len, window_left=40)) for kv_len in range(1, 200)}) == 2
    other: list[dict[str, Any]] = [
        {"scale": 0.3},
        {"softcap": 1.0},
        {"backend": "triton"},
        {"q_len": 2},
        {"head_dim": 80},
    ]
    seen |= {kinds.kind_of_call(**decoding(**each)) for each in other}
    assert len(seen) == 1 + len(other)


@pytest.mark.usefixtures("fake_is_plain")
def test_what_a_kind_does_not_hold_makes_none():
    assert kinds.kind_of_call(**decoding(kv_len=0)) is None
    assert kinds.kind_of_call(**decoding(7, head_dim=72)) is None  # heads 7 * 72 apart
    with torch.autocast("cpu"):
        assert kinds.kind_of_call(**decoding()) is None
    given, shape = decoding(), (1, 2, 100, 64)
    wrong = {
        "type": [1.0],
        "none": None,
        "dtype": fake(*shape, dtype=torch.float16),
        "device": fake(*shape, device="cpu"),
        "rank": fake(*shape[1:]),
        "keys": fake(1, 2, 101, 64),
        "stride": fake(*shape, strides=(12800, 6400, 1, 100)),
    }
    for why, x in wrong.items():
        for name in ("q", "k", "v") if why != "keys" else ("k", "v"):
            assert kinds.kind_of_call(**{**given, name: x}) is None, (name, why)
    q, v = given["q"], given["v"]
    assert kinds.kind_of_call(**{**given, "k": v}) is None  # one tensor twice
    with pytest.raises(TypeError, match="k must be a"):
        attention(q, None, v)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("fake_is_plain")
def test_a_kind_of_long_calls_is_of_one_layout_and_of_one_wish_for_gradients():
    def long(kv_len: int = 100, **options: Any) -> dict[str, Any]:
        return decoding(kv_len, q_len=64, **options)

    kind = kinds.kind_of_call(**long())
    assert kind is not None
    assert not kind.needs_grad
    assert kinds.kind_of_call(**long()) is kind
    assert kinds.kind_of_call(**long(101)) is not kind
    for shape, name in (((1, 4, 64, 64), "q"), ((1, 2, 100, 64), "k")):
        strides = (3 * shape[1] * shape[2] * 64, shape[2] * 64, 64, 1)
        other = kinds.kind_of_call(**{**long(), name: fake(*shape, strides=strides)})
        assert other is not None
        assert other is not kind
        asking = {**long(), name: fake(*shape, requires_grad=True)}
        other = kinds.kind_of_call(**asking)
        assert other is not None
        assert other.needs_grad
        assert kinds.kind_of_call(**asking) is other
    assert kinds.kind_of_call(**long(7, head_dim=72)) is not None  # heads 7 * 72 apart


@contextmanager
def autocast_of_a_gpu(dtype: torch.dtype) -> Iterator[None]:
    """`torch.autocast` of CUDA, which refuses where there is none."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", before)


@pytest.mark.usefixtures("fake_is_plain")
def test_a_kind_of_packed_calls():
    shape = (2, 64, 8, 64)
    qkv = fake(*shape, requires_grad=True)
    kind = kinds.kind_of_packed(qkv, 4, True)
    assert kind is not None
    assert kind.needs_grad
    assert kinds.kind_of_packed(fake(*shape, requires_grad=True), 4, True) is kind
    others = [kinds.kind_of_packed(qkv, 2, True), kinds.kind_of_packed(qkv, 4, False)]
    others.append(kinds.kind_of_packed(fake(*shape), 4, True))
    others.append(kinds.kind_of_packed(fake(*shape, strides=(64 * 8 * 64, 64, 64 * 64, 1)), 4, True))
    assert len({id(x) for x in (kind, None, *others)}) == 6
    assert kinds.kind_of_packed(fake(2, 8, 8, 64), 4, True) is None  # few queries
    assert kinds.kind_of_packed(fake(*shape, strides=(64 * 8 * 64, 1, 64 * 64, 64)), 4, True) is None
    assert kinds.kind_of_packed(fake(*shape, device="cpu"), 4, True) is None
    assert kinds.kind_of_packed(fake(*shape[1:]), 4, True) is None
    # q, k and v whose sizes and options are the same numbers in the same order
    apart = {**decoding(q_len=64, scale=4.0, window_left=2), "q": fake(2, 64, 64, 64)}
    assert kinds.kind_of_call(**apart) is not None
    assert kinds.kind_of_packed(fake(2, 64, 64, 64), 4, 2.0, 0, 100, 0.0, "auto") is not None
    with autocast_of_a_gpu(torch.bfloat16):
        autocast = kinds.kind_of_packed(qkv, 4, True)
        assert autocast is not None
        assert autocast is not kind
        assert kinds.kind_of_packed(fake(*shape, dtype=torch.float16), 4, True) is None  # would be cast
    with torch.autograd.profiler.profile():
        assert kinds.kind_of_packed(qkv, 4, True) is None


class Backwards:
    """Notes the tensors that it is asked to serve."""

    def __init__(self) -> None:
        self.heard: list[tuple[Tensor, ...]] = []

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self.heard.append(tensors)
        return tensors


def test_a_backward_is_repeated_for_its_own_layout_and_order(monkeypatch):
    kind, tensors = kinds.Kind(None, True), (torch.zeros(2, 3), torch.zeros(3))
    any_order, in_order = Backwards(), Backwards()
    with torch.no_grad():
        assert kind.repeat_backward(None, *tensors) is None
        kind.learn_backward(any_order, False, *tensors)
        assert kind.repeat_backward(None, *tensors) == tensors
        assert kind.repeat_backward(False, *(torch.zeros_like(x) for x in tensors)) is not None
        assert kind.repeat_backward(True, *tensors) is None
        kind.learn_backward(in_order, True, *tensors)
        assert kind.repeat_backward(True, *tensors) == tensors
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert kind.repeat_backward(None, *tensors) == tensors
        assert (len(any_order.heard), len(in_order.heard)) == (2, 2)
        assert kind.repeat_backward(False, torch.zeros(3, 2).t(), tensors[1]) is None
        with torch.autograd.profiler.profile():
            assert kind.repeat_backward(False, *tensors) is None
    assert kind.repeat_backward(False, *tensors) is None  # whose own derivative is asked for


def test_the_backwards_of_a_kind_are_bounded(monkeypatch):
    monkeypatch.setattr(kinds, "_MAX_ALIKE", 3)
    kind = kinds.Kind(None, True)
    with torch.no_grad():
        for size in range(1, 6):
            kind.learn_backward(Backwards(), False, torch.zeros(size))
        known = [size for size in range(1, 6) if kind.repeat_backward(False, torch.zeros(size)) is not None]
    assert known == [3, 4, 5]


def test_a_backward_that_refuses_is_not_learned_once_more():
    """As others of its kind would be forgotten for copies of it."""
    kind, tensors, other = kinds.Kind(None, True), torch.zeros(2, 3), torch.zeros(4)
    refusals: list[Tensor] = []
    with torch.no_grad():
        kind.learn_backward(Backwards(), False, other)
        for _ in range(2 * kinds._MAX_ALIKE):
            assert kind.repeat_backward(False, tensors) is None
            kind.learn_backward(refusals.append, False, tensors)
        assert kind.repeat_backward(False, other) is not None
    assert len(refusals) == 2 * kinds._MAX_ALIKE - 1


def test_a_backward_is_not_repeated_while_compiling(monkeypatch):
    kind, tensors = kinds.Kind(None, True), torch.zeros(3)
    with torch.no_grad():
        kind.learn_backward(Backwards(), False, tensors)
        assert kind.repeat_backward(False, tensors) is not None
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert kind.repeat_backward(False, tensors) is None


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
    kind = kinds.kind_of_call(**given)
    assert kind is not None
    assert kinds.kind_of_call(**given) is kind
    with listener():
        assert kinds.kind_of_call(**given) is not kind
    assert kinds.kind_of_call(**given) is kind


@pytest.mark.usefixtures("fake_is_plain")
def test_a_known_kind_is_none_under_transforms_and_while_compiling(monkeypatch):
    given = decoding()
    kind, heard = kinds.kind_of_call(**given), []
    torch.vmap(lambda x: heard.append(kinds.kind_of_call(**given)) or x)(torch.zeros(3))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    heard.append(kinds.kind_of_call(**given))
    assert kind is not None
    assert heard == [None, None]


@pytest.mark.usefixtures("fake_is_plain")
def test_kinds_are_bounded(monkeypatch):
    monkeypatch.setattr(kinds, "KINDS", {})
    monkeypatch.setattr(kinds, "_MAX_KINDS", 4)
    monkeypatch.setattr(kinds, "_MAX_ALIKE", 3)
    for scale in range(1, 9):
        assert kinds.kind_of_call(**decoding(scale=float(scale))) is not None
        assert len(kinds.KINDS) <= 4
    for row in range(64, 128, 8):  # of keys
        keys = fake(1, 2, 100, 64, strides=(25600, 12800, row, 1))
        kind = kinds.kind_of_call(**{**decoding(), "k": keys})
        assert kind is not None
        assert kinds.kind_of_call(**{**decoding(), "k": keys}) is kind
    assert max(map(len, kinds.KINDS.values())) == 3
