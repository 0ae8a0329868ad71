"""Jitted steps that the kernels share, with the names of the mathematics.

The visibility rule and its spans are the very functions of `streamattn.pattern`, jitted. Scores are kept in
base 2: ``exp(x) = exp2(x * LOG2E)``, one instruction on the GPU.
"""

import types

import triton
import triton.language as tl

from streamattn import pattern

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PHILOX_ROUNDS = tl.constexpr(pattern.PHILOX_ROUNDS)
UNBOUNDED = tl.constexpr(pattern.UNBOUNDED)
NO_MASK = tl.constexpr(pattern.NO_MASK)
BOOL_MASK = tl.constexpr(pattern.BOOL_MASK)
# a program walks its tiles in three phases: an edge, where pairs are tested for visibility, the inside, where
# all are visible, and the other edge
INSIDE = tl.constexpr(1)
SCAN = tl.constexpr(1024)  # segment ids that are searched at once
SPAN = tl.constexpr(8)  # numbers of a row of `segments.query_spans`, three of them unused: whole sectors
ORDER = tl.constexpr(4)  # where the order of work items begins, behind their counter: at whole 16 bytes
ITEM = tl.constexpr(4)  # numbers of a work item there
HALF_TF32_BIT = tl.constexpr(0.00034)  # of a float32; from 0.35 to 0.7 of that bit


def _jit(rule):
    # the interpreter wants triton.language among a function's globals; pattern.py knows no Triton
    return triton.jit(
        types.FunctionType(rule.__code__, {"__name__": rule.__module__, "tl": tl}, rule.__name__)
    )


visible = _jit(pattern.visible)
kv_span = _jit(pattern.kv_span)
kv_span_full = _jit(pattern.kv_span_full)
q_span = _jit(pattern.q_span)
q_span_full = _jit(pattern.q_span_full)


@triton.jit
def schedule(pid, num_tiles, num_heads, heads_per_group):
    """(tile, head) of a program, tiles counted in the order in which they start, heads over the whole batch.

    Groups of heads follow one another, so that a group's keys stay in the cache; within a group the same tile
    of all its heads starts together, so that with the longest tiles first the short ones fill the gaps at the
    end.
    """
    group = pid // (num_tiles * heads_per_group)
    first_head = group * heads_per_group
    size = min(num_heads - first_head, heads_per_group)
    within = pid - group * num_tiles * heads_per_group
    return within // size, first_head + within % size


@triton.jit
def valid_length(kv_lengths_ptr, b, stride_kv_lengths, kv_len, HAS_LENGTHS: tl.constexpr):
    """Keys of sequence b that are filled, int32: kv_lengths[b] clamped to [0, kv_len], or kv_len."""
    if HAS_LENGTHS:
        length = tl.load(kv_lengths_ptr + b * stride_kv_lengths)
        return tl.minimum(tl.maximum(length, 0), kv_len).to(tl.int32)
    return kv_len


@triton.jit
def row_starts(ptr, rows, stride_row, ALIGNED: tl.constexpr):
    """[rows, 1] pointers. ALIGNED: to whole 16 bytes each (see `launch.rows_are_aligned`)."""
    starts = ptr + rows.to(tl.int64)[:, None] * stride_row
    if ALIGNED:
        starts = tl.multiple_of(starts, [16, 16])
    return starts


@triton.jit
def load_rows(
    ptr,
    rows,
    cols,
    stride_row,
    row_mask,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """[rows, BLOCK_D] of a matrix with unit column stride; 0 outside row_mask and past HEAD_DIM."""
    ptrs = row_starts(ptr, rows, stride_row, ALIGNED) + cols[None, :]
    if ALL_ROWS:
        if HEAD_DIM == BLOCK_D:
            return tl.load(ptrs)
        return tl.load(ptrs, mask=cols[None, :] < HEAD_DIM, other=0.0)
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptrs, mask=row_mask[:, None], other=0.0)
    return tl.load(ptrs, mask=row_mask[:, None] & (cols[None, :] < HEAD_DIM), other=0.0)


@triton.jit
def store_rows(ptr, tile, rows, cols, stride_row, row_mask, HEAD_DIM: tl.constexpr, ALIGNED: tl.constexpr):
    """The counterpart of load_rows."""
    ptrs = row_starts(ptr, rows, stride_row, ALIGNED) + cols[None, :]
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=row_mask[:, None] & (cols[None, :] < HEAD_DIM))


@triton.jit
def dot_add(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b.

    Tensor cores truncate their sums: over many tiles that would cost float32 inputs their accuracy, so there
    each tile's product starts at 0 and is added to acc with rounding.
    """
    if PRECISION == "tf32x3":
        # the unused limit keeps the compiler from folding the addition back into the product
        return acc + tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def tf32_parts(x):
    """(high, low) of a float32 tile, high + low = x: high keeps 11 bits, which TF32 has.

    What is added before the others are cut off is half of the last bit on average, so that low is as often
    positive as negative, and leaves infinities and NaN what they are. That takes half the instructions of a
    conversion. low is NaN where x is not finite; see `sum_of_parts`.
    """
    high = x + x * HALF_TF32_BIT
    high = (high.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def dot_add_parts(a, b, acc, low, PRECISION: tl.constexpr):
    """(acc, low) whose sum has grown by a @ b; both begin as 0 and `sum_of_parts` ends it.

    For float32 inputs in three TF32 products. acc takes that of the high parts, as `dot_add` does it. Those
    with a low part are summed up in low, on the tensor cores alone: truncation costs nothing there, no sum is
    waited for, and NaN of infinite inputs has to be looked for only once.
    """
    if PRECISION == "tf32x3":
        a_high, a_low = tf32_parts(a)
        b_high, b_low = tf32_parts(b)
        low = tl.dot(a_low, b_high, low, input_precision="tf32")
        low = tl.dot(a_high, b_low, low, input_precision="tf32")
        acc += tl.dot(a_high, b_high, input_precision="tf32", max_num_imprecise_acc=32)
        return acc, low
    return tl.dot(a, b, acc, input_precision=PRECISION), low


@triton.jit
def sum_of_parts(acc, low, PRECISION: tl.constexpr):
    """acc + low, and acc where it is infinite: then low may be NaN, of inf - inf or of inf * 0."""
    if PRECISION == "tf32x3":
        return tl.where(tl.abs(acc) == float("inf"), acc, acc + low)
    return acc


@triton.jit
def even_and_odd(x):
    """x[:, ::2] and x[:, 1::2].

    By sums with 0 and not by `tl.split`, which wants both columns in one thread: where they are not, the
    compiler made whole operands of products anew in each thread's registers, and 15 KB of them spilled.
    """
    pairs = tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2])
    is_odd = tl.arange(0, 2)[None, None, :] == 1
    return tl.sum(tl.where(is_odd, 0.0, pairs), 2), tl.sum(tl.where(is_odd, pairs, 0.0), 2)


@triton.jit
def dot_rows(a, b, PRECISION: tl.constexpr):
    """a @ b^T, [M, N] from a [M, K] and b [N, K].

    A chain of truncated sums over more than 128 columns is too long for float32 inputs: even and odd columns
    are summed apart (which moves nothing between threads that load them side by side) and added with
    rounding.
    """
    if PRECISION == "tf32x3" and a.shape[1] > 128:
        a_even, a_odd = even_and_odd(a)
        b_even, b_odd = even_and_odd(b)
        odd = tl.dot(a_odd, tl.trans(b_odd), input_precision=PRECISION)
        return dot_add(a_even, tl.trans(b_even), odd, PRECISION)
    return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def tanh(x):
    """tanh to float32 accuracy: (1 - e) / (1 + e), e = exp(-2 |x|), a polynomial where that would cancel."""
    size = tl.abs(x)
    e = tl.exp2(size * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    # x - x^3/3 + 2 x^5/15 - 17 x^7/315 + 62 x^9/2835: relative error below 1e-8 for |x| < 0.25
    series = 0.021869488536155203 * square - 0.05396825396825397
    series = series * square + 0.13333333333333333
    series = series * square - 0.3333333333333333
    small = x + x * square * series
    return tl.where(size < 0.25, small, tl.where(x < 0.0, -large, large))


@triton.jit
def online_softmax_update(s, m, l, score_scale, GUARD: tl.constexpr):
    """One tile of the online softmax in base 2.

    s [M, N] scores to be multiplied by score_scale > 0; m [M] running maximum and l [M] running denominator
    of the scaled scores. GUARD where a row may have seen nothing yet (its maximum stays -inf). Returns (p [M,
    N], rescale [M], m, l).
    """
    m_new = tl.maximum(m, tl.max(s, 1) * score_scale)
    base = m_new
    if GUARD:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * score_scale - base[:, None])
    rescale = tl.exp2(m - base)
    return p, rescale, m_new, l * rescale + tl.sum(p, 1)


@triton.jit
def probabilities(
    s,
    lse2,
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
    TESTED: tl.constexpr,
    MASK_KIND: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FOLD_SCALE: tl.constexpr,
):
    """(p, slope, seen) of one tile from its products s, p = exp(score - lse).

    slope is the softcap's derivative, seen which pairs are visible. The tile is [M, N] with per-query vectors
    [M, 1] and per-key vectors [1, N], or all of it transposed. Where a flag is off, the value it governs
    comes back as some tensor of the tile's shape and is not to be used.
    """
    if FOLD_SCALE:
        s *= scale * LOG2E
        slope = s
    else:
        s *= scale
        slope = s
        if HAS_SOFTCAP:
            t = tanh(s / softcap)
            s = softcap * t
            slope = 1.0 - t * t
    seen = s
    if TESTED:
        seen = visible(rows, keys, q_len, length, left, right)
        if HAS_SEGMENTS:
            seen = seen & (own == theirs) & (own >= 0)
        if MASK_KIND != NO_MASK:
            mask_ptrs = mask_ptr + rows.to(tl.int64) * stride_mask_m + keys.to(tl.int64) * stride_mask_n
            entry = tl.load(mask_ptrs, mask=row_mask & key_mask, other=0)
            if MASK_KIND == BOOL_MASK:
                seen = seen & (entry != 0)
            else:
                # the interpreter compares bfloat16 by its bits, and hidden_below is a float32
                entry = entry.to(tl.float32)
                seen = seen & row_mask & ~(entry <= hidden_below)
                s += entry
    if not FOLD_SCALE:
        s *= LOG2E
    p = tl.exp2(s - lse2)
    if TESTED:
        p = tl.where(seen, p, 0.0)
        if HAS_SOFTCAP:
            slope = tl.where(seen, slope, 0.0)
    return p, slope, seen


@triton.jit
def keep_tile(seed, head, rows, n_start, drop_threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Dropout's bool [BLOCK_M, BLOCK_N], True = kept, for queries `rows` and keys from n_start on.

    n_start is a multiple of BLOCK_N. The mapping is that of `streamattn.reference.keep_mask`: Philox counters
    (row, call, head, 0); within 64 keys call c of 0..3 serves keys 8 t + 2 c + e by its byte 2 t + e, which
    is byte 2 (t % 2) + e of word t / 2.
    """
    CALLS: tl.constexpr = 4 * ((BLOCK_N + 63) // 64)
    calls = (n_start // 64) * 4 + tl.arange(0, CALLS)
    c0 = tl.broadcast_to(rows[:, None], [BLOCK_M, CALLS])
    c1 = tl.broadcast_to(calls[None, :], [BLOCK_M, CALLS])
    c2 = tl.zeros([BLOCK_M, CALLS], tl.int32) + head
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, tl.zeros([BLOCK_M, CALLS], tl.int32), n_rounds=PHILOX_ROUNDS)
    shifts = (tl.arange(0, 4) * 8).to(tl.uint32)
    if BLOCK_N >= 64:
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M, CALLS, 2, 2], word 2 x + y at [x, y]
        octets = (tl.reshape(words, [BLOCK_M, CALLS, 4, 1]) >> shifts[None, None, None, :]) & 255
        octets = tl.reshape(octets, [BLOCK_M, BLOCK_N // 64, 4, 8, 2])  # [M, block, c, t, e]
        octets = tl.permute(octets, [0, 1, 3, 2, 4])
    elif BLOCK_N == 32:
        upper = (n_start // 32) % 2 == 1
        words = tl.join(tl.where(upper, w2, w0), tl.where(upper, w3, w1))  # [M, 4, 2]
        octets = (tl.reshape(words, [BLOCK_M, 4, 2, 1]) >> shifts[None, None, None, :]) & 255
        octets = tl.permute(tl.reshape(octets, [BLOCK_M, 4, 4, 2]), [0, 2, 1, 3])  # [M, t, c, e]
    else:
        tl.static_assert(BLOCK_N == 16)
        quarter = (n_start // 16) % 4
        word = tl.where(quarter < 2, tl.where(quarter == 0, w0, w1), tl.where(quarter == 2, w2, w3))  # [M, 4]
        octets = (tl.reshape(word, [BLOCK_M, 4, 1]) >> shifts[None, None, :]) & 255
        octets = tl.permute(tl.reshape(octets, [BLOCK_M, 4, 2, 2]), [0, 2, 1, 3])  # [M, t, c, e]
    return tl.reshape(octets, [BLOCK_M, BLOCK_N]).to(tl.int32) >= drop_threshold


@triton.jit
def segment_span(segments_ptr, stride, low, high, start, stop, SCAN: tl.constexpr):
    """Narrows [start, stop) to positions whose segment lies in low..high; (a position, 0) if none does."""
    stop = max(stop, 0)
    first = stop
    last = 0
    for chunk in range(start, stop, SCAN):
        at = chunk + tl.arange(0, SCAN)
        ids = tl.load(segments_ptr + at.to(tl.int64) * stride, mask=at < stop, other=-1)
        hit = (ids >= 0) & (ids >= low) & (ids <= high)
        first = min(first, tl.min(tl.where(hit, at, stop)))
        last = max(last, tl.max(tl.where(hit, at + 1, 0)))
    return first, last


@triton.jit
def segment_range(ids):
    """Least and greatest valid (non-negative) segment of a tile's ids; (2^31 - 1, -1) where there is none."""
    return tl.min(tl.where(ids < 0, 2147483647, ids)), tl.max(ids)
