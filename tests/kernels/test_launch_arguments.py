"""Arguments that launchers share: precision of float32 products, and the limit below which a mask hides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from streamattn import attention
from streamattn.kernels.launch import call_arguments, product_precision, rows_are_aligned
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


@pytest.mark.parametrize(
    ("dtype", "head_dim", "aligned"),
    [
        (torch.float32, 136, True),
        (torch.float32, 132, True),
        (torch.float32, 137, False),
        (torch.float16, 136, True),
        (torch.float16, 132, False),
    ],
    ids=str,
)
def test_rows_begin_at_whole_16_bytes(dtype, head_dim, aligned):
    """By the address, and by the stride of each dimension."""
    x = torch.zeros(2, 5, 3, head_dim, dtype=dtype).transpose(1, 2)
    assert rows_are_aligned(x) is aligned
    assert not rows_are_aligned(x, x[..., 1:])
    assert not rows_are_aligned(torch.zeros(2, 3, 5, head_dim + 1, dtype=dtype)[..., :head_dim])
