"""`StreamMultiHeadAttention` on a GPU against `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from streamattn import StreamMultiHeadAttention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_torch(dtype, need_weights, masks, device):
    """Output, weights and gradients; torch's layer computes in float32 on the same values."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(256, 4, batch_first=True, device=device)
    ours = StreamMultiHeadAttention(256, 4, batch_first=True, device=device)
    ours.load_state_dict(theirs.state_dict())
    ours, theirs = ours.to(dtype), theirs.to(dtype).float()
    x, dout = torch.randn(2, 3, 300, 256, device=device)
    padding = torch.arange(300, device=device) >= torch.tensor([[300], [200], [77]], device=device)
    future = torch.ones(300, 300, dtype=torch.bool, device=device).triu(1)
    options = {
        "key_padding_mask": padding if masks in ("padding", "both") else None,
        "attn_mask": future if masks in ("causal", "both") else None,
        "need_weights": need_weights,
    }
    x, dout = x.to(dtype), dout.to(dtype)
    found = []
    for layer, kind in ((ours, dtype), (theirs, torch.float32)):
        leaf = x.to(kind).detach().clone().requires_grad_()
        out, weights = layer(leaf, leaf, leaf, **options)
        out.backward(dout.to(kind))
        results = [out, leaf.grad, *(p.grad for p in layer.parameters())]
        found.append([r.detach().float() for r in (results if weights is None else [*results, weights])])
    limit = 2e-5 if dtype == torch.float32 else 2e-2
    for left, right in zip(*found, strict=True):
        assert float((left - right).norm() / right.norm()) < limit
