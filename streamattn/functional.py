"""The attention function: the only place where defaults are resolved and arguments are validated.

`attention` takes SDPA's layout and FlashAttention's features; see its docstring for the contract.
`flash_attention` is the same on the matrices of a single head. Left out on purpose: any numerical work, which
is `streamattn.ops`'.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, overload

import torch
from torch import Tensor

from streamattn.dispatch import BACKEND_NAMES, MAX_DECODE_QUERIES
from streamattn.kinds import kind_of_call
from streamattn.ops import attention_forward, repeat_attention
from streamattn.pattern import UNBOUNDED

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FLOAT32 = torch.finfo(torch.float32)
_BELOW_1 = math.nextafter(1.0, 0.0)
_INTEGERS = (int, torch.SymInt)
_NUMBERS = (float, int, torch.SymInt, torch.SymFloat, numbers.Real)  # the common ones first
_FULL_LAYOUT = "[B, Hq, Tq, D], [B, Hkv, Tk, D], [B, Hkv, Tk, Dv]"
SegmentIds = Tensor | tuple[Tensor, Tensor]


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def check_qkv(q: Tensor, k: Tensor, v: Tensor, paged: bool) -> None:
    """Raises unless q, k and v are dense tensors of matching shapes on one device.

    Where k and v are paged, their first dimension is that of the pages.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, got {type(x).__name__}; convert it with torch.as_tensor"
            )
        if x.is_nested:
            raise TypeError(f"{name} is a nested tensor; pack the sequences and pass segment_ids instead")
        if x.layout is not torch.strided:
            raise TypeError(
                f"{name} must be a dense tensor, got {x.layout}; convert it with {name}.to_dense()"
            )
        if x.dtype not in _FLOATING:
            raise TypeError(
                f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; "
                f"convert it with {name}.to(...)"
            )
    if not q.device == k.device == v.device:
        name, x = ("k", k) if k.device != q.device else ("v", v)
        raise ValueError(
            f"q, k, v must be on one device, got q on {q.device} and {name} on {x.device}; move {name}"
        )
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape  # each question makes a new one
    rank = len(q_shape)
    if not (2 <= rank <= 4 and rank == len(k_shape) == len(v_shape)):
        raise ValueError(
            f"q, k, v must all be 4-D ({_FULL_LAYOUT}), 3-D without B or 2-D without B and H, "
            f"got {_shapes(q, k, v)}; add what is missing with unsqueeze"
        )
    if q_shape[-1] != k_shape[-1] or q_shape[-1] == 0:
        raise ValueError(
            f"q and k must share a positive head_dim, got {_shapes(q, k, v)}; project both to one"
        )
    if k_shape[:-1] != v_shape[:-1]:
        raise ValueError(
            f"k and v must agree but for head_dim, got {_shapes(q, k, v)}; pass one v for each k"
        )
    if rank == 4 and q_shape[0] != k_shape[0] and not paged:
        raise ValueError(f"q and k must share the batch size, got {_shapes(q, k, v)}; expand the smaller")
    if rank >= 3 and (k_shape[-3] == 0 or q_shape[-3] == 0 or q_shape[-3] % k_shape[-3] != 0):
        raise ValueError(
            "the heads of q must be a positive multiple of the heads of k and v, "
            f"got {q_shape[-3]} and {k_shape[-3]}: {_shapes(q, k, v)}; give each k head as many of q's"
        )


def rows_in_place(x: Tensor) -> Tensor:
    """``x`` itself, or a copy of it where its last dimension has another stride than 1."""
    return x if x.stride()[-1] == 1 else x.contiguous()


def _is_integral(value: object) -> bool:
    """Whether a value is of a type of integers, Python's or numpy's."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def as_autocast(x: Tensor) -> Tensor:
    """``x`` as autocast has it, where that is on."""
    if x.device.type == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def of_one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast has them, where it is on.

    Raises:
        TypeError: their dtypes differ.
    """
    if q.device.type != "meta" and torch.is_autocast_enabled(q.device.type):
        q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    if not q.dtype is k.dtype is v.dtype:
        raise TypeError(f"q, k, v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them to v's")
    return q, k, v


def resolve_window(window_size: int | tuple[int, int] | None, causal: bool) -> tuple[int, int]:
    """Widths (left, right) to each side, `UNBOUNDED` where open."""
    if window_size is None:
        return UNBOUNDED, 0 if causal else UNBOUNDED
    remedy = (
        "pass a positive int W (W visible keys, the query's own included) "
        "or a pair (left, right), -1 = unbounded"
    )
    if isinstance(window_size, bool) or not isinstance(window_size, (*_INTEGERS, tuple, list)):
        if _is_integral(window_size):
            return resolve_window(int(window_size), causal)
        raise TypeError(f"window_size must be an int or a pair of ints, got {window_size!r}; {remedy}")
    if isinstance(window_size, (tuple, list)):
        if len(window_size) != 2:
            raise ValueError(f"window_size must have two entries, got {window_size!r}; {remedy}")
        if not all(isinstance(side, _INTEGERS) and not isinstance(side, bool) for side in window_size):
            if all(map(_is_integral, window_size)):
                return resolve_window((int(window_size[0]), int(window_size[1])), causal)
            raise TypeError(f"window_size entries must be ints, got {window_size!r}; {remedy}")
        left, right = window_size
        if left < -1 or right < -1:
            raise ValueError(f"window_size entries must be -1 or more, got {window_size!r}; {remedy}")
    else:
        if window_size <= 0:
            raise ValueError(f"window_size must be positive, got {window_size!r}; {remedy}")
        left, right = window_size - 1, 0
    left = UNBOUNDED if left == -1 else min(left, UNBOUNDED)
    right = UNBOUNDED if right == -1 else min(right, UNBOUNDED)
    return left, 0 if causal else right


def _resolve_mask(attn_mask: Tensor, q: Tensor, kv_len: int, rank: int) -> Tensor:
    """The mask as 4-D, each dimension full or 1; ``q`` 4-D, ``rank`` that of the caller's q."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(
            f"attn_mask must be a torch.Tensor, got {type(attn_mask).__name__}; "
            "convert it with torch.as_tensor"
        )
    if attn_mask.is_nested:  # its layout may be strided, and it has no shape
        raise TypeError("attn_mask must be a dense tensor, got a nested tensor; pad it with to_padded_tensor")
    if attn_mask.layout is not torch.strided:
        raise TypeError(
            f"attn_mask must be a dense tensor, got {attn_mask.layout}; convert it with to_dense()"
        )
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in _FLOATING:
        raise TypeError(
            "attn_mask must be bool (True = visible) or floating (added to the scores), "
            f"got {attn_mask.dtype}; convert an integer mask with mask.bool()"
        )
    if attn_mask.device != q.device:
        raise ValueError(f"attn_mask must be on q's device {q.device}, got {attn_mask.device}; move it")
    full = (q.shape[0], q.shape[1], q.shape[2], kv_len)
    given = tuple(attn_mask.shape)
    wanted = full[4 - rank :]
    padded = (1,) * (4 - len(given)) + given
    if len(given) > rank or any(size not in (1, target) for size, target in zip(padded, full, strict=True)):
        raise ValueError(
            f"attn_mask must broadcast to {list(wanted)}, got {list(given)}; "
            "slice it, or add dimensions of size 1"
        )
    return attn_mask.reshape(padded) if attn_mask.dim() < 4 else attn_mask


def resolve_segments(segment_ids: SegmentIds, q: Tensor, kv_len: int, rank: int) -> tuple[Tensor, Tensor]:
    """The ids of 4-D queries and keys, [B, Tq] and [B, Tk]; ``rank`` is that of the caller's q."""
    if isinstance(segment_ids, Tensor):
        if q.shape[2] != kv_len:
            raise ValueError(
                f"one segment_ids tensor needs as many queries as keys, got {q.shape[2]} and {kv_len}; "
                "pass a pair (q_segment_ids, kv_segment_ids)"
            )
        segment_ids = (segment_ids, segment_ids)
    if not (isinstance(segment_ids, (tuple, list)) and len(segment_ids) == 2):
        count = f" of {len(segment_ids)}" if isinstance(segment_ids, (tuple, list)) else ""
        raise TypeError(
            "segment_ids must be an int32 tensor or a pair of them, "
            f"got a {type(segment_ids).__name__}{count}; "
            "pass ids or (q_segment_ids, kv_segment_ids)"
        )
    resolved = []
    for name, ids, length in zip(("q", "kv"), segment_ids, (q.shape[2], kv_len), strict=True):
        wanted = [q.shape[0], length] if rank == 4 else [length]
        if not isinstance(ids, Tensor) or ids.dtype != torch.int32:
            got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(
                f"{name} segment_ids must be an int32 tensor, got {got}; convert with ids.to(torch.int32)"
            )
        if list(ids.shape) != wanted:
            raise ValueError(
                f"{name} segment_ids must have shape {wanted}, got {list(ids.shape)}; "
                "pass one id for each place"
            )
        if ids.device != q.device:
            raise ValueError(f"{name} segment_ids must be on {q.device}, got {ids.device}; move it")
        resolved.append(ids if rank == 4 else ids.unsqueeze(0))
    return resolved[0], resolved[1]


def resolve_lengths(kv_lengths: Tensor, q: Tensor, kv_len: int, rank: int) -> Tensor:
    """The lengths as [B] on the device of q [B, Hq, Tq, D]; ``rank`` is that of the caller's q."""
    if not isinstance(kv_lengths, Tensor) or kv_lengths.dtype not in (torch.int32, torch.int64):
        got = kv_lengths.dtype if isinstance(kv_lengths, Tensor) else type(kv_lengths).__name__
        raise TypeError(
            f"kv_lengths must be an int32 or int64 tensor, got {got}; convert it with torch.as_tensor or .to"
        )
    wanted = [q.shape[0]] if rank == 4 else []
    if list(kv_lengths.shape) != wanted:
        raise ValueError(
            f"kv_lengths must have shape {wanted}, got {list(kv_lengths.shape)}; pass one length per sequence"
        )
    if kv_lengths.device.type == "meta" and q.device.type != "meta":
        raise ValueError(f"kv_lengths must hold values, got a meta tensor; create it on {q.device}")
    if (
        kv_lengths.device.type == "cpu"
        and type(kv_lengths) is Tensor
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()  # vmap's tensors have no one value to look at
    ):
        beyond = (kv_lengths < 0) | (kv_lengths > kv_len)
        if bool(beyond.any()):
            raise ValueError(
                f"kv_lengths must lie in [0, Tk = {kv_len}], got {kv_lengths.tolist()}; "
                "pass the fill level of the cache"
            )
    return kv_lengths.reshape(q.shape[0]).to(q.device, non_blocking=True)


def _check_block_table(block_table: Tensor, q: Tensor, k: Tensor, kv_lengths: Tensor | None) -> None:
    """Raises unless the table names pages of k for each sequence of q, whose lengths are known."""
    if not isinstance(block_table, Tensor) or block_table.dtype != torch.int32:
        got = block_table.dtype if isinstance(block_table, Tensor) else type(block_table).__name__
        raise TypeError(
            f"block_table must be an int32 tensor, got {got}; convert it with block_table.to(torch.int32)"
        )
    if q.dim() != 4:
        raise ValueError(
            "block_table needs q [B, Hq, Tq, D] and k [pages, Hkv, page, D], "
            f"got q {list(q.shape)} and k {list(k.shape)}; add what is missing with unsqueeze"
        )
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"block_table must have shape [{q.shape[0]}, pages of a sequence], got "
            f"{list(block_table.shape)}; pass one row for each sequence"
        )
    if block_table.device != q.device:
        raise ValueError(
            f"block_table must be on q's device {q.device}, got {block_table.device}; move it there"
        )
    if k.shape[0] == 0 or k.shape[2] == 0:
        raise ValueError(
            f"a paged cache must hold a page of keys or more, got k {list(k.shape)}; allocate it first"
        )
    if kv_lengths is None:
        raise ValueError(
            "block_table needs kv_lengths, which says how much of its pages each sequence has filled; "
            "pass an int32 tensor [B]"
        )
    if q.shape[2] > MAX_DECODE_QUERIES:
        raise ValueError(
            f"a paged cache must be read by {MAX_DECODE_QUERIES} queries or fewer, got {q.shape[2]}; attend "
            "to the keys and values of a longer prompt before they are paged, or in pieces"
        )


def resolve_sinks(sinks: Tensor, q: Tensor, rank: int) -> Tensor:
    """Contiguous [Hq] of q [B, Hq, Tq, D]; ``rank`` is that of the caller's q."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        what = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks must be a floating tensor, got {what}; pass one logit per query head")
    wanted = [] if rank == 2 else [q.shape[1]]
    if list(sinks.shape) != wanted:
        raise ValueError(f"sinks must have shape {wanted}, got {list(sinks.shape)}; pass one per query head")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}; move it there")
    return sinks.reshape(q.shape[1]).contiguous()


def _number(name: str, value: float, low: float, high: float, expected: str, remedy: str) -> float:
    """``value`` as a float, both bounds included."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        raise TypeError(f"{name} must be a Python number, got {type(value).__name__}; {remedy}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be {expected}, got {value!s:.40}; {remedy}")
    return float(value)


def check_options(
    causal: bool,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    return_lse: bool,
    deterministic: bool | None,
    backend: str,
) -> tuple[float | None, float, float]:
    """``(scale, softcap, dropout_p)`` as floats, scale None where it was, softcap 0.0 where there is none."""
    if backend not in BACKEND_NAMES:
        raise ValueError(
            f"backend must be one of {', '.join(BACKEND_NAMES)}, got {backend!r}; leave it out for 'auto'"
        )
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}; convert it with bool")
    if return_lse is not False and return_lse is not True:
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}; convert it with bool")
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(
            f"deterministic must be True, False or None, got {deterministic!r}; None is PyTorch's own setting"
        )
    if scale is not None:
        remedy = "None is 1 / sqrt(head_dim)"
        scale = _number("scale", scale, -_FLOAT32.max, _FLOAT32.max, "finite in float32", remedy)
    if softcap is None:
        softcap = 0.0
    else:
        expected = f"0 or more and finite in float32, whose least number is {_FLOAT32.tiny:.1e}"
        remedy = "None leaves the scores uncapped"
        softcap = _number("softcap", softcap, 0.0, _FLOAT32.max, expected, remedy)
        if 0.0 < softcap < _FLOAT32.tiny:  # float32 would divide by 0
            raise ValueError(f"softcap must be {expected}, got {softcap}; {remedy}")
    dropout_p = _number("dropout_p", dropout_p, 0.0, _BELOW_1, "in [0, 1)", "0.0 drops nothing")
    return scale, softcap, dropout_p


def resolve_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    segment_ids: SegmentIds | None,
    kv_lengths: Tensor | None,
    block_table: Tensor | None,
    sinks: Tensor | None,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    backend: str,
    deterministic: bool | None,
) -> tuple[int, tuple[Any, ...]]:
    """q's own number of dimensions, and the arguments of `ops.attention_forward`; raises as `attention`."""
    check_qkv(q, k, v, block_table is not None)
    q, k, v = of_one_dtype(q, k, v)
    if block_table is not None:
        _check_block_table(block_table, q, k, kv_lengths)
    rank = q.dim()
    for _ in range(4 - rank):
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    q, k, v = rows_in_place(q), rows_in_place(k), rows_in_place(v)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    kv_len = k.shape[2]
    if block_table is not None:
        kv_len *= block_table.shape[1]
    if attn_mask is not None:
        attn_mask = _resolve_mask(attn_mask, q, kv_len, rank)
    q_segments, kv_segments = None, None
    if segment_ids is not None:
        q_segments, kv_segments = resolve_segments(segment_ids, q, kv_len, rank)
    if kv_lengths is not None:
        kv_lengths = resolve_lengths(kv_lengths, q, kv_len, rank)
    if sinks is not None:
        sinks = resolve_sinks(sinks, q, rank)
    seed = None
    if dropout_p > 0.0:
        seed = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=q.device)
    masks = (attn_mask, q_segments, kv_segments, kv_lengths, seed, sinks)
    options = (scale, window_left, window_right, softcap, dropout_p, backend, deterministic)
    return rank, (q, k, v, *masks, *options)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window_size: int | tuple[int, int] | None = ...,
    scale: float | None = ...,
    attn_mask: Tensor | None = ...,
    segment_ids: SegmentIds | None = ...,
    kv_lengths: Tensor | None = ...,
    block_table: Tensor | None = ...,
    sinks: Tensor | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[False] = ...,
    deterministic: bool | None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = ...,
    window_size: int | tuple[int, int] | None = ...,
    scale: float | None = ...,
    attn_mask: Tensor | None = ...,
    segment_ids: SegmentIds | None = ...,
    kv_lengths: Tensor | None = ...,
    block_table: Tensor | None = ...,
    sinks: Tensor | None = ...,
    softcap: float | None = ...,
    dropout_p: float = ...,
    return_lse: Literal[True],
    deterministic: bool | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    segment_ids: SegmentIds | None = None,
    kv_lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention ``softmax(softcap(scale * q @ k^T) + mask) @ v``, fused and exact.

    With ``L = kv_lengths[b]`` or Tk, query ``i`` stands at ``p = i + L - Tq`` (bottom-right alignment) and
    sees key ``j`` iff ``j < L`` and every condition given below holds. A query that sees nothing gives
    ``out = 0``, ``lse = -inf`` and zero gradients. The last dimension of q, k, v must have stride 1; other
    layouts of it cost one copy, all other strides are read in place.

    Args:
        q: [B, Hq, Tq, D], or [Hq, Tq, D], or [Tq, D] (one head); float16, bfloat16, float32 or float64.
        k: [B, Hkv, Tk, D] likewise; Hq is a multiple of Hkv, head h of q uses head ``h // (Hq / Hkv)``.
        v: [B, Hkv, Tk, Dv] likewise.
        causal: key ``j`` is visible only if ``j <= p``. Default False. (`is_causal` of
            ``F.scaled_dot_product_attention``, which aligns the first query with the first key.)
        window_size: W keys up to and including the query's own (``p - W < j <= p``), or a pair (left, right):
            ``p - left <= j <= p + right``, -1 = unbounded. Default None: no window.
        scale: factor of the scores. Default ``1 / sqrt(D)``.
        attn_mask: broadcastable to [B, Hq, Tq, Tk] (without the leading dimensions that q lacks). bool: True
            = visible. Floating: added to the scores in float32, after the softcap; an entry at or below half
            of its dtype's minimum, or too low for float32, hides the key; a NaN does not. Differentiable; its
            gradient has its own shape. Hide with False, -inf or `torch.finfo`'s min, not with -1e9: a row
            whose every key carries that offset gets gradients that are too large, for ``lse`` can't hold
            ``-1e9 + log(n)``.
        segment_ids: int32 [B, T] ([T] for 2-D and 3-D inputs), or a pair (q, kv): only equal, non-negative
            segments see each other; a negative one is padding.
        kv_lengths: int32 or int64 [B] (0-d for 2-D and 3-D inputs): how many keys of each sequence are
            filled, its last Tq being the queries' own. Values are clamped to [0, Tk]; on the CPU others
            raise.
        block_table: int32 [B, P], the pages of each sequence's keys and values in order, for a paged cache:
            k is [pages, Hkv, page, D], v likewise, and Tk is P * page. Needs ``kv_lengths``, takes up to 16
            queries, and has no gradients. Entries behind a sequence's length are not used; one before it
            must name a page, and reads some page of the cache if it doesn't.
        sinks: [Hq] (0-d for one head), any floating dtype: the score of one more key per head, which every
            query sees and which has no value: it takes a share of the softmax away. As it stands, neither
            scaled nor soft-capped. Differentiable. A query that sees no key has ``lse`` = its sink.
        softcap: ``softcap * tanh(score / softcap)`` is used for each score. Default None: off; 0 is off too.
        dropout_p: probability of dropping an attention weight, in [0, 1), rounded to 1/256; the seed is drawn
            from torch's generator of q's device. Default 0.
        return_lse: also return ``lse``. Default False.
        deterministic: whether the same inputs must give the same bits. All do but dq of ``hopper``'s own
            backward above 512 tokens, which differs by rounding from run to run; True makes it add in one
            order.
            Default None: what `torch.are_deterministic_algorithms_enabled` says when the backward runs.
        backend: ``auto``, ``reference``, ``sdpa`` (PyTorch's fused CPU attention), ``triton``, ``hopper``
            (for compute capability 9.0; above head dimension 128 a deterministic backward is ``triton``'s),
            ``decode`` (up to 16 queries; its backward is ``triton``'s) or ``wide`` (head dimensions 257 to
            8192). Default ``auto``: the fastest of those that serve the call.

    Returns:
        ``out`` [B, Hq, Tq, Dv] (leading dimensions as q's) in q's dtype, stored so that
        ``out.transpose(1, 2).reshape(B, Tq, Hq * Dv)`` is a view; with ``return_lse`` the pair
        ``(out, lse)``, ``lse`` [B, Hq, Tq] float32 (float64 for float64 inputs): the natural logarithm of the
        sum of exponentials of all visible scores, before dropout. Both are differentiable, once.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: a wrong shape, device or value, or an explicit backend that can't serve the call.
        NotImplementedError: an input carries a forward-mode tangent, or one needs a gradient beside a
            ``block_table``.
    """
    scale, softcap, dropout_p = check_options(
        causal, scale, softcap, dropout_p, return_lse, deterministic, backend
    )
    window_left, window_right = resolve_window(window_size, causal)

    kind = None
    if attn_mask is segment_ids is kv_lengths is block_table is sinks is None and dropout_p == 0.0:
        kind = kind_of_call(q, k, v, scale, window_left, window_right, softcap, backend)
        if kind is not None and kind.options:
            out, lse = repeat_attention(q, k, v, deterministic, kind)
            return (out, lse) if return_lse else out

    rank, arguments = resolve_call(
        q,
        k,
        v,
        attn_mask,
        segment_ids,
        kv_lengths,
        block_table,
        sinks,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
        backend,
        deterministic,
    )
    out, lse = attention_forward(*arguments, block_table=block_table, kind=kind)
    for _ in range(4 - rank):
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Any
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...


def flash_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of a single head on plain matrices.

    Args:
        q: [Tq, D].
        k: [Tk, D].
        v: [Tk, Dv].
        **options: those of `attention`, without dimensions for batch and heads.

    Returns:
        [Tq, Dv] in q's dtype; with ``return_lse=True`` also ``lse`` [Tq].

    Raises:
        ValueError: an input is not a matrix, or as `attention`.
        TypeError: as `attention`.
    """
    if all(isinstance(x, Tensor) for x in (q, k, v)) and not q.dim() == k.dim() == v.dim() == 2:
        raise ValueError(
            f"q, k, v must be [Tq, D], [Tk, D], [Tk, Dv], got {_shapes(q, k, v)}; use attention for heads"
        )
    return attention(q, k, v, **options)
