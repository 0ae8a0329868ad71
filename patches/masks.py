"""The mask function of "streamattn": what a HuggingFace model says about its masks, as a compact one.

Contract. Models whose configuration names "streamattn" get their masks from `compact_mask`. It returns

- a compact mask (`patches.compact`), a few numbers where nothing is hidden but by causality and a window: it
  says whether there are any, for not every layer knows;
- a dense bool [B, 1, Tq, Tk], made by transformers, where a pattern has no such structure, and where the
  caller asks for a mask that it will work on;
- a dense one to be added, as for eager attention, where models of a configuration work on masks by their
  code: poolers that hand one to torch's own attention, encoders that add a bias to it, layers that don't ask
  transformers' interface for their attention. All of them know such a mask, and not all know a bool one.

Segments are read off the mask function itself: where a key may not see the one before it a document or chunk
begins. No value is read on the host but whether a padding mask hides anything, and that not while a graph is
made or captured.

Left out on purpose: patterns of a user's own functions and of blocks that see both ways, which stay dense.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from patches import compact
from patches.code import works_on_masks
from patches.views import LayerConfig

# Names of transformers' mask functions; those in <locals> are made by the function before.
_CAUSAL = "causal_mask_function"
_FULL = "bidirectional_mask_function"
_AND = "and_masks.<locals>.and_mask"
_AND_CODE = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_REMAP = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_DOCUMENTS = "packed_sequence_mask_function.<locals>.inner_mask"
_CHUNKS = "chunked_overlay.<locals>.inner_mask"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_FULL_WINDOW = "sliding_window_bidirectional_overlay.<locals>.inner_mask"

_CALLERS_ASK_FOR_MASKS = "allow_is_causal_skip" in signature(masking_utils.create_causal_mask).parameters
"""Whether a model can insist on a dense mask; else the argument is only about caches that can be compiled."""


def compact_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    cache_position: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool | None = None,
    config: Any = None,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The mask of a model's layers; called by `transformers.masking_utils` as its own mask functions are.

    Args:
        batch_size: B.
        q_length: Tq; None in releases that give `cache_position`.
        kv_length: Tk.
        q_offset: place of the first query in its sequence; a tensor for a static cache.
        kv_offset: place of the first key.
        mask_function: ``(batch, head, query, key) -> bool``, of indices that broadcast.
        attention_mask: bool [B, places], True = a token, False = padding.
        cache_position: int64 [Tq], the queries' places, in releases that give no `q_offset`.
        local_size: width of a window or chunk.
        allow_is_causal_skip: False where the caller must have a mask.
        use_vmap: whether `mask_function` has a user's part; None in releases that don't say.
        config: the model's configuration.
        device: of the mask.
        **kwargs: arguments of other mask functions.

    Returns:
        A compact mask or a dense one; see the module's docstring.
    """
    filled: int | Tensor | None = None  # how many keys hold tokens, if it isn't all
    if cache_position is not None:
        q_length, q_offset, device = cache_position.shape[0], cache_position[0], cache_position.device
        if q_length != kv_length:
            # Chunked prefill of some releases counts one place too many.
            filled = (cache_position[-1] + (1 - kv_offset)).clamp(max=kv_length)
    elif q_length is None:
        raise ValueError(
            "a mask needs q_length or cache_position; this release of transformers gives neither"
        )
    elif isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        filled = q_offset + q_length - kv_offset

    padding = None if attention_mask is None else attention_mask.bool()[:, kv_offset : kv_offset + kv_length]
    bidirectional = "allow_is_bidirectional_skip" in kwargs
    readable = compact.readable(padding)
    if readable:
        pattern = _pattern(mask_function, config)
    else:
        packed = attention_mask is None and q_length == kv_length
        pattern = _pattern_unread(mask_function, local_size, use_vmap, config, bidirectional, packed)
    # Without a right to leave it out the caller works on the mask, or decodes on a cache that is compiled.
    decodes = q_length == 1 and (filled is not None or local_size is not None)
    may_skip = allow_is_causal_skip or bidirectional or decodes or not _CALLERS_ASK_FOR_MASKS
    # Of patched models it is known which configuration's modules take compact masks.
    worked_on = not isinstance(config, LayerConfig) and config is not None and works_on_masks(type(config))
    if pattern is None or worked_on or not (may_skip or pattern.documents):
        if cache_position is not None:
            kwargs["cache_position"] = cache_position
        else:
            kwargs |= {"q_length": q_length, "q_offset": q_offset, "use_vmap": use_vmap, "device": device}
        if bidirectional:
            kwargs["allow_is_bidirectional_skip"] = False
        maker: Any = masking_utils.sdpa_mask  # which makes one unless it may leave it out
        dense = maker(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            **kwargs,
        )
        if not worked_on:
            return dense
        dtype = kwargs.get("dtype", torch.float32)
        return torch.zeros_like(dense, dtype=dtype).masked_fill(~dense, torch.finfo(dtype).min)

    if not pattern.causal:
        filled = None
    segments = None
    if pattern.segmented:
        segments = _segments(mask_function, batch_size, kv_length, kv_offset, device, check=not readable)
        segments = segments.expand(batch_size, -1)
    if padding is not None:
        missing = kv_length - padding.shape[1]  # places that the mask doesn't reach hold no token
        if not readable or (missing and filled is None) or not bool(padding.all()):
            hidden = F.pad(~padding, (0, missing), value=True)
            # Padding is hidden as a key; as a query it sees what is before it, for its labels may count.
            apart = 0 if segments is None else segments
            segments = torch.where(hidden, -1 - apart, apart).to(torch.int32)
    return compact.write(segments, filled, causal=pattern.causal, windowed=pattern.windowed, device=device)


def _segments(
    mask_function: Callable[..., Any], batch: int, kv_len: int, kv_offset: int, device: Any, check: bool
) -> Tensor:
    """Segments of the keys, int32 [B or 1, Tk]: a new one where a key may not see the one before it.

    That is right for whatever runs of keys see themselves causally, so under a window of one key too.
    """
    later = torch.arange(kv_offset + 1, kv_offset + kv_len, device=device)[None]
    rows, head = torch.arange(batch, device=device)[:, None], torch.zeros_like(later)
    joined = mask_function(rows, head, later, later - 1)
    if check:
        ahead = mask_function(rows, head, later - 1, later)
        torch.ops.aten._assert_async.msg(
            ~ahead.any(),
            "some tokens see later ones, which a compiled model takes for documents; pass an attention_mask",
        )
    return compact.segments(~joined)


@dataclass(frozen=True)
class _Pattern:
    """What a mask function does, apart from padding."""

    causal: bool
    windowed: bool
    segmented: bool  # by documents or chunks
    documents: bool


def _pattern(mask_function: Callable[..., Any], config: Any) -> _Pattern | None:
    """The structure of a mask function, or None if it has none that is known."""
    parts: dict[str, list[int]] = {}
    _take_apart(mask_function, parts)
    causal = _CAUSAL in parts
    known = {_CAUSAL, _WINDOW, _CHUNKS, _DOCUMENTS} if causal else {_FULL, _FULL_WINDOW}
    widths = [*parts.get(_WINDOW, ()), *parts.get(_FULL_WINDOW, ())]
    # The layers take the width from where the model did.
    if not parts.keys() <= known or any(w != getattr(config, "sliding_window", None) for w in widths):
        return None
    return _Pattern(causal, bool(widths), bool(parts.keys() & {_CHUNKS, _DOCUMENTS}), _DOCUMENTS in parts)


def _take_apart(mask_function: Callable[..., Any], parts: dict[str, list[int]]) -> None:
    """Collect the conditions that a mask function joins: name -> widths of windows, if it has any."""
    name = getattr(mask_function, "__qualname__", "")
    if getattr(mask_function, "__module__", None) != masking_utils.__name__:
        name = "a user's function"
    names = mask_function.__code__.co_freevars if isinstance(mask_function, FunctionType) else ()
    held: dict[str, Any] = dict(zip(names, getattr(mask_function, "__closure__", None) or (), strict=True))
    if name == _AND:
        for part in held["mask_functions"].cell_contents:
            _take_apart(part, parts)
    elif name == _REMAP:
        _take_apart(held["mask_function"].cell_contents, parts)
    else:
        widths = parts.setdefault(name, [])
        if "sliding_window" in held:
            widths.append(held["sliding_window"].cell_contents)


def _pattern_unread(
    mask_function: Callable[..., Any],
    local_size: int | None,
    use_vmap: bool | None,
    config: Any,
    bidirectional: bool,
    packed: bool,
) -> _Pattern | None:
    """`_pattern` while compiling, when closures can't be looked into: from the makers and users of a mask."""
    if mask_function is masking_utils.causal_mask_function:
        return _Pattern(True, False, False, False)
    if bidirectional and mask_function is masking_utils.bidirectional_mask_function:
        return _Pattern(False, False, False, False)
    # By the code, as torch.compile doesn't know the name of a function made at run time.
    made = isinstance(mask_function, FunctionType) and mask_function.__code__ is _AND_CODE
    if not made or use_vmap is not False:
        return None
    windowed = local_size is not None and local_size == getattr(config, "sliding_window", None)
    if bidirectional:
        return _Pattern(False, True, False, False) if windowed else None
    return _Pattern(True, windowed, True, packed)
