"""Queries stay, keys and values of the whole sequence come: gathered from their shards, or there already.

Gathering goes by groups of heads: while one group computes, the next one's keys and values are on their way,
together in one buffer. So all but the first group's way is hidden behind compute, and no more than two groups
of the whole sequence's keys are held at a time; backward gathers them again instead of keeping them. A rank
makes at most two calls for each group of heads, one for each of its chunks, and each chunk sees a stretch of
the keys that ends with its own last query, so `attention`'s alignment to the bottom right is all it takes.
(All-gather of keys and values with zigzag shards: Llama 3, arXiv:2407.21783, section 3.3.2.)

Buffers are [tokens, B, heads, D + Dv], tokens first, so that what is gathered lies in the order of the ranks,
and in that of the sequence after one copy of whole chunks. The attention reads its views in place.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from streamattn.parallel.layout import Layout, in_order
from streamattn.reference import accumulate_dtype

MAX_HEAD_GROUPS = 4
MIN_GROUP_BYTES = 32 << 20
"""Of keys and values that a rank sends at a time: links are slow with less."""


def count_head_groups(k: Tensor, v: Tensor) -> int:
    """In how many groups of heads keys and values are gathered: a divisor of Hkv, at most `MAX_HEAD_GROUPS`.

    Args:
        k: [B, Hkv, T, D], a shard.
        v: [B, Hkv, T, Dv].
    """
    size = (k.numel() + v.numel()) * k.element_size()
    wanted = min(MAX_HEAD_GROUPS, max(1, size // max(1, MIN_GROUP_BYTES)))
    return max(n for n in range(1, wanted + 1) if k.shape[1] % n == 0)


def calls_of(k: Tensor, v: Tensor) -> int:
    """How many seeds a call with dropout needs at most."""
    return 2 * count_head_groups(k, v)


@dataclass
class _Heads:
    """Keys and values of one group of heads, on their way."""

    pending: collectives.Pending
    head_dim: int
    layout: Layout
    chunks: int

    def wait(self) -> tuple[Tensor, Tensor]:
        """k [B, h, tokens, D] and v [B, h, tokens, Dv] of the sequence's first chunks."""
        return _split(in_order(self.pending.wait(), self.layout, self.chunks), self.head_dim)


def _split(kv: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views [B, h, T, D] and [B, h, T, Dv] of a buffer [T, B, h, D + Dv]."""
    kv = kv.permute(1, 2, 0, 3)
    return kv[..., :head_dim], kv[..., head_dim:]


def _tokens_first(k: Tensor, v: Tensor) -> Tensor:
    """k [B, h, T, D] and v [B, h, T, Dv] in one new buffer [T, B, h, D + Dv]."""
    batch, heads, length, head_dim = k.shape
    kv = k.new_empty((length, batch, heads, head_dim + v.shape[3]))
    kv[..., :head_dim] = k.permute(2, 0, 1, 3)
    kv[..., head_dim:] = v.permute(2, 0, 1, 3)
    return kv


class _Gathered(torch.autograd.Function):
    """``(out, lse)`` of a rank's queries and the whole sequence's keys; `run` is its way in."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, reduce: bool | None
    ) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.reduce = call, reduce
        ctx.spans = call.layout.spans(call.window_left, call.window_right, call.kv_lengths is not None)
        ctx.groups = 1 if reduce is not None else count_head_groups(k, v)
        out = heads_last(q, v.shape[3], call.layout.tokens())
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulate_dtype(q.dtype))
        for group, keys, values in _each_group(ctx, k, v):
            heads = _heads(q, ctx.groups, group)
            for number, span in enumerate(ctx.spans):
                options = _options(ctx, sinks, heads, group, number)
                part = forward(
                    q[:, heads, span.rows], keys[:, :, span.keys], values[:, :, span.keys], *options
                )
                out[:, heads, span.rows], lse[:, heads, span.rows] = part
            del keys, values
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dout, dlse = grads
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        dq = heads_last(q, q.shape[3], ctx.call.layout.tokens())
        dsinks = None if sinks is None else torch.zeros_like(sinks)
        way = _Whole(ctx, k, v) if ctx.reduce is not None else _Scattered(ctx, k, v)
        for group, keys, values in _each_group(ctx, k, v):
            heads = _heads(q, ctx.groups, group)
            for number, span in enumerate(ctx.spans):
                options = _options(ctx, sinks, heads, group, number)
                part, dk, dv, dsink = backward(
                    dout[:, heads, span.rows],
                    None if dlse is None else dlse[:, heads, span.rows],
                    q[:, heads, span.rows],
                    keys[:, :, span.keys],
                    values[:, :, span.keys],
                    out[:, heads, span.rows],
                    lse[:, heads, span.rows],
                    options,
                    sinks is not None,
                )
                dq[:, heads, span.rows] = part
                way.add(span.keys, dk, dv)
                if dsinks is not None:
                    dsinks[heads] += dsink
            way.send(group)
            del keys, values
        dk, dv = way.finish()
        return dq, dk, dv, dsinks, None, None


def run(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call, reduce: bool | None
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of a rank's queries [B, Hq, 2 * chunk, D].

    Args:
        q: this rank's shard.
        k: likewise [B, Hkv, 2 * chunk, D]; with ``reduce`` the whole sequence's [B, Hkv, seq_len, D].
        v: likewise.
        sinks: [Hq] or None.
        call: the options.
        reduce: None: k and v are shards. Else they are whole on each rank, and True sums their gradients over
            the ranks, False leaves those of this rank's queries.
    """
    applied: Any = _Gathered.apply(q, k, v, sinks, call, reduce)
    return applied


def _heads(q: Tensor, groups: int, group: int) -> slice:
    """Query heads of a group."""
    each = q.shape[1] // groups
    return slice(group * each, (group + 1) * each)


def _options(ctx: Any, sinks: Tensor | None, heads: slice, group: int, number: int) -> tuple[Any, ...]:
    span, call = ctx.spans[number], ctx.call
    masks = call.masks(span.rows, span.keys, span.cut)
    own = None if sinks is None else sinks[heads]
    part = group * len(ctx.spans) + number
    return call.options(part, span.window_left, span.window_right, masks, own)


def _each_group(ctx: Any, k: Tensor, v: Tensor):
    """Yields (group, keys, values) of the whole sequence, the next group's being on their way."""
    if ctx.reduce is not None:
        yield 0, k, v
        return
    call: Call = ctx.call
    stop = max((span.keys.stop for span in ctx.spans), default=0)
    chunks = max(-(-stop // call.layout.chunk), 1)  # one for a rank of padding alone, too

    def start(group: int) -> _Heads:
        heads = _heads(k, ctx.groups, group)
        kv = _tokens_first(k[:, heads], v[:, heads])
        return _Heads(collectives.all_gather(kv, call.group), k.shape[3], call.layout, chunks)

    following: _Heads | None = start(0)
    for group in range(ctx.groups):
        assert following is not None
        keys, values = following.wait()
        following = None  # what was gathered is free before the next is begun: `wait` copied it
        if group + 1 < ctx.groups:
            following = start(group + 1)
        yield group, keys, values
        del keys, values


class _Scattered:
    """Gradients of gathered keys and values on their way to the ranks that hold the shards.

    Of each group the two spans' gradients are added, rounded once to the tensors' dtype, and sent; what
    arrives is summed in float32. A group is on its way while the next one computes.
    """

    def __init__(self, ctx: Any, k: Tensor, v: Tensor) -> None:
        self.call: Call = ctx.call
        self.groups = ctx.groups
        self.head_dim = k.shape[3]
        self.dk, self.dv = (heads_last(x, x.shape[3], x.shape[2]) for x in (k, v))
        self.sent: tuple[int, collectives.Pending] | None = None
        self._begin()

    def _begin(self) -> None:
        layout, (batch, num_kv_heads) = self.call.layout, self.dk.shape[:2]
        width = self.head_dim + self.dv.shape[3]
        shape = (2 * layout.size, layout.chunk, batch, num_kv_heads // self.groups, width)
        self.parts = self.dk.new_empty(shape)
        self.begun: set[int] = set()

    def add(self, keys: slice, dk: Tensor, dv: Tensor) -> None:
        """Add the gradients [B, h, tokens, D] and [B, h, tokens, Dv] of a stretch of the sequence."""
        chunk, order = self.call.layout.chunk, self.call.layout.order
        grads = (dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3))
        for c in range(keys.start // chunk, -(-keys.stop // chunk)):
            first, stop = max(keys.start, c * chunk), min(keys.stop, (c + 1) * chunk)
            whole, place = stop - first == chunk, self.parts[order[c]]
            fresh = c not in self.begun
            if fresh and not whole:
                place.zero_()
            self.begun.add(c)
            target = place[first - c * chunk : stop - c * chunk]
            halves = (target[..., : self.head_dim], target[..., self.head_dim :])
            for half, grad in zip(halves, grads, strict=True):
                piece = grad[first - keys.start : stop - keys.start]
                if fresh and whole:
                    half.copy_(piece)
                else:
                    half.add_(piece)

    def send(self, group: int) -> None:
        """Send what was added to this group's heads."""
        for c, place in enumerate(self.call.layout.order):
            if c not in self.begun:
                self.parts[place].zero_()
        layout = self.call.layout
        parts = self.parts.view(layout.size, layout.length, *self.parts.shape[2:])
        pending = collectives.all_to_all(parts, self.call.group)
        self._receive()
        self.sent = group, pending
        if group + 1 < self.groups:
            self._begin()

    def _receive(self) -> None:
        if self.sent is None:
            return
        group, pending = self.sent
        received = pending.wait()
        total = received.sum(dim=0, dtype=accumulate_dtype(received.dtype))
        heads = _heads(self.dk, self.groups, group)
        self.dk[:, heads], self.dv[:, heads] = _split(total, self.head_dim)

    def finish(self) -> tuple[Tensor, Tensor]:
        """``(dk, dv)`` of this rank's shard."""
        self._receive()
        return self.dk, self.dv


class _Whole:
    """Gradients of keys and values that every rank holds whole, in float32."""

    def __init__(self, ctx: Any, k: Tensor, v: Tensor) -> None:
        self.call: Call = ctx.call
        self.reduce, self.k, self.v = ctx.reduce, k, v
        batch, heads, length, head_dim = k.shape
        shape = (length, batch, heads, head_dim + v.shape[3])
        self.total = k.new_zeros(shape, dtype=accumulate_dtype(k.dtype))

    def add(self, keys: slice, dk: Tensor, dv: Tensor) -> None:
        """As `_Scattered.add`."""
        for total, grad in zip(_split(self.total[keys], self.k.shape[3]), (dk, dv), strict=True):
            total += grad

    def send(self, group: int) -> None:
        """There is one group, and `finish` sums it."""

    def finish(self) -> tuple[Tensor, Tensor]:
        """``(dk, dv)`` [B, Hkv, seq_len, D], of all ranks' queries if they are to be summed."""
        if self.reduce:
            collectives.all_reduce(self.total, self.call.group).wait()
        dk, dv = _split(self.total, self.k.shape[3])
        return dk.to(self.k.dtype), dv.to(self.v.dtype)
