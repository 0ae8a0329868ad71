"""Attention on q, k and v that one projection has made side by side, whose gradients come back side by side.

`packed_attention` is `streamattn.attention` on qkv [B, T, Hq + 2 Hkv, D]: heads of q, then k's, then v's.
Autograd would put three gradients together by a copy of all of them; here the kernels write them into one
tensor, which is the projection's own.

Two operators, as `streamattn.ops` has them: ``torch.ops.streamattn.packed_forward`` and ``packed_backward``.
The options and results are those of ``attention_forward`` and ``attention_backward``. dqkv has the strides of
qkv, or where that has gaps, their order. Kernels that make gradients of their own are left as they are, and
theirs are copied: the CPU's, and those for head dimensions above 256.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamattn.functional import (
    SegmentIds,
    as_autocast,
    check_options,
    resolve_call,
    resolve_window,
    rows_in_place,
)
from streamattn.kinds import Kind, empty_strided_cuda, is_deterministic, kind_of_packed, plain_call
from streamattn.ops import (
    ONCE,
    OPTIONS,
    attention_forward,
    check_no_tangent,
    forward_fake,
    gradients_fake,
    or_empty,
    repeat_of_backward,
    run_backward,
    run_forward,
    wants_grad,
)

_library = torch.library.Library("streamattn", "FRAGMENT")
_library.define(
    f"packed_forward(Tensor qkv, SymInt num_heads, {OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "packed_backward(Tensor dout, Tensor? dlse, Tensor qkv, Tensor out, Tensor lse, "
    f"{OPTIONS}, bool mask_grad, bool sink_grad) -> (Tensor dqkv, Tensor dmask, Tensor dsinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def unpacked(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views q [B, Hq, T, D], k and v [B, Hkv, T, D] of qkv [B, T, Hq + 2 Hkv, D]."""
    num_kv_heads = (qkv.shape[2] - num_heads) // 2
    q, k, v = qkv.transpose(1, 2).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def _forward(qkv: Tensor, num_heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    return run_forward(*unpacked(qkv, num_heads), *rest)


def _forward_fake(qkv: Tensor, num_heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    return forward_fake(*unpacked(qkv, num_heads), *rest)


def _run_backward(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    num_heads, dqkv = out.shape[1], torch.empty_like(qkv)
    grads = unpacked(dqkv, num_heads)
    *_, dmask, dsinks = run_backward(dout, dlse, *unpacked(qkv, num_heads), out, lse, *rest, grads=grads)
    return dqkv, dmask, dsinks


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    dqkv, dmask, dsinks = _run_backward(*arguments)
    return dqkv, or_empty(dmask, dqkv), or_empty(dsinks, dqkv)


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, qkv: Tensor, out: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(qkv), *gradients_fake(qkv, *rest)


class _Packed(torch.autograd.Function):
    """`packed_forward` with its gradient; differentiable once."""

    @staticmethod
    def forward(ctx, kind: Kind | None, qkv: Tensor, num_heads: int, *options: Any) -> tuple[Tensor, Tensor]:
        masks, ctx.rest, ctx.kind = options[:6], options[6:], kind
        made = None
        if kind is not None and kind.by_address is not None:
            made = kind.by_address(*_addresses(qkv, num_heads))
        if made is None and plain_call(qkv, *masks):
            made = run_forward(*unpacked(qkv, num_heads), *options, kind=kind)
        elif made is None:
            with torch._C._AutoDispatchBelowAutograd():
                made = torch.ops.streamattn.packed_forward(qkv, num_heads, *options)
        ctx.save_for_backward(*made, qkv, *masks)
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        dout, dlse = grads
        if dout is None and dlse is None:
            return (None,) * 16
        out, lse, qkv, *masks = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        kind = ctx.kind if dlse is None else None
        if kind is not None:
            dqkv = kind.repeat_backward(ctx.rest[-1], dout, qkv, out, lse)
            if dqkv is not None:
                return None, dqkv, *(None,) * 14
        mask_grad, sink_grad = ctx.needs_input_grad[3], ctx.needs_input_grad[8]
        backward: Any = torch.ops.streamattn.packed_backward
        if not torch.is_grad_enabled() and plain_call(dout, dlse, qkv, *masks):
            backward = _run_backward
        dqkv, dmask, dsinks = backward(dout, dlse, qkv, out, lse, *masks, *ctx.rest, mask_grad, sink_grad)
        if backward is _run_backward and kind is not None and kind.by_address is not None:
            _learn_backward(kind, ctx.rest[-1], dout, qkv, out, lse, dqkv)
        dmask, dsinks = dmask if mask_grad else None, dsinks if sink_grad else None
        return None, dqkv, None, dmask, *(None,) * 4, dsinks, *(None,) * 7


def _addresses(qkv: Tensor, num_heads: int) -> tuple[int, int, int]:
    """Where q, k and v of qkv [B, T, Hq + 2 Hkv, D] begin."""
    head = qkv.stride(2) * qkv.element_size()
    q = qkv.data_ptr()
    k = q + num_heads * head
    return q, k, k + (qkv.shape[2] - num_heads) // 2 * head


def _learn_backward(
    kind: Kind, deterministic: bool | None, dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, dqkv: Tensor
) -> None:
    """Has the kind repeat the backward that has just made dqkv."""
    deterministic = is_deterministic(deterministic)
    num_heads = out.shape[1]
    tensors = (dout, *unpacked(qkv, num_heads), out, lse)
    launch = repeat_of_backward(kind, deterministic, tensors, unpacked(dqkv, num_heads))
    if launch is None:
        return
    layout = tuple(dqkv.shape), dqkv.stride(), dqkv.dtype

    def again(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor) -> Tensor | None:
        dqkv = empty_strided_cuda(*layout)
        at, own = _addresses(qkv, num_heads), _addresses(dqkv, num_heads)
        return dqkv if launch(dout.data_ptr(), *at, out.data_ptr(), lse.data_ptr(), *own) else None

    kind.learn_backward(again, deterministic, dout, qkv, out, lse)


class _PackedBackward(torch.autograd.Function):
    """`packed_backward`, whose own derivative raises instead of being silently missing."""

    @staticmethod
    def forward(*args) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.streamattn.packed_backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ONCE)


def _forward_autograd(
    qkv: Tensor, num_heads: int, attn_mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    check_no_tangent(qkv, attn_mask, rest[4])
    if wants_grad(qkv, attn_mask, rest[4]):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention has no torch.func derivative; use backward or torch.autograd.grad"
            )
        return _Packed.apply(None, qkv, num_heads, attn_mask, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.packed_forward(qkv, num_heads, attn_mask, *rest)


def _backward_autograd(dout: Tensor, dlse: Tensor | None, qkv: Tensor, *rest: Any):
    attn_mask, sinks = rest[2], rest[7]
    check_no_tangent(dout, dlse, qkv, attn_mask, sinks)
    if wants_grad(dout, dlse, qkv, attn_mask, sinks):
        return _PackedBackward.apply(dout, dlse, qkv, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.packed_backward(dout, dlse, qkv, *rest)


for _key in ("CPU", "CUDA"):
    _library.impl("packed_forward", _forward, _key)
    _library.impl("packed_backward", _backward, _key)
_library.impl("packed_forward", _forward_autograd, "Autograd")
_library.impl("packed_backward", _backward_autograd, "Autograd")
torch.library.register_fake("streamattn::packed_forward", _forward_fake, lib=_library)
torch.library.register_fake("streamattn::packed_backward", _backward_fake, lib=_library)


def packed_attention(
    qkv: Tensor,
    *,
    num_kv_heads: int | None = None,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    segment_ids: SegmentIds | None = None,
    kv_lengths: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`streamattn.attention` of q, k and v that lie side by side, which gives one gradient for all three.

    Args:
        qkv: [B, T, Hq + 2 Hkv, D], floating: the heads of q, then those of k, then those of v. All strides
            but the last are read in place.
        num_kv_heads: Hkv. Default: as many as q has.
        causal: as `attention` takes it, and so the options below.
        window_size: keys that a query sees.
        scale: factor of the scores.
        attn_mask: broadcastable to [B, Hq, T, T].
        segment_ids: int32 [B, T].
        kv_lengths: int32 or int64 [B].
        sinks: [Hq].
        softcap: bound of the scores.
        dropout_p: probability of dropping a weight.
        deterministic: whether the same inputs must give the same bits.
        backend: which kernels serve the call.

    Returns:
        ``(out, lse)``: [B, Hq, T, D], stored [B, T, Hq, D], and [B, Hq, T].

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`, or qkv is not 4-D, or its heads are not those of q, k and v.
        NotImplementedError: as `attention`.
    """
    scale, softcap, dropout_p = check_options(causal, scale, softcap, dropout_p, True, deterministic, backend)
    window_left, window_right = resolve_window(window_size, causal)
    if not isinstance(qkv, Tensor) or qkv.dim() != 4:
        what = list(qkv.shape) if isinstance(qkv, Tensor) else type(qkv).__name__
        raise ValueError(f"qkv must be a tensor [B, T, Hq + 2 Hkv, D], got {what}; reshape it with unflatten")
    heads = qkv.shape[2]
    if num_kv_heads is None:
        num_kv_heads = heads // 3
    num_heads = heads - 2 * num_kv_heads
    if num_kv_heads <= 0 or num_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(
            "qkv must hold num_kv_heads heads for k, as many for v, and a multiple of them for q, got "
            f"{heads} and num_kv_heads={num_kv_heads}; pass the number of k's heads"
        )
    kind = None
    if attn_mask is segment_ids is kv_lengths is sinks is None and dropout_p == 0.0 and wants_grad(qkv):
        kind = kind_of_packed(qkv, num_heads, scale, window_left, window_right, softcap, backend)
        if kind is not None and kind.by_address is not None:
            return _Packed.apply(kind, qkv, num_heads, *kind.options, deterministic)
    qkv = rows_in_place(as_autocast(qkv))
    _, (q, k, v, *rest) = resolve_call(
        *unpacked(qkv, num_heads),
        attn_mask,
        segment_ids,
        kv_lengths,
        None,
        sinks,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
        backend,
        deterministic,
    )
    if not wants_grad(qkv):
        return attention_forward(q, k, v, *rest)
    if plain_call(qkv, *rest[:6]):
        return _Packed.apply(kind, qkv, num_heads, *rest)
    return torch.ops.streamattn.packed_forward(qkv, num_heads, *rest)
