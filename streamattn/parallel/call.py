"""What the modes of context parallelism share: a call's options, and the attention ops on parts of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamattn.parallel.layout import Layout

_forward: Any = torch.ops.streamattn.attention_forward
_backward: Any = torch.ops.streamattn.attention_backward


@dataclass(frozen=True)
class Call:
    """The options of one call of `parallel.attention`, resolved; tensors that need no gradient among them.

    Attributes:
        group: the ranks that share the sequence.
        layout: which tokens this one holds.
        scale: factor of the scores.
        window_left: `pattern.UNBOUNDED` = open.
        window_right: likewise; 0 is causal.
        softcap: 0 = none.
        dropout_p: 0 = none.
        backend: as `attention` takes it.
        deterministic: as `attention` takes it.
        q_segments: int32 [B, Tq] of this rank's queries.
        kv_segments: int32 [B, seq_len], in the sequence's order.
        kv_lengths: [B], of whole sequences.
        seeds: int64 [calls, 2], whose first column has one for each call of the ops; None without dropout.
            The other keeps them at whole 16 bytes, as kernels are compiled for.
    """

    group: dist.ProcessGroup | None
    layout: Layout
    scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    backend: str
    deterministic: bool | None
    q_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    kv_lengths: Tensor | None = None
    seeds: Tensor | None = None

    def masks(self, rows: slice, keys: slice, cut: int) -> tuple[Tensor | None, ...]:
        """Segments of queries and keys, and lengths, of a part: see `layout.Span`."""
        lengths = self.kv_lengths
        if lengths is not None and cut > 0:
            lengths = (lengths - cut).clamp(min=0)
        if self.q_segments is None or self.kv_segments is None:
            return None, None, lengths
        return self.q_segments[:, rows].contiguous(), self.kv_segments[:, keys].contiguous(), lengths

    def options(
        self,
        number: int,
        window_left: int,
        window_right: int,
        masks: tuple[Tensor | None, ...] = (None,) * 3,
        sinks: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """The arguments behind q, k and v of the ops, for the part with this number."""
        seed = None if self.seeds is None else self.seeds[number, :1]
        window = (window_left, window_right)
        rest = (self.softcap, self.dropout_p, self.backend, self.deterministic)
        return (None, *masks, seed, sinks, self.scale, *window, *rest)


forward: Callable[..., tuple[Tensor, Tensor]] = _forward
"""``forward(q, k, v, *options) -> (out, lse)``."""


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: tuple[Any, ...],
    sink_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, dsinks)``: with out and lse over all keys, the exact shares of the keys that are given.

    The probabilities are ``exp(scores - lse)``, and ``rowsum(dout * out) - dlse`` belongs to the query alone
    (Dao, arXiv:2307.08691, section 3.1.2); so the gradients over disjoint sets of keys add up.
    """
    # the ops read an lse that they wrote, which is contiguous; q, k, v, out and the gradients may be views
    lse = lse.contiguous()
    dq, dk, dv, _, dsinks = _backward(dout, dlse, q, k, v, out, lse, *options, False, sink_grad)
    return dq, dk, dv, dsinks


class _Once(torch.autograd.Function):
    """A gradient whose own derivative raises instead of being silently missing."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *sources: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError("attention over several ranks is differentiable once")


def once_differentiable(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """For the ``backward`` of an ``autograd.Function``: no graph is made of it, but by `_Once`."""

    @functools.wraps(function)
    def wrapped(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            results = function(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        sources = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        once: Any = _Once.apply
        return tuple(x if x is None else once(x, *sources) for x in results)

    return wrapped


def heads_last(x: Tensor, head_dim: int, tokens: int, dtype: torch.dtype | None = None) -> Tensor:
    """[B, H, T, head_dim] for x [B, H, T, D], stored heads last, of x's dtype by default.

    The first ``tokens`` of T are to be written, the others are 0.
    """
    batch, num_heads, length, _ = x.shape
    made = x.new_empty((batch, length, num_heads, head_dim), dtype=dtype)
    made[:, tokens:] = 0
    return made.transpose(1, 2)
