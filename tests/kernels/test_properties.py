"""Any call of the kernels in Triton's interpreter equals the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import HealthCheck
from hypothesis import strategies as st

from streamattn.dispatch import Backend
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
