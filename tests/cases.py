"""One attention call as data: its inputs, its run through an implementation, its judgement by the oracle.

A `Case` names shapes and options; `Case.build` makes tensors from them with a seeded generator; `run` calls
an implementation and collects out, lse and every gradient; `judge` compares two such results, and `Beside`
the errors of two implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from streamattn.reference import keep_mask
from tests.oracle import attend, visible_pairs

MASKS = (
    "none",
    "bool",  # [B, Hq, Tq, Tk]
    "bool_keys",  # [B, 1, 1, Tk], a key-padding mask
    "bool_rows",  # [Tq, Tk], broadcast over batch and head
    "additive",  # [B, Hq, Tq, Tk] with finfo.min and -inf entries
    "additive_heads",  # [1, Hq, Tq, Tk], an ALiBi-like bias
    "additive_keys",  # [B, 1, 1, Tk]
    "additive_expanded",  # [B, Hq, Tq, Tk] with stride 0 in batch and head
    "additive_scalar",  # [1, 1, 1, 1]
    "trained",  # [1, Hq, Tq, Tk], requires grad
    "trained_full",  # [B, Hq, Tq, Tk], requires grad, finite but for a few -inf
    "trained_keys",  # [B, 1, 1, Tk], requires grad
)
LAYOUTS = ("bhtd", "bthd", "fused", "sliced", "expanded", "strided")


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call; the defaults are a small plain case."""

    batch: int = 2
    q_heads: int = 2
    kv_heads: int = 2
    q_len: int = 8
    kv_len: int = 8
    head_dim: int = 16
    value_dim: int | None = None
    causal: bool = False
    window_size: int | tuple[int, int] | None = None
    scale: float | None = None
    mask: str = "none"
    segments: str = "none"  # "none", "ids" (square only), "pair"
    lengths: str = "none"  # "none", "ragged", "extreme" (0 and Tk)
    sinks: bool = False
    softcap: float | None = None
    dropout_p: float = 0.0
    layout: str = "bhtd"
    seed: int = 0

    def build(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Inputs:
        """Tensors of the case, drawn by the CPU's generator, so that every device sees the same."""
        gen = torch.Generator().manual_seed(self.seed)
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        sizes = {
            "q": (self.q_heads, self.q_len, self.head_dim),
            "k": (self.kv_heads, self.kv_len, self.head_dim),
            "v": (self.kv_heads, self.kv_len, value_dim),
        }
        q, k, v = lay_out(self.batch, sizes, self.layout, gen, dtype, device)
        options: dict[str, Any] = {}
        if self.causal:
            options["causal"] = True
        for name in ("window_size", "scale", "softcap"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        if self.mask != "none":
            options["attn_mask"] = self._mask(gen, dtype, device)
        if self.segments != "none":
            options["segment_ids"] = self._segments(gen, device)
        if self.lengths != "none":
            options["kv_lengths"] = self._lengths(gen, device)
        if self.sinks:
            sinks = torch.randn(self.q_heads, generator=gen)
            options["sinks"] = sinks.to(device, dtype).requires_grad_()
        if self.dropout_p:
            options["dropout_p"] = self.dropout_p
        dout = torch.randn(self.batch, self.q_heads, self.q_len, value_dim, generator=gen).to(device, dtype)
        dlse = torch.randn(self.batch, self.q_heads, self.q_len, generator=gen).to(device)
        return Inputs(q, k, v, options, dout, dlse)

    def _mask(self, gen: torch.Generator, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        full = (self.batch, self.q_heads, self.q_len, self.kv_len)
        kind, _, pattern = self.mask.partition("_")
        shape = {
            "": full,
            "full": full,
            "keys": (self.batch, 1, 1, self.kv_len),
            "rows": (self.q_len, self.kv_len),
            "heads": (1, self.q_heads, self.q_len, self.kv_len),
            "expanded": (1, 1, self.q_len, self.kv_len),
            "scalar": (1, 1, 1, 1),
        }[pattern if self.mask != "trained" else "heads"]
        if kind == "bool":
            mask = torch.rand(shape, generator=gen) < 0.7
            if mask.dim() == 4 and mask.shape[2] > 1:
                mask[0, 0, 1] = False  # a row that sees nothing
            return mask.to(device)
        mask = torch.randn(shape, generator=gen).to(dtype)
        if pattern != "scalar":
            draw = torch.rand(shape, generator=gen)
            mask = mask.masked_fill(draw < 0.1, -torch.inf)
            if kind == "additive":
                mask = mask.masked_fill(draw > 0.9, torch.finfo(dtype).min)
            if mask.dim() == 4 and mask.shape[2] > 1:
                mask[:, 0, 1] = -torch.inf
        mask = mask.to(device)
        if pattern == "expanded":
            mask = mask.expand(full)
        return mask.requires_grad_() if kind == "trained" else mask

    def _segments(self, gen: torch.Generator, device: torch.device | str) -> Tensor | tuple[Tensor, Tensor]:
        def packed(length: int) -> Tensor:
            ids = torch.sort(torch.randint(0, 3, (self.batch, length), generator=gen), dim=1).values
            ids[0, max(length - 2, 0) :] = -1  # right padding
            return ids.int().to(device)

        if self.segments == "ids":
            return packed(self.q_len)
        return packed(self.q_len), packed(self.kv_len)

    def _lengths(self, gen: torch.Generator, device: torch.device | str) -> Tensor:
        if self.lengths == "extreme":
            return torch.tensor([0, self.kv_len] * self.batch, dtype=torch.int64)[: self.batch].to(device)
        lengths = torch.randint(1, self.kv_len + 1, (self.batch,), generator=gen)
        return lengths.int().to(device)


@dataclass
class Inputs:
    """Tensors of one call. `q`, `k`, `v` require grad; they may be views that share one storage."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    dout: Tensor
    dlse: Tensor

    def mapped(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> Inputs:
        """The same call on leaves made by `fn` from q, k and v, with other fields changed."""
        q, k, v = (fn(x.detach()).requires_grad_() for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, **changes)


@dataclass
class Result:
    """What a call gave, by name: out, lse, dq, dk, dv and, where there are such, dmask and dsinks.

    `floors` gives for some names the size below which an error counts as if the tensor were that large.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def hidden_by_minimum(dtype: torch.dtype, lowest: str) -> Inputs:
    """5 queries on 40 keys under an additive mask whose "min", "half" of it, or "inf" hides.

    Query 1 sees nothing, and no query key 7.
    """
    inputs = Case(q_len=5, kv_len=40).build()
    minimum = torch.finfo(dtype).min
    mask = torch.randn(5, 40).to(dtype)
    mask[0, 3:] = mask[1] = mask[:, 7] = {"min": minimum, "half": minimum / 2, "inf": -torch.inf}[lowest]
    inputs.options["attn_mask"] = mask
    return inputs


def paged(inputs: Inputs, page: int, spare: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """k, v and block_table of a paged cache that holds the call's keys, on its device.

    Pages lie in any order, stored [pages, page, Hkv, D], and `spare` of them hold NaN and are in no row.
    """
    batch, _, kv_len, _ = inputs.k.shape
    count = kv_len // page
    assert kv_len == count * page
    gen = torch.Generator().manual_seed(page)
    table = torch.randperm(batch * count + spare, generator=gen)[: batch * count].view(batch, count)
    table = table.to(inputs.k.device)
    made = []
    for x in (inputs.k, inputs.v):
        heads, head_dim = x.shape[1], x.shape[3]
        pages = x.detach().transpose(1, 2).reshape(batch, count, page, heads, head_dim)
        pool = pages.new_full((batch * count + spare, page, heads, head_dim), torch.nan)
        pool[table] = pages
        made.append(pool.transpose(1, 2))
    return made[0], made[1], table.int()


def lay_out(
    batch: int,
    sizes: dict[str, tuple[int, int, int]],
    layout: str,
    gen: torch.Generator,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    """Random [B, H, T, D] tensors in one of the storage layouts that callers use."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device, dtype).requires_grad_()

    if layout == "fused" and len({t for _, t, _ in sizes.values()}) == 1:
        # One projection's output [B, T, sum(H * D)], cut into heads.
        length = next(iter(sizes.values()))[1]
        parts = normal(batch, length, sum(h * d for h, _, d in sizes.values())).split(
            [h * d for h, _, d in sizes.values()], dim=-1
        )
        return [
            p.unflatten(-1, (h, d)).transpose(1, 2)
            for p, (h, _, d) in zip(parts, sizes.values(), strict=True)
        ]
    made = []
    for heads, length, dim in sizes.values():
        if layout == "bthd":
            x = normal(batch, length, heads, dim).transpose(1, 2)
        elif layout == "sliced":
            x = normal(batch, heads, length + 3, dim + 8)[:, :, 1 : 1 + length, 3 : 3 + dim]
        elif layout == "expanded":
            x = normal(1, heads, length, dim).expand(batch, -1, -1, -1)
        elif layout == "strided":
            x = normal(batch, heads, dim, length).transpose(2, 3)
        else:
            x = normal(batch, heads, length, dim)
        made.append(x)
    return made


def run(fn: Callable[..., Any], inputs: Inputs, **extra: Any) -> Result:
    """Call `fn` for (out, lse) and differentiate it with the inputs' cotangents."""
    out, lse = fn(inputs.q, inputs.k, inputs.v, **inputs.options, **extra)
    wanted = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    mask = inputs.options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        wanted["dmask"] = mask
    if "sinks" in inputs.options:
        wanted["dsinks"] = inputs.options["sinks"]
    grads = torch.autograd.grad(
        [out, lse],
        list(wanted.values()),
        [inputs.dout.to(out.dtype), inputs.dlse.to(lse.dtype)],
        allow_unused=True,
        retain_graph=True,
    )
    result = Result({"out": out.detach(), "lse": lse.detach()})
    for (name, x), grad in zip(wanted.items(), grads, strict=True):
        result.tensors[name] = torch.zeros_like(x) if grad is None else grad
    return result


def keep_of(case: Case, seed: int, device: torch.device | str = "cpu") -> Tensor | None:
    """The dropout mask of a call that starts from this seed of torch's generator; None without dropout."""
    if not case.dropout_p:
        return None
    torch.manual_seed(seed)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), dtype=torch.int64, device=device)
    return keep_mask(drawn, case.dropout_p, case.batch, case.q_heads, (0, case.q_len), (0, case.kv_len))


def expected(inputs: Inputs, keep: Tensor | None = None) -> Result:
    """The oracle's result in float64, on the very values of `inputs`."""
    result = run(attend, inputs, **({"keep": keep} if keep is not None else {}))
    result.floors = floors(inputs)
    if inputs.q.dim() == 4 and result["out"].numel() < FEW:
        result.floors["out"] = floor_of_few(inputs)
    return result


FEW = 200  # entries of out, of which all may be small at once


def seen_pairs(inputs: Inputs) -> Tensor:
    """Which keys each query sees: bool [B, Hq, Tq, Tk]."""
    names = ("causal", "window_size", "attn_mask", "segment_ids", "kv_lengths")
    rule = {name: inputs.options[name] for name in names if name in inputs.options}
    (batch, heads, q_len, _), kv_len = inputs.q.shape, inputs.k.shape[2]
    seen = visible_pairs(batch, q_len, kv_len, device=inputs.q.device, **rule)
    return seen.expand(batch, heads, q_len, kv_len)


def floor_of_few(inputs: Inputs) -> float:
    """Size of out, were the values that each query sees of their usual size, and its weights alike.

    Weights are rounded before they meet the values, so that a sum that cancels keeps the error of its terms:
    of a few entries all may. A third of that size, which no more of them reach together.
    """
    seen = seen_pairs(inputs)
    values = inputs.v.detach().double()[seen.unflatten(1, (inputs.v.shape[1], -1)).any(3).any(2)]
    keys = seen.sum(-1).double()
    shares = torch.where(keys > 0, 1.0 / keys.clamp(min=1.0), 0.0)
    return 0.3 * float((values.square().mean() * shares.mean()).sqrt()) if values.numel() else 0.0


def floors(inputs: Inputs) -> dict[str, float]:
    """Sizes of the terms that cancel in dq, dk, dmask and dsinks where a query sees few keys.

    ds = p * (dp - delta) is exactly 0 for a query with one key, yet dp and delta are rounded on the way.
    """

    def size(x: Tensor) -> float:
        return float(x.detach().double().square().mean().nan_to_num(0.0).sqrt())

    scale = inputs.options.get("scale")
    scale = abs(inputs.q.shape[-1] ** -0.5 if scale is None else scale)
    dp = 0.3 * (inputs.v.shape[-1] ** 0.5 * size(inputs.dout) * size(inputs.v) + size(inputs.dlse))
    return {"dq": scale * dp * size(inputs.k), "dk": scale * dp * size(inputs.q), "dmask": dp, "dsinks": dp}


# Pooled relative RMS error, and maximum error in units of the largest entry, that rounding alone explains.
# float32 sums of a few hundred terms stay well below 1e-5; half-precision results are rounded once on the way
# out (2**-11 or 2**-8) and the weights once on the way into the product.
TOLERANCE = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (5e-6, 5e-5),
    torch.float16: (2e-3, 1e-2),
    torch.bfloat16: (1.5e-2, 8e-2),
}


def relative_errors(got: Tensor, want: Tensor, floor: float = 1e-3) -> tuple[float, float]:
    """(pooled relative RMS error, maximum error over the largest entry); (0, 0) where all is exact."""
    error = got.double() - want.double()
    if not error.numel() or not error.any():
        return 0.0, 0.0
    rms = max(float(want.double().square().mean().sqrt()), floor)
    peak = max(float(want.double().abs().max()), floor)
    return float(error.square().mean().sqrt()) / rms, float(error.abs().max()) / peak


# How many times the peer's error a kernel's may be: RMS over a whole tensor, and maximum; None = any.
FACTORS: dict[torch.dtype, tuple[float, float | None]] = {
    torch.float32: (2.0, None),
    torch.float16: (1.1, 2.0),
    torch.bfloat16: (1.1, 2.0),
}
# How many queries and entries it takes until a tensor's RMS says more of a kernel than of the numbers that
# were drawn. In float32 the backward's error is that of the weights, and all weights of a query share the
# rounding of its lse; in half precision each entry is rounded, which outweighs that.
ENOUGH = {torch.float32: (100, 1000), torch.float16: (1, 1), torch.bfloat16: (1, 1)}


@dataclass
class Beside:
    """Errors of a kernel beside those of its peer, by tensor, pooled over as many calls as are added.

    Each call's errors count relative to the size of what was wanted, so that no call drowns the others.
    """

    dtype: torch.dtype
    queries: int = 0
    entries: dict[str, int] = field(default_factory=dict)
    squares: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)

    def add(self, got: Result, want: Result, peer: Result) -> None:
        """Take in one call; only queries that see something count as such."""
        self.queries += int(want["out"].any(-1).sum())
        for name in ("out", "dq", "dk", "dv"):
            if name not in want.tensors:
                continue
            right = want[name].double()
            size = max(float(right.square().mean().sqrt()), want.floors.get(name, 0.0), 1e-3)
            errors = [(x[name].double() - right).flatten() / size for x in (got, peer)]
            squares = torch.stack([x.square().sum() for x in errors]).cpu()
            peaks = torch.stack([x.abs().max() for x in errors]).cpu()
            self.entries[name] = self.entries.get(name, 0) + right.numel()
            self.squares[name] = self.squares.get(name, torch.zeros(2)) + squares
            self.peaks[name] = torch.maximum(self.peaks.get(name, torch.zeros(2)), peaks)

    def judge(self, note: Any = "") -> None:
        """Raise AssertionError where an error is more than the allowed multiple of the peer's.

        Of fewer queries or entries than are `ENOUGH` nothing is said.
        """
        queries, entries = ENOUGH[self.dtype]
        rms_factor, peak_factor = FACTORS[self.dtype]
        for name in self.squares:
            if self.queries < queries or self.entries[name] < entries:
                continue
            rms, peer_rms = (self.squares[name] / self.entries[name]).sqrt().tolist()
            peak, peer_peak = self.peaks[name].tolist()
            assert rms <= rms_factor * peer_rms, (
                f"{name}: RMS error {rms:.3e}, more than {rms_factor} times the peer's {peer_rms:.3e}; {note}"
            )
            assert peak_factor is None or peak <= peak_factor * peer_peak, (
                f"{name}: maximum {peak:.3e}, more than {peak_factor} times the peer's {peer_peak:.3e}; "
                f"{note}"
            )


def judge(
    got: Result, want: Result, dtype: torch.dtype, note: Any = "", *, peer: Result | None = None
) -> None:
    """Raise AssertionError unless every tensor of `got` is `want` within `dtype`'s tolerance.

    `lse` must be -inf exactly where `want` is, and is judged in float32 or better elsewhere, absolutely. With
    the result of a `peer`, out, dq, dk and dv may be no further off than `FACTORS` times as far as it is.
    """
    assert got.tensors.keys() == want.tensors.keys(), (got.tensors.keys(), want.tensors.keys(), note)
    for name, right in want.tensors.items():
        left = got[name]
        assert left.shape == right.shape, (
            f"{name}: shape {tuple(left.shape)}, not {tuple(right.shape)}; {note}"
        )
        if name == "lse":
            unseen = right == -torch.inf
            assert torch.equal(left == -torch.inf, unseen), f"lse: -inf in the wrong rows; {note}"
            left, right = left[~unseen].double(), right[~unseen]
            bound = 1e-11 if dtype == torch.float64 else 2e-5
            worst = float((left - right).abs().max()) if left.numel() else 0.0
            assert worst <= bound * max(1.0, float(right.abs().max()) if right.numel() else 1.0), (
                f"lse: off by {worst:.3g}; {note}"
            )
            continue
        assert torch.isfinite(left).all(), (
            f"{name}: {int((~torch.isfinite(left)).sum())} entries not finite; {note}"
        )
        rms, peak = relative_errors(left, right, max(want.floors.get(name, 0.0), 1e-3))
        rms_bound, peak_bound = TOLERANCE[dtype]
        assert rms <= rms_bound and peak <= peak_bound, (
            f"{name}: relative RMS error {rms:.3g} (at most {rms_bound:g}), "
            f"maximum {peak:.3g} (at most {peak_bound:g}); {note}"
        )
    if peer is not None:
        beside = Beside(dtype)
        beside.add(got, want, peer)
        beside.judge(note)
