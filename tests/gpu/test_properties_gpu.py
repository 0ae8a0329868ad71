"""Any call of the kernels on a GPU equals the oracle; `PROPERTY_EXAMPLES=200` is the long run: 10,000 calls.

Compiling takes longer than running, so an example is a call and others like it that need no other kernels.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption

from streamattn.dispatch import Backend
from tests.properties import Call, calls, check, few_queries, searched

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = st.one_of(st.sampled_from([16, 32, 64, 80, 96, 128, 160, 192, 256]), st.integers(1, 256))
WIDE_HEAD_DIMS = st.sampled_from([257, 264, 320, 512, 1024])
LONGEST = 1100
CALLS = 50  # of an example
ALIGNED = 16  # what Triton asks of a number: code for its multiples is not code for others


def alike(call: Call) -> Iterator[Call]:
    """The call, and others with other lengths, masks and values: `CALLS` in all.

    A length keeps its remainder, and so does every stride.
    """
    yield call
    rng = random.Random(repr(call))
    shared = call.case.q_len == call.case.kv_len
    for _ in range(CALLS - 1):
        q_len, kv_len = (
            rng.randrange(length % ALIGNED or ALIGNED, LONGEST + 1, ALIGNED)
            for length in (call.case.q_len, call.case.kv_len)
        )
        case = replace(call.case, q_len=q_len, kv_len=q_len if shared else kv_len, seed=rng.randrange(1000))
        yield replace(call, case=case)


@searched(calls(DTYPES, longest=LONGEST, head_dims=HEAD_DIMS), examples=8)
def test_any_call(call: Call) -> None:
    check_alike(call)


@searched(calls(DTYPES, longest=LONGEST, head_dims=WIDE_HEAD_DIMS, most_heads=4), examples=2)
def test_any_call_of_wide_heads(call: Call) -> None:
    check_alike(call)


def check_alike(call: Call) -> None:
    """Memory that a kernel allocates and does not write holds NaN; the backward is whichever is fastest."""
    check_all(alike(call), Backend.AUTO)


@searched(calls(DTYPES, longest=LONGEST, shortest=1, head_dims=HEAD_DIMS), examples=4)
def test_any_call_of_few_queries(call: Call) -> None:
    check_all(map(few_queries, alike(few_queries(call))), Backend.DECODE)


def check_all(given: Iterable[Call], backend: Backend) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for each in given:
            with contextlib.suppress(UnsatisfiedAssumption):  # of one call; the others may be fit
                check(each, backend.value, device="cuda", deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
