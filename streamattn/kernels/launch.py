"""What every launcher of a Triton kernel needs: the masks and scores of a call as kernel arguments, device, precision.

Each kernel names these arguments alike, so that a launcher passes ``**score_arguments(...)`` beside its own tensors.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from streamattn.kernels.tiles import Architecture, architecture
from streamattn.pattern import UNBOUNDED

GROUP_BYTES = 16 << 20  # of keys and values, or queries and gradients, that share the second-level cache
NO_MASK, BOOL_MASK, ADDITIVE_MASK = 0, 1, 2


def device_guard(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes x's GPU the current one: Triton launches on the current device, whatever the pointers say."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def architecture_of(x: Tensor) -> Architecture:
    return architecture(torch.cuda.get_device_capability(x.device) if x.is_cuda else None)


def heads_last(x: Tensor) -> Tensor:
    """An uninitialised tensor of x's shape [B, H, T, D], stored [B, T, H, D]."""
    batch, heads, length, head_dim = x.shape
    return x.new_empty((batch, length, heads, head_dim)).transpose(1, 2)


def heads_per_group(x: Tensor, window_right: int) -> int:
    """How many heads start side by side (see `primitives.schedule`), where each program reads all rows of a head of x.

    Without a right limit all tiles are alike and one head after the other is best for the cache.
    """
    if window_right == UNBOUNDED:
        return 1
    return max(1, GROUP_BYTES // (2 * x.shape[2] * x.shape[3] * x.element_size()))


def strides(name: str, x: Tensor) -> dict[str, int]:
    """Strides of batch, head and row of a [B, H, T, D] tensor as stride_<name>_b, _h, _t."""
    return dict(zip((f"stride_{name}_b", f"stride_{name}_h", f"stride_{name}_t"), x.stride(), strict=False))


def score_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
) -> dict[str, Any]:
    """Keyword arguments about scores and visibility that all kernels share; shapes as in `streamattn.ops`."""
    q_len, kv_len = q.shape[2], k.shape[2]
    drop_threshold = min(round(dropout_p * 256), 255)
    # a side that reaches past every key is no limit: it costs no masked tiles
    window_left, window_right = (
        UNBOUNDED if side >= q_len + kv_len else side for side in (window_left, window_right)
    )
    mask_kind, mask_strides = NO_MASK, (0, 0, 0, 0)
    if attn_mask is not None:
        mask_kind = BOOL_MASK if attn_mask.dtype == torch.bool else ADDITIVE_MASK
        mask_strides = tuple(
            stride if size > 1 else 0
            for stride, size in zip(attn_mask.stride(), attn_mask.shape, strict=True)
        )
    hidden_below = (
        torch.finfo(attn_mask.dtype).min / 2 if attn_mask is not None and mask_kind == ADDITIVE_MASK else 0.0
    )
    precision = "tf32" if torch.get_float32_matmul_precision() != "highest" else "tf32x3"
    return dict(
        mask_ptr=attn_mask.view(torch.uint8)
        if attn_mask is not None and mask_kind == BOOL_MASK
        else attn_mask,
        stride_mask_b=mask_strides[0],
        stride_mask_h=mask_strides[1],
        stride_mask_m=mask_strides[2],
        stride_mask_n=mask_strides[3],
        q_segments_ptr=q_segments,
        kv_segments_ptr=kv_segments,
        stride_q_segments_b=0 if q_segments is None else q_segments.stride(0),
        stride_q_segments_t=0 if q_segments is None else q_segments.stride(1),
        stride_kv_segments_b=0 if kv_segments is None else kv_segments.stride(0),
        stride_kv_segments_t=0 if kv_segments is None else kv_segments.stride(1),
        kv_lengths_ptr=kv_lengths,
        seed_ptr=seed,
        num_heads=q.shape[1],
        group=q.shape[1] // k.shape[1],
        q_len=q_len,
        kv_len=kv_len,
        window_left=window_left,
        window_right=window_right,
        scale=scale,
        softcap=softcap,
        hidden_below=hidden_below,
        drop_threshold=drop_threshold,
        HEAD_DIM=q.shape[3],
        HEAD_DIM_V=v.shape[3],
        HAS_LEFT=window_left < UNBOUNDED,
        HAS_RIGHT=window_right < UNBOUNDED,
        MASK_KIND=mask_kind,
        HAS_SEGMENTS=q_segments is not None,
        HAS_LENGTHS=kv_lengths is not None,
        HAS_SOFTCAP=softcap > 0.0,
        HAS_DROPOUT=drop_threshold > 0,
        # whether some query may see no key at all; such a row may hold anything
        EMPTY_ROWS=attn_mask is not None
        or q_segments is not None
        or kv_lengths is not None
        or kv_len - q_len + window_right < 0,
        # the scale is folded into the exponent's argument where nothing stands between it and the product
        FOLD_SCALE=scale > 0.0 and softcap == 0.0 and mask_kind != ADDITIVE_MASK,
        PRECISION=precision if q.dtype == torch.float32 else "ieee",
    )


# arguments whose values change from call to call without changing the code
UNSPECIALIZED = (
    "stride_row_stats",
    "heads_per_group",
    "batch",
    "num_heads",
    "group",
    "q_len",
    "kv_len",
    "window_left",
    "window_right",
    "drop_threshold",
)
