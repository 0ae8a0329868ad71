"""Which tokens of a sequence each rank holds, and what its queries see of the keys.

A sequence of ``seq_len`` tokens is cut into 2 * P chunks of ``chunk`` tokens for P ranks; rank r holds chunks
r and 2 * P - 1 - r, its head and its tail (zigzag order). Under a causal mask the two see as many keys
together on every rank. With P = 2 and 8 tokens::

    tokens   0 1 | 2 3 | 4 5 | 6 7
    chunk      0 |   1 |   2 |   3
    rank       0 |   1 |   1 |   0

Where seq_len is no multiple of 2 * P, padding follows the end of the sequence, so that all shards are of one
length, and what is real of a shard is its beginning. The padding is no key of any query, and its queries give
out = 0, lse = -inf and zero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from streamattn.parallel.collectives import all_gather, rank_and_size
from streamattn.pattern import UNBOUNDED


class Span(NamedTuple):
    """One call of `attention` on a rank: some of its queries, and the keys that they can see.

    Attributes:
        rows: the queries, of the rank's shard.
        keys: the keys, of the whole sequence.
        window_left: of that call, whose last query stands at its last key.
        window_right: likewise.
        cut: tokens of the sequence behind ``keys``, by which a row's ``kv_lengths`` are less there.
    """

    rows: slice
    keys: slice
    window_left: int
    window_right: int
    cut: int


@dataclass(frozen=True)
class Layout:
    """The zigzag order of a sequence, as one rank sees it.

    Args:
        rank: this rank's number in its group.
        size: ranks in the group, P.
        seq_len: tokens of the whole sequence, without padding.
    """

    rank: int
    size: int
    seq_len: int

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return -(-self.seq_len // (2 * self.size))

    @property
    def length(self) -> int:
        """Tokens of a shard, padding included."""
        return 2 * self.chunk

    @property
    def order(self) -> list[int]:
        """Of chunks that lie as ranks hold them, shard after shard: where the sequence's chunks are."""
        return [*range(0, 2 * self.size, 2), *range(2 * self.size - 1, 0, -2)]

    def chunks(self, rank: int | None = None) -> tuple[int, int]:
        """The two chunks of a rank, by default this one's."""
        rank = self.rank if rank is None else rank
        return rank, 2 * self.size - 1 - rank

    def tokens(self, rank: int | None = None) -> int:
        """How many tokens of a rank's shard are no padding: its first ones."""
        return sum(min(max(self.seq_len - c * self.chunk, 0), self.chunk) for c in self.chunks(rank))

    def spans(self, window_left: int, window_right: int, has_lengths: bool) -> list[Span]:
        """The calls that serve this rank's queries with the keys of the whole sequence, the longer one first.

        One where everything is visible, else one for each chunk, or for both where they adjoin, as on the
        last rank. Its keys end where its last query's window does, at most at the end of the sequence.
        `attention` puts the last query at the last key: where the keys go on for e tokens behind the last
        query, the window moves left by e.

        Args:
            window_left: of the whole call, `pattern.UNBOUNDED` = open.
            window_right: likewise; 0 is causal.
            has_lengths: whether sequences have ``kv_lengths``; then they may begin anywhere.
        """
        if window_left == window_right == UNBOUNDED:
            rows = slice(0, self.tokens())
            found = [Span(rows, slice(0, self.seq_len), UNBOUNDED, UNBOUNDED, 0)]
        else:
            found = []
            head, tail = self.chunks()
            pieces = [(0, head, head + 1), (self.chunk, tail, tail + 1)]
            if tail == head + 1:
                pieces = [(0, head, tail + 1)]
            for first_row, c, end in pieces:
                first, stop = c * self.chunk, min(end * self.chunk, self.seq_len)
                behind = min(window_right, self.seq_len - stop)
                before = 0 if has_lengths else max(first - window_left, 0)
                found.append(
                    Span(
                        slice(first_row, first_row + stop - first),
                        slice(before, stop + behind),
                        window_left if window_left == UNBOUNDED else window_left + behind,
                        window_right if window_right == UNBOUNDED else window_right - behind,
                        self.seq_len - stop - behind,
                    )
                )
        return [span for span in reversed(found) if span.rows.stop > span.rows.start]


def shard(x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, fill: float = 0) -> Tensor:
    """This rank's part of a tensor that every rank holds whole; differentiable.

    Args:
        x: seq_len tokens along ``dim``.
        group: the ranks that share the sequence; default: all.
        dim: the dimension of the sequence; default 1, as of token ids [B, T] and hidden states [B, T, E]. Of
            heads [B, H, T, D] it is 2.
        fill: what the padding holds where seq_len is no multiple of 2 * P: -100 for labels.

    Returns:
        A copy with 2 * ceil(seq_len / (2 * P)) tokens along ``dim``, in zigzag order.
    """
    rank, size = rank_and_size(group)
    layout = Layout(rank, size, x.shape[dim])
    parts = []
    for c in layout.chunks():
        first, stop = (min(edge * layout.chunk, layout.seq_len) for edge in (c, c + 1))
        parts.append(x.narrow(dim, first, stop - first))
    missing = layout.length - layout.tokens()
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        parts.append(x.new_full(shape, fill))
    return torch.cat(parts, dim=dim)


def unshard(
    x: Tensor, group: dist.ProcessGroup | None = None, dim: int = 1, seq_len: int | None = None
) -> Tensor:
    """The whole tensor, on every rank, of the parts that `shard` made. One all-gather; not differentiable.

    Args:
        x: this rank's part, without a gradient.
        group: as `shard` takes it.
        dim: as `shard` takes it.
        seq_len: tokens of the whole sequence. Default: there is no padding.

    Returns:
        seq_len tokens along ``dim``, in their order.

    Raises:
        ValueError: x has a gradient to keep, or seq_len doesn't fit its length.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("unshard has no gradient, and x requires one; pass x.detach()")
    layout = layout_of(x.shape[dim], seq_len, group)
    parts = all_gather(x.movedim(dim, 0).contiguous(), group).wait()
    return in_order(parts, layout)[: layout.seq_len].movedim(0, dim).contiguous()


def positions(
    seq_len: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Where the tokens of this rank's shard stand in the sequence.

    Args:
        seq_len: tokens of the whole sequence.
        group: as `shard` takes it.
        device: default: the CPU.

    Returns:
        int64 [2 * ceil(seq_len / (2 * P))]; padding stands at the last token's place, which any table of
        positions has.

    Raises:
        TypeError: seq_len is no int.
        ValueError: it is less than 1.
    """
    _check_seq_len(seq_len)
    whole = torch.arange(seq_len, device=device)
    return shard(whole, group, dim=0, fill=seq_len - 1)


def _check_seq_len(seq_len: int) -> None:
    remedy = "pass the tokens of the whole sequence"
    if not isinstance(seq_len, int):
        raise TypeError(f"seq_len must be an int, got {type(seq_len).__name__}; {remedy}")
    if seq_len < 1:
        raise ValueError(f"seq_len must be 1 or more, got {seq_len}; {remedy}")


def layout_of(length: int, seq_len: int | None, group: dist.ProcessGroup | None) -> Layout:
    """The layout of shards of ``length`` tokens.

    Raises:
        TypeError: seq_len is no int.
        ValueError: no sequence of seq_len tokens has such shards.
    """
    if seq_len is not None:
        _check_seq_len(seq_len)
    rank, size = rank_and_size(group)
    layout = Layout(rank, size, length * size if seq_len is None else seq_len)
    if layout.seq_len < 1 or layout.length != length:
        if seq_len is None:
            what = f"an even number of tokens on each rank, got {length}; make the shards with shard()"
            raise ValueError(f"expected {what} and pass seq_len, the length without padding")
        raise ValueError(
            f"seq_len={seq_len} over {size} ranks makes shards of {layout.length} tokens, got {length}; "
            "make them with shard()"
        )
    return layout


def in_order(parts: Tensor, layout: Layout, chunks: int | None = None) -> Tensor:
    """Shards one after the other, [P * length, ...], as the sequence's first chunks; default: all."""
    pieces = parts.unflatten(0, (-1, layout.chunk))
    return torch.cat([pieces[place] for place in layout.order[:chunks]])


def as_shards(x: Tensor, layout: Layout) -> Tensor:
    """The inverse of `in_order`: x [seq_len, ...] as all ranks' shards, [P * length, ...], padded with 0."""
    parts = x.new_empty((layout.size * layout.length, *x.shape[1:]))
    pieces = parts.unflatten(0, (-1, layout.chunk))
    for c, place in enumerate(layout.order):
        piece = x[c * layout.chunk : (c + 1) * layout.chunk]
        pieces[place, : piece.shape[0]] = piece
        pieces[place, piece.shape[0] :] = 0
    return parts
