"""Large batches and far offsets."""

from __future__ import annotations

import torch

from streamattn import attention
from tests.cases import relative_errors
from tests.oracle import attend


# Dao-AILab/flash-attention#2260: batch 8300 x 16 heads overflowed an axis of the backward's grid
def test_a_batch_of_8300(device, backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(8300, 16, 1, 128, device=device).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)
    out = attention(q, k, v, backend=backend)
    dq, dk, dv = torch.autograd.grad(out, [q, k, v], dout)
    # one query on one key: the weight is 1
    torch.testing.assert_close(out, v.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dv, dout, rtol=1e-6, atol=1e-6)
    assert float(dq.abs().max()) < 1e-3
    assert float(dk.abs().max()) < 1e-3


# fla-org/flash-linear-attention#1080: an offset past 2**31 wrapped around
def test_an_offset_past_two_to_the_31st(device, backend):
    torch.manual_seed(0)
    size, far = 16 * 16, 2**31 + 64
    made = []
    for _ in range(3):
        storage = torch.empty(
            far + size, dtype=torch.float16, device=device
        )  # only the two ends are ever touched
        x = storage.as_strided((2, 1, 16, 16), (far, size, 16, 1))
        x.copy_(torch.randn(2, 1, 16, 16))
        made.append(x.requires_grad_())
    out = attention(*made, causal=True, backend=backend)
    want = attend(*made, causal=True)[0]
    assert relative_errors(out.detach(), want.detach())[0] < 2e-3
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, made, dout)
    for x, right in zip(got, torch.autograd.grad(want, made, dout.double()), strict=True):
        assert relative_errors(x, right)[0] < 4e-3
