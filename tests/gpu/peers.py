"""PyTorch's own kernels as peers: their error against float64 is the yardstick of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tests.cases import Beside, Inputs, Result, expected
from tests.oracle import visible_pairs

NAMES = ("out", "dq", "dk", "dv")


def sdpa(inputs: Inputs, peer: SDPBackend) -> Result:
    """The call on one backend of scaled_dot_product_attention: out, dq, dk, dv.

    What is more than causal becomes one dense mask, boolean, or additive where `attn_mask` is: the efficient
    backend takes one, math too, flash on the CPU alone. Sinks, softcap and dropout raise TypeError.
    """
    options = dict(inputs.options)
    causal, scale = options.pop("causal", False), options.pop("scale", None)
    batch, q_heads, q_len, _ = inputs.q.shape
    kv_heads, kv_len = inputs.k.shape[1:3]
    bias: Tensor | None = None
    if options:
        seen = visible_pairs(batch, q_len, kv_len, causal=causal, device=inputs.q.device, **options)
        bias = seen = seen.expand(batch, q_heads, q_len, kv_len)
        mask = options.get("attn_mask")
        if mask is not None and mask.dtype != torch.bool:
            bias = mask.detach().expand_as(seen).masked_fill(~seen, -torch.inf)
    elif causal and q_len != kv_len:
        bias = causal_lower_right(q_len, kv_len)
    flags = {"is_causal": causal and bias is None, "enable_gqa": q_heads != kv_heads, "scale": scale}
    with sdpa_kernel(peer):
        out = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, attn_mask=bias, **flags)
        grads = torch.autograd.grad(out, [inputs.q, inputs.k, inputs.v], inputs.dout)
    return Result(dict(zip(NAMES, (out.detach(), *grads), strict=True)))


def compare(inputs: Inputs, ours: Callable[[Inputs], Result], peer: SDPBackend, note: Any = "") -> None:
    """Raise AssertionError where our error against float64 is more than the allowed multiple of a backend's.

    Each backend makes something else of a query that sees nothing, and none returns lse: such queries and lse
    get no cotangent, in place, and what the backend leaves in their rows does not count.
    """
    inputs.dlse.zero_()
    blind = (expected(inputs)["lse"] == -torch.inf).unsqueeze(-1)
    inputs.dout.masked_fill_(blind, 0.0)
    want, got, theirs = expected(inputs), ours(inputs), sdpa(inputs, peer)
    for name in ("out", "dq"):
        theirs.tensors[name].masked_fill_(blind, 0.0)
    beside = Beside(inputs.q.dtype)
    beside.add(got, want, theirs)
    beside.judge(note)
