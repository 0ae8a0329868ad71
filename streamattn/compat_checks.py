"""What flash-attn's functions refuse before anything is computed, and with which words.

Shapes, types and devices always; values only where `readable` says that looking is free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def readable(x: Tensor) -> bool:
    """Whether looking at values costs no wait for a device and breaks no graph."""
    return x.device.type == "cpu" and type(x) is Tensor and not torch.compiler.is_compiling()


def is_zero(length: int | Tensor) -> bool:
    """Whether a length is 0; False where looking costs something, as `readable` tells of tensors."""
    if isinstance(length, Tensor):
        return readable(length) and length.item() == 0
    return not torch.compiler.is_compiling() and length == 0


def check_rank(rank: int, layout: str, **tensors: Tensor) -> None:
    """Each is a tensor of so many dimensions."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != rank:
            raise ValueError(f"{name} must be {layout}, got shape {list(x.shape)}")


def check_options(
    window_size: tuple[int, int], dropout_p: float = 0.0, return_attn_probs: bool = False
) -> None:
    """A window is a pair, and the weights are not asked for under dropout."""
    if not isinstance(window_size, (tuple, list)):
        raise TypeError(
            f"window_size must be a pair (left, right), -1 = unbounded, got {window_size!r}; "
            f"W keys up to and including the query's own are (W - 1, 0)"
        )
    if return_attn_probs and dropout_p > 0.0:
        raise NotImplementedError(
            "return_attn_probs=True with dropout asks for S_dmask, which holds every weight; the weights are "
            "never formed here. Pass dropout_p=0.0 to get softmax_lse"
        )


def check_alibi(alibi_slopes: Tensor, batch: int, num_heads: int) -> None:
    """A slope for each head, or for each head of each sequence."""
    if not isinstance(alibi_slopes, Tensor):
        raise TypeError(f"alibi_slopes must be a torch.Tensor, got {type(alibi_slopes).__name__}")
    if list(alibi_slopes.shape) not in ([num_heads], [batch, num_heads]):
        raise ValueError(
            f"alibi_slopes must have shape [{num_heads}] or [{batch}, {num_heads}], "
            f"got {list(alibi_slopes.shape)}"
        )


def check_tokens(k: Tensor, v: Tensor) -> None:
    """As many values as keys, [total, Hkv, D] each."""
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"k and v must have as many tokens, got {k.shape[0]} and {v.shape[0]}")


def check_cu_seqlens(name: str, cu_seqlens: Tensor, x: Tensor, max_seqlen: int) -> None:
    """Bounds of sequences in x; values are looked at where they can be read."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{name} must have shape [B + 1], got {list(cu_seqlens.shape)}")
    if cu_seqlens.device != x.device:
        raise ValueError(f"{name} must be on {x.device}, got {cu_seqlens.device}; move it")
    if not readable(cu_seqlens):
        return
    bounds = cu_seqlens.tolist()
    lengths = cu_seqlens.diff().tolist()
    if bounds[0] < 0 or bounds[-1] > x.shape[0] or min(lengths, default=0) < 0:
        raise ValueError(
            f"{name} must not fall and lie in [0, {x.shape[0]}], the number of tokens, got {bounds}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"the longest sequence of {name} has {max(lengths)} tokens, more than the {max_seqlen} passed as "
            "its max_seqlen"
        )


def check_no_pages(block_table: Tensor | None) -> None:
    """No paged cache is asked for."""
    if block_table is not None:
        raise NotImplementedError(
            "block_table asks for a paged cache, which is not served here; pass the keys and values as they "
            "were packed, or read a paged cache for a few queries with flash_attn_with_kvcache"
        )


def check_pages(q: Tensor, block_table: Tensor, cache_batch_idx: Tensor | None) -> None:
    """A row of pages for each sequence, and nothing else that says where its cache is."""
    if not isinstance(block_table, Tensor) or block_table.dtype != torch.int32:
        got = block_table.dtype if isinstance(block_table, Tensor) else type(block_table).__name__
        raise TypeError(f"block_table must be an int32 tensor, got {got}; cast it")
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_table must have shape [{q.shape[0]}, pages of a sequence], got {list(block_table.shape)}"
        )
    if cache_batch_idx is not None:
        raise ValueError(
            "block_table and cache_batch_idx both say where a sequence's cache is; index the table's rows"
        )


def check_written_pages(pages: Tensor, count: int) -> None:
    """New tokens' pages are there; looked at on the CPU alone, where it costs no wait."""
    if readable(pages) and bool(((pages < 0) | (pages >= count)).any()):
        raise ValueError(
            f"block_table must name a page of the cache, 0 to {count - 1}, for each new token, got "
            f"{pages.tolist()}; give the sequence its next page before the call"
        )


def check_rotary(cos: Tensor, sin: Tensor, q: Tensor, capacity: int) -> None:
    """The tables fit q and each other, and have a row for every place of the cache."""
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > q.shape[3] or cos.shape[0] < capacity:
        raise ValueError(
            "rotary_cos and rotary_sin must both have shape [positions, R / 2] with R of at most q's "
            f"{q.shape[3]} and positions of at least the cache's {capacity}, got {list(cos.shape)} and "
            f"{list(sin.shape)}"
        )


def check_rotated(cos: Tensor, positions: Tensor) -> None:
    """The tables have a row for every place of q, where these can be read."""
    if readable(positions) and positions.numel() and int(positions.max()) >= cos.shape[0]:
        raise ValueError(
            f"rotary_cos and rotary_sin must have a row for each place of q, the last of which is "
            f"{int(positions.max())}, got {cos.shape[0]} rows; make them longer"
        )


def check_per_sequence(q: Tensor, **tensors: Any) -> None:
    """Each is an integer for each sequence, on q's device."""
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must hold int32 or int64, got {got}; cast it")
        if list(x.shape) != [q.shape[0]]:
            raise ValueError(f"{name} must have shape [{q.shape[0]}], got {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, got {x.device}; move it")


def check_new(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """New keys and values fit the caches in all but their number, and q has their dtype."""
    if q.dtype != k_cache.dtype:
        raise TypeError(f"q must have the cache's dtype {k_cache.dtype}, got {q.dtype}; cast it")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = [q.shape[0], k.shape[1], *cache.shape[2:]]
        if list(new.shape) != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {list(new.shape)}")
        if new.dtype != cache.dtype:
            raise TypeError(f"{name} must have its cache's dtype {cache.dtype}, got {new.dtype}; cast it")
