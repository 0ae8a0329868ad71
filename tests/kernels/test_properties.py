"""Any call of the kernels in Triton's interpreter equals the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st

from streamattn.dispatch import Backend
from streamattn.kernels import decode
from tests.properties import Call, calls, check, few_queries, searched

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
    call = few_queries(call)
    monkeypatch.setattr(decode, "split_count", lambda *given: 1 + call.case.seed % 4)
    check(call, Backend.DECODE.value)
