"""The bar for kernels where no GPU is, beside what PyTorch's own CPU kernels reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from tests.cases import Case, expected, relative_errors
from tests.gpu.peers import NAMES, sdpa
from tests.rounding import rounded

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"q_len": 64, "causal": True},
    {"q_len": 300, "kv_len": 700, "head_dim": 64},
    {"window_size": 40},
    {"mask": "bool_keys"},
    {"mask": "additive_keys"},
    {"scale": 0.5},
]


def errors(options: dict[str, Any], dtype: torch.dtype, backend: SDPBackend) -> list[tuple[float, float]]:
    """Pooled relative RMS error of the bar and of PyTorch's backend, for each of `NAMES`."""
    inputs = Case(**{"q_len": 128, "kv_len": 128, "head_dim": 32, **options}).build(dtype)
    inputs.dlse.zero_()
    want, bar, theirs = expected(inputs), rounded(inputs), sdpa(inputs, backend)
    return [
        (relative_errors(bar[name], want[name])[0], relative_errors(theirs[name], want[name])[0])
        for name in NAMES
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bar_is_no_lower_than_pytorchs_flash(options, dtype):
    """Which adds dk and dv up in the inputs' dtype, block by block, and dq where keys are many."""
    for name, (bar, theirs) in zip(NAMES, errors(options, dtype, SDPBackend.FLASH_ATTENTION), strict=True):
        assert bar <= 1.02 * theirs, (name, bar, theirs)
        assert name != "out" or theirs <= 1.05 * bar, (name, bar, theirs)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_bar_in_float32_is_pytorchs_plain_formula(options):
    for name, (bar, theirs) in zip(NAMES, errors(options, torch.float32, SDPBackend.MATH), strict=True):
        assert theirs / 1.15 <= bar <= 1.15 * theirs, (name, bar, theirs)
