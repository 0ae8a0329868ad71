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
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _is_any_autocast_enabled, _len_torch_function_stack
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import Parameter

from streamattn.dispatch import MIN_HOPPER_QUERIES, Backend, Masks, choose, unsupported_backward
from streamattn.pattern import open_sides

_GUARDS: Any
try:
    from torch._C._dynamo.guards import TensorGuards as _GUARDS
except ImportError:  # no kinds then: each call goes through all of its checks
    _GUARDS = None

OPTIONS = (
    "Tensor? attn_mask, Tensor? q_segments, Tensor? kv_segments, Tensor? kv_lengths, Tensor? seed, "
    "Tensor? sinks, float scale, SymInt window_left, SymInt window_right, float softcap, float dropout_p, "
    "str backend, bool? deterministic"
)

ONCE = (
    "attention is differentiable once; for a second derivative write it with matmul and softmax, "
    "or take torch's scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
)
_MAX_KINDS, _MAX_ALIKE = 4096, 16
_BACKENDS = {backend.value: backend for backend in Backend}
_PLAIN = (Tensor, Parameter)
# set for the thread while torch.autograd batches gradients by itself, as is_grads_batched does
_BATCHING = torch._C._dispatch_key_parse("VmapMode")


class Kind:
    """Calls that the checks, the choice of a backend and the launch can't tell apart; see `kind_of_call`.

    Attributes:
        guards: tell whether q, k and v are of this kind, by their classes, dispatch keys, dtypes, devices,
            `requires_grad`, sizes and strides, but for the number of keys and the strides that grow with it.
        again: serves one more, ``(q, k, v) -> (out, lse)``, once the kernel has served one.
    """

    __slots__ = ("again", "guards")

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The kind of a call on these tensors."""
        sizes = [list(q.shape), *([*x.shape[:2], None, x.shape[3]] for x in (k, v))]
        strides = [list(q.stride()), *([None, None, *x.stride()[2:]] for x in (k, v))]
        self.guards = _GUARDS(q, k, v, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self.again: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


KINDS: dict[Hashable, list[Kind]] = {}
"""Kinds of calls that were seen, by what their guards don't tell."""

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
    """``attention_forward`` by the backend that serves the call, which ``kind`` is told."""
    masks = Masks(attn_mask, q_segments, kv_segments, kv_lengths, sinks, block_table)
    chosen = choose(_BACKENDS[backend], q, k, v, masks, scale, window_left, softcap, dropout_p)
    forward = _implementation(chosen)
    if chosen is Backend.HOPPER:
        options = (scale, window_left, window_right, softcap, dropout_p)
        if q_segments is None or kv_segments is None:
            return forward(q, k, v, None, None, None, kv_lengths, seed, *options)
        from streamattn.kernels.segments import query_spans

        spans = query_spans(q_segments, kv_segments, window_left, window_right)
        return forward(q, k, v, *spans, None, seed, *options)
    if kind is not None and chosen in (Backend.TRITON, Backend.DECODE):
        features, options = (None,) * 6, (scale, window_left, window_right, softcap, dropout_p)
        if chosen is Backend.DECODE:
            from streamattn.kernels import decode

            repeat = decode.repeat_attention_forward(q, k, v, window_left, kind)
        else:
            from streamattn.kernels.forward import repeat_attention_forward

            repeat = repeat_attention_forward(q, v, kind)
        kind.again = lambda q, k, v: repeat(q, k, v) or forward(q, k, v, *features, *options, kind)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``attention_backward`` by the backend that serves the call; dq, dk, dv go into ``grads`` if given."""
    masks = Masks(attn_mask, q_segments, kv_segments, kv_lengths, sinks)
    chosen = choose(_BACKENDS[backend], q, k, v, masks, scale, window_left, softcap, dropout_p)
    if chosen is Backend.DECODE:
        chosen = Backend.TRITON  # which makes gradients of any out and lse
    if chosen in (Backend.HOPPER, Backend.TRITON, Backend.WIDE):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    if chosen is Backend.HOPPER:
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
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
            return dq, dk, dv, q.new_empty(0), q.new_empty(0)
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
    dmask = q.new_empty(0) if dmask is None else dmask
    return dq, dk, dv, dmask, q.new_empty(0) if dsinks is None else dsinks


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
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor]:
        tensors, ctx.rest = inputs[:9], inputs[9:]
        if plain_call(*tensors):
            out, lse = run_forward(*inputs)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = torch.ops.streamattn.attention_forward(*inputs)
        ctx.save_for_backward(out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, *grads: Tensor | None):
        dout, dlse = grads
        out, lse, q, k, v, attn_mask, *masks = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 16
        if dout is None:
            dout = torch.zeros_like(out)
        mask_grad, sink_grad = ctx.needs_input_grad[3], ctx.needs_input_grad[8]
        backward: Any = torch.ops.streamattn.attention_backward
        if not torch.is_grad_enabled() and plain_call(dout, dlse, q, k, v, attn_mask, *masks):
            backward = run_backward
        dq, dk, dv, dmask, dsinks = backward(
            dout, dlse, q, k, v, out, lse, attn_mask, *masks, *ctx.rest, mask_grad, sink_grad
        )
        dmask, dsinks = dmask if mask_grad else None, dsinks if sink_grad else None
        return dq, dk, dv, dmask, *(None,) * 4, dsinks, *(None,) * 7


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
        return _Attention.apply(q, k, v, *rest)
    return run_forward(q, k, v, *rest, block_table=block_table, kind=kind)


def kind_of_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    backend: str,
) -> Kind | None:
    """What two calls have alike if the checks, the choice of a backend and the launch can't tell them apart.

    So a call of a kind that was served needs none of these again. A kind holds all that they look at but for
    the number of keys and the strides that grow with it: decoding has one kind for a cache of any length.
    What a kind does not hold is asked here, and None returned for a call that has no kind.

    Only decoding has one, where the host's time counts: eager calls of few queries on a GPU, without
    gradient, mask, segments, lengths, sinks and dropout. q, k and v may be anything, and of any shape.
    """
    if _GUARDS is None:
        return None
    # every line here is host time of each token
    if torch.compiler.is_compiling() or not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return None
    # the guards take shapes and strides for granted
    if not (q.is_cuda and q.layout is k.layout is v.layout is torch.strided):
        return None
    if q.is_nested or k.is_nested or v.is_nested:
        return None
    # what they don't see; modes and transforms of other sorts change the dispatch keys
    if (
        _len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or _is_any_autocast_enabled()
        or _profiler_enabled()
    ):
        return None
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not (len(q_shape) == len(k_shape) == len(v_shape) == 4 and 0 < k_shape[2] == v_shape[2]):
        return None
    if q_shape[2] >= MIN_HOPPER_QUERIES:  # the Hopper kernel looks at addresses and at the number of keys
        return None
    k_strides, v_strides = k.stride(), v.stride()
    # a compiled kernel takes any such strides that are whole 16s, in 32 bits; each is, if all their bits are
    growing = k_strides[0] | k_strides[1] | v_strides[0] | v_strides[1]
    if growing % 16 != 0 or growing >= 1 << 31:
        return None
    # the number of keys decides what is compiled by this alone: which sides of the window are limits
    sides = open_sides(q_shape[2], k_shape[2], window_left, window_right)
    key = (q_shape, q.get_device(), scale, window_left, window_right, sides, softcap, backend)
    alike = KINDS.get(key)
    if alike is not None:
        for kind in alike:
            if kind.guards.check(q, k, v):
                return kind
    if not plain_call(q, k, v) or q.requires_grad or k.requires_grad or v.requires_grad:
        return None
    if q is k or k is v or q is v:  # which guards refuse
        return None
    # `attention` hands them on as they are: it would copy rows of another stride; a launch asks one tensor
    # for what must be alike
    if not q.stride(3) == k_strides[3] == v_strides[3] == 1 or k_shape[:3] != v_shape[:3]:
        return None
    if not (q.dtype is k.dtype is v.dtype and q.device == k.device == v.device):
        return None
    if alike is None:
        if len(KINDS) >= _MAX_KINDS:
            KINDS.clear()
        alike = KINDS[key] = []
    elif len(alike) >= _MAX_ALIKE:
        del alike[0]
    alike.append(Kind(q, k, v))
    return alike[-1]


def plain_call(q: Tensor, *others: Tensor | None) -> bool:
    """Whether a call may skip torch's dispatcher: that would call our implementation and do nothing else.

    It does more when compiling, for subclasses, for a tensor whose memory does not hold its values (a lazy
    negative, a zero without memory), on other devices, and where a mode, transform or profiler listens.
    """
    if torch.compiler.is_compiling():
        return False
    for x in (q, *others):  # a loop, not all(): every eager call pays for it
        if x is not None and (type(x) not in _PLAIN or x.is_neg() or x._is_zerotensor()):
            return False
    return (
        (q.is_cuda or q.is_cpu)
        and torch._C._len_torch_dispatch_stack() == 0
        and _len_torch_function_stack() == 0
        and torch._C._get_tracing_state() is None  # torch.jit.trace
        and not torch._C._are_functorch_transforms_active()  # torch.func and vmap
        and not torch._C._dispatch_tls_is_dispatch_key_included(_BATCHING)
        and forward_ad._current_level < 0  # where tensors may carry tangents
        and not _profiler_enabled()
    )


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
        return _Attention.apply(q, k, v, attn_mask, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.streamattn.attention_forward(q, k, v, attn_mask, *rest, block_table=block_table)


for _key in ("CPU", "CUDA"):
    _library.impl("attention_forward", run_forward, _key)
    _library.impl("attention_backward", run_backward, _key)
_library.impl("attention_forward", _forward_autograd, "Autograd")
_library.impl("attention_backward", _backward_autograd, "Autograd")
torch.library.register_fake("streamattn::attention_forward", forward_fake, lib=_library)
torch.library.register_fake("streamattn::attention_backward", _backward_fake, lib=_library)
