"""Any call of the kernels on a GPU equals the oracle; `PROPERTY_EXAMPLES=10000` is the long run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from streamattn.dispatch import Backend
from tests.properties import Call, calls, check, searched

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = st.one_of(st.sampled_from([16, 32, 64, 80, 96, 128, 160, 192, 256]), st.integers(1, 256))


@searched(calls(DTYPES, longest=1100, head_dims=HEAD_DIMS), examples=300)
def test_any_call(call: Call) -> None:
    """Memory that a kernel allocates and does not write holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check(call, Backend.AUTO.value, device="cuda")
    finally:
        torch.use_deterministic_algorithms(False)
