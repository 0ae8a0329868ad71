"""What is measured: cases, the sets of them that the command line names, their operations and their inputs.

The work is that of FlashAttention's benchmarks: a constant number of tokens, heads times head_dim constant,
storage [B, S, H, D], random data. As many queries as keys, but few where a cache is decoded: there the
bytes of keys and values count. TFLOP/s count 4 * D operations for each visible pair of query and key forward,
2.5 times that backward; dropout changes nothing of that. One set is small enough for a CPU,
the others are made so by `shrunk`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from streamattn.pattern import UNBOUNDED, count_pairs

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "tf32": torch.float32,
}
"""``tf32`` is float32 whose products may be of TF32."""
PASSES = {"forward": 4.0, "backward": 10.0, "both": 14.0}
"""Operations of a pass for each visible pair and column of a head; ``both`` is one after the other."""


@dataclass(frozen=True)
class Case:
    """One shape under one pattern.

    Attributes:
        case: name of the set it belongs to.
        dtype: a name in `DTYPES`.
        batch: B.
        num_heads: query heads.
        num_kv_heads: key heads.
        seq_len: S, keys of a row, and its queries, but where it decodes.
        head_dim: D.
        causal: whether a query sees no key after its own place.
        window: keys up to and including its own that a query sees; None = all.
        document: tokens of each of the documents that a row is packed of, a divisor of S; None = not packed.
        dropout_p: probability of dropping an attention weight.
        queries: of a row that decodes, on a cache of S keys; None = as many as keys.
    """

    case: str
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int
    causal: bool
    window: int | None = None
    document: int | None = None
    dropout_p: float = 0.0
    queries: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not self.causal:
            raise ValueError("a window reaches back from a query's own place; give causal=True with it")
        if self.document is not None and self.seq_len % self.document:
            raise ValueError(
                f"document must be a divisor of seq_len, got {self.document} and {self.seq_len}; change one"
            )

    @property
    def q_len(self) -> int:
        """Queries of a row."""
        return self.queries or self.seq_len

    @property
    def plain(self) -> bool:
        """Whether there is neither window, nor document, nor dropout."""
        return self.window is None and self.document is None and self.dropout_p == 0.0

    @property
    def label(self) -> str:
        """The pattern in few words, for a table.

        w = window, doc = tokens of a document, p = dropout, q = queries on a cache.
        """
        words = ["causal" if self.causal else "full"]
        words += [f"w {self.window}"] if self.window is not None else []
        words += [f"doc {self.document}"] if self.document is not None else []
        words += [f"p {self.dropout_p}"] if self.dropout_p else []
        words += [f"q {self.queries}"] if self.queries is not None else []
        return " ".join(words)

    def pairs(self) -> int:
        """Visible pairs of query and key, of one head of one row."""
        length = self.document or self.seq_len
        left = UNBOUNDED if self.window is None else self.window - 1
        right = 0 if self.causal else UNBOUNDED
        return self.seq_len // length * count_pairs(min(self.q_len, length), length, left, right)

    def flops(self, which: str) -> float:
        """Floating-point operations of a pass, a name in `PASSES`."""
        return PASSES[which] * self.batch * self.num_heads * self.head_dim * self.pairs()

    def kv_bytes(self) -> int:
        """Size of k and v."""
        elements = 2 * self.batch * self.num_kv_heads * self.seq_len * self.head_dim
        return elements * DTYPES[self.dtype].itemsize

    def moved(self, which: str) -> int:
        """Bytes that a pass reads and writes at least: inputs, outputs and gradients, each once.

        The backward reads q, k, v, out and dout, and writes dq, dk and dv.
        """
        queries = self.batch * self.num_heads * self.q_len * self.head_dim * DTYPES[self.dtype].itemsize
        forward, backward = 2 * queries + self.kv_bytes(), 4 * queries + 2 * self.kv_bytes()
        return {"forward": forward, "backward": backward, "both": forward + backward}[which]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Random q, k, v and dout: views [B, H, S, D] of storage [B, S, H, D].

        A cache that is decoded is stored as HuggingFace's are, [B, H, S, D].
        """
        queries, keys = (self.num_heads, self.q_len), (self.num_kv_heads, self.seq_len)
        q, k, v, dout = (
            torch.randn(self.batch, *sizes, self.head_dim, device=device, dtype=DTYPES[self.dtype])
            if self.queries is not None
            else torch.randn(
                self.batch, *sizes[::-1], self.head_dim, device=device, dtype=DTYPES[self.dtype]
            ).transpose(1, 2)
            for sizes in (queries, keys, keys, queries)
        )
        return q, k, v, dout

    def segments(self, device: torch.device) -> Tensor | None:
        """The number of its document for every token, int32 [B, S]; None where rows are not packed."""
        if self.document is None:
            return None
        places = torch.arange(self.seq_len, device=device, dtype=torch.int32)
        return (places // self.document).expand(self.batch, self.seq_len)


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Products of float32 as a dtype, a name in `DTYPES`, wants them: of TF32 or exact."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def shrunk(case: Case) -> Case:
    """A case of the same kind that a CPU has done in no time: no more than 2 rows, 4 heads, 256 tokens."""
    heads = min(case.num_heads, 4)
    group = min(heads, case.num_heads // case.num_kv_heads)
    return replace(
        case,
        batch=min(case.batch, 2),
        num_heads=heads,
        num_kv_heads=heads // group,
        seq_len=min(case.seq_len, 256),
        window=None if case.window is None else min(case.window, 64),
        document=None if case.document is None else min(case.document, 64),
    )


@dataclass(frozen=True)
class Sweep:
    """The options of the sets.

    Attributes:
        dtype: of most sets.
        head_dims: of the sweep, ``single`` and ``headless``; None = each set's own.
        seq_lens: of the same; None = each set's own.
        tokens: batch times sequence length of the sweep.
        hidden: heads times head_dim of the sweep.
    """

    dtype: str
    head_dims: Sequence[int] | None = None
    seq_lens: Sequence[int] | None = None
    tokens: int = 16384
    hidden: int = 2048


def _sweep(options: Sweep) -> list[Case]:
    found = []
    for head_dim in options.head_dims or (64, 128, 256):
        heads = max(1, options.hidden // head_dim)
        for causal in (False, True):
            for seq_len in options.seq_lens or (512, 1024, 2048, 4096, 8192, 16384):
                batch = max(1, options.tokens // seq_len)
                found.append(Case("sweep", options.dtype, batch, heads, heads, seq_len, head_dim, causal))
    return found


def _gpt2(options: Sweep) -> list[Case]:
    return [Case("gpt2", options.dtype, 16, 12, 12, 1024, 64, True)]


def _grouped(options: Sweep) -> list[Case]:
    shapes = ((4, 4096), (1, 16384))
    return [Case("grouped", options.dtype, batch, 32, 8, seq_len, 128, True) for batch, seq_len in shapes]


def _window(options: Sweep) -> list[Case]:
    return [
        Case("window", options.dtype, 1, heads, heads, 16384, head_dim, True, window=window)
        for heads, head_dim in ((32, 64), (16, 128))
        for window in (1024, None)
    ]


def _documents(options: Sweep) -> list[Case]:
    return [
        Case("documents", options.dtype, batch, heads, heads, seq_len, head_dim, True, document=document)
        for heads, head_dim in ((32, 64), (16, 128))
        for batch, seq_len, document in ((1, 16384, 1024), (16, 1024, None))
    ]


def _dropout(options: Sweep) -> list[Case]:
    return [
        Case("dropout", options.dtype, 4, heads, heads, 4096, head_dim, True, dropout_p=dropout_p)
        for heads, head_dim in ((32, 64), (16, 128))
        for dropout_p in (0.1, 0.0)
    ]


def _decode(options: Sweep) -> list[Case]:
    shapes = (
        (1, 32, 32, 4096, 128),
        (1, 32, 32, 32768, 128),
        (1, 32, 8, 32768, 128),
        (32, 32, 8, 8192, 128),
        (64, 12, 12, 1024, 64),
        (1, 12, 12, 8192, 64),
    )
    return [Case("decode", options.dtype, *shape, False, queries=1) for shape in shapes]


def _drafts(options: Sweep) -> list[Case]:
    """The same caches, for the queries of tokens that another model guessed, or the last ones of a prompt."""
    return [
        replace(case, case="drafts", queries=queries)
        for case in _decode(options)
        for queries in (2, 4, 8, 16)
    ]


def _wide(options: Sweep) -> list[Case]:
    few = [
        Case("wide", "float32", 1, 4, 4, seq_len, head_dim, False)
        for head_dim in (512, 2048, 4096, 8192)
        for seq_len in (16, 64, 256, 512)
    ]
    many = [Case("wide", options.dtype, batch, batch, batch, 4096, 512, False) for batch in (4, 1)]
    return few + many


def _one_head(name: str, batch: int, lengths: range, options: Sweep) -> list[Case]:
    return [
        Case(name, options.dtype, batch, 1, 1, seq_len, head_dim, True)
        for head_dim in options.head_dims or (16, 32, 64, 128)
        for seq_len in options.seq_lens or [2**power for power in lengths]
    ]


def _single(options: Sweep) -> list[Case]:
    """One head of one row, from the shortest to the longest: where launches are all, and where memory is."""
    return _one_head("single", 1, range(7, 17), options)


def _headless(options: Sweep) -> list[Case]:
    """A batch of eight without heads, [B, T, D]."""
    return _one_head("headless", 8, range(8, 15), options)


def _cpu(options: Sweep) -> list[Case]:
    return [Case("cpu", "float32", 4, 12, 12, 1024, 64, True)]


SETS: dict[str, Callable[[Sweep], list[Case]]] = {
    "sweep": _sweep,
    "gpt2": _gpt2,
    "grouped": _grouped,
    "window": _window,
    "documents": _documents,
    "dropout": _dropout,
    "decode": _decode,
    "drafts": _drafts,
    "wide": _wide,
    "single": _single,
    "headless": _headless,
    "cpu": _cpu,
}
"""Sets of cases. Window, documents and dropout hold each pattern beside the same work without it: all keys,
the documents as a batch, no dropout. Decode is one query on a cache, ``drafts`` 2 to 16 on the same caches.
Wide heads come with few tokens, in float32, and with many, in the dtype that is asked for. ``single`` is one
head of 128 to 65,536 tokens, ``headless`` eight rows of one head. The last is one case in float32, whatever
dtype is asked for."""
