"""Calls of a kind that was served: repeated by addresses alone, forward and backward, with their gradients.

Stand-ins for the kernels look tensors up by address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import attention, functional, kinds, ops, packed
from streamattn.dispatch import MIN_HOPPER_QUERIES, Backend
from streamattn.packed import packed_attention, unpacked
from streamattn.pattern import UNBOUNDED

T, D, HEADS = MIN_HOPPER_QUERIES, 16, 3
OPTIONS = (D**-0.5, UNBOUNDED, 0, 0.0, 0.0)


class Memory:
    """Tensors by address, and what attention makes of them."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.forwards = self.backwards = 0
        self.refuses = False

    def own(self, *tensors: Tensor) -> None:
        self.tensors |= {x.data_ptr(): x.detach() for x in tensors}

    def empty(self, *layout: Any) -> Tensor:
        size, stride, dtype = layout
        assert type(size) is type(stride) is tuple  # what PyTorch's own insists on
        x = torch.empty_strided(size, stride, dtype=dtype).fill_(float("nan"))
        self.own(*(unpacked(x, HEADS) if size[2] == 3 * HEADS else [x]))
        return x

    def forward(self, *addresses: int) -> tuple[Tensor, Tensor] | None:
        if self.refuses:
            return None
        self.forwards += 1
        q, k, v = (self.tensors[at] for at in addresses)
        return attention(q, k, v, causal=True, return_lse=True, backend="reference")

    def repeat_attention_backward(self, *given: Any) -> Callable[..., bool]:
        assert given[7:] == (*OPTIONS, False)  # in any order

        def launch(dout: int, *addresses: int) -> bool:
            if self.refuses:
                return False
            self.backwards += 1
            q, k, v = (self.tensors[at].clone().requires_grad_() for at in addresses[:3])
            with torch.enable_grad():
                out = attention(q, k, v, causal=True, backend="reference")
                grads = torch.autograd.grad(out, (q, k, v), self.tensors[dout])
            for at, x in zip(addresses[-3:], grads, strict=True):
                self.tensors[at].copy_(x)
            return True

        return launch


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Serves what is of one kind: all calls of this file, once one was served."""
    memory, kind = Memory(), kinds.Kind(None, True)
    for module in (ops, packed):
        monkeypatch.setattr(module, "empty_strided_cuda", memory.empty)
    hopper_repeat = pytest.importorskip("streamattn.kernels.hopper_repeat")
    monkeypatch.setattr(hopper_repeat, "repeat_attention_backward", memory.repeat_attention_backward)
    kind.options, kind.by_address = (None,) * 6 + (*OPTIONS, "auto"), memory.forward
    kind.again = lambda q, k, v: memory.forward(q.data_ptr(), k.data_ptr(), v.data_ptr())
    monkeypatch.setattr(functional, "kind_of_call", lambda *given: kind if given[-1] == "auto" else None)
    monkeypatch.setattr(packed, "kind_of_packed", lambda *given: kind)
    return memory


def inputs(memory: Memory, together: bool) -> tuple[list[Tensor], Tensor]:
    """qkv, or q, k and v, and dout; all of them known by address."""
    shape = (2, T, 3 * HEADS, D) if together else (2, T, HEADS, D)
    tensors = [torch.randn(shape, requires_grad=True) for _ in range(1 if together else 3)]
    tensors = tensors if together else [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    dout = torch.randn(2, T, HEADS, D).transpose(1, 2)
    memory.own(dout, *(unpacked(tensors[0], HEADS) if together else tensors))
    return tensors, dout


def call(tensors: list[Tensor], **options: Any) -> Tensor:
    if len(tensors) == 3:
        return attention(*tensors, causal=True, **options)
    return packed_attention(*tensors, causal=True, **options)[0]


def gradients(tensors: list[Tensor], dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    out = call(tensors, **options)
    return (out, *torch.autograd.grad(out, tensors, dout))


def check(memory: Memory, together: bool) -> None:
    """A call, beside the same calculation in torch's own operators."""
    tensors, dout = inputs(memory, together)
    q, k, v = unpacked(tensors[0], HEADS) if together else tensors
    scores = (q @ k.transpose(2, 3) * OPTIONS[0]).masked_fill(~torch.ones(T, T).tril().bool(), float("-inf"))
    want = scores.softmax(3) @ v
    for got, right in zip(
        gradients(tensors, dout), (want, *torch.autograd.grad(want, tensors, dout)), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("together", [False, True])
def test_a_repeated_call_and_its_gradients(memory, together):
    check(memory, together)  # whose backward is served the long way, and learned
    assert (memory.forwards, memory.backwards) == (1, 0)
    for served in (1, 2):
        check(memory, together)
        assert (memory.forwards, memory.backwards) == (1 + served, served)
    memory.refuses = True  # an address, a device or a profiler
    check(memory, together)


@pytest.mark.parametrize("together", [False, True])
def test_what_a_repeated_backward_can_not_serve_goes_the_long_way(memory, together):
    check(memory, together)
    tensors, dout = inputs(memory, together)
    want = gradients(tensors, dout)
    memory.backwards = 0
    others = {
        "laid out otherwise": lambda out: torch.autograd.grad(out, tensors, dout.contiguous()),
        "broadcast": lambda out: torch.autograd.grad(out.sum(), tensors),
        "differentiable": lambda out: torch.autograd.grad(out, tensors, dout, create_graph=True),
    }
    for why, backward in others.items():
        made = backward(call(tensors))
        assert memory.backwards == 0, why
        if why != "broadcast":
            for got, right in zip(made, want[1:], strict=True):
                torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    out = call(tensors)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(torch.autograd.grad(out, tensors, dout, create_graph=True)[0].sum(), tensors)
    assert memory.backwards == 0


@pytest.mark.parametrize("together", [False, True])
def test_tensors_that_come_back_otherwise_are_no_longer_of_the_kind(memory, together):
    """Saved tensors that a hook moves to the CPU and back have strides of their own."""
    check(memory, together)
    tensors, dout = inputs(memory, together)
    want = torch.autograd.grad(call(tensors), tensors, dout)
    memory.backwards = 0
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.contiguous(), lambda x: x):
        out = call(tensors)
    got = torch.autograd.grad(out, tensors, dout)
    assert memory.backwards == 0
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [Backend.HOPPER, Backend.TRITON, Backend.DECODE])
def test_a_kind_is_told_once_how_it_is_repeated(backend, monkeypatch):
    """Also if it refuses, as on a GPU that isn't the current one: each call would pay for being told."""
    where = {Backend.HOPPER: "hopper_repeat", Backend.TRITON: "forward", Backend.DECODE: "decode"}
    kernels = pytest.importorskip(f"streamattn.kernels.{where[backend]}")
    told: list[Tensor] = []

    def repeat_attention_forward(q: Tensor, *others: Any) -> Callable[..., None]:
        told.append(q)
        return lambda *tensors: None

    monkeypatch.setattr(kernels, "repeat_attention_forward", repeat_attention_forward)
    monkeypatch.setattr(ops, "choose", lambda *call: backend)
    monkeypatch.setattr(ops, "_implementation", lambda chosen: lambda q, k, v, *options: (q, q[..., 0]))
    kind, x = kinds.Kind(None, False), torch.zeros(1, 1, T, D)
    arguments: Any = (x, x, x, *(None,) * 6, *OPTIONS, "auto", None)
    for _ in range(3):
        ops.run_forward(*arguments, kind=kind)
    assert kind.again is not None
    assert len(told) == 1


def test_what_was_chosen_for_its_address_is_not_repeated(monkeypatch):
    """The portable kernel serves what TMA can't copy; the next call of that kind may lie better."""
    forward = pytest.importorskip("streamattn.kernels.forward")
    monkeypatch.setattr(forward, "repeat_attention_forward", lambda *given: lambda *tensors: None)
    monkeypatch.setattr(ops, "choose", lambda *call: Backend.TRITON)
    monkeypatch.setattr(ops, "_implementation", lambda chosen: lambda q, k, v, *options: (q, q[..., 0]))
    kind, store = kinds.Kind(None, False), torch.zeros(T * D + 1)
    for start, told in ((1, False), (0, True)):
        x = store[start : start + T * D].view(1, 1, T, D)
        arguments: Any = (x, x, x, *(None,) * 6, *OPTIONS, "auto", None)
        ops.run_forward(*arguments, kind=kind)
        assert (kind.again is not None) == told
