"""Keys and values travel around the ring of ranks, a shard at a time; for full and causal attention.

Every rank computes with the shard that it has while the next one arrives, merges (out, lse) in float32 as
`reference.merge` does, and after P steps has seen all keys; forward holds two shards at a time. In backward
the shards travel again, and with each its dk and dv in float32, to which every rank adds the share
of its queries, and which reach their owner with the last step (Liu et al., arXiv:2310.01889).

Under a causal mask with zigzag shards a step is one call without a mask, of half the queries or half the
keys, and the ranks have equal work: of a shard from a rank before this one the tail is hidden from all
queries and the head from none; of one from a rank behind, all is hidden from this rank's head and nothing
from its tail.

Left out on purpose: windows, segments, lengths and sinks, which gathering serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamattn.parallel import collectives
from streamattn.parallel.call import (
    Call,
    backward,
    forward,
    heads_last,
    once_differentiable,
)
from streamattn.parallel.layout import Layout
from streamattn.pattern import UNBOUNDED
from streamattn.reference import accumulate_dtype, merge


def _block(layout: Layout, owner: int, causal: bool) -> tuple[slice, slice] | None:
    """(rows, keys) of this rank's shard and the owner's that see each other; None if none do.

    Of its own shard a causal call sees what lies before: chunks lie there in the sequence's order.
    """
    rows, keys = slice(0, layout.tokens()), slice(0, layout.tokens(owner))
    if causal and owner < layout.rank:
        keys = slice(0, min(layout.chunk, keys.stop))
    elif causal and owner > layout.rank:
        rows = slice(layout.chunk, rows.stop)
    return (rows, keys) if rows.start < rows.stop and keys.stop > 0 else None


def _steps(ctx: Any, kv: Tensor):
    """Yields (step, block, window_right, kv) for each shard, this rank's first, the next on its way."""
    call: Call = ctx.call
    layout = call.layout
    causal = call.window_right == 0
    following = None
    for step in range(layout.size):
        if following is not None:
            kv = following.wait()
        following = collectives.pass_on(kv, call.group) if step + 1 < layout.size else None
        owner = (layout.rank - step) % layout.size
        right = 0 if causal and owner == layout.rank else UNBOUNDED
        yield step, _block(layout, owner, causal), right, kv


def _split(kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views [B, Hkv, T, D] and [B, Hkv, T, Dv] of a buffer [B, T, Hkv, D + Dv]."""
    kv = kv.transpose(1, 2)
    return kv[..., :head_dim], kv[..., head_dim:]


def _together(k: Tensor, v: Tensor) -> Tensor:
    """k [B, Hkv, T, D] and v [B, Hkv, T, Dv] in one new buffer [B, T, Hkv, D + Dv]."""
    batch, heads, length, head_dim = k.shape
    kv = k.new_empty((batch, length, heads, head_dim + v.shape[3]))
    for half, x in zip(_split(kv, head_dim), (k, v), strict=True):
        half.copy_(x)
    return kv


class _Ring(torch.autograd.Function):
    """``(out, lse)`` of a rank's queries and the keys of all; `run` is its way in."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        ctx.call = call
        dtype = accumulate_dtype(q.dtype)
        out = heads_last(q, v.shape[3], call.layout.tokens(), dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        for step, block, right, kv in _steps(ctx, _together(k, v)):
            if block is None:
                continue
            rows, keys = block
            k_part, v_part = (x[:, :, keys] for x in _split(kv, q.shape[3]))
            part = forward(q[:, :, rows], k_part, v_part, *call.options(step, UNBOUNDED, right))
            so_far = out[:, :, rows], lse[:, :, rows]
            out[:, :, rows], lse[:, :, rows] = part if step == 0 else merge(*so_far, *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dout, dlse = grads
        call: Call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dtype = accumulate_dtype(q.dtype)
        dq = heads_last(q, q.shape[3], 0, dtype)
        travelling = None
        for step, block, right, kv in _steps(ctx, _together(k, v)):
            share = None
            if block is not None:
                rows, keys = block
                k_part, v_part = (x[:, :, keys] for x in _split(kv, q.shape[3]))
                part, *share = backward(
                    dout[:, :, rows],
                    None if dlse is None else dlse[:, :, rows],
                    q[:, :, rows],
                    k_part,
                    v_part,
                    out[:, :, rows],
                    lse[:, :, rows],
                    call.options(step, UNBOUNDED, right),
                )
                dq[:, :, rows] += part
            # what the ranks before this one added arrived while this one computed
            if travelling is None:
                dkv = torch.zeros(kv.shape, dtype=dtype, device=kv.device)
            else:
                dkv = travelling.wait()
            if block is not None and share is not None:
                for total, grad in zip(_split(dkv, q.shape[3]), share, strict=False):
                    total[:, :, block[1]] += grad
            travelling = collectives.pass_on(dkv, call.group)
        assert travelling is not None
        dk, dv = _split(travelling.wait(), q.shape[3])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def run(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of this rank's queries; q, k and v are its shards, [B, heads, 2 * chunk, D]."""
    applied: Any = _Ring.apply(q, k, v, call)
    return applied
