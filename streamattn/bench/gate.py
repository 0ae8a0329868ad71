"""Right before fast: a provider's results against float64, on the inputs that are then timed.

The first and the last head of keys (batch 0 and batch B - 1) with their query heads are compared with the
reference, over the whole length; every other element must be finite, in memory that held NaN before the call.
Dropout draws every provider's own mask: there the call without dropout is compared, and three laws of
dropout must hold with it. Left out on purpose: the values of the heads in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from streamattn.bench.cases import Case
from streamattn.bench.providers import Call
from streamattn.functional import attention

GRADIENTS = ("dq", "dk", "dv")
DROPOUT_LIMIT = 3e-2
"""Of sums that must be equal; a wrong scale or another mask in the backward is off by a tenth at p = 0.1."""


class WrongResult(Exception):
    """What is wrong, and by how much."""


def _ends(x: Tensor, num_kv_heads: int) -> Tensor:
    """The first and the last head of keys and their query heads: [B, H, S, D] -> [2, H / Hkv, S, D]."""
    group = x.shape[1] // num_kv_heads
    return torch.stack([x[0, :group], x[-1, -group:]])


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|``, NaN where an element is."""
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Gate:
    """The judge of one case; what it compares with is computed once for all providers."""

    def __init__(self, case: Case, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        """Keeps the case and its inputs.

        Args:
            case: what is measured.
            inputs: q, k, v, dout as `Case.tensors` draws them.
        """
        self.case, (*self.qkv, self.dout) = case, inputs
        self.limit = 1e-5 if case.dtype == "float32" else 1e-2
        self.want: dict[str, Tensor] = {}

    def check(self, bind: Callable[[Case, torch.device], Call], call: Call, backward: bool) -> float:
        """Judges the calls of a provider.

        Args:
            bind: the provider's; asked for the call without dropout where the case has some.
            call: of the case.
            backward: whether its gradients are judged as well.

        Returns:
            The largest relative error of out and, where they are judged, the gradients; without dropout.

        Raises:
            WrongResult: nothing of it may be timed.
        """
        if self.case.dropout_p == 0.0:
            return self._values(call, backward)
        error = self._values(bind(replace(self.case, dropout_p=0.0), self.dout.device), backward)
        self._dropout(call, backward)
        return error

    def _reference(self, backward: bool) -> dict[str, Tensor]:
        if "out" not in self.want or (backward and "dq" not in self.want):
            kv_heads = self.case.num_kv_heads
            q, k, v, dout = (_ends(x, kv_heads).double() for x in (*self.qkv, self.dout))
            leaves = [x.requires_grad_(backward) for x in (q, k, v)]
            segments = self.case.segments(q.device)
            out = attention(
                *leaves,
                causal=self.case.causal,
                window_size=self.case.window,
                segment_ids=None if segments is None else segments[:1].expand(2, -1),
                backend="reference",
            )
            self.want["out"] = out.detach()
            if backward:
                self.want |= dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, dout), strict=True))
        return self.want

    def _run(self, call: Call, qkv: list[Tensor], dout: Tensor | None) -> dict[str, Tensor]:
        """Out, and gradients where dout is given, in memory that was poisoned."""
        leaves = [x.detach().requires_grad_(dout is not None) for x in qkv]
        poison = [torch.full_like(x, torch.nan) for x in (self.dout, *qkv)]
        del poison  # PyTorch's allocator hands the same blocks out again
        with torch.set_grad_enabled(dout is not None):
            out = call(*leaves)
        got = {"out": out.detach()}
        if dout is not None:
            got |= dict(zip(GRADIENTS, torch.autograd.grad(out, leaves, dout), strict=True))
        for (name, x), like in zip(got.items(), (self.dout, *qkv), strict=False):
            if x.shape != like.shape or x.dtype != like.dtype:
                raise WrongResult(f"{name} is {x.dtype} {list(x.shape)}, not {like.dtype} {list(like.shape)}")
            if not x.isfinite().all():
                raise WrongResult(f"{name} has NaN or infinity")
        return got

    def _values(self, call: Call, backward: bool) -> float:
        want, worst = self._reference(backward), 0.0
        for name, x in self._run(call, self.qkv, self.dout if backward else None).items():
            error = relative_error(_ends(x, self.case.num_kv_heads), want[name])
            if not error <= self.limit:
                raise WrongResult(f"{name} is off by {error:.1e} of its size, more than {self.limit:.0e}")
            worst = max(worst, error)
        return worst

    def _dropout(self, call: Call, backward: bool) -> None:
        """Raises unless the three laws hold.

        A query's weights sum up to 1 on average. Out changes by sqrt(p / (1 - p)) of its size, for each of
        its summands is divided by 1 - p or gone. It is linear in v with one mask: <out, out> = <dv, v>.
        """
        q, k, v = self.qkv
        sums = self._run(call, [q, k, torch.ones_like(v)], None)["out"].double()
        if abs(sums.mean().item() - 1.0) > DROPOUT_LIMIT:
            raise WrongResult(
                f"with dropout the weights of a query sum up to {sums.mean().item():.3f}, not 1"
            )
        out = self._run(call, self.qkv, None)["out"]
        change = relative_error(_ends(out, self.case.num_kv_heads), self.want["out"])
        expected = math.sqrt(self.case.dropout_p / (1.0 - self.case.dropout_p))
        if not 0.8 <= change / expected <= 1.25:
            raise WrongResult(f"dropout changes out by {change:.2f} of its size, not by {expected:.2f}")
        if backward:
            leaves = [x.detach().requires_grad_() for x in self.qkv]
            out = call(*leaves)
            (dv,) = torch.autograd.grad(out, leaves[2:], out.detach())
            ratio = ((dv.double() * v.double()).sum() / out.detach().double().square().sum()).item()
            if not abs(ratio - 1.0) <= DROPOUT_LIMIT:
                raise WrongResult(
                    f"dv has another dropout mask than out: <dv, v> is {ratio:.3f} of <out, out>"
                )
