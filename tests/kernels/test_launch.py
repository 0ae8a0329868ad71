"""What launchers share: the precision of float32 products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from streamattn import attention
from streamattn.kernels.launch import product_precision


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
