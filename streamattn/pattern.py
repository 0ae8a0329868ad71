"""Who sees whom: the visibility rule of the whole package, its spans of tiles, and its pair counts.

Query ``i`` of ``q_len`` stands at position ``p = i + kv_len - q_len`` among ``kv_len`` keys (bottom-right
alignment) and sees key ``j`` iff ``j < kv_len`` and ``p - window_left <= j <= p + window_right``. Causal
attention is ``window_right = 0``. An open side has the width `UNBOUNDED`.

Everything here is written with operators, ``min`` and ``max`` only, so that the same source serves Python
ints, torch tensors (`visible` alone) and, jitted by ``kernels/primitives.py``, Triton blocks. Segments and
mask tensors are data, not geometry; they are left to the callers, but for the kinds of masks and the entries
that hide. So is dropout, but for the two numbers on which the reference and the kernels must agree.

A range ``i_first..i_last`` or ``j_first..j_last`` includes both ends; ``[start, stop)`` excludes stop.
"""

UNBOUNDED = 1 << 30
"""Width of an open side of the window; fits int32 with room for any legal length on top."""

NO_MASK, BOOL_MASK, ADDITIVE_MASK = 0, 1, 2
"""What a kernel is told of its ``attn_mask``."""


def visible(i, j, q_len, kv_len, window_left, window_right):
    """Whether query ``i`` sees key ``j``; broadcasts over tensors and blocks."""
    p = i + (kv_len - q_len)
    return (j < kv_len) & (j >= p - window_left) & (j <= p + window_right)


def open_sides(q_len: int, kv_len: int, window_left: int, window_right: int) -> tuple[int, int]:
    """The window with a side that reaches past every key made `UNBOUNDED`: it costs no masked tiles."""
    length = q_len + kv_len
    return (
        UNBOUNDED if window_left >= length else window_left,
        UNBOUNDED if window_right >= length else window_right,
    )


def hiding_limit(mask_lowest: float, score_lowest: float) -> float:
    """An entry of an additive mask hides at or below it; by the least of the mask's dtype and the scores'."""
    return max(mask_lowest / 2, score_lowest)


def kv_span(i_first, i_last, q_len, kv_len, window_left, window_right):
    """Keys ``[start, stop)`` that some query of ``i_first..i_last`` may see; empty where stop <= start."""
    shift = kv_len - q_len
    start = max(i_first + shift - window_left, 0)
    stop = min(i_last + shift + window_right + 1, kv_len)
    return start, stop


def kv_span_full(i_first, i_last, q_len, kv_len, window_left, window_right):
    """Keys ``[start, stop)`` that every query of ``i_first..i_last`` sees; empty where stop <= start."""
    shift = kv_len - q_len
    start = max(i_last + shift - window_left, 0)
    stop = min(i_first + shift + window_right + 1, kv_len)
    return start, stop


def q_span(j_first, j_last, q_len, kv_len, window_left, window_right):
    """Queries ``[start, stop)`` that may see some key of ``j_first..j_last``; empty where stop <= start."""
    shift = kv_len - q_len
    start = max(j_first - shift - window_right, 0)
    stop = min(min(j_last, kv_len - 1) - shift + window_left + 1, q_len)
    return start, stop


def q_span_full(j_first, j_last, q_len, kv_len, window_left, window_right):
    """Queries ``[start, stop)`` that see every key of ``j_first..j_last``, all of them below ``kv_len``."""
    shift = kv_len - q_len
    start = max(j_last - shift - window_right, 0)
    stop = min(j_first - shift + window_left + 1, q_len)
    return start, stop


def count_pairs(q_len: int, kv_len: int, window_left: int = UNBOUNDED, window_right: int = UNBOUNDED) -> int:
    """Visible (query, key) pairs of one head; a forward's FLOPs are ``4 * head_dim`` times that."""
    total = 0
    for i in range(q_len):
        start, stop = kv_span(i, i, q_len, kv_len, window_left, window_right)
        total += max(stop - start, 0)
    return total


PHILOX_ROUNDS = 7
"""Rounds of the generator behind the dropout mask: the fewest that pass the statistical tests."""


def drop_threshold(dropout_p: float) -> int:
    """Dropout rate in 256ths, 0 to 255: an element is dropped iff its random byte is below it."""
    return min(round(dropout_p * 256), 255)
