"""Dense float64 attention, the judge of every implementation.

Written from the public contract with plain torch operators: it forms the whole [B, Hq, Tq, Tk] score matrix,
shares no code with the package and lets autograd differentiate it. Everything is computed in float64 on the
device of `q`, whatever the inputs' dtype.

Layout: `q` [B, Hq, Tq, D], `k` [B, Hkv, Tk, D], `v` [B, Hkv, Tk, Dv], or the same without the batch (3-D) or
without batch and head (2-D), the options then unbatched alike.

Left out on purpose: validation (inputs are taken to be legal) and drawing a dropout mask (it is given).
"""

from __future__ import annotations

import torch
from torch import Tensor

Window = int | tuple[int, int] | None
Segments = Tensor | tuple[Tensor, Tensor] | None


def hidden_entries(attn_mask: Tensor) -> Tensor:
    """Bool tensor of the mask's own shape: True where a bool or additive mask hides the key."""
    if attn_mask.dtype == torch.bool:
        return ~attn_mask
    return attn_mask <= torch.finfo(attn_mask.dtype).min / 2


def visible_pairs(
    batch: int,
    q_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    window_size: Window = None,
    attn_mask: Tensor | None = None,
    segment_ids: Segments = None,
    kv_lengths: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Who sees whom: bool, broadcastable to [B, Hq, Tq, Tk]. All conditions are ANDed."""
    i = torch.arange(q_len, device=device).view(1, 1, q_len, 1)
    j = torch.arange(kv_len, device=device).view(1, 1, 1, kv_len)
    if kv_lengths is None:
        length = torch.full((batch, 1, 1, 1), kv_len, device=device)
    else:
        length = kv_lengths.to(device).long().clamp(0, kv_len).view(batch, 1, 1, 1)
    position = i + length - q_len  # bottom-right: the last query stands at the last valid key
    visible = (j < length).expand(batch, 1, q_len, kv_len)
    if isinstance(window_size, int):
        causal, left, right = True, window_size - 1, 0
    else:
        left, right = window_size if window_size is not None else (-1, -1)
    if causal:
        visible = visible & (j <= position)
    if left >= 0:
        visible = visible & (j >= position - left)
    if right >= 0:
        visible = visible & (j <= position + right)
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        q_ids, kv_ids = q_ids.expand(batch, q_len), kv_ids.expand(batch, kv_len)
        q_ids, kv_ids = q_ids[:, None, :, None], kv_ids[:, None, None, :]
        visible = visible & (q_ids == kv_ids) & (q_ids >= 0) & (kv_ids >= 0)
    if attn_mask is not None:
        visible = visible & ~hidden_entries(attn_mask)
    return visible


def kept_probability(dropout_p: float) -> float:
    """The probability with which an element stays: dropout is rounded to 1/256, and never to certainty."""
    return 1.0 - min(round(dropout_p * 256), 255) / 256


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Window = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    segment_ids: Segments = None,
    kv_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by definition.

    Args:
        q: any floating dtype, 2-D, 3-D or 4-D.
        k: likewise.
        v: likewise.
        sinks: [Hq], the score of one more key that every query sees and that has no value.
        keep: bool, broadcastable to [B, Hq, Tq, Tk]: the elements that dropout keeps.

    Returns:
        `out` [..., Tq, Dv] and `lse` [..., Tq], float64, differentiable by autograd.
    """
    missing = 4 - q.dim()
    q, k, v = (x.double()[(None,) * missing] for x in (q, k, v))
    batch, q_heads, q_len, head_dim = q.shape
    kv_heads, kv_len = k.shape[1:3]
    visible = visible_pairs(
        batch,
        q_len,
        kv_len,
        causal=causal,
        window_size=window_size,
        attn_mask=attn_mask,
        segment_ids=segment_ids,
        kv_lengths=kv_lengths,
        device=q.device,
    ).expand(batch, q_heads, q_len, kv_len)

    # A key that no query of its (batch, key head) sees takes no part, whatever it holds.
    group = q_heads // kv_heads
    seen = visible.reshape(batch, kv_heads, group * q_len, kv_len).any(2)[..., None]
    k = torch.where(seen, k, 0.0).repeat_interleave(group, dim=1)
    v = torch.where(seen, v, 0.0).repeat_interleave(group, dim=1)

    scores = q @ k.transpose(-1, -2) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + torch.where(hidden_entries(attn_mask), 0.0, attn_mask.double())
    scores = torch.where(visible, scores, -torch.inf)
    if sinks is not None:
        logits = sinks.double().reshape(1, q_heads, 1, 1).expand(batch, -1, q_len, -1)
        scores = torch.cat([scores, logits], dim=-1)
    blind = (scores == -torch.inf).all(-1, keepdim=True)  # rows that see nothing
    safe_lse = (
        torch.logsumexp(torch.where(blind, 0.0, scores), -1, keepdim=True)
        if scores.shape[-1]
        else scores.sum(-1, True)
    )
    scores = scores[..., :kv_len]
    weights = torch.where(visible, torch.exp(scores - safe_lse), 0.0)
    if keep is not None:
        weights = weights * keep / kept_probability(dropout_p)
    out = weights @ v
    lse = torch.where(blind, -torch.inf, safe_lse).squeeze(-1)
    for _ in range(missing):
        out, lse = out.squeeze(0), lse.squeeze(0)
    return out, lse
