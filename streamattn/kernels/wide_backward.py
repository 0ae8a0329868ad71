"""Attention backward for heads of more than 256 columns, in Triton: dq, dk and dv.

As in wide.py, products are kernels of their own. One makes tiles of the weights and of the scores' gradients
and leaves both in a workspace, in q's dtype; one multiplies the latter with k for dq, one either of them,
transposed, with q and dout for dk and dv. So each of the five products is made once. The workspaces hold a
limited number of queries at a time (`tiles.WIDE_WORKSPACE_BYTES` each); where one key head's queries take
several turns, dk and dv are summed up in float32, turn by turn, in order: the same inputs give the same bits.

Layouts as in forward.py; gradients are stored [B, T, H, D]. Left out on purpose: what wide.py leaves out, and
the gradient of a mask.
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
    strides,
)
from streamattn.kernels.primitives import (
    LOG2E,
    NO_MASK,
    UNBOUNDED,
    dot_add_parts,
    keep_tile,
    kv_span,
    load_rows,
    probabilities,
    q_span,
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
from streamattn.kernels.wide_primitives import head_products, only_weighted

DELTA_ROWS, DELTA_COLUMNS = 16, 128  # of a tile


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    stride_out_b,
    stride_out_h,
    stride_out_t,
    stride_dout_b,
    stride_dout_h,
    stride_dout_t,
    stride_dlse_b,
    stride_dlse_h,
    stride_dlse_t,
    num_heads,
    q_len,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """delta [B, Hq, Tq] = rowsum(dout * out) - dlse; where out is 0 the product is, whatever dout holds."""
    tiles_m = tl.cdiv(q_len, BLOCK_M)
    head, tile_m = tl.program_id(0) // tiles_m, tl.program_id(0) % tiles_m
    b64, h64 = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    out_ptr += b64 * stride_out_b + h64 * stride_out_h
    dout_ptr += b64 * stride_dout_b + h64 * stride_dout_h
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = rows < q_len
    delta = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, HEAD_DIM_V, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        out = load_rows(out_ptr, rows, cols, stride_out_t, row_mask, HEAD_DIM_V, 0, False, False)
        dout = load_rows(dout_ptr, rows, cols, stride_dout_t, row_mask, HEAD_DIM_V, 0, False, False)
        delta += tl.sum(tl.where(out == 0.0, 0.0, out.to(tl.float32) * dout.to(tl.float32)), 1)
    if HAS_DLSE:
        dlse_ptr += b64 * stride_dlse_b + h64 * stride_dlse_h
        delta -= tl.load(dlse_ptr + rows.to(tl.int64) * stride_dlse_t, mask=row_mask, other=0.0)
    tl.store(delta_ptr + head.to(tl.int64) * q_len + rows, delta, mask=row_mask)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_dscores_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    weights_ptr,
    dscores_ptr,
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
    stride_v_b,
    stride_v_h,
    stride_v_t,
    stride_dout_b,
    stride_dout_h,
    stride_dout_t,
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
    HEAD_DIM_V: tl.constexpr,
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
    PRECISION: tl.constexpr,
):
    """Weights and gradients of the scores, both [heads, rows, keys], of a chunk; a tile a program.

    Weights are those that v was multiplied with, rescaled by dropout. A tile that no query may see is not
    written.
    """
    tiles_n = tl.cdiv(kv_len, BLOCK_N)
    tiles_m = tl.cdiv(row_stop - row_start, BLOCK_M)
    pid = tl.program_id(0)
    tile_n, tile_m, local_head = pid % tiles_n, pid // tiles_n % tiles_m, pid // (tiles_n * tiles_m)
    head = head_start + local_head
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    q_ptr += b64 * stride_q_b + h64 * stride_q_h
    k_ptr += b64 * stride_k_b + (h64 // group) * stride_k_h
    v_ptr += b64 * stride_v_b + (h64 // group) * stride_v_h
    dout_ptr += b64 * stride_dout_b + h64 * stride_dout_h
    statistics = (b64 * num_heads + h64) * q_len
    tile = local_head.to(tl.int64) * stride_weights_h

    local_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    rows = row_start + local_rows
    row_mask = rows < q_len
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    i_first = row_start + tile_m * BLOCK_M
    start, stop = kv_span(i_first, min(i_first + BLOCK_M, q_len) - 1, q_len, length, left, right)
    n_start = tile_n * BLOCK_N
    if n_start + BLOCK_N > start and n_start < stop:
        keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_mask = (keys >= max(length - q_len - left, 0)) & (keys < length)
        # lse in base 2, +inf for a row that sees nothing or does not exist, so that its weights are 0
        lse = tl.load(lse_ptr + statistics + rows, mask=row_mask, other=float("-inf"))
        lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        delta = tl.load(delta_ptr + statistics + rows, mask=row_mask, other=0.0)
        own = rows
        theirs = keys
        if HAS_SEGMENTS:
            q_segments_ptr += b64 * stride_q_segments_b
            kv_segments_ptr += b64 * stride_kv_segments_b
            own = tl.load(q_segments_ptr + rows.to(tl.int64) * stride_q_segments_t, mask=row_mask, other=-1)
            theirs = tl.load(
                kv_segments_ptr + keys.to(tl.int64) * stride_kv_segments_t, mask=key_mask, other=-1
            )
        if MASK_KIND != NO_MASK:
            mask_ptr += b64 * stride_mask_b + h64 * stride_mask_h
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
        p, slope, seen = probabilities(
            s,
            lse2[:, None],
            rows[:, None],
            keys[None, :],
            row_mask[:, None],
            key_mask[None, :],
            own[:, None],
            theirs[None, :],
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
            True,
            MASK_KIND,
            HAS_SEGMENTS,
            HAS_SOFTCAP,
            FOLD_SCALE,
        )
        at = tile + local_rows.to(tl.int64)[:, None] * stride_weights_t + keys[None, :]
        kept = p
        if HAS_DROPOUT:
            seed = tl.load(seed_ptr)
            rescale = 1.0 / (1.0 - drop_threshold / 256.0)
            keep = keep_tile(seed, head, rows, n_start, drop_threshold, BLOCK_M, BLOCK_N)
            kept = tl.where(keep, p * rescale, 0.0)
        tl.store(weights_ptr + at, kept.to(weights_ptr.dtype.element_ty))
        dp = head_products(
            dout_ptr,
            v_ptr,
            rows,
            keys,
            stride_dout_t,
            stride_v_t,
            row_mask,
            key_mask,
            0,
            HEAD_DIM_V,
            HEAD_DIM_V,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            PRECISION,
        )
        if HAS_DROPOUT:
            dp = tl.where(keep, dp * rescale, 0.0)
        # dp of an unseen value may be NaN
        ds = tl.where(seen, p * (dp - delta[:, None]), 0.0)
        if HAS_SOFTCAP:
            ds *= slope
        tl.store(dscores_ptr + at, ds.to(dscores_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_dq_kernel(
    k_ptr,
    dscores_ptr,
    dq_ptr,
    kv_lengths_ptr,
    stride_k_b,
    stride_k_h,
    stride_k_t,
    stride_dq_b,
    stride_dq_h,
    stride_dq_t,
    stride_kv_lengths,
    stride_weights_h,
    stride_weights_t,
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
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dq [B, Hq, Tq, D] of a chunk, BLOCK_M rows and BLOCK_D columns a program.

    The gradients of the scores come in tiles of TILE_N keys, a multiple of BLOCK_N.
    """
    slices: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    tiles_m = tl.cdiv(row_stop - row_start, BLOCK_M)
    pid = tl.program_id(0)
    # the slices of a row of tiles start together and share its gradients in the cache; under a causal mask
    # late queries see most, and those of all heads start first
    heads = tl.num_programs(0) // (slices * tiles_m)
    part, local_head = pid % slices, pid // slices % heads
    tile_m = tiles_m - 1 - pid // (slices * heads)
    head = head_start + local_head
    b, h = head // num_heads, head % num_heads
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    k_ptr += b64 * stride_k_b + (h64 // group) * stride_k_h
    dq_ptr += b64 * stride_dq_b + h64 * stride_dq_h
    dscores_ptr += local_head.to(tl.int64) * stride_weights_h
    local_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    rows = row_start + local_rows
    cols = part * BLOCK_D + tl.arange(0, BLOCK_D)
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    i_first = row_start + tile_m * BLOCK_M
    start, stop = kv_span(i_first, min(i_first + BLOCK_M, q_len) - 1, q_len, length, left, right)
    first_seen = max(length - q_len - left, 0)

    WIDTH: tl.constexpr = HEAD_DIM if HEAD_DIM % BLOCK_D == 0 else 0
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low = dq
    for n_start in range(start // TILE_N * TILE_N, stop, BLOCK_N):
        keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        ds = tl.load(dscores_ptr + local_rows.to(tl.int64)[:, None] * stride_weights_t + keys[None, :])
        key_mask = (keys >= first_seen) & (keys < length)
        k = load_rows(
            k_ptr, keys, cols, stride_k_t, key_mask, HEAD_DIM, WIDTH, False, False
        )  # [BLOCK_N, BLOCK_D]
        if MASK_KIND != NO_MASK or HAS_SEGMENTS:
            k = only_weighted(k, ds, 0)
        dq, low = dot_add_parts(ds, k, dq, low, PRECISION)
    dq = sum_of_parts(dq, low, PRECISION)
    store_rows(dq_ptr, dq * scale, rows, cols, stride_dq_t, rows < q_len, HEAD_DIM, False)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_wide_dkdv_kernel(
    x_ptr,
    weights_ptr,
    dx_ptr,
    kv_lengths_ptr,
    stride_x_b,
    stride_x_h,
    stride_x_t,
    stride_dx_b,
    stride_dx_h,
    stride_dx_t,
    stride_kv_lengths,
    stride_weights_h,
    stride_weights_t,
    head_start,
    row_start,
    row_stop,
    num_heads,
    group,
    q_len,
    kv_len,
    window_left,
    window_right,
    factor,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    EMPTY_ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dx [B, Hkv, Tk, WIDTH] of a chunk, factor * weights^T @ x, BLOCK_N keys and BLOCK_D columns a program.

    That is dk with x = q, and dv with x = dout, of as many columns. Not FIRST: added to what dx holds.
    EMPTY_ROWS: whether a query may see no key; its row of x may hold anything.
    """
    slices: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    tiles_n = tl.cdiv(kv_len, BLOCK_N)
    pid = tl.program_id(0)
    part, tile_n, local_group = pid % slices, pid // slices % tiles_n, pid // (slices * tiles_n)
    kv_heads = num_heads // group
    kv_head = head_start // group + local_group
    b = kv_head // kv_heads
    b64 = b.to(tl.int64)
    dx_ptr += b64 * stride_dx_b + (kv_head % kv_heads).to(tl.int64) * stride_dx_h
    length = valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS)
    left = window_left if HAS_LEFT else UNBOUNDED
    right = window_right if HAS_RIGHT else UNBOUNDED
    n_start = tile_n * BLOCK_N
    keys = n_start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    cols = part * BLOCK_D + tl.arange(0, BLOCK_D)
    start, stop = q_span(n_start, n_start + BLOCK_N - 1, q_len, length, left, right)
    if n_start >= length:
        stop = 0
    start = max(start, row_start) // BLOCK_M * BLOCK_M
    stop = min(stop, row_stop)

    EVEN: tl.constexpr = WIDTH if WIDTH % BLOCK_D == 0 else 0
    dx = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    low = dx
    for g in range(0, group):
        h64 = (kv_head % kv_heads).to(tl.int64) * group + g
        x_head_ptr = x_ptr + b64 * stride_x_b + h64 * stride_x_h
        weights_head_ptr = weights_ptr + (local_group.to(tl.int64) * group + g) * stride_weights_h
        for m_start in range(start, stop, BLOCK_M):
            rows = m_start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            local_rows = (rows - row_start).to(tl.int64)
            w = tl.load(weights_head_ptr + local_rows[:, None] * stride_weights_t + keys[None, :])
            x = load_rows(x_head_ptr, rows, cols, stride_x_t, rows < q_len, WIDTH, EVEN, False, False)
            if EMPTY_ROWS:
                x = only_weighted(x, w, 1)
            dx, low = dot_add_parts(tl.trans(w), x, dx, low, PRECISION)
    dx = sum_of_parts(dx, low, PRECISION) * factor
    if not FIRST:
        dx += load_rows(dx_ptr, keys, cols, stride_dx_t, keys < kv_len, WIDTH, EVEN, False, False)
    store_rows(dx_ptr, dx, keys, cols, stride_dx_t, keys < kv_len, WIDTH, False)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dv, delta)``; arguments as in `streamattn.ops`, dout with a unit last stride.

    delta [B, Hq, Tq] float32 is rowsum(dout * out) - dlse.
    """
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len, head_dim_v = v.shape[1:]
    group = num_heads // num_kv_heads
    dq, dk, dv = heads_last(q, head_dim), heads_last(k, head_dim), heads_last(v, head_dim_v)
    delta = lse.new_empty(lse.shape)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths)
    options = (scale, window_left, window_right, softcap, dropout_p)
    empty_rows = any(x is not None for x in masks) or kv_len - q_len + window_right < 0

    tile = pick_weights("dscores", q, k)
    tiles_n = cdiv(kv_len, tile.BLOCK_N)
    kv_padded = tiles_n * tile.BLOCK_N
    parts = chunks(batch * num_heads, group, q_len, kv_padded, q.element_size(), tile.BLOCK_M)
    heads, rows = parts[0].heads, parts[0].row_stop - parts[0].row_start
    padded = cdiv(rows, tile.BLOCK_M) * tile.BLOCK_M
    weights, dscores = q.new_empty((2, heads, padded, kv_padded))
    dq_reader = pick_reader("dq", q, tile, heads, rows, head_dim)
    sums = {"dk": dk, "dv": dv}
    if any(part.row_start for part in parts) and q.dtype != torch.float32:
        sums = {name: torch.empty_like(x, dtype=torch.float32) for name, x in sums.items()}
    key = call_key((q, k, v, *masks, sinks, dout, dlse, out), *options)

    def delta_arguments() -> tuple[int, dict[str, Any]]:
        shared = call_arguments(shared_tile(tile), q, k, v, *masks, *options)
        own = dict(
            **strides("out", out),
            **strides("dout", dout),
            **strides("dlse", dlse),
            HAS_DLSE=dlse is not None,
            BLOCK_M=DELTA_ROWS,
            BLOCK_D=DELTA_COLUMNS,
            num_warps=4,
        )
        programs = cdiv(q_len, DELTA_ROWS) * batch * num_heads
        return programs, arguments_of(attention_wide_delta_kernel, shared, **own)

    with device_guard(q):
        launch(attention_wide_delta_kernel, key, (out, dout, dlse, delta), delta_arguments)
        for chunk in parts:
            at: dict[str, Any] = dict(
                stride_weights_h=weights.stride(0),
                stride_weights_t=weights.stride(1),
                head_start=chunk.head_start,
                row_start=chunk.row_start,
                row_stop=chunk.row_stop,
            )
            size = chunk.row_stop - chunk.row_start
            place = (key, chunk, parts[0])

            def dscores_arguments(
                at: dict[str, Any] = at, programs: int = cdiv(size, tile.BLOCK_M) * tiles_n * chunk.heads
            ) -> tuple[int, dict[str, Any]]:
                shared = call_arguments(shared_tile(tile), q, k, v, *masks, *options)
                own = dict(**at, **strides("dout", dout), BLOCK_D=tile.BLOCK_D)
                return programs, arguments_of(attention_wide_dscores_kernel, shared, **own)

            def dq_arguments(
                at: dict[str, Any] = at, programs: int = cdiv(size, dq_reader.BLOCK_M) * chunk.heads
            ) -> tuple[int, dict[str, Any]]:
                shared = call_arguments(shared_tile(dq_reader), q, k, v, *masks, *options)
                own = dict(**at, **strides("dq", dq), BLOCK_D=dq_reader.BLOCK_D, TILE_N=tile.BLOCK_N)
                slices = cdiv(head_dim, dq_reader.BLOCK_D)
                return slices * programs, arguments_of(attention_wide_dq_kernel, shared, **own)

            pointers = (q, k, v, dout, lse, delta, weights, dscores, *mask_pointers(*masks, seed))
            launch(attention_wide_dscores_kernel, place, pointers, dscores_arguments)
            launch(attention_wide_dq_kernel, place, (k, dscores, dq, kv_lengths), dq_arguments)
            for name, x, from_weights in (("dk", q, dscores), ("dv", dout, weights)):
                dx = sums[name]
                reader = pick_reader("dkdv", q, tile, chunk.heads // group, kv_len, x.shape[3])

                def dkdv_arguments(
                    at: dict[str, Any] = at,
                    name: str = name,
                    x: Tensor = x,
                    dx: Tensor = dx,
                    reader: Any = reader,
                    chunk: Any = chunk,
                ) -> tuple[int, dict[str, Any]]:
                    shared = call_arguments(shared_tile(reader), q, k, v, *masks, *options)
                    own = dict(
                        **at,
                        **strides("x", x),
                        **strides("dx", dx),
                        factor=float(scale) if name == "dk" else 1.0,
                        WIDTH=x.shape[3],
                        BLOCK_D=reader.BLOCK_D,
                        EMPTY_ROWS=empty_rows,
                        FIRST=chunk.row_start == 0,
                    )
                    slices = cdiv(x.shape[3], reader.BLOCK_D)
                    programs = slices * cdiv(kv_len, reader.BLOCK_N) * (chunk.heads // group)
                    return programs, arguments_of(attention_wide_dkdv_kernel, shared, **own)

                pointers = (x, from_weights, dx, kv_lengths)
                launch(attention_wide_dkdv_kernel, (place, name), pointers, dkdv_arguments)
    for name, x in (("dk", dk), ("dv", dv)):
        if sums[name] is not x:
            x.copy_(sums[name])
    return dq, dk, dv, delta
