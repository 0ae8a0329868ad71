"""flash-attn 2's functions over `streamattn.attention`: same names, argument order, defaults and meanings.

Write ``from streamattn.compat import flash_attn_func`` for ``from flash_attn import flash_attn_func``.
Tensors are stored as there, [B, T, H, D], or [total, H, D] with ``cu_seqlens``; q, k and v are read in place
through views, packed ones too. What is wider here: float32 and float64, any device, a head_dim of v unlike
q's, and derivatives through ``softmax_lse`` and ``alibi_slopes``. A query that sees nothing gives 0, and
``softmax_lse`` -inf.

Sequences of unequal lengths in [total, H, D] are served in one of two ways, neither of which waits for the
device. Where only segments matter, the whole is one row with segment ids. Where a document's own alignment
matters and differs (causal or a window with unlike lengths of queries and keys, ALiBi), documents are copied
into a padded batch.

Left out on purpose: paged caches of packed sequences; ``S_dmask`` under dropout, for the weights are never
formed; the private functions of flash-attn.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from streamattn.compat_checks import (
    check_alibi,
    check_cu_seqlens,
    check_new,
    check_no_pages,
    check_options,
    check_pages,
    check_per_sequence,
    check_rank,
    check_rotary,
    check_rotated,
    check_tokens,
    check_written_pages,
    is_zero,
    readable,
)
from streamattn.functional import attention
from streamattn.packed import packed_attention

Pair = tuple[int, int]


def _alibi(alibi_slopes: Tensor, q: Tensor, kv_len: int, kv_lengths: Tensor | None) -> Tensor:
    """``-slope * |p - j|`` [1 or B, H, Tq, Tk] for q [B, Tq, H, D]; float64 for float64, else float32."""
    batch, q_len, num_heads, _ = q.shape
    check_alibi(alibi_slopes, batch, num_heads)
    i = torch.arange(q_len, device=q.device).view(-1, 1)
    j = torch.arange(kv_len, device=q.device)
    filled = kv_len if kv_lengths is None else kv_lengths.view(-1, 1, 1, 1)
    distance = (i + (filled - q_len) - j).abs()
    slopes = alibi_slopes.to(torch.promote_types(q.dtype, torch.float32))
    return -slopes.view(-1, num_heads, 1, 1) * distance


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None,
    causal: bool,
    window_size: Pair,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
    segment_ids: tuple[Tensor, Tensor] | None = None,
    kv_lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    qkv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``out`` [B, Tq, H, Dv] and ``lse`` [B, H, Tq] for q, k, v [B, T, H, D]; k, v may be paged.

    They may be views of qkv [B, T, 3, H, D], which then gets its gradient as one.
    """
    kv_len = k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1]
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "scale": softmax_scale,
        "attn_mask": None if alibi_slopes is None else _alibi(alibi_slopes, q, kv_len, kv_lengths),
        "segment_ids": segment_ids,
        "kv_lengths": kv_lengths,
        "softcap": softcap,
        "dropout_p": dropout_p,
        "deterministic": deterministic or None,  # False is flash-attn's default, not a wish against torch's
    }
    if qkv is not None and qkv.requires_grad and _side_by_side(qkv):
        out, lse = packed_attention(qkv.flatten(2, 3), **options)
    else:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out, lse = attention(q, k, v, block_table=block_table, return_lse=True, **options)
    return out.transpose(1, 2), lse


def _returned(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Any:
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention on [B, T, H, D].

    Args:
        q: [B, Tq, H, D], floating.
        k: [B, Tk, Hkv, D]; H is a multiple of Hkv.
        v: [B, Tk, Hkv, Dv].
        dropout_p: probability of dropping a weight, rounded to 1/256; 0 in evaluation. Default 0.
        softmax_scale: factor of the scores. Default ``1 / sqrt(D)``.
        causal: query ``i`` stands at ``p = i + Tk - Tq`` and sees the keys up to ``p``. Default False.
        window_size: (left, right): the keys from ``p - left`` to ``p + right``; -1 = unbounded.
        softcap: ``softcap * tanh(score / softcap)`` is used for each score. Default 0: off.
        alibi_slopes: [H] or [B, H], floating: ``-slope * |p - j|`` is added to the score of key ``j``. The
            bias is formed as a float32 tensor [1 or B, H, Tq, Tk]. Default None.
        deterministic: the same bits for the same inputs. False follows torch's global flag.
        return_attn_probs: also return ``softmax_lse`` and ``S_dmask``. Default False.

    Returns:
        ``out`` [B, Tq, H, Dv], or ``(out, softmax_lse, S_dmask)``: ``softmax_lse`` [B, H, Tq] float32, the
        natural logarithm of the sum of exponentials of the scores; ``S_dmask`` an empty tensor, as
        flash-attn's is without dropout.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value.
        NotImplementedError: ``return_attn_probs`` with dropout.
    """
    check_rank(4, "[B, T, H, D]", q=q, k=k, v=v)
    check_options(window_size, dropout_p, return_attn_probs)
    out, lse = _attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return _returned(out, lse, return_attn_probs)


def _side_by_side(qkv: Tensor) -> bool:
    """Whether the heads of q, k and v [B, T, 3, H, D] are one row of heads; what is sparse has none."""
    return qkv.layout == torch.strided and qkv.stride(2) == qkv.shape[3] * qkv.stride(3)


def _unpacked(packed: Tensor, count: int, name: str, rank: int) -> Any:
    """Views of a tensor [..., count, H, D] along its third dimension from the end."""
    layout = f"[{'B, T' if rank == 5 else 'total'}, {count}, H, D]"
    check_rank(rank, layout, **{name: packed})
    if packed.shape[-3] != count:
        raise ValueError(f"{name} must be {layout}, got shape {list(packed.shape)}")
    return packed.unbind(-3)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k, v packed as ``qkv`` [B, T, 3, H, D], which is read and written in place."""
    q, k, v = _unpacked(qkv, 3, "qkv", 5)
    check_options(window_size, dropout_p, return_attn_probs)
    out, lse = _attend(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        qkv=qkv,
    )
    return _returned(out, lse, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q [B, Tq, H, D] with k and v packed as ``kv`` [B, Tk, 2, Hkv, D]."""
    k, v = _unpacked(kv, 2, "kv", 5)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def _documents(cu_seqlens: Tensor, total: int) -> Tensor:
    """int32 [total]: the document of each token, -1 before the first one and after the last."""
    token = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.bucketize(token, cu_seqlens, right=True, out_int32=True) - 1
    return torch.where(document < cu_seqlens.numel() - 1, document, -1)


def _in_a_padded_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Documents as rows of a batch: keys at its start, queries at its end, where bottom-right puts them."""
    total, documents = q.shape[0], cu_seqlens_q.numel() - 1
    kv_lengths = cu_seqlens_k.diff()
    column = torch.arange(max_seqlen_q, device=q.device)
    rows = cu_seqlens_q[1:, None] - max_seqlen_q + column
    real = rows >= cu_seqlens_q[:-1, None]
    keys = cu_seqlens_k[:-1, None] + torch.arange(max_seqlen_k, device=q.device)
    # What pads is another token: a query that sees nothing, or a key past the length. The key is of the same
    # document, because a query that is NaN makes the gradients of the whole row so.
    q_rows = q[rows.clamp(0, total - 1)]
    keys = keys.minimum(cu_seqlens_k[1:, None] - 1).clamp(0, k.shape[0] - 1)
    k_rows, v_rows = k[keys], v[keys]
    segments = torch.where(real, 0, -1).int(), torch.zeros_like(keys, dtype=torch.int32)
    out, lse = _attend(q_rows, k_rows, v_rows, segment_ids=segments, kv_lengths=kv_lengths, **options)

    document = _documents(cu_seqlens_q, total)
    outside = document < 0
    document = document.clamp(0, documents - 1).long()
    column = torch.arange(total, device=q.device) - cu_seqlens_q[document + 1] + max_seqlen_q
    column = column.clamp(0, max_seqlen_q - 1)
    out, lse = out[document, column], lse[document, :, column]
    return out.masked_fill(outside[:, None, None], 0.0), lse.mT.masked_fill(outside, -torch.inf)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention within each of B documents that lie one after another.

    q, k and v are read in place where every document has as many queries as keys, which is taken from
    ``cu_seqlens_q`` and ``cu_seqlens_k`` being the same tensor object, or where neither ``causal`` nor a
    window asks for an alignment. Otherwise, and with ``alibi_slopes``, q, k and v are copied into a batch of
    B documents padded to ``max_seqlen_q`` and ``max_seqlen_k``. Both ways are exact, and neither waits for
    the device. Read in place, a NaN in one document can reach its neighbours; padded, it can't.

    Args:
        q: [total_q, H, D], floating.
        k: [total_k, Hkv, D]; H is a multiple of Hkv.
        v: [total_k, Hkv, Dv].
        cu_seqlens_q: int32 [B + 1] on q's device: document ``b`` has the queries ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``, the latter excluded. A token of no document gives 0. Wrong values raise
            on the CPU; elsewhere they are not looked at.
        cu_seqlens_k: likewise for keys.
        max_seqlen_q: at least the number of queries of the longest document.
        max_seqlen_k: likewise for keys.
        dropout_p: as in `flash_attn_func`, and so the options below.
        softmax_scale: factor of the scores. Default ``1 / sqrt(D)``.
        causal: bottom-right aligned within each document. Default False.
        window_size: (left, right), aligned likewise; -1 = unbounded.
        softcap: cap of the scores. Default 0: off.
        alibi_slopes: [H] or [B, H]; its bias is [1 or B, H, max_seqlen_q, max_seqlen_k] float32.
        deterministic: the same bits for the same inputs. False follows torch's global flag.
        return_attn_probs: also return ``softmax_lse`` and ``S_dmask``. Default False.
        block_table: paged caches are not served.

    Returns:
        ``out`` [total_q, H, Dv], or ``(out, softmax_lse, S_dmask)``, ``softmax_lse`` [H, total_q] float32.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value.
        NotImplementedError: ``block_table``, or ``return_attn_probs`` with dropout.
    """
    check_no_pages(block_table)
    check_rank(3, "[total, H, D]", q=q, k=k, v=v)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _varlen(q, k, v, *bounds, *options, return_attn_probs)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Pair,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    qkv: Tensor | None = None,
) -> Any:
    """`flash_attn_varlen_func`; q, k and v may be views of qkv [total, 3, H, D]."""
    check_tokens(k, v)
    check_options(window_size, dropout_p, return_attn_probs)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, max_seqlen_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k, max_seqlen_k)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must have the same length B + 1, "
            f"got {cu_seqlens_q.numel()} and {cu_seqlens_k.numel()}"
        )
    options: dict[str, Any] = {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }
    aligned = cu_seqlens_q is cu_seqlens_k and q.shape[0] == k.shape[0]
    by_position = causal or tuple(window_size) != (-1, -1)
    padded = alibi_slopes is not None or (by_position and not aligned)
    documents = cu_seqlens_q.numel() - 1
    empty = q.shape[0] == 0 or k.shape[0] == 0 or documents == 0
    if empty or (padded and (is_zero(max_seqlen_q) or is_zero(max_seqlen_k))):
        # No query sees a key: the same as no key at all, where a bias takes no memory. Slopes of documents
        # are added up only to fit one row; they weigh nothing, and get gradients of 0.
        if alibi_slopes is not None:
            check_alibi(alibi_slopes, documents, q.shape[1])
            options["alibi_slopes"] = alibi_slopes.reshape(-1, q.shape[1]).sum(0)
        out, lse = _attend(q[None], k[None, :0], v[None, :0], **options)
        out, lse = out[0], lse[0]
    elif padded:
        out, lse = _in_a_padded_batch(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
        )
    else:
        q_segments = _documents(cu_seqlens_q, q.shape[0])[None]
        kv_segments = q_segments if aligned else _documents(cu_seqlens_k, k.shape[0])[None]
        options.update(segment_ids=(q_segments, kv_segments), qkv=None if qkv is None else qkv[None])
        out, lse = _attend(q[None], k[None], v[None], **options)
        out, lse = out[0], lse[0]
    return _returned(out, lse, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v packed as ``qkv`` [total, 3, H, D], read in place."""
    q, k, v = _unpacked(qkv, 3, "qkv", 4)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _varlen(q, k, v, *bounds, *options, return_attn_probs, qkv)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q [total_q, H, D] with k and v packed as ``kv`` [total_k, 2, Hkv, D]."""
    k, v = _unpacked(kv, 2, "kv", 4)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options, return_attn_probs
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """``x`` [B, T, H, D] rotated in its first ``2 * cos.shape[1]`` dimensions; ``positions`` [B, T or 1]."""
    width = 2 * cos.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[positions.long()].unsqueeze(2).to(dtype) for table in (cos, sin))
    turning = x[..., :width].to(dtype)
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = turning.chunk(2, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def _fill_levels(cache_seqlens: int | Tensor, q: Tensor, new: int, capacity: int) -> Tensor:
    """``cache_seqlens`` as a tensor [B] on q's device."""
    if isinstance(cache_seqlens, Tensor):
        levels = cache_seqlens.tolist() if readable(cache_seqlens) else []
    else:
        levels = [cache_seqlens]
        cache_seqlens = q.new_full(q.shape[:1], cache_seqlens, dtype=torch.int32)
    if any(level < 0 or level + new > capacity for level in levels):
        raise ValueError(
            f"cache_seqlens must be 0 or more and leave room for {new} new tokens in a cache of {capacity}, "
            f"got {levels}"
        )
    return cache_seqlens


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a cache, after writing new keys and values into it in place. No gradients, no host sync.

    Args:
        q: [B, Tq, H, D], floating.
        k_cache: [Bc, S, Hkv, D], or paged (see ``block_table``). With ``k``, its rows ``cache_seqlens`` to
            ``cache_seqlens + Tnew`` are overwritten.
        v_cache: [Bc, S, Hkv, Dv] likewise.
        k: [B, Tnew, Hkv, D], new keys. Default None: the cache is only read.
        v: [B, Tnew, Hkv, Dv], new values.
        rotary_cos: [positions, R / 2], R <= D, positions >= S: ``k`` and q are rotated in their first R
            dimensions, token ``t`` at position ``cache_seqlens + t``; without ``causal`` and a window every
            query at ``cache_seqlens``. A query behind the last position raises on the CPU; elsewhere it is
            not looked at. Needs ``k``. Default None.
        rotary_sin: [positions, R / 2] likewise.
        cache_seqlens: how many tokens each sequence has in the cache, before new ones: an int, or int32 [B]
            on q's device. Default None: the cache is full. On the CPU a value without room for the new tokens
            raises; elsewhere it is not looked at.
        cache_batch_idx: int32 [B], which row of the cache each sequence has; the rows are gathered by a copy.
            Default None: the first B rows, read in place.
        cache_leftpad: int32 [B]: the first tokens of each sequence's cache that count for nothing. Default
            None: none.
        block_table: int32 [B, P], the pages of each sequence in order, for caches [pages, page, Hkv, D] and
            [pages, page, Hkv, Dv]; S is then P * page. Takes up to 16 queries, and no ``cache_batch_idx``.
            The pages that new tokens go to must be in it: on a GPU that is not looked at, and -1 is the last
            page of the cache. Default None.
        softmax_scale: factor of the scores. Default ``1 / sqrt(D)``.
        causal: the last query stands at the last token, new ones included. Default False.
        window_size: (left, right), aligned likewise; -1 = unbounded.
        softcap: cap of the scores. Default 0: off.
        rotary_interleaved: dimensions 0 and 1, 2 and 3, ... turn together; False: ``d`` and ``d + R / 2``.
        alibi_slopes: [H] or [B, H]; its bias is formed as [B, H, Tq, S] float32. Default None.
        num_splits: how keys are split is the backend's choice; any number gives the same result.
        return_softmax_lse: also return ``softmax_lse``. Default False.

    Returns:
        ``out`` [B, Tq, H, Dv], or ``(out, softmax_lse)`` with ``softmax_lse`` [B, H, Tq] float32.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    check_rank(4, "[B, T, H, D]", q=q, k_cache=k_cache, v_cache=v_cache)
    check_options(window_size)
    if (k is None) != (v is None):
        raise ValueError("k and v must be passed together")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin must be passed together")
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos needs new keys k; rotate q beforehand to read a cache that is rotated")
    if k is not None and cache_seqlens is None:
        raise ValueError("k needs cache_seqlens, which says where to write it")
    check_per_sequence(
        q,
        cache_seqlens=None if isinstance(cache_seqlens, numbers.Integral) else cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )
    batch, capacity = q.shape[0], k_cache.shape[1]
    if block_table is not None:
        check_pages(q, block_table, cache_batch_idx)
        capacity *= block_table.shape[1]
    if rotary_cos is not None and rotary_sin is not None:
        check_rotary(rotary_cos, rotary_sin, q, capacity)
    new = 0 if k is None else k.shape[1]
    filled = None if cache_seqlens is None else _fill_levels(cache_seqlens, q, new, capacity)

    if k is not None and v is not None and filled is not None:
        check_new(q, k, v, k_cache, v_cache)
        positions = filled[:, None] + torch.arange(new, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            q_positions = filled[:, None]
            if causal or tuple(window_size) != (-1, -1):
                q_positions = q_positions + torch.arange(q.shape[1], device=q.device)
            check_rotated(rotary_cos, q_positions)
            k = _rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
            q = _rotate(q, rotary_cos, rotary_sin, q_positions, rotary_interleaved)
        positions = positions.long()
        if block_table is not None:
            page = k_cache.shape[1]
            rows, positions = block_table.gather(1, positions // page).long(), positions % page
            check_written_pages(rows, k_cache.shape[0])
        elif cache_batch_idx is None:
            rows = torch.arange(batch, device=q.device)[:, None]
        else:
            rows = cache_batch_idx.long()[:, None]
        k_cache[rows, positions] = k
        v_cache[rows, positions] = v

    kv_lengths = None if filled is None else filled + new
    if block_table is not None:
        if kv_lengths is None:
            kv_lengths = q.new_full((batch,), capacity, dtype=torch.int32)
    elif cache_batch_idx is None:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    else:
        k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
    segment_ids = None
    if cache_leftpad is not None:
        counted = torch.arange(capacity, device=q.device) >= cache_leftpad[:, None]
        segment_ids = q.new_zeros(q.shape[:2], dtype=torch.int32), torch.where(counted, 0, -1).int()
    out, lse = _attend(
        q,
        k_cache,
        v_cache,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        segment_ids=segment_ids,
        kv_lengths=kv_lengths,
        block_table=block_table,
    )
    return (out, lse) if return_softmax_lse else out
