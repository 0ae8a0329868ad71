"""The boundary that torch.compile and autograd see.

Two schemas, ``torch.ops.streamattn.attention_forward`` and ``attention_backward``; for each a fake kernel
(shapes and strides only) and one implementation for CPU and CUDA that asks `streamattn.dispatch` and imports
the chosen backend when it first runs; and an Autograd kernel that calls one ``autograd.Function``. Arguments
are validated before, by `streamattn.functional`.

Shapes: q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] with a unit last stride; attn_mask 4-D, each
dimension full or 1; q_segments [B, Tq] and kv_segments [B, Tk] int32; kv_lengths [B] int32 or int64; seed
int64 [1]. An open side of the window is `pattern.UNBOUNDED`; softcap and dropout_p are 0.0 where unused.
``out`` and the gradients are stored [B, T, H, D] and viewed as [B, H, T, D]; ``lse`` [B, Hq, Tq] is float32,
float64 for float64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamattn.dispatch import Backend, choose

_OPTIONS = (
    "Tensor? attn_mask, Tensor? q_segments, Tensor? kv_segments, Tensor? kv_lengths, Tensor? seed, "
    "float scale, SymInt window_left, SymInt window_right, float softcap, float dropout_p, str backend"
)

_library = torch.library.Library("streamattn", "DEF")
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, bool mask_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _empty_heads_last(x: Tensor, num_heads: int, length: int, head_dim: int) -> Tensor:
    return x.new_empty((x.shape[0], length, num_heads, head_dim)).transpose(1, 2)


def _forward(
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
    backend: str,
) -> tuple[Tensor, Tensor]:
    chosen = choose(Backend(backend), q, v, softcap=softcap, dropout_p=dropout_p)
    if chosen is Backend.TRITON:
        from streamattn.kernels.forward import attention_forward
    elif chosen is Backend.SDPA:
        from streamattn.kernels.cpu import attention_forward
    else:
        from streamattn.reference import attention_forward
    return attention_forward(
        q,
        k,
        v,
        attn_mask,
        q_segments,
        kv_segments,
        kv_lengths,
        seed,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
    )


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    batch, num_heads, q_len, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = _empty_heads_last(q, num_heads, q_len, v.shape[-1])
    return out, q.new_empty((batch, num_heads, q_len), dtype=lse_dtype)


def _backward(
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
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    backend: str,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = choose(Backend(backend), q, v, softcap=softcap, dropout_p=dropout_p)
    if chosen is Backend.SDPA and (dlse is not None or mask_grad):
        chosen = Backend.REFERENCE  # the fused kernel knows neither gradient
    masks = (q_segments, kv_segments, kv_lengths, seed)
    options = (scale, window_left, window_right, softcap, dropout_p)
    if chosen is Backend.TRITON:
        from streamattn.kernels.backward import attention_backward
        from streamattn.kernels.mask_gradient import attention_mask_gradient

        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dq, dk, dv, lse2, delta = attention_backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *masks, *options
        )
        dmask = None
        if mask_grad and attn_mask is not None:
            dmask = attention_mask_gradient(dout, q, k, v, lse2, delta, attn_mask, *masks, *options)
    else:
        if chosen is Backend.SDPA:
            from streamattn.kernels.cpu import attention_backward
        else:
            from streamattn.reference import attention_backward
        dq, dk, dv, dmask = attention_backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *masks, *options, mask_grad
        )
    return dq, dk, dv, q.new_empty(0) if dmask is None else dmask


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    attn_mask, mask_grad = options[0], options[-1]
    dq, dk, dv = (_empty_heads_last(x, x.shape[1], x.shape[2], x.shape[3]) for x in (q, k, v))
    dmask = q.new_empty(0)
    if mask_grad:
        assert isinstance(attn_mask, Tensor)
        dmask = attn_mask.new_empty(attn_mask.shape)
    return dq, dk, dv, dmask


class _Attention(torch.autograd.Function):
    """`attention_forward` with its gradient; differentiable once."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *rest) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.streamattn.attention_forward(q, k, v, attn_mask, *rest)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        out, lse = output
        tensors, ctx.rest = inputs[:8], inputs[8:]
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        dout, dlse = grads
        out, lse, q, k, v, attn_mask, *masks = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 14
        if dout is None:
            dout = torch.zeros_like(out)
        mask_grad = ctx.needs_input_grad[3]
        dq, dk, dv, dmask = torch.ops.streamattn.attention_backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *masks, *ctx.rest, mask_grad
        )
        return dq, dk, dv, dmask if mask_grad else None, *(None,) * 10


class _AttentionBackward(torch.autograd.Function):
    """`attention_backward`, whose own derivative raises instead of being silently missing."""

    @staticmethod
    def forward(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.streamattn.attention_backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "attention is differentiable once; for a second derivative write it with matmul and softmax, "
            "or take torch's scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
        )


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _backward_autograd(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest):
    attn_mask = rest[2]
    if _wants_grad(dout, dlse, q, k, v, attn_mask):
        return _AttentionBackward.apply(dout, dlse, q, k, v, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.attention_backward(dout, dlse, q, k, v, *rest)


def _forward_autograd(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *rest
) -> tuple[Tensor, Tensor]:
    if _wants_grad(q, k, v, attn_mask):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention has no torch.func derivative; use backward or torch.autograd.grad"
            )
        return _Attention.apply(q, k, v, attn_mask, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.attention_forward(q, k, v, attn_mask, *rest)


for _key in ("CPU", "CUDA"):
    _library.impl("attention_forward", _forward, _key)
    _library.impl("attention_backward", _backward, _key)
_library.impl("attention_forward", _forward_autograd, "Autograd")
_library.impl("attention_backward", _backward_autograd, "Autograd")
torch.library.register_fake("streamattn::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("streamattn::attention_backward", _backward_fake, lib=_library)
