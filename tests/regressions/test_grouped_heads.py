"""Several query heads on one key head."""

from __future__ import annotations

import pytest
import torch

from streamattn import attention
from tests.cases import Case, expected, judge, run


# fla-org/native-sparse-attention#27: dK and dV of a group were not summed
@pytest.mark.parametrize("heads", [(6, 2), (4, 1), (8, 4), (3, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "bool"}, {"window_size": 9}], ids=str)
def test_key_gradients_are_summed_over_the_group(heads, options, device, backend):
    inputs = Case(q_heads=heads[0], kv_heads=heads[1], q_len=33, kv_len=33, **options).build(device=device)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# fla-org/native-sparse-attention#27: head h belongs to key head h // group
def test_groups_are_runs_of_neighbouring_heads(device, backend):
    inputs = Case(q_heads=6, kv_heads=2, q_len=5, kv_len=9).build(device=device)
    k, v = (x.detach().repeat_interleave(3, dim=1) for x in (inputs.k, inputs.v))
    repeated = attention(inputs.q, k, v, backend=backend)
    torch.testing.assert_close(
        attention(inputs.q, inputs.k, inputs.v, backend=backend), repeated, rtol=0, atol=5e-6
    )
