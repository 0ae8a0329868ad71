"""Any call of the kernels on a GPU equals the oracle; `PROPERTY_EXAMPLES=400` is the long run: 10,000 calls.

Compiling takes longer than running, so an example is a call and some like it that need few other kernels.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from streamattn.dispatch import Backend
from tests.properties import Call, calls, check, searched

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = st.one_of(st.sampled_from([16, 32, 64, 80, 96, 128, 160, 192, 256]), st.integers(1, 256))
LONGEST = 1100
CALLS = 25  # of an example


def alike(call: Call) -> Iterator[Call]:
    """The call, and others with other lengths, batches, memory and values: `CALLS` in all."""
    yield call
    rng = random.Random(repr(call))
    for _ in range(CALLS - 1):
        q_len, kv_len = rng.randint(1, LONGEST), rng.randint(1, LONGEST)
        if call.case.q_len == call.case.kv_len:
            kv_len = q_len
        case = replace(
            call.case, q_len=q_len, kv_len=kv_len, batch=rng.randint(1, 3), seed=rng.randrange(1000)
        )
        yield replace(call, case=case, strides=None if call.strides is None else case.seed)


@searched(calls(DTYPES, longest=LONGEST, head_dims=HEAD_DIMS), examples=60)
def test_any_call(call: Call) -> None:
    """Memory that a kernel allocates and does not write holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for each in alike(call):
            with contextlib.suppress(UnsatisfiedAssumption):  # of one call; the others may be fit
                check(each, Backend.AUTO.value, device="cuda")
    finally:
        torch.use_deterministic_algorithms(False)
