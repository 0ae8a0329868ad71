"""All-to-all over heads: each rank computes some heads on the whole sequence (arXiv:2309.14509).

One exchange turns q, k and v from shards with all heads into whole sequences with Hq / P heads, one turns the
output back, and between them it is the plain attention, with every option it has. Query heads must be a
multiple of P. Key heads that are none are repeated until they are: Hkv grouped heads become lcm(Hkv, P), so
that every rank gets the ones that its query heads read; their gradients are summed again by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamattn.parallel import collectives
from streamattn.parallel.call import Call, forward
from streamattn.parallel.layout import Layout, as_shards, in_order


def _to_heads(tensors: Sequence[Tensor], layout: Layout, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Shards [B, H, 2 * chunk, E] of one dtype as sequences [B, H / P, seq_len, E] of a rank's heads."""
    size = layout.size
    # [P, T, B, H / P, E]: what each rank is to have
    sent = [x.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4) for x in tensors]
    packed = torch.cat([x.reshape(size, -1) for x in sent], dim=1)
    received = collectives.all_to_all(packed, group).wait()
    whole = []
    for part, x in zip(received.split([x[0].numel() for x in sent], dim=1), sent, strict=True):
        tokens = in_order(part.reshape(size * layout.length, *x.shape[2:]), layout)
        whole.append(tokens[: layout.seq_len].permute(1, 2, 0, 3))
    return whole


def _to_tokens(tensors: Sequence[Tensor], layout: Layout, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The inverse of `_to_heads`; padding is 0."""
    size = layout.size
    sent = [as_shards(x.permute(2, 0, 1, 3), layout) for x in tensors]  # [P * T, B, H / P, E]
    packed = torch.cat([x.view(size, -1) for x in sent], dim=1)
    received = collectives.all_to_all(packed, group).wait()
    shards = []
    for part, x in zip(received.split([x.numel() // size for x in sent], dim=1), sent, strict=True):
        heads = part.reshape(size, layout.length, *x.shape[1:])
        shards.append(heads.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2))
    return shards


class _Exchange(torch.autograd.Function):
    """One of the two exchanges, whose gradient is the other."""

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, group: dist.ProcessGroup | None, to_heads: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = layout, group, to_heads
        return tuple((_to_heads if to_heads else _to_tokens)(tensors, layout, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layout, group, to_heads = ctx.exchange
        exchange: Any = _Exchange.apply
        return None, None, None, *exchange(layout, group, not to_heads, *grads)


def repeats(num_kv_heads: int, size: int) -> int:
    """How often each key head is sent so that their number is a multiple of the ranks'."""
    return math.lcm(num_kv_heads, size) // num_kv_heads


def run(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """``(out, lse)`` of a rank's queries, lse None unless it is wanted, as it takes an exchange of its own.

    Args:
        q: this rank's shard [B, Hq, 2 * chunk, D].
        k: likewise [B, Hkv, 2 * chunk, D].
        v: likewise [B, Hkv, 2 * chunk, Dv].
        sinks: [Hq] or None.
        call: the options; its ``q_segments`` are the whole sequence's.
        return_lse: whether lse is wanted.
    """
    layout, group = call.layout, call.group
    times = repeats(k.shape[1], layout.size)
    if times > 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (k, v))
    exchange: Any = _Exchange.apply
    q, k, v = exchange(layout, group, True, q, k, v)
    if sinks is not None:
        sinks = sinks.unflatten(0, (layout.size, -1))[layout.rank]
    whole = slice(0, layout.seq_len)
    masks = call.masks(whole, whole, 0)
    out, lse = forward(q, k, v, *call.options(0, call.window_left, call.window_right, masks, sinks))
    (out,) = exchange(layout, group, False, out)
    if not return_lse:
        return out, None
    (lse,) = exchange(layout, group, False, lse.unsqueeze(-1))
    padding = torch.arange(layout.length, device=lse.device) >= layout.tokens()
    return out, lse.squeeze(-1).masked_fill(padding, -torch.inf)
