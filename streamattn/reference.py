"""The attention of this package in plain PyTorch: tiled online softmax, forward and backward, on any device.

It reads as the algorithm of FlashAttention-2 (Dao 2023, arXiv:2307.08691) with the online softmax of Milakov
and Gimelshein (2018, arXiv:1805.02867): queries and keys are walked tile by tile, a running maximum ``m`` and
denominator ``l`` rescale the accumulator, and the backward recomputes the probabilities from ``lse``. It
defines what the fused kernels must return, and it serves what they can't: float64 and a head_dim above 8192
on a GPU; dropout, softcap, Dv != D, and gradients through ``lse`` or into a mask on the CPU; empty tensors.

Shapes: ``q`` [B, Hq, Tq, D], ``k`` [B, Hkv, Tk, D], ``v`` [B, Hkv, Tk, Dv], ``attn_mask`` 4-D with each
dimension full or 1, segments int32 [B, Tq] and [B, Tk], ``kv_lengths`` [B]; arguments are validated by
`streamattn.functional`. Products and sums are float32, or float64 for float64 inputs. Tiles no query can see
are not visited; nothing of the size Tq x Tk is ever held. Left out on purpose: speed beyond what batched
matrix products give.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from einops import rearrange, repeat
from torch import Tensor

from streamattn.pattern import PHILOX_ROUNDS, drop_threshold, hiding_limit, kv_span, kv_span_full, visible

P = ParamSpec("P")
R = TypeVar("R")

BLOCK_M = 256
BLOCK_N = 512

_PHILOX_M = (0xD2511F53, 0xCD9E8D57)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_U32 = 0xFFFFFFFF


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32: the dtype of products, sums and ``lse``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def heads_last(x: Tensor, head_dim: int) -> Tensor:
    """An uninitialised tensor of x's dtype, batch, heads and length, stored [B, T, H, head_dim].

    Merging the heads of an output stored so is a view.
    """
    batch, num_heads, length, _ = x.shape
    return x.new_empty((batch, length, num_heads, head_dim)).transpose(1, 2)


def _philox_words(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor) -> list[Tensor]:
    """Philox-4x32 (Salmon et al. 2011) of counters (c0, c1, c2, 0), key = seed: four 32-bit words, int64."""
    c0, c1, c2 = torch.broadcast_tensors(c0, c1, c2)
    c = [c0, c1, c2, torch.zeros_like(c0)]
    key = [seed & _U32, (seed >> 32) & _U32]
    for _ in range(PHILOX_ROUNDS):
        high, low = [], []
        for word, factor in ((c[0], _PHILOX_M[0]), (c[2], _PHILOX_M[1])):
            upper = factor * (word >> 16) + ((factor * (word & 0xFFFF)) >> 16)  # below 2^49: no overflow
            high.append(upper >> 16)
            low.append((factor * word) & _U32)  # wraps modulo 2^64, low bits stay right
        c = [high[1] ^ c[1] ^ key[0], low[1], high[0] ^ c[3] ^ key[1], low[0]]
        key = [(key[0] + _PHILOX_W[0]) & _U32, (key[1] + _PHILOX_W[1]) & _U32]
    return c


def keep_mask(
    seed: Tensor, dropout_p: float, batch: int, num_heads: int, rows: tuple[int, int], cols: tuple[int, int]
) -> Tensor:
    """The dropout mask that every backend applies, for queries ``rows`` and keys ``cols`` (half-open ranges).

    One Philox call gives 16 bytes, for 16 keys of one query: within each 64 keys, call ``c`` of 0..3 serves
    keys ``8 * t + 2 * c + e`` (t 0..7, e 0..1) by its byte ``2 * t + e``. These are the columns that one
    thread of a tensor-core accumulator holds.

    Args:
        seed: int64, one element, the seed of the call.
        dropout_p: probability of dropping, in [0, 1); rounded to 1/256.
        batch: B.
        num_heads: Hq.
        rows: first and last + 1 of the queries.
        cols: first and last + 1 of the keys.

    Returns:
        bool [B, Hq, rows, cols] on the seed's device, True = kept.
    """
    device = seed.device
    head = torch.arange(batch * num_heads, device=device).view(batch, num_heads, 1, 1)
    i = torch.arange(*rows, device=device).view(-1, 1)
    first, last = cols[0] // 64, -(-cols[1] // 64)
    call = torch.arange(4 * first, 4 * last, device=device)
    words = torch.stack(_philox_words(seed.reshape(()), i, call, head), dim=-1)
    shifts = torch.arange(0, 32, 8, device=device)
    octets = ((words.unsqueeze(-1) >> shifts) & 255).flatten(-2)  # [B, H, m, calls, 16]
    octets = rearrange(octets, "b h m (block c) (t e) -> b h m (block t c e)", c=4, e=2)
    start = cols[0] - 64 * first
    return octets[..., start : start + cols[1] - cols[0]] >= drop_threshold(dropout_p)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``.
    Associative and commutative up to rounding; a side that saw nothing (``lse`` -inf) has no weight.

    Args:
        out_a: [..., T, Dv], any floating dtype.
        lse_a: [..., T] float32 or float64.
        out_b: as ``out_a``.
        lse_b: as ``lse_a``.

    Returns:
        ``(out, lse)`` in ``out_a``'s and ``lse_a``'s dtypes.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = torch.where(lse == -math.inf, 0.0, lse)
    weight_a, weight_b = (torch.exp(part - base).unsqueeze(-1) for part in (lse_a, lse_b))
    out = weight_a * out_a.to(lse.dtype) + weight_b * out_b.to(lse.dtype)
    return out.to(out_a.dtype), lse


def gather_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """Keys or values of each sequence in one piece, of a paged cache; a copy.

    Args:
        cache: [pages, Hkv, page, D], a page at least.
        block_table: int32 [B, P], the pages of each sequence in order; an entry that names no page is taken
            for one that does.

    Returns:
        [B, Hkv, P * page, D].
    """
    pages = cache[block_table.clamp(0, cache.shape[0] - 1).long()]
    return rearrange(pages, "b p hkv n d -> b hkv (p n) d")


def row_delta(dout: Tensor, dlse: Tensor | None, out: Tensor) -> Tensor:
    """``rowsum(dout * out) - dlse``, [B, Hq, Tq]; where out is 0 the product is, whatever dout holds."""
    dtype = accumulate_dtype(out.dtype)
    delta = torch.where(out == 0.0, 0.0, dout.to(dtype) * out.to(dtype)).sum(dim=-1)
    return delta if dlse is None else delta - dlse


def sink_gradient(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks [Hq] from `row_delta`: ``-sum(exp(sink - lse) * delta)`` over batch and queries.

    A sink is a key without a value: ``ds = p * (dp - delta)`` with ``dp = 0``. A sink of -inf is none.
    """
    logits = sinks.to(lse.dtype).view(1, -1, 1)
    p = torch.exp(logits - torch.where(lse == -math.inf, 0.0, lse))
    return -(p * delta).sum(dim=(0, 2)).to(sinks.dtype)


def _known_finite(*tensors: Tensor) -> bool:
    """Whether nothing is NaN or infinite, and that is known without waiting for a device."""
    return all(x.is_cpu and bool(x.sum(dim=-1).isfinite().all()) for x in tensors)


def _without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps autocast away from the products of tensors that were upcast on purpose."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return wrapped


@dataclass(frozen=True)
class _Tile:
    """Scores of one tile, [B, Hkv, G, m, n]; ``visible`` is None where every pair of the tile is visible."""

    s: Tensor
    visible: Tensor | None
    cap_slope: Tensor | None  # derivative of the softcap
    keep: Tensor | None  # dropout: 0, or 1 / (1 - p)


@dataclass
class _Tiling:
    """Walks the tiles of one call and computes their scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    q_segments: Tensor | None
    kv_segments: Tensor | None
    kv_lengths: Tensor | None
    seed: Tensor | None
    scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float

    def __post_init__(self) -> None:
        self.batch, self.num_heads, self.q_len, _ = self.q.shape
        self.num_kv_heads, self.kv_len = self.k.shape[1], self.k.shape[2]
        self.copies = 1
        mask_by_head = self.attn_mask is not None and self.attn_mask.shape[1] > 1
        if mask_by_head and self.num_heads > self.num_kv_heads and not _known_finite(self.k, self.v):
            # heads of a group see different keys: each has its own copy, without a NaN that it does not see
            self.copies, self.num_kv_heads = self.num_heads // self.num_kv_heads, self.num_heads
        self.group = self.num_heads // self.num_kv_heads
        self.dtype = accumulate_dtype(self.q.dtype)
        self.window = (self.window_left, self.window_right)
        self.by_position_only = self.kv_lengths is None and self.q_segments is None and self.attn_mask is None

    def q_tiles(self):
        return ((m, min(m + BLOCK_M, self.q_len)) for m in range(0, self.q_len, BLOCK_M))

    def kv_tiles(self, m0: int, m1: int):
        start, stop = kv_span(m0, m1 - 1, self.q_len, self.kv_len, *self.window)
        if self.kv_lengths is not None:
            start = 0  # a shorter row stands further left
        return ((n, min(n + BLOCK_N, stop)) for n in range(start // BLOCK_N * BLOCK_N, stop, BLOCK_N))

    def rows(self, x: Tensor, m0: int, m1: int) -> Tensor:
        """Rows m0:m1 of a [B, Hq, Tq, D] tensor as [B, Hkv, G * m, D], so that a group shares a product."""
        tile = x[:, :, m0:m1].to(self.dtype)
        return rearrange(tile, "b (hkv g) m d -> b hkv (g m) d", hkv=self.num_kv_heads)

    def unfold(self, x: Tensor) -> Tensor:
        return rearrange(x, "b hkv (g m) n -> b hkv g m n", g=self.group)

    def fold(self, x: Tensor) -> Tensor:
        return rearrange(x, "b hkv g m n -> b hkv (g m) n")

    def by_head(self, x: Tensor) -> Tensor:
        """[B, Hkv, G * m, D] as [B, Hq, m, D]."""
        return rearrange(x, "b hkv (g m) d -> b (hkv g) m d", g=self.group)

    def grouped(self, x: Tensor) -> Tensor:
        """A [b, h, m, n] tile, h = Hq or 1, as [b, Hkv or 1, G or 1, m, n]."""
        if x.shape[1] == 1:
            return x.unsqueeze(2)
        return rearrange(x, "b (hkv g) m n -> b hkv g m n", g=self.group)

    def mask_tile(self, x: Tensor, m0: int, m1: int, n0: int, n1: int) -> Tensor:
        """The tile of a broadcast mask; a dimension of size 1 stays so."""
        x = x[:, :, m0:m1] if x.shape[2] > 1 else x
        x = x[..., n0:n1] if x.shape[3] > 1 else x
        return self.grouped(x)

    def visible_tile(self, m0: int, m1: int, n0: int, n1: int) -> Tensor | None:
        """bool, broadcastable to [B, Hkv, G, m, n]; None where everything is visible."""
        full = kv_span_full(m0, m1 - 1, self.q_len, self.kv_len, *self.window)
        if self.by_position_only and full[0] <= n0 and n1 <= full[1]:
            return None
        i = torch.arange(m0, m1, device=self.q.device).view(1, 1, 1, -1, 1)
        j = torch.arange(n0, n1, device=self.q.device)
        kv_len: int | Tensor = self.kv_len
        if self.kv_lengths is not None:
            kv_len = self.kv_lengths.clamp(0, self.kv_len).view(-1, 1, 1, 1, 1)
        seen = visible(i, j, self.q_len, kv_len, *self.window)
        if self.q_segments is not None and self.kv_segments is not None:
            own = self.q_segments[:, None, None, m0:m1, None]
            theirs = self.kv_segments[:, None, None, None, n0:n1]
            seen = seen & (own == theirs) & (own >= 0)
        if self.attn_mask is not None:
            mask = self.mask_tile(self.attn_mask, m0, m1, n0, n1)
            if mask.dtype != torch.bool:  # a NaN does not hide, it shows in the result
                limit = hiding_limit(torch.finfo(mask.dtype).min, torch.finfo(self.dtype).min)
                mask = ~(mask.to(self.dtype) <= limit)
            seen = seen & mask
        return seen

    def alive_rows(self, m0: int, m1: int) -> Tensor:
        """bool [B, Hkv, G * m, 1]: the queries that see a key."""
        alive = self.q.new_zeros((self.batch, self.num_kv_heads, self.group, m1 - m0, 1), dtype=torch.bool)
        for n0, n1 in self.kv_tiles(m0, m1):
            seen = self.visible_tile(m0, m1, n0, n1)
            alive = alive | (True if seen is None else seen.any(dim=-1, keepdim=True))
        return self.fold(alive)

    def tile(self, q_tile: Tensor, k: Tensor, m0: int, m1: int, n0: int, n1: int) -> _Tile:
        s = self.unfold(q_tile @ self.kv_tile(k, n0, n1, None).mT) * self.scale
        cap_slope = None
        if self.softcap > 0.0:
            t = torch.tanh(s / self.softcap)
            s, cap_slope = self.softcap * t, 1.0 - t * t
        if self.attn_mask is not None and self.attn_mask.dtype != torch.bool:
            s = s + self.mask_tile(self.attn_mask, m0, m1, n0, n1).to(self.dtype)
        seen = self.visible_tile(m0, m1, n0, n1)
        if seen is not None:
            s = s.masked_fill(~seen, -math.inf)
        keep = None
        if self.dropout_p > 0.0 and self.seed is not None:
            kept = keep_mask(self.seed, self.dropout_p, self.batch, self.num_heads, (m0, m1), (n0, n1))
            keep = self.grouped(kept).to(self.dtype) / (1.0 - drop_threshold(self.dropout_p) / 256)
        return _Tile(s, seen, cap_slope, keep)

    def kv_tile(self, x: Tensor, n0: int, n1: int, seen: Tensor | None) -> Tensor:
        """Keys or values n0:n1; what no query of the tile sees becomes 0: its NaN enters no product."""
        tile = repeat(x[:, :, n0:n1].to(self.dtype), "b h n d -> b (h copies) n d", copies=self.copies)
        if seen is None:
            return tile
        return torch.where(seen.any(dim=3).any(dim=2).unsqueeze(-1), tile, 0.0)

    def by_kv_head(self, grad: Tensor) -> Tensor:
        """The gradient of a `kv_tile`, summed over the copies of a key head."""
        return grad.unflatten(1, (-1, self.copies)).sum(dim=2)

    def only_seen(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """[B, Hkv, G * m, n], 0 where hidden: there a row that is NaN for a key it does see has no part."""
        return x if seen is None else self.fold(self.unfold(x).masked_fill(~seen, 0.0))


@_without_autocast
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
    """``out`` [B, Hq, Tq, Dv] in q's dtype and ``lse`` [B, Hq, Tq] float32 (float64 for float64 inputs)."""
    tiling = _Tiling(
        q,
        k,
        v,
        attn_mask,
        q_segments,
        kv_segments,
        kv_lengths,
        seed,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
    )
    out = heads_last(q, v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=tiling.dtype)
    for m0, m1 in tiling.q_tiles():
        q_tile = tiling.rows(q, m0, m1)
        shape = (*q_tile.shape[:3], 1)
        if sinks is None:
            m = q_tile.new_full(shape, -math.inf)
            l = q_tile.new_zeros(shape)  # noqa: E741
        else:  # the sink is a key of its own: seen by every row, with no value
            m = tiling.rows(sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1), m0, m1)
            l = torch.ones_like(m)  # noqa: E741
        acc = q_tile.new_zeros((*shape[:3], v.shape[-1]))
        for n0, n1 in tiling.kv_tiles(m0, m1):
            tile = tiling.tile(q_tile, k, m0, m1, n0, n1)
            s = tiling.fold(tile.s)
            m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
            # a row that saw nothing yet: exp(-inf - 0) = 0
            base = torch.where(m_new == -math.inf, 0.0, m_new)
            p = torch.exp(s - base)
            rescale = torch.exp(m - base)
            l = l * rescale + p.sum(dim=-1, keepdim=True)  # noqa: E741
            if tile.keep is not None:
                p = p * tiling.fold(tile.keep)
            acc = acc * rescale + p @ tiling.kv_tile(v, n0, n1, tile.visible)
            m = m_new
        out[:, :, m0:m1] = tiling.by_head(acc / torch.where(l == 0.0, 1.0, l))
        lse[:, :, m0:m1] = tiling.by_head(m + torch.log(l)).squeeze(-1)  # -inf + log(0) = -inf: saw nothing
    return out, lse


@_without_autocast
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `attention_forward`: ``(dq, dk, dv, dmask)`` in the dtypes of their tensors.

    With ``delta = rowsum(dout * out) - dlse``: ``ds = p * (dp - delta)``, ``dq = scale * ds @ k``,
    ``dk = scale * ds^T @ q``, ``dv = p^T @ dout``. ``dmask`` (None unless ``mask_grad``) has the mask's own
    shape. The sinks' is `sink_gradient`.
    """
    tiling = _Tiling(
        q,
        k,
        v,
        attn_mask,
        q_segments,
        kv_segments,
        kv_lengths,
        seed,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
    )
    dq, dk, dv = (
        torch.zeros_like(
            x.transpose(1, 2), dtype=tiling.dtype, memory_format=torch.contiguous_format
        ).transpose(1, 2)
        for x in (q, k, v)
    )
    dmask = None
    if mask_grad and attn_mask is not None:
        dmask = torch.zeros(attn_mask.shape, dtype=tiling.dtype, device=q.device)
    delta = row_delta(dout, dlse, out)
    for m0, m1 in tiling.q_tiles():
        alive = tiling.rows((lse != -math.inf).unsqueeze(-1), m0, m1) > 0
        if sinks is not None:  # lse tells nothing: a sink far above the scores rounds them away
            alive = tiling.alive_rows(m0, m1)
        q_tile = torch.where(alive, tiling.rows(q, m0, m1), 0.0)
        dout_tile = torch.where(alive, tiling.rows(dout, m0, m1), 0.0)
        lse_tile = torch.where(alive, tiling.rows(lse.unsqueeze(-1), m0, m1), 0.0)
        delta_tile = torch.where(alive, tiling.rows(delta.unsqueeze(-1), m0, m1), 0.0)
        dq_tile = torch.zeros_like(q_tile)
        for n0, n1 in tiling.kv_tiles(m0, m1):
            tile = tiling.tile(q_tile, k, m0, m1, n0, n1)
            k_tile, v_tile = (tiling.kv_tile(x, n0, n1, tile.visible) for x in (k, v))
            p = tiling.only_seen(torch.exp(tiling.fold(tile.s) - lse_tile), tile.visible)
            dp = dout_tile @ v_tile.mT
            p_kept = p
            if tile.keep is not None:
                p_kept, dp = p * tiling.fold(tile.keep), dp * tiling.fold(tile.keep)
            ds = tiling.only_seen(p * (dp - delta_tile), tile.visible)
            if dmask is not None and attn_mask is not None:
                part = rearrange(tiling.unfold(ds), "b hkv g m n -> b (hkv g) m n")
                target = dmask[:, :, m0:m1] if dmask.shape[2] > 1 else dmask
                target = target[..., n0:n1] if dmask.shape[3] > 1 else target
                target += part.sum_to_size(target.shape)
            if tile.cap_slope is not None:
                # the score of an unseen key may be NaN, and so its slope
                ds = tiling.only_seen(ds * tiling.fold(tile.cap_slope), tile.visible)
            dv[:, :, n0:n1] += tiling.by_kv_head(p_kept.mT @ dout_tile)
            dk[:, :, n0:n1] += tiling.by_kv_head(ds.mT @ q_tile) * scale
            dq_tile += (ds @ k_tile) * scale
        dq[:, :, m0:m1] = tiling.by_head(dq_tile)
    if dmask is not None and attn_mask is not None:
        dmask = dmask.to(attn_mask.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dmask
