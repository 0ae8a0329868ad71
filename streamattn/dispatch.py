"""Which implementation serves a call.

One predicate, `unsupported`, that dispatch, errors, ``streamattn info`` and tests all read. A backend is
chosen from devices, dtypes and shapes before anything runs, never after a caught exception.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from enum import Enum

import torch
from torch import Tensor


class Backend(str, Enum):
    """Implementations of the attention ops. ``auto`` is resolved to one of the others by `choose`."""

    AUTO = "auto"
    REFERENCE = "reference"
    SDPA = "sdpa"
    TRITON = "triton"


BACKEND_NAMES = tuple(backend.value for backend in Backend)
MAX_TRITON_HEAD_DIM = 256
_HALF_OR_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def unavailable(backend: Backend, device: torch.device) -> str | None:
    """Why ``backend`` can't serve tensors on ``device`` in this process; None where it can."""
    if backend is Backend.SDPA and device.type != "cpu":
        return (
            f"it is PyTorch's fused CPU attention and the tensors are on {device.type}; use backend='triton'"
        )
    if backend is Backend.TRITON:
        interpreted = device.type == "cpu" and _interpreting()
        if not interpreted and (device.type != "cuda" or torch.version.hip is not None):
            return f"its kernels need an NVIDIA GPU, and the tensors are on {device.type.upper()}"
        if not _has_triton():
            return "Triton is not installed; install it with 'pip install triton'"
        if interpreted:
            return None
        capability = _capability(device.index if device.index is not None else torch.cuda.current_device())
        if capability < (8, 0):
            major, minor = capability
            return f"its kernels need compute capability 8.0 or newer and {device} has {major}.{minor}"
    return None


def unsupported(backend: Backend, q: Tensor, v: Tensor, *, softcap: float, dropout_p: float) -> str | None:
    """Why ``backend`` can't serve this call; None where it can.

    Args:
        backend: any but ``auto``.
        q: [B, Hq, Tq, D].
        v: [B, Hkv, Tk, Dv].
        softcap: 0 = none.
        dropout_p: 0 = none.
    """
    if backend is Backend.REFERENCE:
        return None
    reason = unavailable(backend, q.device)
    if reason is not None:
        return reason
    head_dims = (q.shape[-1], v.shape[-1])
    if backend is Backend.SDPA:
        if head_dims[0] != head_dims[1]:
            return f"it needs equal head dimensions of q and v, got {head_dims[0]} and {head_dims[1]}"
        if softcap > 0.0 or dropout_p > 0.0:
            return "PyTorch's CPU attention does neither softcap nor dropout"
        if q.numel() == 0 or v.numel() == 0:
            return "it can't take empty tensors"
        return None
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly; use float32"
    if q.dtype not in _HALF_OR_SINGLE:
        return f"it takes float16, bfloat16 and float32, got {q.dtype}"
    if max(head_dims) > MAX_TRITON_HEAD_DIM:
        return f"it takes head dimensions up to {MAX_TRITON_HEAD_DIM}, got {max(head_dims)}"
    if q.numel() == 0 or v.numel() == 0:
        return "it can't take empty tensors"
    return None


def choose(backend: Backend, q: Tensor, v: Tensor, *, softcap: float, dropout_p: float) -> Backend:
    """The implementation that serves the call.

    ``auto`` takes the first that can: on CUDA Triton, else the reference; on the CPU PyTorch's fused
    attention, else the reference.

    Raises:
        ValueError: an explicit backend can't serve the call; the message says why.
    """
    if backend is not Backend.AUTO:
        reason = unsupported(backend, q, v, softcap=softcap, dropout_p=dropout_p)
        if reason is not None:
            raise ValueError(
                f"backend='{backend.value}' can't serve this call: {reason}; or use backend='auto'"
            )
        return backend
    fused = Backend.SDPA if q.device.type == "cpu" else Backend.TRITON
    if unsupported(fused, q, v, softcap=softcap, dropout_p=dropout_p) is None:
        return fused
    return Backend.REFERENCE
