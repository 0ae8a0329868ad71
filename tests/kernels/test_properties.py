"""Any call of the kernels in Triton's interpreter equals the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st

from streamattn.dispatch import MAX_DECODE_QUERIES, Backend
from streamattn.kernels import decode
from tests.cases import Case
from tests.properties import Call, calls, check, searched

# Square, wide and tall, as on GPUs. A pair of tiles costs milliseconds, so a head has few of them.
TILES = [(32, 32), (32, 32), (16, 32), (32, 16)]


@searched(
    calls(
        (torch.float32, torch.float16),
        longest=40,
        shortest=1,
        most_heads=2,
        largest_batch=2,
        head_dims=st.sampled_from([1, 8, 16, 20, 32]),
    ),
    examples=200,
    suppress=(HealthCheck.function_scoped_fixture,),  # every call sets the tile anew
)
def test_any_call(use_tile: Callable[[int, int], None], call: Call) -> None:
    use_tile(*TILES[call.case.seed % len(TILES)])
    check(call, Backend.TRITON.value)


@searched(
    calls(
        (torch.float32, torch.float16),
        longest=100,
        shortest=1,
        most_heads=4,
        largest_batch=2,
        head_dims=st.sampled_from([1, 8, 16, 20, 32]),
    ),
    examples=30,
    suppress=(HealthCheck.function_scoped_fixture,),  # every call is split anew
)
def test_any_call_of_few_queries(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    call = replace(call, case=few_queries(call.case))
    monkeypatch.setattr(decode, "split_count", lambda *given: 1 + call.case.seed % 4)
    check(call, Backend.DECODE.value)


def few_queries(case: Case) -> Case:
    """The case with as many queries as the decode kernel takes, and without what it leaves to others."""
    by_head = case.mask in ("bool", "additive", "additive_heads", "trained", "trained_full")
    return replace(
        case,
        q_len=1 + (case.q_len - 1) % MAX_DECODE_QUERIES,
        segments="none" if case.segments == "none" else "pair",
        dropout_p=0.0,
        mask="none" if by_head and case.q_heads != case.kv_heads else case.mask,
    )
