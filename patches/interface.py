"""Layers that use transformers' attention interface, on `streamattn.attention`; models' compact masks.

Contract. Importing this file registers the name "streamattn", an attention function and a mask function, in
releases of transformers that have both (4.53), so that ``attn_implementation="streamattn"`` works. A patched
layer asks for that name by itself: its `config` becomes a `LayerConfig`, a view of the one it shares with its
model (`patches.views`), and what it computes around the attention stays its own. Where every layer under a
configuration is patched, in this way or by a patch of its own, the model's other modules see that one under
the name too (`ModelConfig`), so that the model makes compact masks (`patches.masks`); elsewhere the masks are
those of the model's own implementation, and all of them are taken. The configurations themselves stay as they
are, but for what is set through a view.

Layout. q, k, v are [B, H, T, D], heads of k and v unrepeated; the output is [B, T, H, D].

Differs from eager: queries that see no key (padding before the first token) give 0 where eager gives the mean
of the values. Attention weights, when asked for, are those before dropout.

Left out on purpose: sparse attention by indices, paged caches and flex attention's block masks, each with an
error that says so.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, modeling_utils

from patches import code, compact, hf
from patches.hosts import DENSE, KNOWN, documents_by_positions, mask_maker, refuse_window_of_masks
from patches.registry import NAME, is_patched, replacement_of, uses_interface
from patches.views import LayerConfig, ModelConfig, plain, view

try:
    from transformers import masking_utils

    from patches.masks import compact_mask
except ImportError:  # older releases make masks in each model, and none for a name that they don't know
    masking_utils = compact_mask = None

_SPARSE = ("indices", "block_indices")
"""Keywords of layers that attend to keys chosen by another network."""

_NOT_SERVED = {
    "indices": "it chooses keys by index",
    "block_indices": "it chooses blocks of keys by index",
    "head_mask": "it scales heads, which the kernels don't; prune_heads removes them",
    "block_table": "its cache is paged; unpatch_model(model) before continuous batching",
}
"""Arguments that change what is computed -> why they can't be served."""

_REFUSED = frozenset(_NOT_SERVED)  # what torch.compile can compare with a layer's arguments

_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Types of layers whose masks of packed documents are known."""

PlainMasks = Literal["any positions", "no positions"] | None
"""When a module's masks hide nothing but later keys, if it gets none and has no cache.

"any positions": whatever positions it gets, as long as none start again; "no positions": if it gets none, so
that transformers' reading of gaps stays; None: it may make masks of another kind, or look at its own.
"""

# Of the names of modules: up to a place inside the innermost numbered block, and the numbers.
_SLOT = re.compile(r"(?:.*\.)?\d+\.[^.]+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of "streamattn", called by a layer as transformers' own ones are.

    Args:
        module: the layer.
        query: [B, Hq, Tq, D]; a batch of 1 stands for any, of key and value too.
        key: [B, Hkv, Tk, D].
        value: [B, Hkv, Tk, Dv].
        attention_mask: None, compact, 2-D over keys, or 4-D and then complete: bool (True = visible) or
            floating (added).
        dropout: probability of dropping a weight.
        scaling: factor of the scores; None = ``1 / sqrt(D)``.
        is_causal: whether a query sees only keys up to its own place, if the mask doesn't say it; None = what
            the layer says.
        sliding_window: W keys, the query's own included; without causality W - 1 keys to each side.
        softcap: bound of the scores.
        s_aux: attention sinks [Hq]; some layers call them ``sinks``.
        position_bias: added to the scores, [1 or B, Hq or 1, Tq, Tk].
        **kwargs: the other arguments of the model.

    Returns:
        ``(out [B, Tq, Hq, Dv], weights [B, Hq, Tq, Tk] or None)``.

    Raises:
        ValueError: an argument or mask that asks for what can't be computed.
    """
    if not _REFUSED.isdisjoint(kwargs):
        for name, reason in _NOT_SERVED.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"{type(module).__name__} passed {name}: {reason}")
    queries, _, q_len, _ = query.shape
    batch, _, kv_len, _ = key.shape
    if queries > 1 == batch:  # one encoded text for all
        key, value = key.expand(queries, -1, -1, -1), value.expand(queries, -1, -1, -1)
    elif queries != batch:
        query = query.expand(batch, -1, -1, -1)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    complete, windowed, filled = False, False, None
    if compact.is_plain(attention_mask, kv_len):
        causal, attention_mask = True, None
    elif compact.is_compact(attention_mask):
        causal, windowed = compact.is_causal(attention_mask), compact.is_windowed(attention_mask)
    elif isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        complete = True
    else:
        if (
            isinstance(attention_mask, Tensor)
            and attention_mask.dim() == 2
            and attention_mask.shape[1] < kv_len
        ):
            filled = attention_mask.shape[1]
        elif attention_mask is None and causal and 1 < q_len < kv_len and mask_maker(module.config) in KNOWN:
            # Dense implementations make no mask for a static cache that was empty. This one always makes one:
            # without it the layer is in another model than its configuration says.
            filled = q_len
        if causal and cu_seqlens is None and q_len > 1:
            attention_mask = documents_by_positions(module, attention_mask, kwargs, q_len, kv_len)
        if sliding_window is None:
            refuse_window_of_masks(module, kv_len)
    if complete:
        causal, sliding_window, cu_seqlens = False, None, None
    else:
        sliding_window = _window(module, sliding_window, windowed, causal)
    if cu_seqlens is not None and q_len != kv_len:
        raise ValueError(
            f"{type(module).__name__} got the bounds of packed documents (cu_seq_lens_q) for {q_len} queries "
            f"on {kv_len} keys; call the model without a cache on packed documents"
        )
    window = None
    if sliding_window is not None:
        window = (sliding_window - 1, 0 if causal else sliding_window - 1)
    sinks = s_aux if s_aux is not None else kwargs.get("sinks")
    need_weights = hf.weights_wanted(module, kwargs, key=None)
    out, weights = hf.attend(
        query,
        key,
        value,
        causal=causal,
        mask=attention_mask,
        scale=scaling,
        dropout_p=dropout,
        filled=filled,
        cu_seqlens=cu_seqlens,
        need_weights=need_weights,
        window_size=window,
        softcap=softcap,
        sinks=sinks,
        sinks_scale_output=sinks is not None and need_weights and _sinks_scale_the_output(module),
        position_bias=position_bias,
    )
    return out.transpose(1, 2), weights


def _sinks_scale_the_output(module: nn.Module) -> bool:
    """Whether a layer's weights are those without sinks: its eager function applies these afterwards."""
    eager = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
    return "logsumexp" in getattr(getattr(eager, "__code__", None), "co_names", ())


def shown() -> str:
    """What a patched layer says of itself when its model is printed."""
    return f"attention={NAME}"


def reported(layer: nn.Module) -> str:
    """What a report says of a patched layer."""
    return f"{type(layer).__name__} ({shown()})"


def _window(module: nn.Module, given: int | None, windowed: bool, causal: bool) -> int | None:
    """The keys that a layer's query sees to its left, its own included; None = all."""
    if windowed and (width := hf.setting(module.config, "sliding_window")) is not None:
        # The mask was made with this width, which without causality doesn't count the query itself.
        return width if causal else width + 1
    if given is not None:
        return given
    # One that passes a width itself, as cross-attention beside sliding layers does, has none by saying None.
    sliding = _is_sliding(module) and not code.passes(type(module), "sliding_window")
    if windowed or (sliding and mask_maker(module.config) not in DENSE):
        raise ValueError(
            f"{type(module).__name__} is a sliding layer by its configuration, but neither it nor its mask "
            "gave the window; unpatch_model(model), and load it with attn_implementation='sdpa'"
        )
    return None


def _is_sliding(module: nn.Module) -> bool:
    types, index = hf.setting(module.config, "layer_types"), module.__dict__.get("layer_idx")
    if isinstance(types, (list, tuple)) and isinstance(index, int) and index < len(types):
        return types[index] == "sliding_attention"
    return module.__dict__.get("is_sliding", getattr(type(module), "is_sliding", False)) is True


def unsupported(layer: nn.Module) -> str | None:
    """The reason why a layer that uses the interface can't be served, or None.

    Args:
        layer: the layer.
    """
    if masking_utils is None:
        return "this release of transformers has no mask interface, which came with 4.53"
    if not isinstance(layer.__dict__.get("config"), PretrainedConfig):
        return "it has no configuration of its own to name an implementation in"
    words = set(code.words(inspect.unwrap(type(layer).forward).__code__))
    if "sinks" in words and not isinstance(layer._parameters.get("sinks"), Tensor):
        return "its sinks depend on the tokens, and the kernels take one for each head"
    return next((f"it passes {name}: {_NOT_SERVED[name]}" for name in _SPARSE if name in words), None)


def _is_adopted(layer: nn.Module) -> bool:
    return is_patched(layer) and uses_interface(layer)


def adopt(model: nn.Module, layers: Iterable[nn.Module], attention_layers: Iterable[nn.Module]) -> None:
    """Have layers ask for "streamattn", and their model make compact masks where it can.

    Args:
        model: a module, whose layers with a patch of their own have changed sides.
        layers: those of its layers to patch, each served by `unsupported`.
        attention_layers: all attention layers of the model.
    """
    if masking_utils is None:
        return
    for layer in layers:
        layer.__dict__["config"] = view(LayerConfig, layer.__dict__["config"])
        if type(layer).extra_repr is nn.Module.extra_repr:
            layer.__dict__["extra_repr"] = shown
    everyone = set(attention_layers)
    for config, wholly in _held(model, everyone):
        if isinstance(config, ModelConfig) and not wholly:
            config.rename(False)
    _hand_out_views(model, everyone)
    for config, wholly in _held(model, everyone):
        if wholly:
            config.rename(True)
    for module in model.modules():
        names = _document_arguments(module)
        if names and not _document_hooks(module) and any(map(_takes_compact_masks, module.modules())):
            hook = partial(keep_documents_apart, names, _plain_masks(module))
            module.register_forward_pre_hook(hook, with_kwargs=True)


def release(model: nn.Module) -> None:
    """Undo `adopt`: every layer shares its model's configuration again, under the name that it had.

    Args:
        model: a module, patched or not.
    """
    for module in model.modules():
        if _is_adopted(module) or replacement_of(module):
            config = module.__dict__.get("config")
            while isinstance(config, LayerConfig):
                for each in config.views if isinstance(config, ModelConfig) else ():
                    each.rename(False)  # wherever its model is
                config = config.shared
            if module.__dict__.get("extra_repr") is shown:
                del module.__dict__["extra_repr"]
        for name, value in module.__dict__.items():
            if isinstance(value, LayerConfig):
                module.__dict__[name] = plain(value)
        for key in _document_hooks(module):
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def _held(model: nn.Module, attention_layers: set[nn.Module]) -> list[tuple[Any, bool]]:
    """Configurations, as modules hold them, and whether all attention under one understands compact masks.

    Args:
        model: a module.
        attention_layers: all attention layers of the model.
    """
    found: dict[int, tuple[Any, list[nn.Module]]] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PretrainedConfig) and module not in attention_layers:
            found.setdefault(id(config), (config, []))[1].append(module)
    # torch's own layers get no masks
    layers = {layer for layer in attention_layers if not isinstance(layer, nn.MultiheadAttention)}
    held = []
    for config, holders in found.values():
        inner = {layer for holder in holders for layer in holder.modules() if layer in layers}
        if inner:
            known = not any(
                _has_unknown_attention(each, inner) or _works_on_masks(each, type(plain(config)), layers)
                for each in holders
            )
            held.append((config, known and all(map(_takes_compact_masks, inner))))
    return held


def _has_unknown_attention(model: nn.Module, layers: set[nn.Module]) -> bool:
    """Whether a block of a model has something else in the place where another has one of `layers`."""
    places: dict[str, list[nn.Module]] = {}
    attention: set[str] = set()
    for name, module in model.named_modules():
        places.setdefault(_NUMBER.sub("*", name), []).append(module)
        if module in layers and (slot := _SLOT.match(name)):
            attention.add(_NUMBER.sub("*", slot[0]))
    return any(layers.isdisjoint(module.modules()) for place in attention for module in places[place])


def _works_on_masks(model: nn.Module, config_class: type[PretrainedConfig], layers: set[nn.Module]) -> bool:
    """Whether a module inside a model, not one of `layers`, works on masks made for its configuration."""
    inside = {each for root in model.modules() if code.may_hold_masks(root) for each in root.modules()}
    return any(code.works_on_mask_of(config_class, type(each)) for each in inside - layers)


def _takes_compact_masks(layer: nn.Module) -> bool:
    """Whether a layer is patched and hands its mask on without looking at it or making another of it."""
    if replacement_of(layer):
        return True
    return _is_adopted(layer) and code.hands_mask_on(type(layer))


def _hand_out_views(model: nn.Module, attention_layers: set[nn.Module]) -> None:
    """Give views of a model's configurations to all its modules but to layers that look a name up.

    Where no configuration gets this implementation's name, the model keeps those it has. So do modules of
    another model that shares one with a patched model, if not all of its own layers are patched.
    """
    named = {layer for layer in attention_layers if not replacement_of(layer)}
    others = [module for module in model.modules() if module not in named]
    held = [
        (module, name, value)
        for module in others
        for name, value in module.__dict__.items()
        if isinstance(value, PretrainedConfig)
    ]
    views = next((value.views for _, _, value in held if isinstance(value, ModelConfig)), [])
    whole = _held(model, attention_layers)
    if not views and not any(wholly for _, wholly in whole):
        return
    kept = {id(config) for config, wholly in whole if not wholly}
    kept &= {id(each.shared) for each in views if each.named}
    for module, name, value in held:
        if not isinstance(value, ModelConfig) and id(value) not in kept:
            known = next((each for each in views if each.shared is value), None)
            if known is None:
                known = view(ModelConfig, value)
                known.__setstate__((False, views))
                views.append(known)
            module.__dict__[name] = known
    for layer in filter(_is_adopted, attention_layers):
        config = layer.__dict__["config"]
        known = next((each for each in views if each.shared is plain(config)), None)
        if known is not None and id(known.shared) not in kept:
            object.__setattr__(config, "shared", known)


def keep_documents_apart(
    names: tuple[str, ...], plain_masks: PlainMasks, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a model that makes masks: documents packed into a row become a compact mask.

    They are told as `hf.document_starts` says. HuggingFace takes a gap in the positions for a start too, if
    there is neither cache nor mask, and takes every row for a packed one in a graph.

    Args:
        names: the model's arguments, in order.
        plain_masks: when the masks that the model makes hide nothing but later keys.
        model: the model.
        args: its arguments by position.
        kwargs: its arguments by name.

    Returns:
        The arguments with that mask, or None to leave them as they are.
    """
    if model.config._attn_implementation != NAME or getattr(model.config, "is_causal", True) is False:
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    starts = hf.document_starts(given)
    # Where no value may be read, every row is taken for a packed one, which is right for others too.
    if starts is not None and not (compact.readable(mask, positions) and not bool(starts.any())):
        return _with_mask(names, args, kwargs, _masks_of_documents(model, starts, mask))
    tokens = _tokens(given)
    if plain_masks is None or mask is not None or tokens is None or not hf.is_fresh(hf.cache_of(given)):
        return None
    if positions is None or (plain_masks == "any positions" and starts is not None):
        nothing = compact.write(None, None, causal=True, windowed=False, device=tokens.device)
        return _with_mask(names, args, kwargs, nothing)
    return None


def make_mask(
    names: tuple[str, ...], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a decoder that would make a dense mask by itself, but takes another.

    Args:
        names: the decoder's arguments, in order.
        model: the decoder.
        args: its arguments by position.
        kwargs: its arguments by name.

    Returns:
        The arguments with the mask that transformers' own function makes, or None to leave them as they are.
    """
    changed = keep_documents_apart(names, "any positions", model, args, kwargs)
    if changed is not None or masking_utils is None:
        return changed
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, cache, tokens = given.get("attention_mask"), hf.cache_of(given), _tokens(given)
    cache = getattr(cache, "self_attention_cache", cache)
    if model.config._attn_implementation != NAME or tokens is None:
        return None
    if isinstance(cache, tuple):  # which the decoder takes, too
        legacy: Any = DynamicCache
        cache = legacy.from_legacy_cache(tuple(each[:2] for each in cache))
    if mask is not None and mask.dim() != 2:
        return None
    first = 0 if cache is None else cache.get_seq_length()
    last = first + tokens.shape[1]
    if mask is not None and not hf.has_static_layer(cache) and mask.shape[1] != last:
        return None  # the decoder says what is wrong
    places = given.get("cache_position")
    if places is None:
        places = torch.arange(first, last, device=tokens.device)
    maker: Any = masking_utils.create_causal_mask
    made = maker(
        config=model.config,
        input_embeds=tokens,  # for their sizes
        attention_mask=mask,
        cache_position=places,
        past_key_values=cache,
    )
    return _with_mask(names, args, kwargs, made)


def _tokens(given: dict[str, Any]) -> Tensor | None:
    tokens = given.get("input_ids")
    return given.get("inputs_embeds") if tokens is None else tokens


def _with_mask(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], mask: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments with another mask, which stays where it came."""
    place = names.index("attention_mask")
    if place < len(args):
        return (*args[:place], mask, *args[place + 1 :]), kwargs
    return args, {**kwargs, "attention_mask": mask}


def _masks_of_documents(model: Any, starts: Tensor, mask: Tensor | None) -> Tensor | dict[str, Tensor]:
    """The masks of a model's layers: one for all, or by the type of layer where the model takes them so.

    Args:
        model: the model.
        starts: where the second and later tokens of a row start a document, bool [B, T - 1].
        mask: [B, T], non-zero = a token; or None.
    """
    config = model.config
    types = set(getattr(config, "layer_types", None) or ())
    if not types:
        # a width alone says nothing: some have one that they never use
        slides = "create_sliding_window_causal_mask" in code.mask_makers(type(model))
        windowed = slides and getattr(config, "sliding_window", None) is not None
        return compact.of_documents(starts, mask, windowed)
    if not types <= _TYPES or not _takes_masks_by_type(model):
        return compact.of_documents(starts, mask)
    masks = {
        "full_attention": compact.of_documents(starts, mask),
        "sliding_attention": compact.of_documents(starts, mask, windowed=True),
    }
    if "chunked_attention" in types:
        places = torch.arange(1, starts.shape[1] + 1, device=starts.device)
        within = places - torch.where(starts, places, 0).cummax(dim=1).values
        borders = starts | (within % config.attention_chunk_size == 0)
        masks["chunked_attention"] = compact.of_documents(borders, mask)
    return {name: masks[name] for name in types}


def _takes_masks_by_type(model: nn.Module) -> bool:
    return "dict" in inspect.unwrap(type(model).forward).__code__.co_names


def makes_masks(cls: type[nn.Module]) -> bool:
    """Whether modules of a class have transformers' functions make their causal masks.

    Args:
        cls: the class.
    """
    return bool(code.mask_makers(cls))


def _document_arguments(module: nn.Module) -> tuple[str, ...]:
    """The arguments of a module that makes causal masks and is told positions; empty for others."""
    if not makes_masks(type(module)):
        return ()
    names = hf.argument_names(inspect.unwrap(type(module).forward))
    return names if {"attention_mask", "position_ids"} <= set(names) else ()


def _plain_masks(module: nn.Module) -> PlainMasks:
    """See `PlainMasks`."""
    decoders = (getattr(replacement_of(layer), "decoder", None) for layer in module.modules())
    if any(decoder is not None and decoder.forward is type(module).forward for decoder in decoders):
        return "any positions"
    body = inspect.unwrap(type(module).forward).__code__
    if (
        code.mask_makers(type(module)) != {"create_causal_mask"}
        or code.uses(body).count("attention_mask") != 1
    ):
        return None
    overlays = any(word.endswith("_mask_function") or word.startswith("block_") for word in code.words(body))
    return None if overlays else "no positions"


def _document_hooks(module: nn.Module) -> list[int]:
    return [
        key
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, partial) and hook.func is keep_documents_apart
    ]


if masking_utils is not None and compact_mask is not None:
    modeling_utils.AttentionInterface.register(NAME, attention_function)
    masking_utils.AttentionMaskInterface.register(NAME, compact_mask)
