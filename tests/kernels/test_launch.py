"""What launchers share: the precision of float32 products, the limit below which a mask hides, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

import streamattn.kernels.launch as launch_file
from streamattn import attention
from streamattn.kernels.launch import BY_LENGTH, UNSPECIALIZED, call_arguments, product_precision
from streamattn.kernels.tiles import Tile
from streamattn.pattern import UNBOUNDED


@pytest.fixture
def precision_restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    everywhere("none")
    matmul("none")


def legacy(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)


def everywhere(precision: str) -> None:
    torch.backends.fp32_precision = precision  # pyright: ignore[reportAttributeAccessIssue]


def matmul(precision: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = precision


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        ([], "tf32x3"),
        ([(legacy, "high")], "tf32"),
        ([(legacy, "medium")], "tf32"),
        ([(legacy, "high"), (legacy, "highest")], "tf32x3"),
        ([(everywhere, "tf32")], "tf32"),
        ([(matmul, "tf32")], "tf32"),
        ([(everywhere, "tf32"), (matmul, "ieee")], "tf32x3"),
        ([(everywhere, "tf32"), (legacy, "highest")], "tf32x3"),
    ],
    ids=lambda x: "-".join(f"{f.__name__}_{p}" for f, p in x) if isinstance(x, list) else x,
)
def test_either_way_to_allow_tf32_is_followed(steps, want, precision_restored):
    """After the newer way PyTorch's older question raises, and transformers' Trainer goes the newer way."""
    for allow, precision in steps:
        allow(precision)
    q = torch.zeros(1, 1, 4, 16)
    assert product_precision(q) == want
    assert product_precision(q.half()) == "ieee"
    assert torch.equal(attention(q, q, q, backend="triton"), q)


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        (torch.float16, -32752.0),
        (torch.bfloat16, torch.finfo(torch.bfloat16).min / 2),
        (torch.float32, torch.finfo(torch.float32).min / 2),
        (torch.float64, torch.finfo(torch.float32).min),
    ],
    ids=str,
)
def test_the_limit_of_a_mask_is_a_float32(dtype, limit):
    """Compiled kernels take it as one: half of float64's minimum would become -inf and hide nothing."""
    q = torch.zeros(1, 1, 4, 16)
    mask = torch.zeros(1, 1, 4, 4, dtype=dtype)
    options = (1.0, UNBOUNDED, UNBOUNDED, 0.0, 0.0)
    got = call_arguments(Tile(16, 16, 4, 1), q, q, q, mask, None, None, None, *options)["hidden_below"]
    assert got == limit == torch.tensor(limit).item()


class FakeKernel:
    """A jitted kernel of two pointers that notes how it is launched, by Triton's way and by the short one."""

    __name__ = "fake_kernel"
    arg_names = ("x_ptr", "y_ptr", "stride_x_t", "q_len", "BLOCK_M")

    def __init__(self) -> None:
        self.by_triton: list[dict[str, Any]] = []
        self.short: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            self.short.append(arguments)

        def by_triton(**arguments: Any) -> Any:
            self.by_triton.append(arguments)
            return SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))

        return by_triton


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeKernel]:
    """A kernel, and a launch of it on rows [T] of a store with a tile of BLOCK_M."""
    kernel = FakeKernel()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11, raising=False)
    for name in ("_plans", "_compiled"):
        monkeypatch.setattr(launch_file, name, {})

    def launch_on(x: Tensor, y: Tensor | None = None, block: int = 16) -> FakeKernel:
        def arguments() -> tuple[int, dict[str, Any]]:
            return 5, {"stride_x_t": x.stride(0), "q_len": len(x), "BLOCK_M": block, "num_warps": 4}

        key = (x.shape, x.stride(), x.dtype, y is None, block)
        launch_file.launch(kernel, key, (x, y), arguments)
        return kernel

    return launch_on


def test_what_was_planned_is_launched_on_new_addresses(fake):
    first, second = torch.zeros(20), torch.zeros(20)
    kernel = fake(first)
    assert kernel.by_triton[0]["x_ptr"] is first
    assert kernel.by_triton[0]["enable_fp_fusion"] is True
    assert kernel.short == []
    fake(second)
    assert len(kernel.by_triton) == 1
    grid_and_stream, code, pointers = (
        (5, 1, 1, 11),
        (7, (4, 1, 0), None, None, None),
        (second.data_ptr(), None),
    )
    assert kernel.short == [(*grid_and_stream, *code, *pointers, 1, 20, 16)]


def test_a_new_length_is_planned_without_triton(fake):
    kernel = fake(torch.zeros(20))
    longer = torch.zeros(21)
    fake(longer)
    assert len(kernel.by_triton) == 1
    assert kernel.short[0][9:] == (longer.data_ptr(), None, 1, 21, 16)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(20).half()},
        {"x": torch.zeros(40)[::2]},
        {"x": torch.zeros(21)[1:]},
        {"x": torch.zeros(32)},
        {"x": torch.zeros(20), "y": torch.zeros(20)},
        {"x": torch.zeros(20), "block": 32},
    ],
    ids=["dtype", "stride", "unaligned", "multiple of 16", "another pointer", "tile"],
)
def test_other_code_is_asked_of_triton(fake, other):
    kernel = fake(torch.zeros(20))
    fake(**other)
    assert len(kernel.by_triton) == 2
    assert kernel.short == []
    fake(**other)
    assert len(kernel.by_triton) == 2


def test_what_varies_under_a_key_is_passed_anew(fake):
    kernel = fake(torch.zeros(20))
    kernel.arg_names = ("x_ptr", "q_len", *reversed(BY_LENGTH), "BLOCK_M")
    x = torch.zeros(20)

    def grown(kv_len: int) -> None:
        lengths = (kv_len, 32 * kv_len, 16 * kv_len, 64 * kv_len, 16)
        others = {"q_len": 1, **dict(zip(BY_LENGTH, lengths, strict=True)), "BLOCK_M": 16}
        launch_file.launch(kernel, "decoding", (x,), lambda: (5, others), lengths)

    for kv_len in (7, 8, 9):
        grown(kv_len)
    assert len(kernel.by_triton) == 2
    assert [call[9:] for call in kernel.short] == [
        (x.data_ptr(), 1, 16, 64 * kv_len, 16 * kv_len, 32 * kv_len, kv_len, 16) for kv_len in (8, 9)
    ]


def test_a_profiler_of_tritons_hears_of_each_launch(fake, monkeypatch):
    kernel = fake(torch.zeros(20))
    monkeypatch.setattr(launch_file, "_hooked", lambda: True)
    fake(torch.zeros(20))
    assert len(kernel.by_triton) == 2
    assert kernel.short == []


def test_numbers_of_one_code_are_one_to_triton():
    """What it asks of a number before it compiles, whether it may bake in what it learns or not."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    numbers = [
        0,
        1,
        2,
        8,
        15,
        16,
        17,
        32,
        -1,
        -16,
        *(2**31 + i for i in (-16, -1, 0, 1, 16)),
        -(2**31),
        2**40,
    ]
    asked: dict[Any, set[Any]] = {}
    for number in numbers:
        code = launch_file._code_key((), {"stride_x_t": number})
        assert code == launch_file._code_key((), {UNSPECIALIZED[0]: number})
        asked.setdefault(code, set()).add(
            tuple(
                native_specialize_impl(backend, number, False, specialize, True)
                for specialize in (True, False)
            )
        )
    assert all(len(answers) == 1 for answers in asked.values()), asked
    assert len(asked) < len(numbers)
    assert launch_file._code_key((), {"BLOCK_M": 2}) != launch_file._code_key((), {"BLOCK_M": 8})
