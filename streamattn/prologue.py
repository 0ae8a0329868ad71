"""QK-norm and rotary embedding in one pass: what comes between the projections of q and k and the attention.

`qk_norm_rope` reads the projections' outputs in place and writes what `streamattn.attention` reads. Two
operators, made as in `streamattn.ops`: ``torch.ops.streamattn.prologue_forward``, ``prologue_backward``. On
a GPU each is one kernel, with sums of the weights' gradients behind the second; elsewhere the formulas in
PyTorch, step by step as HuggingFace's models take them. Saved for the backward are the inputs alone.

Shapes: q [B, T, Hq * D] and k [B, T, Hkv * D] with a unit last stride; weights [H * D] for norms over all
heads, [D] for norms over each; cos and sin [B or 1, T, R] of the same strides, the last of which is 1.
Results are [B, H, T, D], stored [B, T, H, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamattn.dispatch import Backend, unavailable
from streamattn.kinds import plain_call
from streamattn.ops import check_no_tangent, wants_grad

_HALF_OR_SINGLE = (torch.float16, torch.bfloat16, torch.float32)
_MAX_WIDTH = 1 << 14
"""Numbers of a token, sizes rounded up to powers of two, that a program takes. Above half of it the backward
spills."""

_TENSORS = "Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin"
_library = torch.library.Library("streamattn", "FRAGMENT")
_library.define(
    f"prologue_forward({_TENSORS}, int head_dim, float eps, float weight_offset, bool interleaved, "
    "bool round_before_weight) -> (Tensor q_out, Tensor k_out)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"prologue_backward(Tensor dq_out, Tensor dk_out, {_TENSORS}, int head_dim, float eps, "
    "float weight_offset, bool interleaved) -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _served_by_kernel(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, head_dim: int
) -> bool:
    """Whether the Triton kernels serve a call, in place of PyTorch."""
    if any(x.dtype not in _HALF_OR_SINGLE for x in (q, q_weight, k_weight, cos)):
        return False
    if q.is_cpu and q.dtype == torch.bfloat16:  # Triton's interpreter computes it wrongly
        return False
    heads = max(q.shape[2], k.shape[2]) // head_dim
    width = (1 << (heads - 1).bit_length()) * (1 << (head_dim - 1).bit_length())
    return q.numel() > 0 and width <= _MAX_WIDTH and unavailable(Backend.TRITON, q.device) is None


def _wide(x: Tensor, beside: torch.dtype = torch.float32) -> Tensor:
    """x in float32 or more, whatever it and what it meets need."""
    return x.to(torch.promote_types(torch.promote_types(x.dtype, beside), torch.float32))


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair of columns (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _plain_forward(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    round_before_weight: bool,
) -> Tensor:
    """q or k [B, H, T, D], with the steps and roundings of HuggingFace's layers."""
    over_all = weight.shape[0] == x.shape[2]
    wide = _wide(x if over_all else x.unflatten(2, (-1, head_dim)))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_before_weight:
        wide = wide.to(x.dtype)
    if weight_offset:
        weight = weight_offset + _wide(weight, x.dtype)
    normed = (weight * wide).to(x.dtype)
    normed = normed.unflatten(2, (-1, head_dim)) if over_all else normed
    part, rest = normed.split([cos.shape[2], head_dim - cos.shape[2]], dim=-1)
    part = part * cos.unsqueeze(2) + _turned(part, interleaved) * sin.unsqueeze(2)
    return torch.cat((part.to(x.dtype), rest), dim=-1).transpose(1, 2)


def _plain_backward(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    head_dim: int,
    eps: float,
    weight_offset: float,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight, in float32 up to their ends.

    With ``n = x / rms`` and ``g = (offset + weight) * dy``: ``dx = (g - n * mean(g * n)) / rms``.
    """
    part, rest = _wide(dout.transpose(1, 2)).split([cos.shape[2], head_dim - cos.shape[2]], dim=-1)
    turned = part * _wide(cos).unsqueeze(2) - _turned(part * _wide(sin).unsqueeze(2), interleaved)
    grad = torch.cat((turned, rest), dim=-1)
    if weight.shape[0] == x.shape[2]:
        grad, wide = grad.flatten(2), _wide(x)
    else:
        wide = _wide(x).unflatten(2, (-1, head_dim))
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = wide * factor
    dweight = (grad * wide).flatten(0, -2).sum(0)
    grad = grad * (weight_offset + _wide(weight, x.dtype))
    grad = factor * (grad - wide * (grad * wide).mean(-1, keepdim=True))
    return grad.reshape(x.shape).to(x.dtype), dweight.to(weight.dtype)


def _forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    if _served_by_kernel(q, k, q_weight, k_weight, cos, options[0]):
        from streamattn.kernels.qk_prologue import prologue_forward

        return prologue_forward(q, k, q_weight, k_weight, cos, sin, *options)
    return _plain_forward(q, q_weight, cos, sin, *options), _plain_forward(k, k_weight, cos, sin, *options)


def _forward_fake(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    q_out, k_out = (x.new_empty(x.shape).unflatten(2, (-1, options[0])).transpose(1, 2) for x in (q, k))
    return q_out, k_out


def _backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # the kernel reads rows, and results of PyTorch's operators would take over another order of strides
    dq_out, dk_out = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq_out, dk_out))
    if _served_by_kernel(q, k, q_weight, k_weight, cos, options[0]):
        from streamattn.kernels.qk_prologue import prologue_backward

        return prologue_backward(dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, *options)
    dq, dq_weight = _plain_backward(dq_out, q, q_weight, cos, sin, *options)
    dk, dk_weight = _plain_backward(dk_out, k, k_weight, cos, sin, *options)
    return dq, dk, dq_weight, dk_weight


def _backward_fake(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dq_weight, dk_weight = (x.new_empty(x.shape) for x in (q, k, q_weight, k_weight))
    return dq, dk, dq_weight, dk_weight


class _Prologue(torch.autograd.Function):
    """`prologue_forward` with its gradient; differentiable once."""

    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, ctx.options = inputs[:6], inputs[6:]
        ctx.save_for_backward(*tensors)
        if plain_call(*tensors):
            return _forward(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.streamattn.prologue_forward(*inputs)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        tensors, options = ctx.saved_tensors, ctx.options[:-1]
        backward: Any = torch.ops.streamattn.prologue_backward
        if not torch.is_grad_enabled() and plain_call(*grads, *tensors):
            backward = _backward
        return *backward(*grads, *tensors, *options), *(None,) * 7


class _PrologueBackward(torch.autograd.Function):
    """`prologue_backward`, whose own derivative raises instead of being silently missing."""

    @staticmethod
    def forward(*args) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.streamattn.prologue_backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("qk_norm_rope is differentiable once, as attention is")


def _forward_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    check_no_tangent(*args[:6])
    if wants_grad(*args[:4]):
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "qk_norm_rope has no torch.func derivative; use backward or torch.autograd.grad"
            )
        return _Prologue.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.prologue_forward(*args)


def _backward_autograd(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_no_tangent(*args[:8])
    if wants_grad(*args[:6]):
        return _PrologueBackward.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.prologue_backward(*args)


for _key in ("CPU", "CUDA"):
    _library.impl("prologue_forward", _forward, _key)
    _library.impl("prologue_backward", _backward, _key)
_library.impl("prologue_forward", _forward_autograd, "Autograd")
_library.impl("prologue_backward", _backward_autograd, "Autograd")
torch.library.register_fake("streamattn::prologue_forward", _forward_fake, lib=_library)
torch.library.register_fake("streamattn::prologue_backward", _backward_fake, lib=_library)


def _check(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, head_dim: int
) -> None:
    """Raises unless the tensors of a call fit each other; see `qk_norm_rope`."""
    for name, x in (("q_weight", q_weight), ("k_weight", k_weight)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}; torch.ones for a norm without")
    if not isinstance(head_dim, int):
        raise TypeError(f"head_dim must be an int, got {head_dim!r} of {type(head_dim).__name__}")
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    if not (q.dim() == k.dim() == 3 and q.shape[:2] == k.shape[:2]):
        raise ValueError(f"q and k must be [B, T, heads * head_dim], got {shapes}; leave the heads unsplit")
    if head_dim <= 0 or head_dim % 2 or any(x.shape[2] % head_dim or not x.shape[2] for x in (q, k)):
        raise ValueError(f"q and k must hold whole heads of head_dim={head_dim} columns, even, got {shapes}")
    if q.dtype != k.dtype or not q.is_floating_point():
        raise TypeError(f"q and k must be of one floating dtype, got {q.dtype} and {k.dtype}; cast one")
    if (
        cos.dim() != 3
        or cos.shape != sin.shape
        or cos.shape[0] not in (1, q.shape[0])
        or cos.shape[1] != q.shape[1]
        or not 0 < cos.shape[2] <= head_dim
        or cos.shape[2] % 2
    ):
        raise ValueError(
            "cos and sin must be [B or 1, T, R] with an even R up to head_dim, as HuggingFace's modules "
            f"return them, got {shapes} and head_dim={head_dim}"
        )
    if cos.dtype != sin.dtype or cos.requires_grad or sin.requires_grad:
        raise TypeError("cos and sin must be of one dtype and need no gradient; detach them")
    if not all(x.is_floating_point() for x in (q_weight, k_weight, cos)):
        dtypes = ", ".join(str(x.dtype) for x in (q_weight, k_weight, cos))
        raise TypeError(f"q_weight, k_weight, cos and sin must be floating, got {dtypes}; cast them")
    sizes = [tuple(x.shape) for x in (q_weight, k_weight)]
    if sizes not in ([(q.shape[2],), (k.shape[2],)], [(head_dim,), (head_dim,)]):
        raise ValueError(
            f"q_weight and k_weight must be [{q.shape[2]}] and [{k.shape[2]}] for norms over all heads, or "
            f"both [{head_dim}] for norms over each, got {sizes[0]} and {sizes[1]}"
        )
    if any(x.device != q.device for x in (k, q_weight, k_weight, cos, sin)):
        raise ValueError(f"all tensors must be on q's device {q.device}; move the others there")


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    head_dim: int,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMS norms of q and k, and their rotation by position, in one pass over each.

    ``y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight)`` over all heads or over each, whichever the
    weights' sizes say; then ``out = y * cos + turn(y) * sin`` in the first R columns of each head, ``turn``
    being HuggingFace's ``rotate_half``. In half precision the steps round where theirs do.

    Args:
        q: [B, T, Hq * D], what the projection gives; floating. Strides but the last are read in place.
        k: [B, T, Hkv * D], of q's dtype.
        q_weight: [Hq * D] for a norm over all heads (OLMo-2), [D] for one over each (Qwen3, Gemma 3). Any
            floating dtype.
        k_weight: [Hkv * D] or [D] alike.
        cos: [B or 1, T, R], floating; R is even and up to D. As HuggingFace's modules return it: the same for
            both columns of a pair. In q's own half precision each product is rounded to it, as PyTorch would.
        sin: as cos. Copied with it if their strides differ.
        head_dim: D, even.
        eps: added to the mean of squares. Default 1e-6.
        weight_offset: added to the weights; Gemma's is 1. Default 0.
        round_before_weight: whether what is normed is rounded to q's dtype before it meets the weight, too,
            as in Qwen3. Default False: after it alone, as in OLMo-2 and Gemma 3.
        interleaved: whether columns 2 i and 2 i + 1 rotate with one another, in place of i and i + R / 2.
            Default False.

    Returns:
        ``(q, k)``: [B, Hq, T, D] and [B, Hkv, T, D] in q's dtype, stored [B, T, H, D], for `attention`. They
        are differentiable once, by q, k and the weights; the same inputs give the same bits, gradients too.

    Raises:
        TypeError: a wrong dtype, or cos or sin that need a gradient.
        ValueError: shapes that don't fit each other, or tensors on several devices.
        NotImplementedError: an input carries a forward-mode tangent.
    """
    _check(q, k, q_weight, k_weight, cos, sin, head_dim)
    q, k, q_weight, k_weight = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, q_weight, k_weight)
    )
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    options = (head_dim, float(eps), float(weight_offset), interleaved, round_before_weight)
    arguments = (q, k, q_weight, k_weight, cos, sin, *options)
    if not plain_call(*arguments[:6]):
        return torch.ops.streamattn.prologue_forward(*arguments)
    if wants_grad(*arguments[:4]):
        return _Prologue.apply(*arguments)
    return _forward(*arguments)
