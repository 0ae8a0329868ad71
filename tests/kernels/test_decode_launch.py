"""Calls of a kind, which the decode kernels serve again with new addresses: each argument in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import streamattn.kernels.launch as launch_file
from streamattn.kernels import decode
from tests.kernels.test_launch import FakeKernel

OPTIONS: Any = (None, None, None, None, None, None, 0.3, 10_000, 0, 2.0, 0.0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeKernel, FakeKernel]:
    """Stand for both kernels of the file, on a GPU of 132 multiprocessors."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    for name in ("_plans", "_compiled"):
        monkeypatch.setattr(launch_file, name, {})
    made = []
    for name in ("decode_fwd_kernel", "decode_combine_kernel"):
        kernel = FakeKernel()
        kernel.__name__ = name
        kernel.arg_names = tuple(getattr(decode, name).arg_names)
        monkeypatch.setattr(decode, name, kernel)
        made.append(kernel)
    on_cpu = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(decode, "_empty_strided_cuda", on_cpu)
    monkeypatch.setattr(decode, "most_splits", lambda *given: 8)
    return made[0], made[1]


def inputs(kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(2, 1, 4, 64, dtype=torch.float16).transpose(1, 2)
    return (
        q,
        torch.randn(2, 2, kv_len, 64, dtype=torch.float16),
        torch.randn(2, 2, kv_len, 32, dtype=torch.float16),
    )


def named(kernel: FakeKernel, call: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(kernel.arg_names, call[9:], strict=True))


@pytest.mark.parametrize(("kv_len", "splits"), [(700, 5), (100, 1)])
def test_a_call_of_a_kind_is_launched_again_as_its_first_was(kernels, kv_len, splits):
    forward, combine = kernels
    q, k, v = inputs(kv_len)
    decode.attention_forward(q, k, v, *OPTIONS, kind="a kind")
    again = decode.repeat_attention_forward(q, k, v, 10_000, "a kind")
    q, k, v = inputs(kv_len + 17)
    served = again(q, k, v)
    assert served is not None
    assert (len(forward.by_triton), len(forward.short)) == (1, 1)
    assert len(combine.by_triton) == len(combine.short) == int(splits > 1)
    launch_file._plans.clear()
    launch_file._compiled.clear()
    want = decode.attention_forward(q, k, v, *OPTIONS)
    for got, right in zip(served, want, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (right.shape, right.stride(), right.dtype)
    short = named(forward, forward.short[0])
    assert list(short.values())[:5] == [x.data_ptr() for x in (q, k, v, *served)]
    rest = forward.arg_names[6:]
    assert {name: short[name] for name in rest} == {name: forward.by_triton[1][name] for name in rest}
    assert (short["num_splits"], short["kv_len"], short["HAS_SPLITS"]) == (splits, kv_len + 17, splits > 1)
    assert forward.short[0][0] == 2 * 2 * splits
    if splits == 1:
        assert short["parts_ptr"] is None
        return
    short_combine = named(combine, combine.short[0])
    assert list(short_combine.values())[:3] == [*(x.data_ptr() for x in served), short["parts_ptr"]]
    rest = combine.arg_names[3:]
    assert {name: short_combine[name] for name in rest} == {name: combine.by_triton[1][name] for name in rest}
    assert combine.short[0][0] == 2 * 4 * (32 // decode.COMBINED_COLUMNS)


def test_more_splits_are_planned_once_under_the_same_kind(kernels):
    forward, combine = kernels
    again = decode.repeat_attention_forward(*inputs(100), 10_000, "a kind")
    assert again(*inputs(300)) is None  # of which nothing is planned
    for kv_len in (300, 700, 300, 701, 699):
        if again(*inputs(kv_len)) is None:
            decode.attention_forward(*inputs(kv_len), *OPTIONS, kind="a kind")
    assert len(forward.by_triton) == len(combine.by_triton) == 1  # code is shared, whatever their number
    assert [named(forward, call)["num_splits"] for call in forward.short] == [5, 2, 5, 5]


def test_another_device_is_left_to_the_long_way(kernels, monkeypatch):
    q, k, v = inputs(300)
    decode.attention_forward(q, k, v, *OPTIONS, kind="a kind")
    again = decode.repeat_attention_forward(q, k, v, 10_000, "a kind")
    assert again(q, k, v) is not None
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert again(q, k, v) is None
