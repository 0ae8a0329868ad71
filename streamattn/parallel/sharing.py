"""Where patched layers learn that the tokens they get are one rank's shard of a longer sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist


class Shared(NamedTuple):
    """A sequence that is shared out; the arguments of `parallel.attention` that say so."""

    group: dist.ProcessGroup | None
    seq_len: int
    mode: str


_shared: Shared | None = None


@contextmanager
def sharing(seq_len: int, group: dist.ProcessGroup | None = None, mode: str = "auto") -> Iterator[None]:
    """Let the attention of patched models go over a group of ranks: `parallel.attention`, with their options.

    Inside, a model is given what `shard` makes of its ids, `positions` for their places, and an attention
    mask of ones, without which transformers takes the step between a rank's two chunks for a new document;
    on every rank of the group, without cache, padding or packed documents. It is so for the whole process, as
    autograd recomputes checkpointed layers in threads of its own: backward belongs inside, too.

    Args:
        seq_len: tokens of the whole sequence.
        group: the ranks that share it. Default: all.
        mode: as `parallel.attention` takes it.
    """
    global _shared
    before, _shared = _shared, Shared(group, seq_len, mode)
    try:
        yield
    finally:
        _shared = before


def shared() -> Shared | None:
    """What `sharing` was told; None outside of it."""
    return _shared
