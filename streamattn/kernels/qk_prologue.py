"""What comes between the projections of q and k and the attention: an RMS norm and the rotation by position.

Forward and backward each read a projection's output once, in place, and write once. The first half of the
programs serve q, the others k; each walks tokens, with all heads of one in registers and the norm's weight
beside them. A head's columns stand in pairs: those that rotate with one another, then the others, which
rotate by nothing. The forward rounds where PyTorch's steps do: after the norm, or also before its weight; a
rotation by cos and sin of x's own half precision rounds each product.

The backward computes the norm's factor again. Each program keeps a share of the weight's gradient in
registers, and the shares are added up behind it in one order.

Layouts: x [B, T, H * D] with a unit last stride, D even; weight [H * D] for a norm over all heads, [D] for
one over each; cos and sin [B or 1, T, R], of the same strides, R even and up to D, of which the first columns
of pairs are read; out [B, T, H, D], contiguous, and so the gradient of x; the gradient of out [B, H, T, D]
with a unit last stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamattn.kernels.launch import (
    UNSPECIALIZED,
    call_key,
    device_guard,
    launch,
    multiprocessor_count,
    strides,
)

FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 32, 3  # of q and of k, at most, for each multiprocessor
FORWARD_BYTES = 64  # of x for each thread
BACKWARD_NUMBERS = 32  # of x for each thread, and as many of the gradient of out
SUM_ROWS, SUM_COLUMNS = 64, 32  # of shares that a program adds up at a time


@dataclass(frozen=True)
class Layout:
    """What the code for q or for k depends on beside dtypes.

    Attributes:
        HEADS: of a token.
        BLOCK_H: these rounded up to a power of two.
        HEAD_DIM: columns of a head.
        BLOCK_P: pairs of columns, rounded up to a power of two.
        ROTARY: columns that rotate, the first ones.
        INTERLEAVED: whether a pair lies side by side; else half of the columns apart.
        EACH_HEAD: whether the norm is over each head; else over all.
    """

    HEADS: int
    BLOCK_H: int
    HEAD_DIM: int
    BLOCK_P: int
    ROTARY: int
    INTERLEAVED: bool
    EACH_HEAD: bool


@triton.jit
def places(LAYOUT: tl.constexpr):
    """Heads [BLOCK_H, 1], the columns of pairs, two [1, BLOCK_P], and which pairs there are and rotate."""
    heads = tl.arange(0, LAYOUT.BLOCK_H)[:, None]
    pair = tl.arange(0, LAYOUT.BLOCK_P)[None, :]
    rotates = pair < LAYOUT.ROTARY // 2
    if LAYOUT.INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    elif LAYOUT.ROTARY == LAYOUT.HEAD_DIM:
        first, second = pair, pair + LAYOUT.ROTARY // 2
    else:
        first = tl.where(rotates, pair, pair + LAYOUT.ROTARY // 2)
        second = tl.where(rotates, pair + LAYOUT.ROTARY // 2, pair + LAYOUT.HEAD_DIM // 2)
    return heads, first, second, pair < LAYOUT.HEAD_DIM // 2, rotates


@triton.jit
def load_pairs(ptr, rows, first, second, inside):
    """Two tiles in float32, 0 outside."""
    x_1 = tl.load(ptr + rows + first, mask=inside, other=0.0).to(tl.float32)
    x_2 = tl.load(ptr + rows + second, mask=inside, other=0.0).to(tl.float32)
    return x_1, x_2


@triton.jit
def store_pairs(ptr, rows, first, second, inside, x_1, x_2):
    """The opposite, rounded to the dtype of what ptr points to."""
    tl.store(ptr + rows + first, x_1.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + rows + second, x_2.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_weight(ptr, offset, LAYOUT: tl.constexpr):
    """The norm's factors ``offset + weight`` in pairs; where it is over each head, one row of them."""
    heads, first, second, inside, _ = places(LAYOUT)
    if LAYOUT.EACH_HEAD:
        w_1, w_2 = load_pairs(ptr, 0, first, second, inside)
    else:
        inside = inside & (heads < LAYOUT.HEADS)
        w_1, w_2 = load_pairs(ptr, heads * LAYOUT.HEAD_DIM, first, second, inside)
    return w_1 + offset, w_2 + offset


@triton.jit
def load_angles(cos_ptr, sin_ptr, at, LAYOUT: tl.constexpr):
    """cos and sin of each pair in float32, [1, BLOCK_P]; 1 and 0 for those that don't rotate."""
    _, first, _, _, rotates = places(LAYOUT)
    cos = tl.load(cos_ptr + at + first, mask=rotates, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at + first, mask=rotates, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def mean(pairs, LAYOUT: tl.constexpr):
    """Of sums over pairs: over all columns [1, 1], or over each head's [BLOCK_H, 1]."""
    x = tl.sum(pairs, 1, keep_dims=True)
    if LAYOUT.EACH_HEAD:
        x = x / LAYOUT.HEAD_DIM
    else:
        x = tl.sum(x, 0, keep_dims=True) / (LAYOUT.HEADS * LAYOUT.HEAD_DIM)
    return x


@triton.jit
def rounded(x, like_ptr):
    """x as it is after a stay in the dtype of what like_ptr points to."""
    return x.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def forward_tokens(
    pointers,
    stride_b,
    stride_t,
    angles,
    walk,
    eps,
    offset,
    ROUND_FIRST: tl.constexpr,
    ROUND_PRODUCTS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Every programs-th token of q or of k."""
    x_ptr, weight_ptr, out_ptr = pointers
    cos_ptr, sin_ptr, stride_angles_b, stride_angles_t = angles
    program, programs, tokens, q_len = walk
    heads, first, second, inside, _ = places(LAYOUT)
    inside = inside & (heads < LAYOUT.HEADS)
    rows = heads * LAYOUT.HEAD_DIM
    w_1, w_2 = load_weight(weight_ptr, offset, LAYOUT)
    for token in range(program, tokens, programs):
        b, t = tl.cast(token // q_len, tl.int64), tl.cast(token % q_len, tl.int64)
        x_1, x_2 = load_pairs(x_ptr + b * stride_b + t * stride_t, rows, first, second, inside)
        at = b * stride_angles_b + t * stride_angles_t
        cos, sin = load_angles(cos_ptr, sin_ptr, at, LAYOUT)
        factor = tl.rsqrt(mean(x_1 * x_1 + x_2 * x_2, LAYOUT) + eps)
        x_1, x_2 = x_1 * factor, x_2 * factor
        if ROUND_FIRST:
            x_1, x_2 = rounded(x_1, x_ptr), rounded(x_2, x_ptr)
        x_1, x_2 = rounded(x_1 * w_1, x_ptr), rounded(x_2 * w_2, x_ptr)
        if ROUND_PRODUCTS:
            out_1 = rounded(x_1 * cos, x_ptr) - rounded(x_2 * sin, x_ptr)
            out_2 = rounded(x_2 * cos, x_ptr) + rounded(x_1 * sin, x_ptr)
        else:
            out_1 = x_1 * cos - x_2 * sin
            out_2 = x_2 * cos + x_1 * sin
        at_out = out_ptr + tl.cast(token, tl.int64) * (LAYOUT.HEADS * LAYOUT.HEAD_DIM)
        store_pairs(at_out, rows, first, second, inside, out_1, out_2)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def qk_prologue_fwd_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    stride_q_b,
    stride_q_t,
    stride_k_b,
    stride_k_t,
    stride_angles_b,
    stride_angles_t,
    batch,
    q_len,
    programs,
    eps,
    offset,
    ROUND_FIRST: tl.constexpr,
    ROUND_PRODUCTS: tl.constexpr,
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
):
    """q and k normed and rotated, [B, T, H, D]."""
    program = tl.program_id(0)
    angles = (cos_ptr, sin_ptr, stride_angles_b, stride_angles_t)
    walk = (program % programs, programs, batch * q_len, q_len)
    if program < programs:
        at = (q_ptr, q_weight_ptr, q_out_ptr)
        forward_tokens(
            at, stride_q_b, stride_q_t, angles, walk, eps, offset, ROUND_FIRST, ROUND_PRODUCTS, Q_LAYOUT
        )
    else:
        at = (k_ptr, k_weight_ptr, k_out_ptr)
        forward_tokens(
            at, stride_k_b, stride_k_t, angles, walk, eps, offset, ROUND_FIRST, ROUND_PRODUCTS, K_LAYOUT
        )


@triton.jit
def backward_tokens(
    pointers, dout_strides, stride_b, stride_t, angles, walk, eps, offset, LAYOUT: tl.constexpr
):
    """Every programs-th token of q or of k, and a share of the gradient of its weight.

    With ``n = x / rms`` and ``g = (offset + weight) * dy``: ``dx = (g - n * mean(g * n)) / rms``.
    """
    dout_ptr, x_ptr, weight_ptr, dx_ptr, shares_ptr = pointers
    stride_dout_b, stride_dout_h, stride_dout_t = dout_strides
    cos_ptr, sin_ptr, stride_angles_b, stride_angles_t = angles
    program, programs, tokens, q_len = walk
    heads, first, second, inside, _ = places(LAYOUT)
    is_column, inside = inside, inside & (heads < LAYOUT.HEADS)
    rows = heads * LAYOUT.HEAD_DIM
    dout_rows = heads.to(tl.int64) * stride_dout_h
    w_1, w_2 = load_weight(weight_ptr, offset, LAYOUT)
    dw_1 = tl.full([LAYOUT.BLOCK_H, LAYOUT.BLOCK_P], 0.0, tl.float32)
    dw_2 = tl.full([LAYOUT.BLOCK_H, LAYOUT.BLOCK_P], 0.0, tl.float32)
    for token in range(program, tokens, programs):
        b, t = tl.cast(token // q_len, tl.int64), tl.cast(token % q_len, tl.int64)
        at_dout = dout_ptr + b * stride_dout_b + t * stride_dout_t
        d_1, d_2 = load_pairs(at_dout, dout_rows, first, second, inside)
        x_1, x_2 = load_pairs(x_ptr + b * stride_b + t * stride_t, rows, first, second, inside)
        at = b * stride_angles_b + t * stride_angles_t
        cos, sin = load_angles(cos_ptr, sin_ptr, at, LAYOUT)
        g_1 = d_1 * cos + d_2 * sin
        g_2 = d_2 * cos - d_1 * sin
        factor = tl.rsqrt(mean(x_1 * x_1 + x_2 * x_2, LAYOUT) + eps)
        x_1, x_2 = x_1 * factor, x_2 * factor
        dw_1 += g_1 * x_1
        dw_2 += g_2 * x_2
        g_1, g_2 = g_1 * w_1, g_2 * w_2
        along = mean(g_1 * x_1 + g_2 * x_2, LAYOUT)
        g_1, g_2 = factor * (g_1 - x_1 * along), factor * (g_2 - x_2 * along)
        at_dx = dx_ptr + tl.cast(token, tl.int64) * (LAYOUT.HEADS * LAYOUT.HEAD_DIM)
        store_pairs(at_dx, rows, first, second, inside, g_1, g_2)
    if LAYOUT.EACH_HEAD:
        dw_1, dw_2 = tl.sum(dw_1, 0, keep_dims=True), tl.sum(dw_2, 0, keep_dims=True)
        store_pairs(shares_ptr + program * LAYOUT.HEAD_DIM, 0, first, second, is_column, dw_1, dw_2)
    else:
        at_share = shares_ptr + program * (LAYOUT.HEADS * LAYOUT.HEAD_DIM)
        store_pairs(at_share, rows, first, second, inside, dw_1, dw_2)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def qk_prologue_bwd_kernel(
    dq_out_ptr,
    dk_out_ptr,
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    dq_ptr,
    dk_ptr,
    q_shares_ptr,
    k_shares_ptr,
    stride_dq_out_b,
    stride_dq_out_h,
    stride_dq_out_t,
    stride_dk_out_b,
    stride_dk_out_h,
    stride_dk_out_t,
    stride_q_b,
    stride_q_t,
    stride_k_b,
    stride_k_t,
    stride_angles_b,
    stride_angles_t,
    batch,
    q_len,
    programs,
    eps,
    offset,
    Q_LAYOUT: tl.constexpr,
    K_LAYOUT: tl.constexpr,
):
    """dq and dk [B, T, H * D], and a row for each program of shares of the weights' gradients."""
    program = tl.program_id(0)
    angles = (cos_ptr, sin_ptr, stride_angles_b, stride_angles_t)
    walk = (program % programs, programs, batch * q_len, q_len)
    if program < programs:
        at = (dq_out_ptr, q_ptr, q_weight_ptr, dq_ptr, q_shares_ptr)
        dout_strides = (stride_dq_out_b, stride_dq_out_h, stride_dq_out_t)
        backward_tokens(at, dout_strides, stride_q_b, stride_q_t, angles, walk, eps, offset, Q_LAYOUT)
    else:
        at = (dk_out_ptr, k_ptr, k_weight_ptr, dk_ptr, k_shares_ptr)
        dout_strides = (stride_dk_out_b, stride_dk_out_h, stride_dk_out_t)
        backward_tokens(at, dout_strides, stride_k_b, stride_k_t, angles, walk, eps, offset, K_LAYOUT)


@triton.jit
def sum_shares(shares_ptr, dweight_ptr, block, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of a weight's gradient, of shares [programs, width] in float32."""
    cols = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.full([1, COLUMNS], 0.0, tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)[:, None]
        inside = (rows < programs) & (cols < width)
        shares = tl.load(shares_ptr + rows * width + cols, mask=inside, other=0.0)
        total += tl.sum(shares, 0, keep_dims=True)
    tl.store(dweight_ptr + cols, total.to(dweight_ptr.dtype.element_ty), mask=cols < width)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def qk_prologue_sum_kernel(
    q_shares_ptr,
    k_shares_ptr,
    dq_weight_ptr,
    dk_weight_ptr,
    programs,
    q_width,
    k_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of both weights, in their dtypes."""
    block, q_blocks = tl.program_id(0), tl.cdiv(q_width, COLUMNS)
    if block < q_blocks:
        sum_shares(q_shares_ptr, dq_weight_ptr, block, programs, q_width, ROWS, COLUMNS)
    else:
        sum_shares(k_shares_ptr, dk_weight_ptr, block - q_blocks, programs, k_width, ROWS, COLUMNS)


def _arguments(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    head_dim: int,
    eps: float,
    offset: float,
    interleaved: bool,
    programs: int,
    numbers: int,
) -> dict[str, Any]:
    """What both kernels take, with so many numbers of x for each thread."""
    layouts = [
        Layout(
            HEADS=x.shape[2] // head_dim,
            BLOCK_H=triton.next_power_of_2(x.shape[2] // head_dim),
            HEAD_DIM=head_dim,
            BLOCK_P=triton.next_power_of_2(head_dim // 2),
            ROTARY=cos.shape[2],
            INTERLEAVED=interleaved,
            EACH_HEAD=weight.shape[0] == head_dim,  # of one head: the same
        )
        for x, weight in ((q, q_weight), (k, k_weight))
    ]
    width = max(x.BLOCK_H for x in layouts) * 2 * layouts[0].BLOCK_P
    return dict(
        stride_q_b=q.stride(0),
        stride_q_t=q.stride(1),
        stride_k_b=k.stride(0),
        stride_k_t=k.stride(1),
        stride_angles_b=cos.stride(0) if cos.shape[0] > 1 else 0,
        stride_angles_t=cos.stride(1),
        batch=q.shape[0],
        q_len=q.shape[1],
        programs=programs,
        eps=eps,
        offset=offset,
        Q_LAYOUT=layouts[0],
        K_LAYOUT=layouts[1],
        num_warps=min(max(width // (32 * numbers), 1), 16),
    )


def _programs(q: Tensor, most: int) -> int:
    """Programs for q, and as many for k: a token each at least; a few in the interpreter."""
    tokens = q.shape[0] * q.shape[1]
    return min(tokens, most * multiprocessor_count(q.get_device()) if q.is_cuda else 5)


def prologue_forward(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
    offset: float,
    interleaved: bool,
    round_first: bool,
) -> tuple[Tensor, Tensor]:
    """q [B, Hq, T, D] and k [B, Hkv, T, D], stored [B, T, H, D]; arguments as in `streamattn.prologue`."""
    batch, q_len, _ = q.shape
    q_out, k_out = (
        x.new_empty_strided(
            (batch, x.shape[2] // head_dim, q_len, head_dim),
            (q_len * x.shape[2], head_dim, x.shape[2], 1),
        )
        for x in (q, k)
    )
    programs = _programs(q, FORWARD_PROGRAMS)

    def arguments() -> tuple[int, dict[str, Any]]:
        options = (head_dim, eps, offset, interleaved, programs, FORWARD_BYTES // q.element_size())
        return 2 * programs, dict(
            **_arguments(q, k, q_weight, k_weight, cos, *options),
            ROUND_FIRST=round_first,
            ROUND_PRODUCTS=q.dtype != torch.float32 and cos.dtype == q.dtype,
        )

    tensors = (q, k, q_weight, k_weight, cos, sin)
    key = call_key(tensors, head_dim, eps, offset, interleaved, round_first)
    with device_guard(q):
        launch(qk_prologue_fwd_kernel, key, (*tensors, q_out, k_out), arguments)
    return q_out, k_out


def prologue_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
    offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(dq, dk, dq_weight, dk_weight)`` for dq_out and dk_out [B, H, T, D] with a unit last stride."""
    dq, dk = (x.new_empty(x.shape) for x in (q, k))
    dq_weight, dk_weight = (x.new_empty(x.shape) for x in (q_weight, k_weight))
    programs = _programs(q, BACKWARD_PROGRAMS)
    shares = [x.new_empty((programs, x.shape[0]), dtype=torch.float32) for x in (q_weight, k_weight)]

    def arguments() -> tuple[int, dict[str, Any]]:
        options = (head_dim, eps, offset, interleaved, programs, BACKWARD_NUMBERS)
        return 2 * programs, dict(
            **strides("dq_out", dq_out),
            **strides("dk_out", dk_out),
            **_arguments(q, k, q_weight, k_weight, cos, *options),
        )

    def sum_arguments() -> tuple[int, dict[str, Any]]:
        widths = [x.shape[0] for x in (q_weight, k_weight)]
        blocks = sum(triton.cdiv(width, SUM_COLUMNS) for width in widths)
        return blocks, dict(
            programs=programs, q_width=widths[0], k_width=widths[1], ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
        )

    tensors = (dq_out, dk_out, q, k, q_weight, k_weight, cos, sin)
    key = call_key(tensors, head_dim, eps, offset, interleaved)
    with device_guard(q):
        launch(qk_prologue_bwd_kernel, key, (*tensors, dq, dk, *shares), arguments)
        launch(qk_prologue_sum_kernel, key, (*shares, dq_weight, dk_weight), sum_arguments)
    return dq, dk, dq_weight, dk_weight
