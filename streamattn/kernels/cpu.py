"""PyTorch's fused CPU attention behind this package's contract: the backend ``sdpa``.

Shapes and arguments as in `streamattn.reference`. The fused kernel knows full and square causal attention, a
dense additive mask, grouped heads, and returns ``lse``; every other pattern is served by walking `BLOCK_M`
queries at a time against the keys they can see, with the mask of that strip, so memory stays linear in the
sequence. Left out on purpose, because the fused kernel lacks it: softcap, dropout, Dv != D (see
`streamattn.dispatch`); gradients of ``lse`` and of the mask are the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from streamattn.pattern import UNBOUNDED, hiding_limit, kv_span, visible

BLOCK_M = 256
MIN_PLAIN_KEYS = 16
"""With fewer, less than a vector of floats, and no mask, a row of NaN passes for one that sees nothing."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _is_plain(
    q: Tensor, k: Tensor, masks: tuple[Tensor | None, ...], scale: float, window_left: int, window_right: int
) -> bool:
    """Whether one call of the fused kernel with or without its own causal flag is enough."""
    if any(mask is not None for mask in masks) or window_left < UNBOUNDED or k.shape[2] < MIN_PLAIN_KEYS:
        return False
    if _sees_all(q, window_right):
        return True
    # its own causal mask takes part in the product with the scale: -inf * 0 or * -1 would hide nothing
    return window_right == 0 and q.shape[2] == k.shape[2] and scale > 0.0


def _sees_all(q: Tensor, window_right: int) -> bool:
    """Whether the right limit hides nothing, as from one new query on a cache."""
    return window_right >= q.shape[2] - 1


def _rows_apart(x: Tensor) -> Tensor:
    """``x`` itself, or a copy where rows share memory: the fused kernel's products take no such matrix."""
    if x.stride(2) >= x.shape[3]:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row as it is


def _stored_heads_last(x: Tensor) -> Tensor:
    """``x`` [B, H, T, D] stored [B, T, H, D], whatever layout the fused kernel took from its inputs."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _strips(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    window_left: int,
    window_right: int,
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yields (rows, keys, seen, bias): bool and additive, both broadcastable to [B, Hq, m, n]."""
    q_len, kv_len = q.shape[2], k.shape[2]
    lengths: int | Tensor = kv_len if kv_lengths is None else kv_lengths.clamp(0, kv_len).view(-1, 1, 1, 1)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for m0 in range(0, q_len, BLOCK_M):
        m1 = min(m0 + BLOCK_M, q_len)
        n0, n1 = kv_span(m0, m1 - 1, q_len, kv_len, window_left, window_right)
        if kv_lengths is not None:
            n0 = 0  # a shorter row stands further left
        if n0 >= n1:
            n0, n1 = 0, 1  # no row of the strip sees a key: one masked key keeps the shapes legal
        i = torch.arange(m0, m1, device=q.device).view(1, 1, -1, 1)
        j = torch.arange(n0, n1, device=q.device).view(1, 1, 1, -1)
        seen = visible(i, j, q_len, lengths, window_left, window_right)
        if q_segments is not None and kv_segments is not None:
            own, theirs = q_segments[:, None, m0:m1, None], kv_segments[:, None, None, n0:n1]
            seen = seen & (own == theirs) & (own >= 0)
        extra = None
        if attn_mask is not None:
            extra = attn_mask[:, :, m0:m1] if attn_mask.shape[2] > 1 else attn_mask
            extra = extra[..., n0:n1] if extra.shape[3] > 1 else extra
            if extra.dtype == torch.bool:
                seen = seen & extra
            else:  # a NaN does not hide, it shows in the result
                limit = hiding_limit(torch.finfo(extra.dtype).min, torch.finfo(dtype).min)
                extra = extra.to(dtype)
                seen = seen & ~(extra <= limit)
        bias = torch.zeros(seen.shape, dtype=dtype, device=q.device)
        if extra is not None and extra.dtype != torch.bool:
            bias = bias + extra
        yield slice(m0, m1), slice(n0, n1), seen, bias.masked_fill(~seen, -math.inf)


def _harmless(q: Tensor, k: Tensor, v: Tensor, scale: float, dout: Tensor | None = None) -> Tensor | None:
    """Keys that leave no trace where they are hidden, as they are, bool [B, Hkv, Tk, 1]; None for all.

    Such a key's products are finite, by Cauchy and Schwarz: ``|q @ k| <= |q| |k|``; likewise ``dout @ v``.
    Most calls have no other, and this reading of q, k and v spares them copies of k and v.
    """
    norm_q, norm_k, norm_v = (torch.linalg.vector_norm(x, dim=3, keepdim=True).float() for x in (q, k, v))
    bound = norm_k * (norm_q.amax() * max(1.0, abs(scale)))
    if dout is not None:
        norm_v = norm_v * torch.linalg.vector_norm(dout, dim=3).float().amax()
    finite = (bound + norm_v).isfinite()
    return None if bool(finite.all()) else finite


def _kept(seen: Tensor, num_kv_heads: int, harmless: Tensor | None = None) -> Tensor | None:
    """Keys that some query of the strip sees, and the harmless ones, bool [b, h, n, 1]; None for all.

    h is Hq where the heads of a group keep different keys, else Hkv or 1.
    """
    kept = seen.any(dim=2).unsqueeze(-1)
    if kept.shape[1] > 1:
        kept = kept.unflatten(1, (num_kv_heads, -1))
    else:
        kept = kept.unsqueeze(2)
    if harmless is not None:
        kept = kept | harmless.unsqueeze(2)
    if bool(kept.all()):
        return None
    if bool((kept == kept[:, :, :1]).all()):
        return kept[:, :, 0]
    return kept.flatten(1, 2)


def _only_seen(x: Tensor, kept: Tensor | None) -> Tensor:
    """``x`` [B, Hkv, n, D] or [B, Hq, n, D], 0 at the keys not kept: their NaN reaches nothing.

    Where heads of a group keep different keys, each gets a copy of its own.
    """
    if kept is None:
        return x
    if kept.shape[1] > x.shape[1]:
        x = x.repeat_interleave(kept.shape[1] // x.shape[1], dim=1)
    return torch.where(kept, x, 0.0)


def _may_weigh_nothing(out: Tensor, lse: Tensor) -> bool:
    """Whether a row may have no score above -inf: the fused kernel gives it an ``lse`` and an out of 0."""
    suspects = lse == 0.0
    return bool(suspects.any()) and bool((suspects & (out == 0.0).all(dim=3)).any())


def _weighs_nothing(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Rows of a strip whose scores are all -inf, bool [B, Hq, m]: hidden, or below what floats can hold."""
    q, k = q.to(bias.dtype), k.to(bias.dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(2, 3) * scale + bias
    return scores.masked_fill(bias == -math.inf, -math.inf).amax(dim=3) == -math.inf


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Adds a key without a value, seen by every row, to the sums of the softmax; changes out in place."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    share = torch.exp(lse - torch.where(total == -math.inf, 0.0, total))
    return out.mul_(share.unsqueeze(-1)), total


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """``out`` [B, Hq, Tq, D] stored [B, Tq, Hq, D], ``lse`` [B, Hq, Tq] float32 (float64 for float64)."""
    assert softcap == 0.0 and dropout_p == 0.0 and seed is None
    q, k, v = _rows_apart(q), _rows_apart(k), _rows_apart(v)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    if _is_plain(q, k, masks, scale, window_left, window_right):
        out, lse = _flash(q, k, v, 0.0, not _sees_all(q, window_right), scale=scale)
        if not _may_weigh_nothing(out, lse):
            return _with_sinks(_stored_heads_last(out), lse.contiguous(), sinks)
    out = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
    lse = q.new_empty(q.shape[:3], dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    harmless = _harmless(q, k, v, scale)
    for rows, keys, seen, bias in _strips(q, k, *masks, window_left, window_right):
        kept = None if harmless is None else _kept(seen, k.shape[1], harmless[:, :, keys])
        k_strip, v_strip = (_only_seen(x[:, :, keys], kept) for x in (k, v))
        out_strip, lse_strip = _flash(
            q[:, :, rows], k_strip, v_strip, 0.0, False, attn_mask=bias, scale=scale
        )
        nothing = ~seen.any(dim=3)
        if _may_weigh_nothing(out_strip, lse_strip.masked_fill(nothing, -math.inf)):
            nothing = nothing | _weighs_nothing(q[:, :, rows], k_strip, bias, scale)
        out[:, :, rows] = out_strip.masked_fill(nothing.unsqueeze(-1), 0.0)
        lse[:, :, rows] = lse_strip.masked_fill(nothing, -math.inf)
    return _with_sinks(out, lse, sinks)


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """``(dq, dk, dv, None)`` of `attention_forward` in the inputs' dtype, stored [B, T, H, D]."""
    assert softcap == 0.0 and dropout_p == 0.0 and seed is None and dlse is None and not mask_grad
    q, k, v = _rows_apart(q), _rows_apart(k), _rows_apart(v)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    if _is_plain(q, k, masks, scale, window_left, window_right):
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # such a row has no weights: exp(-inf - 0) is 0
        dq, dk, dv = _flash_backward(
            dout, q, k, v, out, lse, 0.0, not _sees_all(q, window_right), scale=scale
        )
        return _stored_heads_last(dq), _stored_heads_last(dk), _stored_heads_last(dv), None
    dq = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2)
    # strips add to dk and dv: sums in half precision would round at every strip
    dk, dv = (x.new_zeros(x.transpose(1, 2).shape, dtype=lse.dtype).transpose(1, 2) for x in (k, v))
    every_key_harmless = _harmless(q, k, v, scale, dout) is None
    for rows, keys, seen, bias in _strips(q, k, *masks, window_left, window_right):
        nothing = ~seen.any(dim=3)
        q_strip, dout_strip = (x[:, :, rows].masked_fill(nothing.unsqueeze(-1), 0.0) for x in (q, dout))
        lse_strip = lse[:, :, rows]
        lse_strip = lse_strip.masked_fill(nothing | (lse_strip == -math.inf), 0.0)
        # a row that is NaN for a key it sees is so for the others, and would enter their gradients
        exact = every_key_harmless and bool(lse_strip.isfinite().all())
        kept = None if exact else _kept(seen, k.shape[1])
        k_strip, v_strip = (_only_seen(x[:, :, keys], kept) for x in (k, v))
        dq_strip, dk_strip, dv_strip = _flash_backward(
            dout_strip,
            q_strip,
            k_strip,
            v_strip,
            out[:, :, rows],
            lse_strip,
            0.0,
            False,
            attn_mask=bias,
            scale=scale,
        )
        dq[:, :, rows] = dq_strip
        for grad, strip in ((dk, dk_strip), (dv, dv_strip)):
            # an unseen key has no gradient, be a row NaN for what it does see
            strip = _only_seen(strip, kept).unflatten(1, (k.shape[1], -1)).sum(dim=2, dtype=grad.dtype)
            grad[:, :, keys] += strip
    return dq, dk.to(k.dtype), dv.to(v.dtype), None
