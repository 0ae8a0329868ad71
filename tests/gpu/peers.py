"""PyTorch's own kernels as peers: their error against float64 is the yardstick of ours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tests.cases import Inputs, Result
from tests.oracle import visible_pairs

NAMES = ("out", "dq", "dk", "dv")


def sdpa(inputs: Inputs, peer: SDPBackend) -> Result:
    """The call on one backend of scaled_dot_product_attention: out, dq, dk, dv.

    Flash and math take no more than causal attention; the efficient backend gets the whole pattern as a
    dense mask.
    """
    options = dict(inputs.options)
    causal = options.pop("causal", False)
    batch, q_heads, q_len, _ = inputs.q.shape
    kv_heads, kv_len = inputs.k.shape[1:3]
    bias: Tensor | None = None
    if options:
        seen = visible_pairs(batch, q_len, kv_len, causal=causal, device=inputs.q.device, **options)
        bias = seen.expand(batch, q_heads, q_len, kv_len)
    elif causal and q_len != kv_len:
        bias = causal_lower_right(q_len, kv_len)
    flags = {"is_causal": causal and bias is None, "enable_gqa": q_heads != kv_heads}
    with sdpa_kernel(peer):
        out = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=bias, **flags)
        grads = torch.autograd.grad(out, [inputs.q, inputs.k, inputs.v], inputs.dout)
    return Result(dict(zip(NAMES, (out.detach(), *grads), strict=True)))
