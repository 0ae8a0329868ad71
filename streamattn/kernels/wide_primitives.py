"""Jitted steps of the kernels for wide heads: products over the columns of a head, and scores."""

import triton
import triton.language as tl

from streamattn.kernels.primitives import (
    BOOL_MASK,
    LOG2E,
    NO_MASK,
    dot_add_parts,
    load_rows,
    sum_of_parts,
    tanh,
    visible,
)


@triton.jit
def head_products(
    a_ptr,
    b_ptr,
    rows,
    keys,
    stride_a_t,
    stride_b_t,
    row_mask,
    key_mask,
    first,
    last,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of rows of a with rows of b over the columns [first, last), float32 [BLOCK_M, BLOCK_N].

    first is a multiple of BLOCK_D, and so is last, or it is HEAD_DIM. Rows outside their masks count as 0.
    """
    # where no step goes past the head, `load_rows` is told that its columns need no test
    WIDTH: tl.constexpr = HEAD_DIM if HEAD_DIM % BLOCK_D == 0 else 0
    s = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    low = s
    for start in range(first, last, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        a = load_rows(
            a_ptr, rows, cols, stride_a_t, row_mask, HEAD_DIM, WIDTH, False, False
        )  # [BLOCK_M, BLOCK_D]
        b = load_rows(
            b_ptr, keys, cols, stride_b_t, key_mask, HEAD_DIM, WIDTH, False, False
        )  # [BLOCK_N, BLOCK_D]
        s, low = dot_add_parts(a, tl.trans(b), s, low, PRECISION)
    return sum_of_parts(s, low, PRECISION)


@triton.jit
def scores(
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
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
):
    """Scores in base 2 from products s [M, N], -inf where a pair is hidden.

    inside: whether every query sees every key by the rule of windows and lengths (`pattern.kv_span_full`).
    """
    if FOLD_SCALE:
        s *= scale * LOG2E
    else:
        s *= scale
        if HAS_SOFTCAP:
            s = softcap * tanh(s / softcap)
    if not inside:
        seen = visible(rows[:, None], keys[None, :], q_len, length, left, right)
        if HAS_SEGMENTS:
            seen = seen & (own[:, None] == theirs[None, :]) & (own[:, None] >= 0)
        if MASK_KIND != NO_MASK:
            mask_ptrs = (
                mask_ptr
                + rows.to(tl.int64)[:, None] * stride_mask_m
                + keys.to(tl.int64)[None, :] * stride_mask_n
            )
            entry = tl.load(mask_ptrs, mask=row_mask[:, None] & key_mask[None, :], other=0)
            if MASK_KIND == BOOL_MASK:
                seen = seen & (entry != 0)
            else:
                # the interpreter compares bfloat16 by its bits, and hidden_below is a float32
                entry = entry.to(tl.float32)
                seen = seen & row_mask[:, None] & ~(entry <= hidden_below)
                s += entry
        s = tl.where(seen, s, float("-inf"))
    if not FOLD_SCALE:
        s *= LOG2E
    return s


@triton.jit
def row_weights(s, WHOLE: tl.constexpr):
    """(p, m) of a tile of scores in base 2: p = exp2(s - m), and m [M] its rows' maxima.

    Where a tile is not all of its rows, not WHOLE, m is rounded up to a whole number, so that tiles are
    brought to one maximum by a power of two: that rounds nothing, whatever type p is stored in. A row that
    sees nothing has m = -inf and p = 0.
    """
    m = tl.max(s, 1)
    if not WHOLE:
        m = tl.ceil(m)
    return tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None]), m


@triton.jit
def only_weighted(x, p, AXIS: tl.constexpr):
    """Rows of x [N, D], 0 where no weight along the other axis of p is other than 0.

    What such a row holds may be NaN, and 0 * NaN must not enter the product.
    """
    some = tl.max(tl.abs(p.to(tl.float32)), AXIS) > 0.0
    # by bits: Triton 3.9 would hand on a tile's conditions through shared memory, and can't
    BITS: tl.constexpr = tl.int16 if x.dtype.primitive_bitwidth == 16 else tl.int32
    kept = (0 - some.to(tl.int32)).to(BITS)  # all bits or none
    return (x.to(BITS, bitcast=True) & kept[:, None]).to(x.dtype, bitcast=True)
