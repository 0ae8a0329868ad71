"""Which implementation serves a call.

One predicate, `unsupported`, that dispatch, errors and tests all read, and `unsupported_backward` beside it
for the backward for Hopper; ``streamattn info`` reads the part that depends on the device alone,
`unavailable`. A backend is chosen from devices, dtypes and shapes before anything runs, never after a caught
exception.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import os
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from streamattn.kernels.tiles import SCALE_LIMIT


class Backend(str, Enum):
    """Implementations of the attention ops. ``auto`` is resolved to one of the others by `choose`."""

    AUTO = "auto"
    REFERENCE = "reference"
    SDPA = "sdpa"
    TRITON = "triton"
    HOPPER = "hopper"
    DECODE = "decode"
    WIDE = "wide"


class Masks(NamedTuple):
    """The tensors of a call that decide who sees whom, its sinks, and where the keys of a paged cache lie.

    As `streamattn.ops` takes them.
    """

    attn_mask: Tensor | None = None
    q_segments: Tensor | None = None
    kv_segments: Tensor | None = None
    kv_lengths: Tensor | None = None
    sinks: Tensor | None = None
    block_table: Tensor | None = None


BACKEND_NAMES = tuple(backend.value for backend in Backend)
MAX_TRITON_HEAD_DIM = 256
MAX_WIDE_HEAD_DIM = 8192
MIN_HOPPER_HEAD_DIM = 64
MIN_HOPPER_QUERIES = 64
MAX_DECODE_QUERIES = 16
MAX_HOPPER_ORDERED_HEAD_DIM = 128
HOPPER_TRITON = ((3, 6), (3, 9))  # first and last release whose Gluon the kernels were compiled with
_HALF_OR_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])


def unavailable(backend: Backend, device: torch.device) -> str | None:
    """Why ``backend`` can't serve tensors on ``device`` in this process; None where it can."""
    if backend is Backend.SDPA and device.type != "cpu":
        return (
            f"it is PyTorch's fused CPU attention and the tensors are on {device.type}; use backend='triton'"
        )
    if backend in (Backend.TRITON, Backend.HOPPER, Backend.DECODE, Backend.WIDE):
        kind = device.type
        interpreted = kind == "cpu" and backend is not Backend.HOPPER and _interpreting()
        if not interpreted and kind != "cuda":
            return f"its kernels need an NVIDIA GPU, and the tensors are on {kind.upper()}"
        if not interpreted and torch.version.hip is not None:
            return "its kernels need an NVIDIA GPU, and this is a ROCm build of PyTorch"
        if not _has_triton():
            return "Triton is not installed; install it with 'pip install triton'"
        if interpreted:
            return None
        capability = _capability(device.index if device.index is not None else torch.cuda.current_device())
        if capability < (8, 0):
            major, minor = capability
            return f"its kernels need compute capability 8.0 or newer and {device} has {major}.{minor}"
        if backend is Backend.HOPPER:
            if capability != (9, 0):
                major, minor = capability
                return f"its kernel is for compute capability 9.0 and {device} has {major}.{minor}"
            first, last = HOPPER_TRITON
            if not first <= _triton_version() <= last:
                tested = " to ".join("{}.{}".format(*version) for version in HOPPER_TRITON)
                return f"its kernel is for Triton {tested}, got {'{}.{}'.format(*_triton_version())}"
    return None


def unsupported(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    scale: float,
    window_left: int,
    softcap: float,
    dropout_p: float,
) -> str | None:
    """Why ``backend`` can't serve this call; None where it can.

    Args:
        backend: any but ``auto``.
        q: [B, Hq, Tq, D].
        k: [B, Hkv, Tk, D]; under a block_table [pages, Hkv, page, D].
        v: [B, Hkv, Tk, Dv] likewise.
        masks: see `Masks`.
        scale: factor of the scores.
        window_left: keys before its own place that a query sees, `pattern.UNBOUNDED` = all.
        softcap: 0 = none.
        dropout_p: 0 = none.
    """
    if backend is Backend.REFERENCE:
        return None
    reason = unavailable(backend, q.device)
    if reason is not None:
        return reason
    if masks.block_table is not None and backend is not Backend.DECODE:
        return "it reads no paged cache (block_table)"
    q_shape, v_shape = q.shape, v.shape
    head_dims = (q_shape[-1], v_shape[-1])
    if backend is Backend.SDPA:
        if head_dims[0] != head_dims[1]:
            return f"it needs equal head dimensions of q and v, got {head_dims[0]} and {head_dims[1]}"
        if softcap > 0.0 or dropout_p > 0.0:
            return "PyTorch's CPU attention does neither softcap nor dropout"
        if q.numel() == 0 or v.numel() == 0:
            return "it can't take empty tensors"
        return None
    dtype = q.dtype
    if dtype is torch.bfloat16 and q.is_cpu:
        return "Triton's interpreter computes bfloat16 wrongly; use float32"
    if dtype not in _HALF_OR_SINGLE:
        return f"it takes float16, bfloat16 and float32, got {dtype}"
    if backend is Backend.WIDE:
        if not MAX_TRITON_HEAD_DIM < max(head_dims) <= MAX_WIDE_HEAD_DIM:
            return (
                f"it takes a head dimension of q or v from {MAX_TRITON_HEAD_DIM + 1} to {MAX_WIDE_HEAD_DIM}, "
                f"got {max(head_dims)}"
            )
    elif max(head_dims) > MAX_TRITON_HEAD_DIM:
        return f"it takes head dimensions up to {MAX_TRITON_HEAD_DIM}, got {max(head_dims)}"
    if 0 in q_shape or 0 in v_shape:
        return "it can't take empty tensors"
    if backend is Backend.HOPPER:
        return _unsupported_by_hopper(q, k, v, masks, scale, window_left, dropout_p)
    if backend is Backend.DECODE:
        if q_shape[2] > MAX_DECODE_QUERIES:
            return f"it takes up to {MAX_DECODE_QUERIES} queries, got {q_shape[2]}"
        if dropout_p > 0.0:
            return "it does no dropout"
        attn_mask, table = masks.attn_mask, masks.block_table
        by_head = attn_mask is not None and attn_mask.shape[1] > 1 and attn_mask.stride(1) != 0
        if by_head and q_shape[1] != v_shape[1]:
            return "heads of a group share the keys it reads, and attn_mask differs from head to head"
        if table is not None and table.shape[1] == 0:
            return "it can't take empty tensors"
    return None


def _unsupported_by_hopper(
    q: Tensor, k: Tensor, v: Tensor, masks: Masks, scale: float, window_left: int, dropout_p: float
) -> str | None:
    if masks.attn_mask is not None or masks.sinks is not None:
        return "it does neither attn_mask nor sinks"
    if masks.q_segments is not None and masks.kv_lengths is not None:
        return "it takes segment_ids or kv_lengths, and got both"
    if masks.kv_lengths is not None and dropout_p > 0.0:
        return "it does no dropout with kv_lengths"
    if q.dtype == torch.float32:
        return "it takes float16 and bfloat16, got torch.float32"
    head_dim, q_len = q.shape[-1], q.shape[-2]
    if v.shape[-1] != head_dim or head_dim % 8 or head_dim < MIN_HOPPER_HEAD_DIM:
        return (
            f"it takes one head dimension of q and v, a multiple of 8 from {MIN_HOPPER_HEAD_DIM} on, got "
            f"{head_dim} and {v.shape[-1]}"
        )
    if q_len < MIN_HOPPER_QUERIES:
        return f"it takes {MIN_HOPPER_QUERIES} queries or more, got {q_len}"
    if not scale > SCALE_LIMIT:
        return f"it takes a scale above 2^{math.log2(SCALE_LIMIT):.0f}, got {scale}"
    if window_left < k.shape[-2] - q_len:
        return "the window leaves keys that no query sees, and what they hold must not reach the output"
    if not (_copies_by_tma(q) and _copies_by_tma(k) and _copies_by_tma(v)):
        return "q, k and v must start, and step from row to row, at whole 16 bytes"
    return None


def _copies_by_tma(x: Tensor) -> bool:
    """Whether x [B, H, T, D] of 16-bit numbers starts, and steps from row to row, at whole 16 bytes."""
    b, h, t, d = x.stride()
    if x.data_ptr() % 16 or d != 1:
        return False
    if (b | h | t) % 8 == 0 and b > 0 and h > 0 and t > 0:
        return True
    return all(
        stride % 8 == 0 and stride > 0
        for size, stride in zip(x.shape[:-1], (b, h, t), strict=True)
        if size > 1
    )


def unsupported_backward(dout: Tensor, q: Tensor, deterministic: bool) -> str | None:
    """Why the Hopper backward can't serve a call that the Hopper forward can; None where it can.

    The portable backward serves the others, whatever backend was asked for.

    Args:
        dout: [B, Hq, Tq, Dv].
        q: as `unsupported` takes it.
        deterministic: whether the same inputs must give the same bits.
    """
    head_dim = q.shape[-1]
    if deterministic and head_dim > MAX_HOPPER_ORDERED_HEAD_DIM:
        return (
            f"it adds up dq in one order up to head dimension {MAX_HOPPER_ORDERED_HEAD_DIM}, got {head_dim}"
        )
    if not _copies_by_tma(dout):
        return "dout must start, and step from row to row, at whole 16 bytes"
    return None


def choose(
    backend: Backend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    scale: float,
    window_left: int,
    softcap: float,
    dropout_p: float,
) -> Backend:
    """The implementation that serves the call; arguments as `unsupported` takes them.

    ``auto`` takes the first that can: on CUDA the kernels for wide heads above a head dimension of 256; up to
    that the decode kernel for up to `MAX_DECODE_QUERIES` queries, or the Hopper kernel for
    `MIN_HOPPER_QUERIES` or more, then portable Triton; else the reference; on the CPU PyTorch's fused
    attention, else the reference. The decode kernel is taken whatever the number of keys: of few it makes one
    split, and its tiles are of the size of so few queries. Its ``lse`` is that of all, so where a gradient is
    wanted the portable backward follows it.

    Raises:
        ValueError: an explicit backend can't serve the call; the message says why.
    """
    if backend is not Backend.AUTO:
        reason = unsupported(backend, q, k, v, masks, scale, window_left, softcap, dropout_p)
        if reason is not None:
            raise ValueError(
                f"backend='{backend.value}' can't serve this call: {reason}; or use backend='auto'"
            )
        return backend
    if q.is_cpu:
        candidates = (Backend.SDPA,)
    elif q.shape[-1] > MAX_TRITON_HEAD_DIM or v.shape[-1] > MAX_TRITON_HEAD_DIM:
        candidates = (Backend.WIDE,)
    elif q.shape[-2] <= MAX_DECODE_QUERIES:  # known at once where every microsecond counts
        candidates = (Backend.DECODE, Backend.TRITON)
    elif q.shape[-2] < MIN_HOPPER_QUERIES:
        candidates = (Backend.TRITON,)
    else:
        candidates = (Backend.HOPPER, Backend.TRITON)
    for fused in candidates:
        if unsupported(fused, q, k, v, masks, scale, window_left, softcap, dropout_p) is None:
            return fused
    return Backend.REFERENCE
