"""`attention` of a sequence whose tokens lie on several ranks: arguments, the choice of a mode, and padding.

The modes and what they can do are in `attention`'s docstring; `choose_mode` has the rule of ``auto``.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from streamattn import functional
from streamattn.functional import SegmentIds, resolve_window
from streamattn.parallel import collectives, gather, ring, ulysses
from streamattn.parallel.call import Call
from streamattn.parallel.layout import Layout, in_order, layout_of
from streamattn.pattern import UNBOUNDED

MODES = ("auto", "gather", "ring", "ulysses", "replicated")
MAX_GATHERED_BYTES = 4 << 30
"""Of keys and values of the whole sequence that ``auto`` lets a rank hold at a time beside its shards."""


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    mode: str = ...,
    seq_len: int | None = ...,
    reduce_kv_grads: bool = ...,
    causal: bool = ...,
    window_size: int | tuple[int, int] | None = ...,
    scale: float | None = ...,
    attn_mask: Tensor | None = ...,
    segment_ids: SegmentIds | None = ...,
    kv_lengths: Tensor | None = ...,
    sinks: Tensor | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    mode: str = ...,
    seq_len: int | None = ...,
    reduce_kv_grads: bool = ...,
    causal: bool = ...,
    window_size: int | tuple[int, int] | None = ...,
    scale: float | None = ...,
    attn_mask: Tensor | None = ...,
    segment_ids: SegmentIds | None = ...,
    kv_lengths: Tensor | None = ...,
    sinks: Tensor | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mode: str = "auto",
    seq_len: int | None = None,
    reduce_kv_grads: bool = True,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    segment_ids: SegmentIds | None = None,
    kv_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Self-attention of one sequence whose tokens are shared out to the ranks of a group; exact.

    Each rank holds a shard of the tokens, in the order that `shard` gives them, and gets the output of its
    own queries. Outputs and gradients equal, up to rounding, those of `streamattn.attention` on the whole
    sequence. All ranks must make the same call, with the same shapes and options. The modes:

    - ``gather``: keys and values are gathered from all ranks by groups of heads, each while the one before
      computes. Everything but ``attn_mask``.
    - ``ring``: they travel around the ring of ranks, one shard at a time, while it computes. Holds two
      shards at a time, and in backward their gradients in float32; full and causal attention only, with
      softcap and dropout.
    - ``ulysses``: all-to-all over heads, each rank computes Hq / P heads of the whole sequence; Hq must be a
      multiple of P, and key heads are repeated until theirs is. Everything but ``attn_mask``.
    - ``replicated``: k and v are whole on each rank, in their own order, and only the queries are shared out:
      no collective in forward, and none in backward without ``reduce_kv_grads``. Everything but
      ``attn_mask``.

    Args:
        q: [B, Hq, T, D], this rank's shard; float16, bfloat16, float32 or float64.
        k: [B, Hkv, T, D] likewise; [B, Hkv, seq_len, D] with ``replicated``.
        v: [B, Hkv, T, Dv] likewise.
        group: the ranks that share the sequence. Default: all of the default process group.
        mode: one of the above, or ``auto``: see `choose_mode`.
        seq_len: tokens of the whole sequence. Default: T * P, and with ``replicated`` the length of k.
            Needed where `shard` added padding: its queries have ``out = 0``, ``lse = -inf`` and no gradient.
        reduce_kv_grads: with ``replicated``: each rank gets dk and dv of all queries, summed over the ranks
            in float32 (default); False: those of its own queries, for a caller that sums gradients itself.
        causal: as `streamattn.attention`, positions being the whole sequence's; so are the following.
        window_size: see there.
        scale: see there.
        attn_mask: no mode takes one: pass segment_ids, kv_lengths or a window.
        segment_ids: int32 [B, T], this rank's shard of the ids (of padding, whatever `shard` filled in); or a
            pair, the keys' being whole, [B, seq_len], with ``replicated``.
        kv_lengths: int32 or int64 [B], of whole sequences, the same on all ranks; moves the diagonal as
            there.
        sinks: [Hq], the same on all ranks. Their gradient is the share of this rank's queries (with
            ``ulysses`` of its heads), as any weight's is, to be summed over the ranks.
        softcap: see there.
        dropout_p: see there. Every call of the kernels draws masks of its own, from one seed by torch's
            generator and the rank's number, so ranks that are seeded alike drop different elements. Backward
            drops what forward did. Which ones depends on mode and number of ranks.
        return_lse: also return ``lse`` [B, Hq, T].
        deterministic: see there.
        backend: see there.

    Returns:
        ``out`` [B, Hq, T, Dv], stored heads last, and with ``return_lse`` the pair ``(out, lse)``; both
        differentiable, once.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, value or device, no process group, or a mode that can't serve the call.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}; leave it out for 'auto'")
    scale, softcap, dropout_p = functional.check_options(
        causal, scale, softcap, dropout_p, return_lse, deterministic, backend
    )
    functional.check_qkv(q, k, v, paged=False)
    if q.dim() != 4:
        raise ValueError(f"q, k, v must be 4-D here, got {q.dim()} dimensions; add what is missing")
    q, k, v = functional.of_one_dtype(q, k, v)
    q, k, v = (functional.rows_in_place(x) for x in (q, k, v))
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not served over several ranks; pass segment_ids, kv_lengths or window_size"
        )
    if mode == "replicated":
        seq_len = k.shape[2] if seq_len is None else seq_len
        if k.shape[2] != seq_len:
            raise ValueError(f"k and v must hold seq_len={seq_len} tokens, got {k.shape[2]}")
    elif q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q and k must be shards of one length, got {q.shape[2]} and {k.shape[2]} tokens; keys that are "
            "whole on every rank need mode='replicated'"
        )
    layout = layout_of(q.shape[2], seq_len, group)
    window_left, window_right = resolve_window(window_size, causal)
    if sinks is not None:
        sinks = functional.resolve_sinks(sinks, q, 4)
    if kv_lengths is not None:
        kv_lengths = functional.resolve_lengths(kv_lengths, q, layout.seq_len, 4)
    segments = None
    if segment_ids is not None:
        segments = functional.resolve_segments(segment_ids, q, k.shape[2], 4)
    paired = segments is not None and segments[0] is not segments[1]
    windowed = window_left != UNBOUNDED or window_right not in (0, UNBOUNDED)
    reason = ring_cannot(windowed, segments is not None, kv_lengths is not None, sinks is not None)
    if mode == "auto":
        mode = choose_mode(q, k, v, layout, reason is None)
        if mode == "ulysses" and paired:
            mode = "gather"
    if mode == "ulysses" and paired:
        raise ValueError(
            "mode='ulysses' needs one segment_ids tensor, for it sends queries and keys to the same ranks, "
            "and got a pair; use mode='gather'"
        )
    if mode == "ring" and reason is not None:
        raise ValueError(f"mode='ring' can't serve this call: {reason}; use mode='gather'")
    if mode == "ulysses" and q.shape[1] % layout.size:
        raise ValueError(
            f"mode='ulysses' needs a multiple of {layout.size} query heads, one part for each rank, got "
            f"{q.shape[1]}; use mode='gather'"
        )
    q_segments, kv_segments = None, None
    if segments is not None:
        q_segments, kv_segments = segments
        if mode != "replicated":
            ids = collectives.all_gather(kv_segments.t().contiguous(), group).wait()
            kv_segments = in_order(ids, layout)[: layout.seq_len].t().contiguous()
        if mode == "ulysses":
            q_segments = kv_segments
    seeds = None
    if dropout_p > 0.0:
        calls = {"ring": layout.size, "ulysses": 1}.get(mode) or gather.calls_of(k, v)
        seeds = _seeds(calls, layout, q.device)
    call = Call(
        group=group,
        layout=layout,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        dropout_p=dropout_p,
        backend=backend,
        deterministic=deterministic,
        q_segments=q_segments,
        kv_segments=kv_segments,
        kv_lengths=kv_lengths,
        seeds=seeds,
    )
    if layout.size == 1:
        out, lse = gather.run(q, k, v, sinks, call, reduce=False)
    elif mode == "ring":
        out, lse = ring.run(q, k, v, call)
    elif mode == "ulysses":
        out, lse = ulysses.run(q, k, v, sinks, call, return_lse)
    else:
        out, lse = gather.run(q, k, v, sinks, call, reduce_kv_grads if mode == "replicated" else None)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def _seeds(calls: int, layout: Layout, device: torch.device) -> Tensor:
    """int64 [calls, 2], drawn by torch's generator, and this rank's own where all ranks' generators agree."""
    shape = (layout.size, calls, 2)
    return torch.randint(-(1 << 63), (1 << 63) - 1, shape, dtype=torch.int64, device=device)[layout.rank]


def ring_cannot(windowed: bool, segmented: bool, has_lengths: bool, has_sinks: bool) -> str | None:
    """Why the ring can't serve a call; None where it can."""
    given = {
        "window_size": windowed,
        "segment_ids": segmented,
        "kv_lengths": has_lengths,
        "sinks": has_sinks,
    }
    names = [name for name, there in given.items() if there]
    return f"it does full and causal attention, and got {' and '.join(names)}" if names else None


def choose_mode(q: Tensor, k: Tensor, v: Tensor, layout: Layout, ring_can: bool) -> str:
    """What ``auto`` is: a rule of sizes alone, so that all ranks choose alike.

    Forward moves, for a sequence of S tokens and head_dim d in a dtype of 2 bytes,
    ``(P - 1) / P * 4 * S * Hkv * d`` bytes to each rank by gathering and
    ``(P - 1) / P^2 * 4 * S * d * (Hq + Hkv)`` through each by ``ulysses``. Gathering hides all of it but the
    first of its groups of heads behind compute, ``ulysses`` nothing; but there a rank computes heads of the
    whole sequence in one piece, where the shards of gathering are two. Of as many bytes ``ulysses`` was the
    faster by 4 % on two GPUs of one host, from 16,384 to 131,072 tokens. So:

    1. Where the keys and values of two groups of heads of the whole sequence pass `MAX_GATHERED_BYTES`:
       ``ulysses`` if Hq is a multiple of P, else ``ring`` if it can serve the call.
    2. Else ``ulysses`` where it moves no more bytes than gathering does: ``Hq + Hkv <= P * Hkv``.
    3. Else ``gather``.

    A link between hosts may be too slow for any of it to hide: that is not known here, ask for ``ring`` then.

    Args:
        q: [B, Hq, T, D], a shard.
        k: [B, Hkv, T, D], likewise.
        v: [B, Hkv, T, Dv], likewise.
        layout: of the sequence.
        ring_can: whether the ring can serve the call.
    """
    size, groups = layout.size, gather.count_head_groups(k, v)
    num_kv_heads = math.lcm(k.shape[1], size)  # as ulysses sends them
    splits = q.shape[1] % size == 0
    held = min(2, groups) * (k.numel() + v.numel()) * k.element_size() * size // groups
    if held > MAX_GATHERED_BYTES:
        if splits:
            return "ulysses"
        return "ring" if ring_can else "gather"
    if splits and q.shape[1] + num_kv_heads <= size * k.shape[1]:
        return "ulysses"
    return "gather"
