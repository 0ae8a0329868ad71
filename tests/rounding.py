"""The bar of the kernels' rounding where no GPU is: attention that rounds what it must, and no more.

On GPUs a kernel is held to PyTorch's own (`tests.gpu.peers`). Here `rounded` stands for them, at the places
where FlashAttention rounds: products of the inputs' dtype are summed in float32; the weights, and in the
backward the gradient of the scores, are rounded to the inputs' dtype before they enter a product; each result
is rounded once, and the backward starts from the rounded output. For float32 no place is left, which makes it
the plain formula of PyTorch's math backend. `tests/test_rounding.py` holds its error to that of PyTorch's CPU
kernels, where those serve; it serves all that `attention` does, sinks, softcap and dropout included.

Dense: whole score matrices, one maximum a row and no tiles. Left out on purpose: the rounding that tiles add.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.cases import Inputs, Result
from tests.oracle import hidden_entries, kept_probability, visible_pairs


def rounded(inputs: Inputs, keep: Tensor | None = None) -> Result:
    """out, lse, dq, dk, dv of a call, as a fused kernel rounds them.

    Args:
        inputs: of the call; the inputs' dtype is the one that is rounded to.
        keep: bool, broadcastable to [B, Hq, Tq, Tk]: the elements that dropout keeps; None without dropout.
    """
    options = dict(inputs.options)
    scale, softcap = options.pop("scale", None), options.pop("softcap", None)
    sinks, dropout_p = options.pop("sinks", None), options.pop("dropout_p", 0.0)
    dtype = inputs.q.dtype
    q, k, v, dout = (x.detach().float() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    group = q_heads // kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = head_dim**-0.5 if scale is None else scale

    def once(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    def over_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, group)).sum(2).to(dtype)

    visible = visible_pairs(batch, q_len, kv_len, device=q.device, **options)
    visible = visible.expand(batch, q_heads, q_len, kv_len)
    scores = q @ k.mT * scale
    slope = torch.ones(())
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1.0 - capped.square()
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + torch.where(hidden_entries(mask), 0.0, mask.detach().float())
    scores = scores.masked_fill(~visible, -torch.inf)

    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = sinks.detach().float().view(1, q_heads, 1, 1)
        top = torch.maximum(top, sinks)
    blind = top == -torch.inf
    top = top.masked_fill(blind, 0.0)
    exponentials = torch.exp(scores - top)
    total = exponentials.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    lse = top + torch.log(total)  # -inf where nothing is seen
    total = total.masked_fill(blind, 1.0)
    weights = exponentials / total
    kept = torch.ones(()) if keep is None else keep / kept_probability(dropout_p)

    # the sum of weights is divided out after the product, dropout's rescale with it
    dropped = exponentials if keep is None else exponentials * keep
    denominator = total if keep is None else total * kept_probability(dropout_p)
    out = (once(dropped) @ v / denominator).to(dtype)
    delta = (out.float() * dout).sum(-1, keepdim=True) - inputs.dlse.float()[..., None].masked_fill(
        blind, 0.0
    )
    dscores = once(weights * (dout @ v.mT * kept - delta) * slope)
    return Result(
        {
            "out": out,
            "lse": lse.squeeze(-1),
            "dq": (dscores @ k * scale).to(dtype),
            "dk": over_group(dscores.mT @ q * scale),
            "dv": over_group(once(weights * kept).mT @ dout),
        }
    )
