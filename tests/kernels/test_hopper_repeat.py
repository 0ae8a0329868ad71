"""A Hopper forward or backward once more at other addresses: each address in the place of its tensor."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from streamattn.kernels import hopper_backward, hopper_forward, hopper_repeat
from streamattn.pattern import UNBOUNDED

Launches = list[tuple[str, Any, list[Tensor | int]]]  # name, key, tensors or their addresses


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What is launched the long way, by its tensors, and the short way, by their addresses."""
    heard: Launches = []
    plans: dict[Any, Any] = {}

    def launch(kernel: Any, key: Any, pointers: tuple[Tensor | None, ...], arguments: Any) -> None:
        tensors = [x for x in pointers if x is not None]
        plans[kernel.__name__, key] = SimpleNamespace(name=kernel.__name__, key=key, pointers=tensors)
        heard.append((kernel.__name__, key, list(tensors)))

    def start_plans(device: int, *given: tuple[Any, list[int]]) -> bool:
        assert device == -1
        heard.extend((plan.name, plan.key, list(addresses)) for plan, addresses in given)
        return True

    for module in (hopper_backward, hopper_forward):
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "multiprocessor_count", lambda device: 40)
    monkeypatch.setattr(
        hopper_repeat, "planned", lambda kernel, key, device: plans.get((kernel.__name__, key))
    )
    monkeypatch.setattr(hopper_repeat, "start_plans", start_plans)
    counter = torch.zeros(1, dtype=torch.int32)
    for module in (hopper_forward, hopper_repeat):
        monkeypatch.setattr(module, "counter_of", lambda device: counter)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    on_cpu = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(hopper_repeat, "_empty_strided_cuda", on_cpu)
    return heard


def inputs(q_len: int, kv_len: int, head_dim: int) -> list[Tensor]:
    """q, k and v of 6 and 2 heads in 2 sequences."""
    return [
        torch.randn(2, length, heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)
        for length, heads in ((q_len, 6), (kv_len, 2), (kv_len, 2))
    ]


@pytest.mark.parametrize("window", [(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (600, 20)], ids=str)
@pytest.mark.parametrize("q_len", [64, 1000])
def test_a_forward(launches, q_len, window, monkeypatch):
    options: Any = (0.3, *window, 2.0, 0.0)
    no_masks: Any = (None,) * 5
    q, k, v = inputs(q_len, 1000, 64)
    want = hopper_forward.attention_forward(q, k, v, *no_masks, *options)
    again = hopper_repeat.repeat_attention_forward(q, k, v, *options)
    assert again is not None
    q, k, v = inputs(q_len, 1000, 64)
    made = again(q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert made is not None
    for got, right in zip(made, want, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (right.shape, right.stride(), right.dtype)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert again(q.data_ptr(), k.data_ptr(), v.data_ptr()) is None
    first, second = launches
    assert second[:2] == first[:2]
    assert second[2][:5] == [x.data_ptr() for x in (q, k, v, *made)]
    assert len(second[2]) == len(first[2])
    assert (len(first[2]) == 6) == (q_len == 1000 and window[1] != UNBOUNDED)  # items are drawn
    assert hopper_repeat.repeat_attention_forward(q, k, v, 0.4, *options[1:]) is None


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "head_dim"), [(70, 300, 64), (300, 1100, 40), (1500, 1500, 128), (300, 300, 256)]
)
def test_a_backward(launches, q_len, kv_len, head_dim, packed, deterministic):
    if deterministic and head_dim > 128:
        pytest.skip("no Hopper kernel adds up dq in order there")
    options: Any = (0.3, UNBOUNDED, 0, 2.0, 0.0, deterministic)

    def call() -> tuple[list[Tensor], tuple[Tensor, ...] | None]:
        q, k, v = inputs(q_len, kv_len, head_dim)
        tensors = [torch.randn_like(q), q, k, v, torch.randn_like(q), torch.randn(2, 6, q_len)]
        return tensors, tuple(torch.empty_like(x) for x in (q, k, v)) if packed else None

    tensors, grads = call()
    hopper_backward.attention_backward(
        *cast(Any, (tensors[0], None, *tensors[1:], *(None,) * 5, *options, grads))
    )
    again = hopper_repeat.repeat_attention_backward(*cast(Any, (*tensors, grads, *options)))
    assert again is not None
    tensors, grads = call()
    grads = grads or tuple(torch.empty_like(x) for x in tensors[1:4])
    assert again(*[x.data_ptr() for x in (*tensors, *grads)])
    long, short = launches[:3], launches[3:]
    assert [x[:2] for x in short] == [x[:2] for x in long]

    # what is the kernels' own: behind one another, 16 bytes apart at least, and none in another's bytes
    dout, q, k, v, out, lse = tensors
    known = [x.data_ptr() for x in (dout, q, k, v, out, lse, *grads)]
    own: dict[int, int] = {}
    for (_, _, addresses), (_, _, pointers) in zip(short, long, strict=True):
        for address, x in zip(addresses, pointers, strict=True):
            if address not in known:
                assert isinstance(address, int)
                assert isinstance(x, Tensor)
                assert own.setdefault(address, x.nbytes) == x.nbytes
    places = sorted(own.items())
    assert len(places) == 2 + (deterministic or q_len == 70)  # so short, it is in order unasked
    for (at, size), (after, _) in itertools.pairwise(places):
        assert at + size == after
        assert after % 16 == 0
    stats, sums, *turns = [at for at, _ in places]
    prepare, main, finish = (addresses for _, _, addresses in short)
    dq, dk, dv = (x.data_ptr() for x in grads)
    out_at, dout_at, lse_at = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
    assert prepare == [out_at, dout_at, lse_at, stats, sums, *turns]
    assert main == [*(x.data_ptr() for x in (q, k, v, dout)), stats, sums, dk, dv, *turns]
    assert finish == [sums, *turns, dq]


def test_what_is_not_planned_is_not_repeated(launches):
    q, k, v = inputs(300, 300, 64)
    dout, out, lse = torch.randn_like(q), torch.randn_like(q), torch.randn(2, 6, 300)
    options: Any = (0.3, UNBOUNDED, 0, 0.0, 0.0, False)
    no_masks: Any = (None,) * 5
    assert hopper_repeat.repeat_attention_backward(dout, q, k, v, out, lse, None, *options) is None
    k, v = (x[:, :, :200] for x in (k, v))  # 100 queries see nothing
    hopper_backward.attention_backward(dout, None, q, k, v, out, lse, *no_masks, *options)
    assert hopper_repeat.repeat_attention_backward(dout, q, k, v, out, lse, None, *options) is None
