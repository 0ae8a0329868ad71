"""QK-norm and rotary embedding as data: inputs, HuggingFace's steps in any dtype, ours, and errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamattn import qk_norm_rope

NAMES = ("q", "k", "dq", "dk", "dq_weight", "dk_weight")


@dataclass(frozen=True)
class Prologue:
    """One call of `qk_norm_rope`, with the norms of OLMo-2 "all", Qwen3 "each" or Gemma 3 "each + 1"."""

    heads: tuple[int, int] = (4, 4)
    head_dim: int = 16
    batch: int = 2
    q_len: int = 7
    norm: str = "all"
    rotary: int | None = None
    interleaved: bool = False
    half_angles: bool = False  # cos and sin in the dtype of q
    float_weights: bool = False  # float32 beside half precision
    layout: str = "own"  # "fused": slices of one projection; "sequence first"

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of `qk_norm_rope` about the formulas."""
        norms = {"each": {"round_before_weight": True}, "each + 1": {"weight_offset": 1.0}}
        return {"head_dim": self.head_dim, "interleaved": self.interleaved, **norms.get(self.norm, {})}

    def build(
        self, dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """``[q, k, q_weight, k_weight]``, ``[cos, sin]`` and cotangents of the results."""
        gen = torch.Generator().manual_seed(hash((self.heads, self.head_dim, self.q_len)) % 1000)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)

        widths = [count * self.head_dim for count in self.heads]
        shape = (self.batch, self.q_len)
        if self.layout == "fused":
            q, k, _ = normal(*shape, sum(widths) + 8).to(device, dtype).split([*widths, 8], dim=2)
        elif self.layout == "sequence first":
            q, k = (normal(self.q_len, self.batch, w).to(device, dtype).transpose(0, 1) for w in widths)
        else:
            q, k = (normal(*shape, width).to(device, dtype) for width in widths)
        sizes = widths if self.norm == "all" else [self.head_dim] * 2
        kept = torch.promote_types(dtype, torch.float32) if self.float_weights else dtype
        trained = [q, k, *((1 + 0.3 * normal(size)).to(device, kept) for size in sizes)]
        rotary = self.head_dim if self.rotary is None else self.rotary
        angles = normal(self.batch if self.batch < 3 else 1, self.q_len, rotary // 2) * 3
        angles = angles.repeat_interleave(2, 2) if self.interleaved else torch.cat((angles, angles), 2)
        angles = angles.to(device)
        angles = [x.to(dtype) if self.half_angles else x for x in (angles.cos(), angles.sin())]
        douts = [
            normal(self.batch, count, self.q_len, self.head_dim).to(device, dtype) for count in self.heads
        ]
        return [x.requires_grad_() for x in trained], angles, douts


def eager(
    case: Prologue, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """What HuggingFace's layers do, in the dtypes that come."""
    made = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if case.norm != "all":
            x = x.unflatten(2, (-1, case.head_dim))
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if case.norm == "each":
            x = (weight * wide.to(x.dtype)).to(x.dtype)
        elif case.norm == "each + 1":
            x = (wide * (1.0 + weight.to(wide.dtype))).to(x.dtype)
        else:
            x = (weight * wide).to(x.dtype)
        if case.norm == "all":
            x = x.unflatten(2, (-1, case.head_dim))
        x = x.transpose(1, 2)
        part, rest_of_x = x[..., : cos.shape[2]], x[..., cos.shape[2] :]
        if case.interleaved:
            turned = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(3)
        else:
            one, two = part.chunk(2, dim=-1)
            turned = torch.cat((-two, one), dim=-1)
        part = (part * cos[:, None] + turned * sin[:, None]).to(x.dtype)
        made.append(torch.cat((part, rest_of_x), dim=-1))
    return made[0], made[1]


def ours(
    case: Prologue, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope`."""
    return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, **case.options)


def results(
    call: Any, case: Prologue, dtype: torch.dtype, device: str = "cpu", exact: bool = False
) -> list[Tensor]:
    """Results and gradients, in the order of `NAMES`; exact: in float64, of the same numbers."""
    trained, angles, douts = case.build(dtype, device)
    if exact:
        trained = [x.detach().double().requires_grad_() for x in trained]
        angles, douts = ([x.double() for x in xs] for xs in (angles, douts))
    outs = call(case, *trained, *angles)
    return [x.detach() for x in (*outs, *torch.autograd.grad(outs, trained, douts))]


def error(got: Tensor, want: Tensor) -> float:
    """Relative RMS error."""
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())
