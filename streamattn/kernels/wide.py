"""Attention forward for heads of more than 256 columns, in Triton: NVIDIA GPUs, and Triton's interpreter.

A program can't hold a tile of such a head, so the two products are two kernels. One makes tiles of weights,
summing over the columns of a head in steps, and leaves in a workspace each tile's ``exp(score - m)`` in q's
dtype with the maxima m and the sums of its rows. The other brings the tiles of a row to one maximum and makes
one slice of the columns of ``out``. So nothing is computed twice and both loops are plain products of
matrices; a kernel with the online softmax would make the scores once for each slice. The workspace holds a
limited number of queries at a time (`tiles.WIDE_WORKSPACE_BYTES`), so memory is linear in Tq + Tk.

Few queries on few keys would leave most of a GPU idle so; wide_short.py serves these.

Layouts as in forward.py, and the same inputs give the same bits. Left out on purpose: float64, empty tensors,
tiles of keys that are skipped for their segments.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamattn.kernels.launch import (
    UNSPECIALIZED,
    call_arguments,
    call_key,
    device_guard,
    heads_last,
    launch,
    mask_pointers,
    starts_early,
    strides,
)
from streamattn.kernels.primitives import (
    LN2,
    LOG2E,
    NO_MASK,
    UNBOUNDED,
    dot_add_parts,
    keep_tile,
    kv_span,
    kv_span_full,
    load_rows,
    store_rows,
    sum_of_parts,
    valid_length,
)
from streamattn.kernels.wide_launch import (
    arguments_of,
    cdiv,
    chunks,
    pick_reader,
    pick_weights,
    shared_tile,
)
from streamattn.kernels.wide_primitives import head_products, only_weighted, row_weights, scores
from streamattn.kernels.wide_short import forward_by_parts, parts_of

TILES = tl.constexpr(16)  # of keys, whose maxima are read at once


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_weights_kernel(
    q_ptr,
    k_ptr,
    weights_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_norm_ptr,
    mask_ptr,
    q_segments_ptr,
    kv_segments_ptr,
    kv_lengths_ptr,
    seed_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_t,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_mask_b,
    stride_mask_h,
    stride_mask_m,
    stride_mask_n,
    stride_q_segments_b,
    stride_q_segments_t,
    stride_kv_segments_b,
    stride_kv_segments_t,
    stride_kv_lengths,
    stride_weights_h,
    stride_weights_t,
    stride_stats_h,
    stride_stats_n,
    head_start,
    row_start,
    row_stop,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    window_right,
    scale,
    softcap,
    hidden_below,
    drop_threshold,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
    WHOLE: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights [heads, rows, keys] of a chunk, and their tiles' statistics [heads, tiles of keys, rows].

    A tile a program; one that no query may see is not written. The statistics are the maximum of a row's
    scores, the sum of its weights, for lse, and that of its weights as they are stored, for out: so the
    rounding of a weight that outweighs the others cancels. DEPENDENT where the kernel that reads all this
    starts before it is there.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_n = tl.cdiv(kv_len, BLOCK_N)
    tiles_m = tl.cdiv(row_stop - row_start, BLOCK_M)
    pid = tl.program_id(0)
    tile_n, tile_m, local_head = pid % tiles_n, pid // tiles_n % tiles_m, pid // (tiles_n * tiles_m)
    head = head_start + local_head
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    q_ptr += b64 * stride_q_b + h64 * stride_q_h
    k_ptr += b64 * stride_k_b + (h64 // group) * stride_k_h
    weights_ptr += local_head.to(tl.int64) * stride_weights_h
    stats = local_head.to(tl.int64) * stride_stats_h + tile_n.to(tl.int64) * stride_stats_n

    local_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    rows = row_start + local_rows
    row_mask = rows < q_len
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    i_first = row_start + tile_m * BLOCK_M
    i_last = min(i_first + BLOCK_M, q_len) - 1
    start, stop = kv_span(i_first, i_last, q_len, length, left, right)
    n_start = tile_n * BLOCK_N
    if n_start + BLOCK_N > start and n_start < stop:
        keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_mask = (keys >= max(length - q_len - left, 0)) & (keys < length)
        s = head_products(
            q_ptr,
            k_ptr,
            rows,
            keys,
            stride_q_t,
            stride_k_t,
            row_mask,
            key_mask,
            0,
            HEAD_DIM,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            PRECISION,
        )
        own = rows
        theirs = keys
        if HAS_SEGMENTS:
            q_segments_ptr += b64 * stride_q_segments_b
            kv_segments_ptr += b64 * stride_kv_segments_b
            own = tl.load(q_segments_ptr + rows.to(tl.int64) * stride_q_segments_t, mask=row_mask, other=-1)
            theirs = tl.load(
                kv_segments_ptr + keys.to(tl.int64) * stride_kv_segments_t, mask=key_mask, other=-1
            )
        inside = False
        if MASK_KIND == NO_MASK:
            if not HAS_SEGMENTS:
                full_start, full_stop = kv_span_full(i_first, i_last, q_len, length, left, right)
                inside = (n_start >= full_start) & (n_start + BLOCK_N <= full_stop)
        else:
            mask_ptr += b64 * stride_mask_b + h64 * stride_mask_h
        s = scores(
            s,
            rows,
            keys,
            row_mask,
            key_mask,
            own,
            theirs,
            mask_ptr,
            stride_mask_m,
            stride_mask_n,
            q_len,
            length,
            left,
            right,
            scale,
            softcap,
            hidden_below,
            inside,
            MASK_KIND,
            HAS_SEGMENTS,
            HAS_SOFTCAP,
            FOLD_SCALE,
        )
        p, m = row_weights(s, WHOLE)
        tl.store(tile_max_ptr + stats + local_rows, m)
        tl.store(tile_sum_ptr + stats + local_rows, tl.sum(p, 1))
        p = p.to(weights_ptr.dtype.element_ty)
        tl.store(tile_norm_ptr + stats + local_rows, tl.sum(p.to(tl.float32), 1))
        if HAS_DROPOUT:
            seed = tl.load(seed_ptr)
            p = tl.where(keep_tile(seed, head, rows, n_start, drop_threshold, BLOCK_M, BLOCK_N), p, 0.0)
        ptrs = weights_ptr + local_rows.to(tl.int64)[:, None] * stride_weights_t + keys[None, :]
        tl.store(ptrs, p)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_out_kernel(
    v_ptr,
    weights_ptr,
    tile_max_ptr,
    tile_sum_ptr,
    tile_norm_ptr,
    out_ptr,
    lse_ptr,
    kv_lengths_ptr,
    sinks_ptr,
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    stride_kv_lengths,
    stride_weights_h,
    stride_weights_t,
    stride_stats_h,
    stride_stats_n,
    head_start,
    row_start,
    row_stop,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    window_right,
    drop_threshold,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [B, Hq, Tq, Dv] and lse [B, Hq, Tq] of a chunk, BLOCK_M rows and BLOCK_D columns a program.

    The weights come in tiles of TILE_N keys, a multiple of BLOCK_N.
    """
    slices: tl.constexpr = (HEAD_DIM_V + BLOCK_D - 1) // BLOCK_D
    tiles_m = tl.cdiv(row_stop - row_start, BLOCK_M)
    pid = tl.program_id(0)
    # the slices of a row of tiles start together and share its weights in the cache; under a causal mask late
    # queries see most, and those of all heads start first
    heads = tl.num_programs(0) // (slices * tiles_m)
    part, local_head = pid % slices, pid // slices % heads
    tile_m = tiles_m - 1 - pid // (slices * heads)
    head = head_start + local_head
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    v_ptr += b64 * stride_v_b + (h64 // group) * stride_v_h
    out_ptr += b64 * stride_out_b + h64 * stride_out_h
    lse_ptr += (b64 * num_heads + h64) * q_len
    weights_ptr += local_head.to(tl.int64) * stride_weights_h
    local_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    tile_max_ptr += local_head.to(tl.int64) * stride_stats_h
    tile_sum_ptr += local_head.to(tl.int64) * stride_stats_h
    tile_norm_ptr += local_head.to(tl.int64) * stride_stats_h

    rows = row_start + local_rows
    row_mask = rows < q_len
    cols = part * BLOCK_D + tl.arange(0, BLOCK_D)
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    i_first = row_start + tile_m * BLOCK_M
    start, stop = kv_span(i_first, min(i_first + BLOCK_M, q_len) - 1, q_len, length, left, right)
    first_tile = start // TILE_N
    last_tile = tl.cdiv(stop, TILE_N)
    first_seen = max(length - q_len - left, 0)

    if HAS_SINKS:  # a key of its own, seen by every row, with no value
        sink = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
        m = tl.ceil(sink)
        l = tl.exp2(sink - tl.where(m == float("-inf"), 0.0, m))
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
    norm = l
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    for tile in range(first_tile, last_tile, TILES):
        numbers = tile + tl.arange(0, TILES)
        at = numbers.to(tl.int64)[:, None] * stride_stats_n + local_rows[None, :]  # [TILES, BLOCK_M]
        there = (numbers < last_tile)[:, None]
        maxima = tl.load(tile_max_ptr + at, mask=there, other=float("-inf"))
        sums = tl.load(tile_sum_ptr + at, mask=there, other=0.0)
        norms = tl.load(tile_norm_ptr + at, mask=there, other=0.0)
        m_new = tl.maximum(m, tl.max(maxima, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale, factors = tl.exp2(m - base), tl.exp2(maxima - base[None, :])
        l = l * rescale + tl.sum(sums * factors, 0)
        norm = norm * rescale + tl.sum(norms * factors, 0)
        m = m_new
    base = tl.where(m == float("-inf"), 0.0, m)

    WIDTH: tl.constexpr = HEAD_DIM_V if HEAD_DIM_V % BLOCK_D == 0 else 0
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = acc
    # loaded a step ahead, for it is no operand of a product and would be waited for
    tile_max = tl.load(tile_max_ptr + first_tile.to(tl.int64) * stride_stats_n + local_rows)
    for n_start in range(first_tile * TILE_N, stop, BLOCK_N):
        keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        p = tl.load(weights_ptr + local_rows.to(tl.int64)[:, None] * stride_weights_t + keys[None, :])
        factor = tl.exp2(tile_max - base)
        following = min((n_start + BLOCK_N) // TILE_N, last_tile - 1)
        tile_max = tl.load(tile_max_ptr + following.to(tl.int64) * stride_stats_n + local_rows)
        key_mask = (keys >= first_seen) & (keys < length)
        v = load_rows(
            v_ptr, keys, cols, stride_v_t, key_mask, HEAD_DIM_V, WIDTH, False, False
        )  # [BLOCK_N, BLOCK_D]
        if MASK_KIND != NO_MASK or HAS_SEGMENTS:
            v = only_weighted(v, p, 0)
        # exact: by a power of two, or by 1 where a row has but one tile
        p = (p.to(tl.float32) * factor[:, None]).to(v.dtype)
        acc, low = dot_add_parts(p, v, acc, low, PRECISION)

    acc = sum_of_parts(acc, low, PRECISION)
    denominator = tl.where(norm == 0.0, 1.0, norm)
    if HAS_DROPOUT:
        denominator *= 1.0 - drop_threshold / 256.0
    store_rows(out_ptr, acc / denominator[:, None], rows, cols, stride_out_t, row_mask, HEAD_DIM_V, False)
    if part == 0:
        tl.store(lse_ptr + rows, (m + tl.log2(l)) * LN2, mask=row_mask)


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
    """``(out, lse)``; arguments as in `streamattn.ops`."""
    batch, num_heads, q_len, _ = q.shape
    out = heads_last(q, v.shape[-1])
    lse = q.new_empty(batch, num_heads, q_len, dtype=torch.float32)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    options = (scale, window_left, window_right, softcap, dropout_p)
    key = call_key((q, k, v, *masks, sinks), *options)
    forward = forward_by_parts if parts_of(q, k) > 1 else _by_tiles
    with device_guard(q):
        forward(q, k, v, out, lse, masks, seed, sinks, options, key)
    return out, lse


def _by_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: tuple[Tensor | None, ...],
    seed: Tensor | None,
    sinks: Tensor | None,
    options: tuple[Any, ...],
    key: Any,
) -> None:
    """Weights of as many queries as the workspace holds, then their out, until all are done."""
    batch, num_heads, q_len, _ = q.shape
    kv_len, head_dim_v = v.shape[2:]
    tile = pick_weights("weights", q, k)
    tiles_n = cdiv(kv_len, tile.BLOCK_N)
    kv_padded = tiles_n * tile.BLOCK_N
    parts = chunks(batch * num_heads, 1, q_len, kv_padded, q.element_size(), tile.BLOCK_M)
    heads, rows = parts[0].heads, parts[0].row_stop - parts[0].row_start
    padded = cdiv(rows, tile.BLOCK_M) * tile.BLOCK_M
    weights = q.new_empty((heads, padded, kv_padded))
    tile_max, tile_sum, tile_norm = q.new_empty((3, heads, tiles_n, padded), dtype=torch.float32)
    reader = pick_reader("out", q, tile, heads, rows, head_dim_v)

    for chunk in parts:
        at = dict(
            stride_weights_h=weights.stride(0),
            stride_weights_t=weights.stride(1),
            stride_stats_h=tile_max.stride(0),
            stride_stats_n=tile_max.stride(1),
            head_start=chunk.head_start,
            row_start=chunk.row_start,
            row_stop=chunk.row_stop,
        )
        size = chunk.row_stop - chunk.row_start

        def weights_arguments(
            at: dict[str, Any] = at, programs: int = cdiv(size, tile.BLOCK_M) * tiles_n * chunk.heads
        ) -> tuple[int, dict[str, Any]]:
            shared = call_arguments(shared_tile(tile), q, k, v, *masks, *options)
            own = dict(**at, BLOCK_D=tile.BLOCK_D, WHOLE=tiles_n == 1 and sinks is None)
            own["DEPENDENT"] = starts_early(q)
            return programs, arguments_of(attention_wide_weights_kernel, shared, **own)

        def out_arguments(
            at: dict[str, Any] = at, programs: int = cdiv(size, reader.BLOCK_M) * chunk.heads
        ) -> tuple[int, dict[str, Any]]:
            shared = call_arguments(shared_tile(reader), q, k, v, *masks, *options)
            own = dict(**at, **strides("out", out), BLOCK_D=reader.BLOCK_D, TILE_N=tile.BLOCK_N)
            early = starts_early(q)
            own.update(HAS_SINKS=sinks is not None, DEPENDENT=early, launch_pdl=early)
            slices = cdiv(head_dim_v, reader.BLOCK_D)
            return slices * programs, arguments_of(attention_wide_out_kernel, shared, **own)

        place = (key, chunk, parts[0])
        pointers = (q, k, weights, tile_max, tile_sum, tile_norm, *mask_pointers(*masks, seed))
        launch(attention_wide_weights_kernel, place, pointers, weights_arguments)
        pointers = (v, weights, tile_max, tile_sum, tile_norm, out, lse, masks[3], sinks)
        launch(attention_wide_out_kernel, place, pointers, out_arguments)
