"""The matrix of attention weights, for who asks for it, and masks of two sources made one.

Contract: who sees whom is `streamattn.attention`'s to the last rule, NaN behind hidden places included.
Layout: q, k [B, H, T, D]; masks in `attention`'s meaning, of any shapes that broadcast. Left out on purpose:
outputs, which always come from `attention`, and dropout.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from streamattn.pattern import UNBOUNDED, hiding_limit, visible


def combine_masks(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """One mask that hides what either hides and adds what either adds.

    Args:
        a: bool (True = visible) or floating (added to the scores), or None.
        b: as `a`, and of a shape that broadcasts with its.

    Returns:
        The other where one is None; bool for two bool masks; in the floating one's dtype for one of each. Two
        floating ones are added in float32, or float64 if one is, in which no sum of finite entries is
        infinite, or so low that it hides what neither does.
    """
    if a is None or b is None:
        return a if b is None else b
    if a.dtype == torch.bool:
        return a & b if b.dtype == torch.bool else torch.where(a, b, -math.inf)
    if b.dtype == torch.bool:
        return torch.where(b, a, -math.inf)
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.where(_shows(a) & _shows(b), _addend(a, dtype) + _addend(b, dtype), -math.inf)


def _shows(mask: Tensor) -> Tensor:
    """Where a floating mask hides nothing, by its own dtype's measure, which a sum of another lacks."""
    lowest = torch.finfo(mask.dtype).min
    return ~(mask <= hiding_limit(lowest, lowest))


def _addend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating mask in `dtype`, its finite entries within such bounds that two never hide or overflow."""
    mask = mask.to(dtype)
    bound = torch.finfo(dtype).max / 5
    return torch.where(mask.isinf(), mask, mask.clamp(-bound, bound))


def in_window(q_len: int, kv_len: int, window: tuple[int, int], device: torch.device) -> Tensor | None:
    """Which keys causality and window, as `attention_weights` takes it, show: bool [T, S]; None for all."""
    if window == (UNBOUNDED, UNBOUNDED):
        return None
    i = torch.arange(q_len, device=device).unsqueeze(1)
    j = torch.arange(kv_len, device=device)
    return visible(i, j, q_len, kv_len, *window)


def attention_weights(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    attn_mask: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The weights behind an output of `attention`, before dropout: ``exp(scale q k^T + mask - lse)``.

    Differentiable in q, k, the mask and ``lse``, whose own gradient is the normalisation's part.

    Args:
        q: [B, Hq, Tq, D].
        k: [B, Hkv, Tk, D].
        lse: [B, Hq, Tq] float32 or float64, as `attention` returned it for the same arguments.
        scale: factor of the scores.
        window: widths to the left and right, `UNBOUNDED` where open.
        attn_mask: 4-D, bool (True = visible) or floating; default None.
        kv_lengths: [B], at most Tk; default None.
        softcap: bound of the scores before the mask, as `attention` takes it; default None: off.

    Returns:
        [B, Hq, Tq, Tk] in lse's dtype.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    with _without_autocast(q.device):
        i = torch.arange(q_len, device=q.device).unsqueeze(1)
        j = torch.arange(kv_len, device=q.device)
        length = kv_len if kv_lengths is None else kv_lengths.view(-1, 1, 1, 1)
        seen = visible(i, j, q_len, length, *window)
        if attn_mask is not None:
            shown = attn_mask
            if attn_mask.dtype != torch.bool:  # as `attention` decides it
                limit = hiding_limit(torch.finfo(attn_mask.dtype).min, torch.finfo(lse.dtype).min)
                shown = ~(attn_mask.to(lse.dtype) <= limit)
            seen = seen & shown
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).to(lse.dtype)
        # a NaN in a key that no query sees, or in a query that sees no key, must enter no gradient's product
        k = torch.where(seen.any(dim=-2).unsqueeze(-1), k, 0.0)
        q = torch.where(seen.any(dim=-1, keepdim=True), q.to(lse.dtype), 0.0)
        scores = (q * scale) @ k.mT
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            scores = scores + attn_mask.to(scores.dtype)
        scores = torch.where(seen, scores, -math.inf)
        lse = torch.where(lse == -math.inf, 0.0, lse)  # a query that sees nothing: exp(-inf - 0) = 0
        return torch.exp(scores - lse.unsqueeze(-1))


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    # PyTorch 2.11 can't trace the question; what is compiled runs on devices that have it
    if not torch.compiler.is_compiling() and not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
