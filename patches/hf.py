"""What a HuggingFace model hands to its attention layers, brought into `streamattn.attention`'s terms.

Contract. The mask that arrives depends on the implementation that the model's configuration names: a compact
one ("streamattn", see `patches.interface`), none, bool or floating 4-D (sdpa and eager), 2-D (flash). All of
them are taken, and broadcast dimensions stay unmaterialised. A 4-D mask that isn't compact is complete,
HuggingFace's as well as a user's: self-attention is causal only where no mask came, or one over keys alone.
The cache may be a tuple of tensors, dynamic, or static; of a static one only the filled part is seen. What
differs between releases is told from signatures, never from a version number.

Layout. q, k, v are [B, H, T, D] views of the projections' outputs.

Attention weights are computed beside the output, and only when they are asked for. Where they have a
gradient, the output is made of them, as eager layers make it, so that ``attentions[i].retain_grad()`` has
something to keep; the kernel's output is not made of them.

Left out on purpose: paged caches of continuous batching and flex attention's block masks, both with an error
that says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, StaticCache

from patches import compact
from patches.registry import is_patched
from streamattn import parallel
from streamattn.functional import attention, resolve_window
from streamattn.packed import packed_attention
from streamattn.weights import attention_weights, combine_masks

try:
    from transformers.cache_utils import StaticLayer
except ImportError:  # before layers there was only one static cache
    StaticLayer = StaticCache

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # older releases tell the layers by an argument instead
    _active_collector = None

CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Every name that HuggingFace has given to a layer's cache argument, newest first."""

MASKS_PASS_UNCHANGED = find_spec("transformers.masking_utils") is not None
"""Whether models hand 4-D masks on to their layers as they are."""

_OUTPUT_ATTENTIONS = (
    "_output_attentions" if hasattr(PretrainedConfig, "output_attentions") else "output_attentions"
)
"""Where configurations keep it: newer releases have a property."""

_PER_LAYER = "_heterogeneity_spec"
"""In the `__dict__` of configurations whose layers differ."""

_UPDATE_TAKES_POSITIONS = "cache_kwargs" in inspect.signature(Cache.update).parameters


def unsupported(layer: nn.Module, forward: Callable[..., Any], *names: str) -> str | None:
    """The reason why a patch can't stand in for a layer, or None.

    Args:
        layer: The layer, whose configuration may ask for what patches don't do.
        forward: The `forward` of its class.
        *names: Arguments that the patch relies on, besides a cache.
    """
    if getattr(layer.config, "is_causal", True) is False:
        return "config.is_causal is False, and patched self-attention is causal"
    parameters = inspect.signature(forward).parameters
    missing = [name for name in names if name not in parameters]
    if not any(name in parameters for name in CACHE_NAMES):
        missing.append(" or ".join(CACHE_NAMES))
    if not missing:
        return None
    return f"this release of transformers calls the layer differently: no argument {', '.join(missing)}"


def argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments of a layer's `forward` that may come by position, without self."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in positional)[1:]


def setting(config: Any, name: str) -> Any:
    """``getattr(config, name, None)`` for what layers ask at every call, at a tenth of the host's time.

    Configurations answer in Python, once for each class that has a say and again for what a property reads.

    Args:
        config: A configuration of transformers, or any object. It may change from call to call.
        name: An attribute that a view of a configuration (`patches.views`) has no answer of its own to.
    """
    cls = type(config)
    cls = getattr(cls, "ordinary", cls)  # what a view stands for
    key = None if torch.compiler.is_compiling() else _stored_name(cls, name)
    if key is None:
        return getattr(config, name, None)
    state = object.__getattribute__(config, "__dict__")
    if key in state:
        # one with settings of each layer's own may refuse to answer for all
        return state[key] if _PER_LAYER not in state else getattr(config, name, None)
    return getattr(cls, key, None)


@cache
def _stored_name(cls: Any, name: str) -> str | None:
    """The key in the `__dict__` of configurations of a class that holds an attribute; None: none does."""
    answering = [base for base in cls.__mro__ if {"__getattribute__", "__getattr__"} & set(vars(base))]
    if not issubclass(cls, PretrainedConfig) or any(
        base is not object and base.__module__.split(".")[0] != "transformers" for base in answering
    ):
        return None
    key = cls.attribute_map.get(name, name)
    return None if isinstance(getattr(cls, key, None), property) else key


def cache_of(arguments: dict[str, Any]) -> Any:
    """The cache among a layer's arguments, under whichever of its names; None if there is none."""
    for name in CACHE_NAMES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None


def update_cache(
    cache: Any,
    k: Tensor,
    v: Tensor,
    layer_idx: Any,
    cache_position: Tensor | None = None,
    **rope: Tensor,
) -> tuple[Tensor, Tensor, Tensor | int | None]:
    """Append this call's keys and values to a layer's cache.

    Args:
        cache: A `transformers.Cache` of self-attention; neither None nor an `EncoderDecoderCache`.
        k: New keys [B, Hkv, T, D].
        v: New values [B, Hkv, T, Dv].
        layer_idx: The layer's place in the cache, an int.
        cache_position: int64 [T], places of the new tokens, where the release passes it.
        **rope: ``sin`` and ``cos``, which some caches of older releases want.

    Returns:
        ``(k, v, filled)``: all keys and values of the cache, and how many of them hold tokens: an int or an
        int64 scalar tensor for a static cache, None if every one does.

    Raises:
        ValueError: the cache is not a `transformers.Cache`.
    """
    if not isinstance(cache, Cache):
        raise ValueError(
            f"expected a transformers.Cache, got {type(cache).__name__}, which a patched layer can't read; "
            "unpatch_model(model) before continuous batching or a custom cache"
        )
    if k.dtype != v.dtype:
        k = k.to(v.dtype)  # a cache takes the dtype of the first keys for both
    filled = None
    if has_static_layer(cache, layer_idx):
        # Read before the update, which counts in place.
        if cache_position is not None:
            filled = cache_position[-1] + 1
        else:
            filled = cache.get_seq_length(layer_idx) + k.shape[2]
        if isinstance(filled, Tensor) and filled.device.type == "cpu" and not torch.compiler.is_compiling():
            filled = int(filled)  # no device to wait for, and a slice is cheaper than a length
    if _UPDATE_TAKES_POSITIONS:
        k, v = cache.update(k, v, layer_idx, {"cache_position": cache_position, **rope})
    else:
        k, v = cache.update(k, v, layer_idx)
    return k, v, filled


def document_starts(given: dict[str, Any]) -> Tensor | None:
    """Where a decoder's arguments say that documents start, by positions that start again within a row.

    HuggingFace tells them so too, but not with a cache or a mask of ones, although models make a cache by
    default (huggingface/transformers#46634).

    Args:
        given: The arguments by name.

    Returns:
        As `compact.document_starts`; None if positions say nothing: there are none, or not of whole rows, or
        they are a shard's.
    """
    if parallel.shared() is not None:
        return None
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    if mask is not None and (
        not isinstance(mask, Tensor)
        or mask.dim() != 2
        or mask.shape[1] != positions.shape[1]  # of a cache's tokens, or of virtual ones, too
        or positions.shape[0] not in (1, mask.shape[0])
    ):
        return None
    return compact.document_starts(positions, mask) if is_fresh(cache_of(given)) else None


def is_fresh(cache: Any) -> bool:
    """Whether a cache holds no token and has no places for them yet, or is none."""
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None:
        return True
    return isinstance(cache, Cache) and not has_static_layer(cache) and cache.get_seq_length() == 0


def refuse_documents(
    names: tuple[str, ...], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Forward pre-hook of a decoder in releases that can't keep documents packed into a row apart.

    Args:
        names: The decoder's arguments, in order.
        model: The decoder.
        args: Its arguments by position.
        kwargs: Its arguments by name.

    Raises:
        ValueError: Packed documents.
    """
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    starts = document_starts(given)
    if starts is None or not compact.readable(given.get("attention_mask"), given["position_ids"]):
        return
    if bool(starts.any()) and any(map(is_patched, model.modules())):
        raise ValueError(
            "position_ids start again within a row, which means packed documents; this release of "
            "transformers can't keep them apart: pad them into rows of their own, or upgrade it"
        )


def is_complete(mask: Any) -> bool:
    """Whether a mask alone says who sees whom, so that causality must not be added: 4-D, and not ours."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return False
    return not compact.is_compact(mask)


def has_static_layer(cache: Any, layer_idx: int | None = None) -> bool:
    """Whether a cache returns slots that hold no token yet, in one of its layers or in any."""
    if isinstance(cache, StaticCache):
        return True
    layers = getattr(cache, "layers", ())
    if layer_idx is not None:
        # a dynamic one may still be to come
        return layer_idx < len(layers) and isinstance(layers[layer_idx], StaticLayer)
    return any(isinstance(layer, StaticLayer) for layer in layers)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    mask: Any,
    scale: float | None,
    dropout_p: float = 0.0,
    filled: Tensor | int | None = None,
    cu_seqlens: Tensor | None = None,
    need_weights: bool = False,
    window_size: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sinks_scale_output: bool = False,
    position_bias: Tensor | None = None,
    packed: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`streamattn.attention` on what a HuggingFace layer holds.

    Args:
        q: [B, Hq, Tq, D]; cast to v's dtype, as is k (QK-norm and autocast leave them in float32).
        k: [B, Hkv, Tk, D].
        v: [B, Hkv, Tk, Dv].
        causal: Whether a query sees only keys up to its own place; on top of `mask` (`is_complete` tells
            where there is nothing to add), unless that is compact and says it itself.
        mask: None; bool 4-D (True = visible); floating 4-D (added); 2-D over keys (non-zero = visible); or
            one of `patches.compact`.
        scale: Factor of the scores; None = ``1 / sqrt(D)``.
        dropout_p: Probability of dropping a weight.
        filled: Number of keys that hold tokens, this call's included; None = all.
        cu_seqlens: int [N + 1], bounds of the documents that B rows of Tq tokens hold one after the other, as
            `DataCollatorWithFlattening` gives them of one row; on top of what `mask` says.
        need_weights: Whether to compute the attention weights; where they have a gradient, the output is made
            of them.
        window_size: As `attention` takes it.
        softcap: As `attention` takes it.
        sinks: [Hq], as `attention` takes them.
        sinks_scale_output: Whether the layer's weights are those without sinks, which scale the output then.
        position_bias: Floating, broadcasts to [B, Hq, Tq, Tk], added to the scores; differentiable.
        packed: [B, T, Hq + 2 Hkv, D], of which q, k and v are views: its gradient is made as one.

    Returns:
        ``(out, weights)``: out [B, Hq, Tq, Dv]; weights [B, Hq, Tq, Tk], before dropout, or None.

    Raises:
        ValueError: a mask of a kind that can't be read; a call that can't go over several ranks, inside of
            `parallel.sharing`.
    """
    if not q.dtype == k.dtype == v.dtype:
        q, k = q.to(v.dtype), k.to(v.dtype)
    shared = parallel.shared()
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "scale": scale,
        "sinks": sinks,
        "softcap": softcap,
        "dropout_p": dropout_p,
    }
    if mask is filled is cu_seqlens is position_bias is packed is shared is None and not need_weights:
        # most tokens are decoded so, one by one, and the host's time for each layer counts
        return attention(q, k, v, **options), None
    batch, _, q_len, _ = q.shape
    if shared is not None:
        hidden = mask is not None
        if compact.is_compact(mask):
            seen = compact.read(mask, batch, q_len, k.shape[2])
            options["causal"] = compact.is_causal(mask)
            hidden = seen.segment_ids is not None or seen.kv_lengths is not None
        _refuse_for_shards(
            {
                "a mask": hidden,
                "a cache": filled is not None,
                "bounds of documents": cu_seqlens is not None,
                "attention weights": need_weights,
                "a bias by position": position_bias is not None,
            }
        )
        return parallel.attention(q, k, v, **shared._asdict(), **options), None
    kv_lengths = None
    if isinstance(filled, int):
        k, v = k[:, :, :filled], v[:, :, :filled]
    elif filled is not None:
        kv_lengths = filled.expand(batch)
    segment_ids = None
    if compact.is_compact(mask):
        seen = compact.read(mask, batch, q_len, k.shape[2])
        options["causal"], segment_ids, mask = compact.is_causal(mask), seen.segment_ids, None
        if seen.kv_lengths is not None and not isinstance(filled, int):  # which cut the keys already
            kv_lengths = seen.kv_lengths
    elif compact.may_come_of_one(mask, q.shape[1]):
        raise ValueError(compact.CHANGED)
    attn_mask = _as_attn_mask(mask, k.shape[2])
    if position_bias is not None:
        attn_mask = combine_masks(attn_mask, position_bias[..., : k.shape[2]])
    if cu_seqlens is not None and q_len == k.shape[2]:
        places = torch.arange(batch * q_len, device=q.device, dtype=cu_seqlens.dtype).view(batch, q_len)
        documents = torch.bucketize(places, cu_seqlens[1:], right=True, out_int32=True)
        # chunks and padding that the mask says stay: a segment is one of theirs within one document
        segment_ids = tuple(
            torch.where(ids < 0, ids, ids * cu_seqlens.numel() + documents)
            for ids in segment_ids or (torch.zeros_like(documents),) * 2
        )
    options |= {"attn_mask": attn_mask, "segment_ids": segment_ids, "kv_lengths": kv_lengths}
    if packed is not None and packed.requires_grad and not need_weights:
        return packed_attention(packed, num_kv_heads=k.shape[1], **options)[0], None
    if not need_weights:
        return attention(q, k, v, **options), None
    apart = sinks if sinks_scale_output else None
    if apart is not None:
        options["sinks"] = None
    differentiable = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, attn_mask, sinks)
    )
    if differentiable:
        options["dropout_p"] = 0.0  # of an output that isn't used
    out, lse = attention(q, k, v, **options, return_lse=True)
    if segment_ids is not None:
        own, theirs = segment_ids[0][:, None, :, None], segment_ids[1][:, None, None, :]
        attn_mask = combine_masks(attn_mask, (own == theirs) & (theirs >= 0))
    weights = attention_weights(
        q,
        k,
        lse,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        window=resolve_window(window_size, options["causal"]),
        attn_mask=attn_mask,
        kv_lengths=kv_lengths,
        softcap=softcap,
    ).to(q.dtype)
    if differentiable:
        out = _weighted(weights, v, dropout_p)
    if apart is not None:
        out = (out * torch.sigmoid(lse - apart[:, None]).unsqueeze(-1)).to(q.dtype)
    return out, weights


def _refuse_for_shards(asked: dict[str, bool]) -> None:
    if any(asked.values()):
        raise ValueError(
            f"ranks that share a sequence can't serve {' and '.join(name for name in asked if asked[name])}; "
            "call the model with ids, positions, an attention_mask of ones and use_cache=False"
        )


def _weighted(weights: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """The values' sums as eager layers make them, so that the weights have a gradient of their own.

    Args:
        weights: [B, Hq, Tq, Tk].
        v: [B, Hkv, Tk, Dv].
        dropout_p: Probability of dropping a weight.

    Returns:
        [B, Hq, Tq, Dv], stored as `attention` stores it.
    """
    v = v.repeat_interleave(weights.shape[1] // v.shape[1], dim=1)
    # a NaN in a value that no query sees must enter no product
    v = torch.where((weights.detach() != 0).any(dim=2).unsqueeze(-1), v, 0.0)
    out = F.dropout(weights, dropout_p) @ v
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _as_attn_mask(mask: Any, kv_len: int) -> Tensor | None:
    """`mask` as `attention` takes it, over exactly `kv_len` keys; stride-0 dimensions stay."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        what = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ValueError(
            f"attention_mask must reach a patched layer as None, [B, Tk] or [B, 1, Tq, Tk], got {what}; "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )
    if mask.dim() == 2:
        mask = mask[:, None, None, :].bool()
    if mask.dtype == torch.bool and 1 < mask.shape[3] < kv_len:
        mask = F.pad(mask, (0, kv_len - mask.shape[3]), value=False)
    # Masks may be as long as a static cache while only its filled part is attended to.
    return mask[..., :kv_len]


def weights_wanted(layer: nn.Module, arguments: dict[str, Any], key: str | None = "attentions") -> bool:
    """Whether this call's attention weights will be looked at, however the release says so.

    Args:
        layer: The attention layer.
        arguments: Its keyword arguments: ``output_attentions`` decides where it is given.
        key: The model output that collects them, "attentions" or "cross_attentions"; None = any of the kind.

    Returns:
        True if the weights are to be computed.
    """
    if arguments.get("output_attentions") or setting(layer.config, _OUTPUT_ATTENTIONS):
        return True
    if isinstance(layer.__dict__.get("forward"), FunctionType):
        return True  # the release records by wrapping `forward` for the time of the call
    if _active_collector is None or (torch.compiler.is_compiling() and not _active_collector.compiling):
        return False  # a context variable set outside can't be read while compiling
    collected = _active_collector.get()
    if not collected:
        return False
    return key in collected if key is not None else any(name.endswith("attentions") for name in collected)
