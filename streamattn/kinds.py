"""The short way of a call: past the dispatcher where nothing listens, and past all checks where it is known.

The host's time of a short call is longer than the GPU's. `plain_call` says whether the way through PyTorch's
dispatcher may be left out. A `Kind` is of calls that the checks, the choice of a backend and the launch can't
tell apart: a call of a kind that was served needs none of these again, forward or backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C import _is_any_autocast_enabled, _len_torch_function_stack
from torch.autograd import _profiler_enabled  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import Parameter

from streamattn.dispatch import MIN_HOPPER_QUERIES
from streamattn.pattern import open_sides

_GUARDS: Any
empty_strided_cuda: Any
try:
    from torch._C._dynamo.guards import TensorGuards as _GUARDS
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_strided_cuda  # pyright: ignore[reportAttributeAccessIssue]
except ImportError:  # no kinds then: each call goes through all of its checks
    _GUARDS = empty_strided_cuda = None

_MAX_KINDS, _MAX_ALIKE = 4096, 16
_PLAIN = (Tensor, Parameter)
# set for the thread while torch.autograd batches gradients by itself, as is_grads_batched does
_BATCHING = torch._C._dispatch_key_parse("VmapMode")


class Kind:
    """Calls that the checks, the choice of a backend and the launch can't tell apart; see `kind_of_call`.

    Attributes:
        guards: tell whether tensors are of this kind, by their classes, dispatch keys, dtypes, devices,
            ``requires_grad``, sizes and strides, but for those that may vary.
        needs_grad: whether one of them is to get a gradient, where gradients are on.
        options: those of ``attention_forward`` behind q, k and v but for ``deterministic``, once one call was
            served.
        again: serves one more forward on q, k and v, or returns None where it must be served as the first
            was; None of a backend that can't repeat what it has served.
        by_address: does so given the addresses of q, k and v, of a backend that needs no more.
    """

    __slots__ = ("_backwards", "again", "by_address", "guards", "needs_grad", "options")

    def __init__(self, guards: Any, needs_grad: bool) -> None:
        """A kind of which nothing was served."""
        self.guards, self.needs_grad = guards, needs_grad
        self.options: tuple[Any, ...] = ()
        self.again: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None] | None = None
        self.by_address: Callable[[int, int, int], tuple[Tensor, Tensor] | None] | None = None
        self._backwards: list[_Backward] = []

    def repeat_backward(self, deterministic: bool | None, *tensors: Tensor) -> Any:
        """What `learn_backward` was given returns for these tensors; None if it was given nothing for them.

        Args:
            deterministic: whether the same inputs must give the same bits; None is PyTorch's setting.
            *tensors: dout first, laid out like those that `learn_backward` got.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_heard(tensors[0].dtype):
            return None
        known = self._known(is_deterministic(deterministic), tensors)
        return None if known is None else known.again(*tensors)

    def learn_backward(self, again: Callable[..., Any], deterministic: bool, *tensors: Tensor) -> None:
        """Has `repeat_backward` call ``again`` for tensors laid out like these, which are different ones.

        What it calls for them already stays: it refused for a reason of the moment, an address or a profiler.
        """
        if self._known(deterministic, tensors) is not None:
            return
        if len(self._backwards) >= _MAX_ALIKE:
            del self._backwards[0]
        self._backwards.append(_Backward(_guards(tensors), deterministic, again))

    def _known(self, deterministic: bool, tensors: tuple[Tensor, ...]) -> _Backward | None:
        for backward in self._backwards:
            if backward.deterministic is deterministic and backward.guards.check(*tensors):
                return backward
        return None


class _Backward:
    """One way in which the backward of a kind was served; see `Kind.learn_backward`."""

    __slots__ = ("again", "deterministic", "guards")

    def __init__(self, guards: Any, deterministic: bool, again: Callable[..., Any]) -> None:
        """See there."""
        self.guards, self.deterministic, self.again = guards, deterministic, again


KINDS: dict[Hashable, list[Kind]] = {}
"""Kinds of calls that were seen, by what their guards don't tell."""


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

    A kind holds all that they look at. Of decoding it leaves out the number of keys and the strides that grow
    with it, so that there is one kind for a cache of any length. What a kind does not hold is asked here, and
    None returned for a call that has no kind.

    Only calls whose time the host's may exceed have one: eager ones on a GPU without mask, segments, lengths,
    sinks and dropout. q, k and v may be anything, and of any shape.
    """
    if _GUARDS is None or torch.compiler.is_compiling():
        return None
    # every line here is host time of each token
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return None
    # the guards take shapes and strides for granted
    if not (q.is_cuda and q.layout is k.layout is v.layout is torch.strided):
        return None
    if q.is_nested or k.is_nested or v.is_nested or _is_heard(q.dtype):
        return None
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not (len(q_shape) == len(k_shape) == len(v_shape) == 4 and 0 < k_shape[2] == v_shape[2]):
        return None
    k_strides, v_strides = k.stride(), v.stride()
    decoding = q_shape[2] < MIN_HOPPER_QUERIES
    if decoding:
        # a compiled kernel takes any such strides that are whole 16s, in 32 bits; each is, if all bits are
        growing = k_strides[0] | k_strides[1] | v_strides[0] | v_strides[1]
        if growing % 16 != 0 or growing >= 1 << 31:
            return None
        # the number of keys decides what is compiled by this alone: which sides of the window are limits
        keys = open_sides(q_shape[2], k_shape[2], window_left, window_right)
    else:
        keys = k_shape[2]
    key = (q_shape, q.get_device(), scale, window_left, window_right, keys, softcap, backend)
    for kind in KINDS.get(key, ()):
        if kind.guards.check(q, k, v):
            return kind
    if not plain_call(q, k, v):
        return None
    if q is k or k is v or q is v:  # which guards refuse
        return None
    # `attention` hands them on as they are: it would copy rows of another stride; a launch asks one tensor
    # for what must be alike
    if not q.stride(3) == k_strides[3] == v_strides[3] == 1 or k_shape[:3] != v_shape[:3]:
        return None
    if not (q.dtype is k.dtype is v.dtype and q.device == k.device == v.device):
        return None
    return _new(key, decoding, q, k, v)


def kind_of_packed(qkv: Tensor, *options: Hashable) -> Kind | None:
    """`kind_of_call` of q, k and v that are one tensor [B, T, Hq + 2 Hkv, D], for training.

    Args:
        qkv: may be anything.
        *options: all that the call depends on beside it.
    """
    if _GUARDS is None or torch.compiler.is_compiling():
        return None
    if type(qkv) not in _PLAIN or not qkv.is_cuda or qkv.layout is not torch.strided:
        return None
    if qkv.is_nested or _is_heard(qkv.dtype):
        return None
    shape = qkv.shape
    if len(shape) != 4 or shape[1] < MIN_HOPPER_QUERIES:
        return None
    key = ("packed", shape, qkv.get_device(), *options)
    for kind in KINDS.get(key, ()):
        if kind.guards.check(qkv):
            return kind
    return _new(key, False, qkv) if plain_call(qkv) and qkv.stride(3) == 1 else None


def _new(key: Hashable, decoding: bool, *tensors: Tensor) -> Kind:
    """A kind for these tensors under this key; one of any number of keys where decoding."""
    if key not in KINDS and len(KINDS) >= _MAX_KINDS:
        KINDS.clear()
    alike = KINDS.setdefault(key, [])
    if len(alike) >= _MAX_ALIKE:
        del alike[0]
    kind = Kind(_guards(tensors, varying=(1, 2) if decoding else ()), any(x.requires_grad for x in tensors))
    alike.append(kind)
    return kind


def _guards(tensors: tuple[Tensor, ...], varying: tuple[int, ...] = ()) -> Any:
    """Guards of tensors; those at the places ``varying`` are [B, Hkv, Tk, D] of any Tk."""
    sizes: list[list[int | None]] = [list(x.shape) for x in tensors]
    strides: list[list[int | None]] = [list(x.stride()) for x in tensors]
    for i in varying:
        sizes[i][2] = strides[i][0] = strides[i][1] = None
    return _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _is_heard(dtype: torch.dtype) -> bool:
    """Whether something that guards don't see listens to an eager call on a GPU, or autocast changes it.

    Other modes and transforms change the dispatch keys, which guards see.
    """
    return (
        _len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or _profiler_enabled()
        or (
            _is_any_autocast_enabled()
            and not (torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is dtype)
        )
    )


def is_deterministic(asked: bool | None) -> bool:
    """Whether the same inputs must give the same bits; None is PyTorch's setting."""
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


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
