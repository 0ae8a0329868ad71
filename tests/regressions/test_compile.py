"""torch.compile sees one operator."""

from __future__ import annotations

import pytest
import torch

from streamattn import attention
from tests.cases import Case, expected, judge, run


# pytorch/pytorch#154365: the graph broke at the kernel
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window_size": 3}, {"mask": "additive_heads"}, {"softcap": 2.0}, {"segments": "ids"}],
    ids=str,
)
def test_no_graph_break_at_the_kernel(options, device, backend):
    torch._dynamo.reset()
    inputs = Case(q_heads=4, **options).build(device=device)
    explained = torch._dynamo.explain(attention)(
        inputs.q, inputs.k, inputs.v, **inputs.options, backend=backend
    )
    assert explained.graph_break_count == 0
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    judge(run(compiled, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)
