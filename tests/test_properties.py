"""Any call of `attention` on the CPU backends equals the oracle."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from streamattn.dispatch import Backend
from tests.properties import Call, calls, check, searched

HEAD_DIMS = st.integers(1, 40)


@searched(calls((torch.float32, torch.float64), longest=70, head_dims=HEAD_DIMS), examples=100)
def test_any_call(call: Call) -> None:
    """`auto` is PyTorch's fused attention where that can serve the call."""
    check(call, Backend.AUTO.value, Backend.REFERENCE.value)


@searched(calls((torch.float16, torch.bfloat16), longest=70, head_dims=HEAD_DIMS), examples=50)
def test_any_call_in_half_precision(call: Call) -> None:
    """PyTorch's fused attention gives lse to 1e-4 only: there it is not judged."""
    check(call, Backend.REFERENCE.value)
    check(replace(call, with_lse=False), Backend.AUTO.value)
