"""Compact masks: who sees whom in the size of a sequence, not of its square.

Contract. A compact mask is an int32 tensor [B, R, 1, Tk]. Row 0 is the segment s of each key, -1 - s where it
is hidden, and row 1 that of the query in its place; the last dimension may be 1: no key is hidden. The last
row, if there are lengths, repeats the number of keys that hold tokens. What is the same for all places is in
the number of rows, which is known while compiling: ``R = ROWS[WINDOWED + BIDIRECTIONAL + LENGTHS]``, each if
it applies. A batch of 1 stands for any.

Queries in places of padding see the tokens before them, as under HuggingFace's own masks: labels may be there
that nobody hid.

It has four dimensions because HuggingFace's models hand such masks on to their layers as they are. It can't
be taken for a user's mask, which is bool or floating: an integer one is an error. A layer that doesn't know
what it was given, and would add it to its scores, raises unless it has just R heads: hence the odd numbers.

A model that works on what it takes for a dense mask gets an error from its layers: a mask remembers how often
it has been written to, and row 2 is `MARK` less row 0, which no change of all rows alike leaves so. That is
looked at where the mask isn't the very tensor that was made, and in graphs, where the error is the device's.

Left out on purpose: the width of a window, which the layer or its configuration knows.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOWED, BIDIRECTIONAL, LENGTHS = 1, 2, 4
"""What the number of rows of a compact mask says."""

ROWS = (7, 11, 13, 17, 19, 23, 29, 31)
"""Numbers of rows: more than are written, and no model's number of heads."""

MARK = 2 * 0x0A4E1F3A
"""Sum of rows 0 and 2: half of it is no number that a model would write into a mask."""

_WRITTEN = "_streamattn_version"
"""Attribute of a mask that was made: the version that torch counts writes by."""

CHANGED = (
    "a patched model makes compact masks, which can't be worked on, and something changed this one before it "
    "reached the layer; call model.set_attn_implementation('sdpa') after patch_model: the model then makes "
    "dense masks, and patched layers take them"
)
"""What is wrong with a mask that isn't what was made."""

_PLAIN = (1, ROWS[0], 1, 1)


@dataclass(frozen=True)
class Seen:
    """A compact mask in `streamattn.attention`'s terms.

    Attributes:
        segment_ids: of queries and keys, int32 [B, Tq] and [B, Tk]; None if no key is hidden.
        kv_lengths: int32 [B], the keys that hold tokens; None if all do.
    """

    segment_ids: tuple[Tensor, Tensor] | None
    kv_lengths: Tensor | None


def write(
    segment_ids: Tensor | None,
    lengths: int | Tensor | None,
    *,
    causal: bool,
    windowed: bool,
    device: torch.device | str | None,
) -> Tensor:
    """A compact mask.

    Args:
        segment_ids: of the places, int32 [B, Tk], -1 - s where the key is hidden; None if no key is hidden.
        lengths: how many keys hold tokens, one number for all rows; None if all do.
        causal: whether a query sees only keys up to its own place.
        windowed: whether it sees only keys near its own place.
        device: of the mask, if there are no segments.
    """
    count = ROWS[WINDOWED * windowed + BIDIRECTIONAL * (not causal) + LENGTHS * (lengths is not None)]
    if torch.compiler.is_compiling():
        return _rows(segment_ids, lengths, count, device)
    # Tensors of inference mode don't count writes.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        mask = _rows(segment_ids, lengths, count, device)
    setattr(mask, _WRITTEN, mask._version)
    return mask


def _rows(
    segment_ids: Tensor | None, lengths: int | Tensor | None, count: int, device: torch.device | str | None
) -> Tensor:
    """The `count` rows of a compact mask; see `write`."""
    if segment_ids is None:
        rows = torch.full((1, count, 1, 1), MARK // 2, dtype=torch.int32, device=device)
        if lengths is not None:
            rows[:, -1] = lengths
        return rows
    keys = segment_ids[:, None, None]
    last = [] if lengths is None else [torch.as_tensor(lengths, dtype=torch.int32, device=keys.device)]
    queries, marks = torch.maximum(keys, ~keys), (MARK - keys).expand(-1, count - 2 - len(last), -1, -1)
    return torch.cat([keys, queries, marks, *(x.expand_as(keys) for x in last)], dim=1)


def is_compact(mask: Any) -> bool:
    """Whether a mask is a compact one."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.dim() != 4:
        return False
    return mask.shape[2] == 1 and mask.shape[1] in ROWS


def is_plain(mask: Any, kv_len: int) -> bool:
    """Whether a mask is a compact one that hides nothing but later keys: most are, when one token is decoded.

    Args:
        mask: as `is_compact` takes it.
        kv_len: Tk.

    Raises:
        ValueError: it isn't what `write` made.
    """
    # a single key may be hidden in the place of all
    if not (isinstance(mask, Tensor) and mask.dtype == torch.int32 and mask.shape == _PLAIN and kv_len > 1):
        return False
    _check_unchanged(mask)
    return True


def may_come_of_one(mask: Any, heads: int) -> bool:
    """Whether a mask that isn't compact may have been computed from one that was: it has as many rows.

    Args:
        mask: what a layer was given.
        heads: the layer's number of heads.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] == heads:
        return False
    return mask.shape[1] in ROWS


def is_causal(mask: Tensor) -> bool:
    """Whether a compact mask lets a query see only keys up to its own place."""
    return not ROWS.index(mask.shape[1]) & BIDIRECTIONAL


def is_windowed(mask: Tensor) -> bool:
    """Whether a compact mask lets a query see only keys near its own place."""
    return bool(ROWS.index(mask.shape[1]) & WINDOWED)


def read(mask: Tensor, batch: int, q_len: int, kv_len: int) -> Seen:
    """What a compact mask says to a layer.

    Args:
        mask: int32 [B or 1, R, 1, Tk or more, or 1].
        batch: B.
        q_len: Tq.
        kv_len: Tk.

    Raises:
        ValueError: the mask is of another size, or isn't what `write` made.
    """
    _check_unchanged(mask)
    rows, count, _, width = mask.shape
    if rows not in (1, batch):
        raise ValueError(f"the layer holds {batch} sequences, its model made the mask for {rows}")
    if 1 < width < kv_len:
        raise ValueError(f"the layer holds {kv_len} keys, its model made the mask for {width} of them")
    has_lengths, has_segments = bool(ROWS.index(count) & LENGTHS), width > 1 or kv_len == 1
    if not (has_lengths or has_segments):
        return Seen(None, None)
    if rows != batch:
        mask = mask.expand(batch, -1, -1, -1)
    lengths = mask[:, -1, 0, 0] if has_lengths else None
    segment_ids = None
    if has_segments:
        keys = mask[:, 0, 0, :kv_len]
        queries = _segments_of_queries(mask[:, 1, 0, :kv_len], q_len, lengths, is_causal(mask))
        segment_ids = (queries, keys)
    return Seen(segment_ids, lengths)


def _check_unchanged(mask: Tensor) -> None:
    """Raise if a mask has been worked on since `write` made it."""
    if not torch.compiler.is_compiling():
        written = getattr(mask, _WRITTEN, None)
        if written is not None:
            if written != mask._version:
                raise ValueError(CHANGED)
            return
    unchanged = (mask[:, 0] + mask[:, 2] == MARK).all()
    if not readable(mask):
        torch.ops.aten._assert_async.msg(unchanged, CHANGED)
    elif not unchanged:
        raise ValueError(CHANGED)


def _segments_of_queries(segments: Tensor, q_len: int, lengths: Tensor | None, causal: bool) -> Tensor:
    """Of `segments` [B, Tk] the last [B, Tq] that hold tokens; without causality one segment sees all."""
    kv_len = segments.shape[1]
    if not causal:
        # theirs, whichever it is: no segments were written where a single key is hidden from none
        return segments[:, :1].expand(-1, q_len)
    if lengths is not None:
        places = torch.arange(q_len, device=segments.device) + (lengths - q_len)[:, None]
        return segments.gather(1, places.clamp(0, kv_len - 1))
    if q_len > kv_len:
        raise ValueError(f"causal self-attention of {q_len} queries on only {kv_len} keys")
    return segments[:, kv_len - q_len :]


def segments(starts: Tensor) -> Tensor:
    """Segments of rows, int32 [B, T], from where the second and later tokens start one, bool [B, T - 1]."""
    return F.pad(starts, (1, 0)).cumsum(-1, dtype=torch.int32)


def document_starts(positions: Tensor, mask: Tensor | None) -> Tensor:
    """Where documents packed into a row start: at a token whose position is not past the last token's.

    Args:
        positions: [B, T], or [1, T] for all rows of `mask`.
        mask: [B, T], non-zero = a token, whose position alone counts; None if all are.

    Returns:
        bool [B, T - 1], for the second and later places; without a mask as many rows as `positions`.
    """
    if mask is None:
        return positions.diff(dim=-1) <= 0
    tokens, positions = mask.bool(), positions.expand(mask.shape[0], -1)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    before = torch.where(tokens, places, -1).cummax(dim=1).values[:, :-1]  # the last token's place
    past = positions[:, 1:] > positions.gather(1, before.clamp(min=0))
    return tokens[:, 1:] & (before >= 0) & ~past


def of_documents(starts: Tensor, mask: Tensor | None, windowed: bool = False) -> Tensor:
    """The compact mask of causal attention inside documents packed into rows.

    Args:
        starts: where the second and later tokens of a row start a document, bool [B, T - 1].
        mask: [B, T], non-zero = a token; None if all are.
        windowed: whether a query sees only keys near its own place.
    """
    ids = segments(starts)
    if mask is not None:
        ids = torch.where(mask.bool(), ids, ~ids)
    return write(ids, None, causal=True, windowed=windowed, device=None)


def readable(*tensors: Tensor | None) -> bool:
    """Whether values may be read: not while a graph is made or captured, nor of tensors without any."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return all(x is None or (type(x) is Tensor and not x.is_meta) for x in tensors)
