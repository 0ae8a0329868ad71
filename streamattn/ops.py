"""The boundary that torch.compile and autograd see.

Two schemas, ``torch.ops.streamattn.attention_forward`` and ``attention_backward``; for each a fake kernel
(shapes and strides only) and one implementation for CPU and CUDA that asks `streamattn.dispatch` and imports
the chosen backend when it first runs; and an Autograd kernel that calls one ``autograd.Function``. Arguments
are validated before, by `streamattn.functional`.

Shapes: q [B, Hq, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] with a unit last stride; attn_mask 4-D, each
dimension full or 1; q_segments [B, Tq] and kv_segments [B, Tk] int32; kv_lengths [B] int32 or int64; seed
int64 [1]; sinks [Hq]. With a block_table int32 [B, Tk / page], which only the forward takes, k and v are
[pages, Hkv, page, D or Dv]. An open side of the window is `pattern.UNBOUNDED`; softcap and dropout_p are 0.0
where unused; deterministic matters to the backward alone, where None is PyTorch's setting at that time.
``out`` and the gradients are stored [B, T, H, D] and viewed as [B, H, T, D]; ``lse`` [B, Hq, Tq] is float32,
float64 for float64 inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from streamattn.dispatch import Backend, Masks, choose, unsupported_backward
from streamattn.kinds import Kind, empty_strided_cuda, is_deterministic, plain_call

OPTIONS = (
    "Tensor? attn_mask, Tensor? q_segments, Tensor? kv_segments, Tensor? kv_lengths, Tensor? seed, "
    "Tensor? sinks, float scale, SymInt window_left, SymInt window_right, float softcap, float dropout_p, "
    "str backend, bool? deterministic"
)

ONCE = (
    "attention is differentiable once; for a second derivative write it with matmul and softmax, "
    "or take torch's scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
)
_BACKENDS = {backend.value: backend for backend in Backend}

_library = torch.library.Library("streamattn", "DEF")
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {OPTIONS}, *, Tensor? block_table=None) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS}, bool mask_grad, bool sink_grad) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask, Tensor dsinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@functools.cache
def _implementation(chosen: Backend) -> Callable[..., tuple[Tensor, Tensor]]:
    """The forward of a backend, imported when it first runs."""
    if chosen is Backend.HOPPER:
        from streamattn.kernels.hopper_forward import attention_forward
    elif chosen is Backend.TRITON:
        from streamattn.kernels.forward import attention_forward
    elif chosen is Backend.DECODE:
        from streamattn.kernels.decode import attention_forward
    elif chosen is Backend.WIDE:
        from streamattn.kernels.wide import attention_forward
    elif chosen is Backend.SDPA:
        from streamattn.kernels.cpu import attention_forward
    else:
        from streamattn.reference import attention_forward
    return attention_forward


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    q_segments: Tensor | None,
    kv_segments: Tensor | None,
    kv_lengths: Tensor | None,
    seed: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    backend: str,
    deterministic: bool | None,
    *,
    block_table: Tensor | None = None,
    kind: Kind | None = None,
) -> tuple[Tensor, Tensor]:
    """``attention_forward`` by the backend that serves the call, which ``kind`` is told.

    It is told once: what could not repeat a call on another device than the current one can repeat the next.
    """
    masks = Masks(attn_mask, q_segments, kv_segments, kv_lengths, sinks, block_table)
    chosen = choose(_BACKENDS[backend], q, k, v, masks, scale, window_left, softcap, dropout_p)
    forward = _implementation(chosen)
    options = (scale, window_left, window_right, softcap, dropout_p)
    if kind is not None:
        kind.options = (None,) * 6 + (*options, backend)
    if chosen is Backend.HOPPER:
        if q_segments is None or kv_segments is None:
            made = forward(q, k, v, None, None, None, kv_lengths, seed, *options)
            if kind is not None and kind.by_address is None:
                from streamattn.kernels.hopper_repeat import repeat_attention_forward

                by_address = kind.by_address = repeat_attention_forward(q, k, v, *options)
                if by_address is not None:
                    kind.again = lambda q, k, v: by_address(q.data_ptr(), k.data_ptr(), v.data_ptr())
            return made
        from streamattn.kernels.segments import query_spans

        spans = query_spans(q_segments, kv_segments, window_left, window_right)
        return forward(q, k, v, *spans, None, seed, *options)
    if kind is not None and chosen in (Backend.TRITON, Backend.DECODE):
        features = (None,) * 6
        if kind.again is None and chosen is Backend.DECODE:
            from streamattn.kernels import decode

            kind.again = decode.repeat_attention_forward(q, k, v, window_left, kind)
        elif kind.again is None and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0:
            # elsewhere it may be chosen for these addresses alone
            from streamattn.kernels.forward import repeat_attention_forward

            kind.again = repeat_attention_forward(q, v, kind)
        return forward(q, k, v, *features, *options, kind)
    paged = {}
    if block_table is not None:
        if chosen is Backend.DECODE:
            paged["block_table"] = block_table
        else:
            from streamattn.reference import gather_pages

            k, v = gather_pages(k, block_table), gather_pages(v, block_table)
    return forward(
        q,
        k,
        v,
        attn_mask,
        q_segments,
        kv_segments,
        kv_lengths,
        seed,
        sinks,
        scale,
        window_left,
        window_right,
        softcap,
        dropout_p,
        **paged,
    )


def forward_fake(
    q: Tensor, k: Tensor, v: Tensor, *options: object, block_table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``out`` and ``lse`` of ``attention_forward`` without their values."""
    from streamattn.reference import accumulate_dtype, heads_last

    return heads_last(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


def run_backward(
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
    sinks: Tensor | None,
    scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    dropout_p: float,
    backend: str,
    deterministic: bool | None,
    mask_grad: bool,
    sink_grad: bool,
    *,
    grads: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``attention_backward`` by the backend that serves the call; dq, dk, dv go into ``grads`` if given.

    dmask and dsinks are None where they aren't wanted.
    """
    masks = Masks(attn_mask, q_segments, kv_segments, kv_lengths, sinks)
    chosen = choose(_BACKENDS[backend], q, k, v, masks, scale, window_left, softcap, dropout_p)
    if chosen is Backend.DECODE:
        chosen = Backend.TRITON  # which makes gradients of any out and lse
    if chosen in (Backend.HOPPER, Backend.TRITON, Backend.WIDE):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    if chosen is Backend.HOPPER:
        deterministic = is_deterministic(deterministic)
        if unsupported_backward(dout, q, deterministic) is None:
            from streamattn.kernels.hopper_backward import attention_backward

            spans = (None, None, None)
            if q_segments is not None and kv_segments is not None:
                from streamattn.kernels.segments import key_spans

                spans = key_spans(q_segments, kv_segments, window_left, window_right)
            options = (scale, window_left, window_right, softcap, dropout_p)
            dq, dk, dv = attention_backward(
                dout, dlse, q, k, v, out, lse, *spans, kv_lengths, seed, *options, deterministic, grads
            )
            return dq, dk, dv, None, None
        chosen = Backend.TRITON
    if chosen is Backend.SDPA and (dlse is not None or mask_grad):
        chosen = Backend.REFERENCE  # the fused kernel knows neither gradient
    if chosen is Backend.WIDE and mask_grad:
        chosen = Backend.REFERENCE  # these kernels know no gradient of a mask
    others = (q_segments, kv_segments, kv_lengths, seed)
    delta = None
    options = (scale, window_left, window_right, softcap, dropout_p)
    if chosen is Backend.TRITON:
        from streamattn.kernels.backward import attention_backward
        from streamattn.kernels.mask_gradient import attention_mask_gradient

        dq, dk, dv, lse2, delta = attention_backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *others, sinks, *options, grads
        )
        delta = delta[..., : q.shape[2]]
        dmask = None
        if mask_grad and attn_mask is not None:
            dmask = attention_mask_gradient(dout, q, k, v, lse2, delta, attn_mask, *others, *options)
    elif chosen is Backend.WIDE:
        from streamattn.kernels.wide_backward import attention_backward

        dq, dk, dv, delta = attention_backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *others, sinks, *options
        )
        dmask = None
    else:
        if chosen is Backend.SDPA:
            from streamattn.kernels.cpu import attention_backward
        else:
            from streamattn.reference import attention_backward
        dq, dk, dv, dmask = attention_backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *others, sinks, *options, mask_grad
        )
    dsinks = None
    if sink_grad and sinks is not None:
        from streamattn.reference import row_delta, sink_gradient

        if delta is None:
            delta = row_delta(dout, dlse, out)
        dsinks = sink_gradient(delta, lse, sinks)
    for made, wanted in zip((dq, dk, dv), grads or (), strict=False):
        if made is not wanted:  # kernels that make their own
            wanted.copy_(made)
    return dq, dk, dv, dmask, dsinks


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dmask, dsinks = run_backward(*arguments)
    return dq, dk, dv, or_empty(dmask, dq), or_empty(dsinks, dq)


def or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """x, or as a schema wants it the empty tensor that says there is none."""
    return like.new_empty(0) if x is None else x


def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from streamattn.reference import heads_last

    dq, dk, dv = (heads_last(x, x.shape[3]) for x in (q, k, v))
    return dq, dk, dv, *gradients_fake(q, *options)


def gradients_fake(q: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    """dmask and dsinks for the options of ``attention_backward``, empty where they aren't wanted."""
    attn_mask, sinks, mask_grad, sink_grad = options[0], options[5], *options[-2:]
    dmask, dsinks = q.new_empty(0), q.new_empty(0)
    if mask_grad:
        assert isinstance(attn_mask, Tensor)
        dmask = attn_mask.new_empty(attn_mask.shape)
    if sink_grad:
        assert isinstance(sinks, Tensor)
        dsinks = sinks.new_empty(sinks.shape)
    return dmask, dsinks


class _Attention(torch.autograd.Function):
    """`attention_forward` with its gradient; differentiable once."""

    @staticmethod
    def forward(ctx, kind: Kind | None, *inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, ctx.rest, ctx.kind = inputs[:9], inputs[9:], kind
        made = None if kind is None or kind.again is None else kind.again(*inputs[:3])
        if made is None and plain_call(*tensors):
            made = run_forward(*inputs, kind=kind)
        elif made is None:
            with torch._C._AutoDispatchBelowAutograd():
                made = torch.ops.streamattn.attention_forward(*inputs)
        ctx.save_for_backward(*made, *tensors)
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        dout, dlse = grads
        if dout is None and dlse is None:
            return (None,) * 17
        out, lse, q, k, v, attn_mask, *masks = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        kind = ctx.kind if dlse is None else None
        if kind is not None:
            made = kind.repeat_backward(ctx.rest[-1], dout, q, k, v, out, lse)
            if made is not None:
                return None, *made, *(None,) * 13
        mask_grad, sink_grad = ctx.needs_input_grad[4], ctx.needs_input_grad[9]
        backward: Any = torch.ops.streamattn.attention_backward
        if not torch.is_grad_enabled() and plain_call(dout, dlse, q, k, v, attn_mask, *masks):
            backward = run_backward
        dq, dk, dv, dmask, dsinks = backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *masks, *ctx.rest, mask_grad, sink_grad
        )
        if backward is run_backward and kind is not None and kind.by_address is not None:
            _learn_backward(kind, ctx.rest[-1], (dout, q, k, v, out, lse), (dq, dk, dv))
        dmask, dsinks = dmask if mask_grad else None, dsinks if sink_grad else None
        return None, dq, dk, dv, dmask, *(None,) * 4, dsinks, *(None,) * 7


def _learn_backward(
    kind: Kind, deterministic: bool | None, tensors: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> None:
    """Has the kind repeat the backward on dout, q, k, v, out and lse that has just made these gradients."""
    deterministic = is_deterministic(deterministic)
    launch = repeat_of_backward(kind, deterministic, tensors, None)
    if launch is None:
        return
    layouts = [(tuple(x.shape), x.stride(), x.dtype) for x in grads]

    def again(*tensors: Tensor) -> list[Tensor] | None:
        grads = [empty_strided_cuda(*layout) for layout in layouts]
        return grads if launch(*[x.data_ptr() for x in (*tensors, *grads)]) else None

    kind.learn_backward(again, deterministic, *tensors)


def repeat_of_backward(
    kind: Kind,
    deterministic: bool,
    tensors: tuple[Tensor, ...],
    grads: tuple[Tensor, Tensor, Tensor] | None,
) -> Callable[..., bool] | None:
    """What repeats the backward of a kind by addresses alone, if a kernel served it that can; see there.

    Args:
        kind: of the call, whose forward is repeated so.
        deterministic: whether the same inputs must give the same bits.
        tensors: dout, q, k, v, out and lse.
        grads: as `run_backward` took them.
    """
    dout, q = tensors[:2]
    if unsupported_backward(dout, q, deterministic) is not None:
        return None
    if len({id(x) for x in tensors}) < len(tensors):  # which guards refuse
        return None
    from streamattn.kernels.hopper_repeat import repeat_attention_backward

    arguments: Any = (*tensors, grads, *kind.options[6:-1], deterministic)
    return repeat_attention_backward(*arguments)


class _AttentionBackward(torch.autograd.Function):
    """`attention_backward`, whose own derivative raises instead of being silently missing."""

    @staticmethod
    def forward(*args) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.streamattn.attention_backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(ONCE)


def repeat_attention(
    q: Tensor, k: Tensor, v: Tensor, deterministic: bool | None, kind: Kind
) -> tuple[Tensor, Tensor]:
    """`attention_forward` of a kind of which one call was served."""
    if kind.needs_grad and torch.is_grad_enabled():
        return _Attention.apply(kind, q, k, v, *kind.options, deterministic)
    made = None if kind.again is None else kind.again(q, k, v)
    if made is None:
        arguments: Any = (q, k, v, *kind.options, deterministic)
        made = run_forward(*arguments, kind=kind)
    return made


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest,
    block_table: Tensor | None = None,
    kind: Kind | None = None,
) -> tuple[Tensor, Tensor]:
    """``torch.ops.streamattn.attention_forward``, without the dispatcher's way where nothing listens on it.

    That way through Python kernels costs more than a short call's own work. ``kind`` is `kind_of_call`'s, to
    be told how to serve one more.
    """
    if not plain_call(q, k, v, *rest[:6], block_table):
        return torch.ops.streamattn.attention_forward(q, k, v, *rest, block_table=block_table)
    if wants_grad(q, k, v, rest[0], rest[5]):
        _check_not_paged(block_table)
        return _Attention.apply(kind, q, k, v, *rest)
    return run_forward(q, k, v, *rest, block_table=block_table, kind=kind)


def check_no_tangent(*tensors: Tensor | None) -> None:
    """Raises for a tensor that carries a forward-mode tangent, which would be lost silently."""
    if forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "StreamAttn has no forward-mode derivative; use backward or torch.autograd.grad"
            )


def _check_not_paged(block_table: Tensor | None) -> None:
    if block_table is not None:
        raise NotImplementedError(
            "a paged cache (block_table) has no gradients; call attention under torch.no_grad(), or on keys "
            "and values that were gathered into one tensor for each sequence"
        )


def wants_grad(*tensors: Tensor | None) -> bool:
    """Whether one of these tensors is to get a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _backward_autograd(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest):
    attn_mask, sinks = rest[2], rest[7]
    check_no_tangent(dout, dlse, q, k, v, attn_mask, sinks)
    if wants_grad(dout, dlse, q, k, v, attn_mask, sinks):
        return _AttentionBackward.apply(dout, dlse, q, k, v, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.attention_backward(dout, dlse, q, k, v, *rest)


def _forward_autograd(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *rest, block_table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_no_tangent(q, k, v, attn_mask, rest[4])
    if wants_grad(q, k, v, attn_mask, rest[4]):
        _check_not_paged(block_table)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "attention has no torch.func derivative; use backward or torch.autograd.grad"
            )
        return _Attention.apply(None, q, k, v, attn_mask, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.attention_forward(q, k, v, attn_mask, *rest, block_table=block_table)


for _key in ("CPU", "CUDA"):
    _library.impl("attention_forward", run_forward, _key)
    _library.impl("attention_backward", _backward, _key)
_library.impl("attention_forward", _forward_autograd, "Autograd")
_library.impl("attention_backward", _backward_autograd, "Autograd")
torch.library.register_fake("streamattn::attention_forward", forward_fake, lib=_library)
torch.library.register_fake("streamattn::attention_backward", _backward_fake, lib=_library)
