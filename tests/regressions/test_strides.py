"""Views as callers make them: the true strides must be read, forward and backward."""

from __future__ import annotations

import pytest
import torch

from streamattn import attention
from tests.cases import LAYOUTS, Case, expected, judge, run


# BobMcDear/attorch#14: `.view(...).transpose(1, 2)` was read as if it were contiguous
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": "bool"}, {"q_heads": 6}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_its_contiguous_copy(layout, options, device, backend):
    inputs = Case(q_len=40, kv_len=40, layout=layout, **options).build(device=device)
    got = run(attention, inputs, return_lse=True, backend=backend)
    copies = inputs.mapped(lambda x: x.clone(memory_format=torch.contiguous_format))
    plain = run(attention, copies, return_lse=True, backend=backend)
    for name, x in plain.tensors.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=5e-6)
    judge(got, expected(inputs), torch.float32, layout)


# FlagOpen/FlagGems#5896: v cut out of a fused projection
def test_values_cut_out_of_a_fused_projection(device, backend):
    torch.manual_seed(0)
    fused = torch.randn(2, 24, 3 * 64, device=device, requires_grad=True)
    q, k, v = (x.view(2, 24, 4, 16).transpose(1, 2) for x in fused.chunk(3, dim=-1))
    dout = torch.randn(2, 4, 24, 16, device=device)
    (got,) = torch.autograd.grad(attention(q, k, v, causal=True, backend=backend), fused, dout)
    leaves = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(attention(*leaves, causal=True, backend=backend), leaves, dout)
    want = torch.cat([x.transpose(1, 2).reshape(2, 24, 64) for x in want], dim=-1)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6)


# BobMcDear/attorch#14: cotangents have strides too; sum().backward() sends stride 0
@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_cotangents_of_any_strides(kind, device, backend):
    inputs = Case(q_len=24, kv_len=24, causal=True).build(device=device)
    inputs.dout = {
        "expanded": lambda: torch.ones((), device=device).expand(2, 2, 24, 16),
        "transposed": lambda: torch.randn(2, 16, 24, 2, device=device).transpose(1, 3),
        "sliced": lambda: torch.randn(2, 2, 24, 40, device=device)[..., 5:21],
    }[kind]()
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# BobMcDear/attorch#14: masks are views as well
@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
def test_masks_of_any_strides(kind, device, backend):
    inputs = Case(q_len=24, kv_len=24).build(device=device)
    base = torch.rand(2, 2, 48, 48, device=device) < 0.7
    inputs.options["attn_mask"] = {
        "transposed": lambda: base[:, :, :24, :24].transpose(2, 3),
        "sliced": lambda: base[:, :, 1::2, ::2],
        "expanded": lambda: base[:1, :1, :24, :1].expand(2, 2, 24, 24),
    }[kind]()
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# FlagOpen/FlagGems#5896: segment ids and lengths cut out of a larger tensor
def test_segments_and_lengths_of_any_strides(device, backend):
    inputs = Case(q_len=24, kv_len=24).build(device=device)
    table = torch.randint(0, 3, (24, 4), dtype=torch.int32, device=device)
    inputs.options["segment_ids"] = table.t()[::2]
    inputs.options["kv_lengths"] = torch.tensor([[9, 0], [24, 0]], device=device)[:, 0]
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)
