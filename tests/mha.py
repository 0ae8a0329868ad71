"""One call of `nn.MultiheadAttention` or of a layer in its place, as data: run both, compare everything.

`Call` names constructor options, inputs and masks; `Call.run` collects output, weights and every gradient;
`twins` makes torch's layer and ours with the same parameters; `assert_same` compares two results.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamattn import StreamMultiHeadAttention

EMBED_DIM, NUM_HEADS = 12, 3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
Result = dict[str, Tensor]


@dataclass
class Call:
    """One call of either layer: constructor options, inputs that require gradients, and forward options."""

    layer: dict[str, Any] = field(default_factory=dict)
    inputs: str = "self"  # "self", "cross" (key is value), "three"
    batch: int | None = 2  # None: inputs without a batch
    q_len: int = 5
    kv_len: int = 5
    padding: str = "none"  # "none", "bool", "float", "trained"
    mask: str = "none"  # "none", "causal", "bool2", "float2", "bool3", "float3", "trained2", "trained3"
    weights: str = "none"  # "none", "averaged", "per head"
    is_causal: bool = False
    seed: int = 0

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Fresh leaves; every query sees key 0, since torch gives NaN where nothing is visible."""
        gen = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

        def drop(*shape: int) -> Tensor:
            hidden = torch.rand(*shape, generator=gen) < 0.3
            hidden[..., 0] = False
            return hidden

        def sequence(length: int, features: int) -> Tensor:
            if self.batch is None:
                return draw(length, features).requires_grad_()
            if self.layer.get("batch_first"):
                return draw(self.batch, length, features).requires_grad_()
            return draw(length, self.batch, features).requires_grad_()

        kv_len = self.q_len if self.inputs == "self" else self.kv_len
        tensors = {"query": sequence(self.q_len, EMBED_DIM)}
        if self.inputs != "self":
            tensors["key"] = sequence(kv_len, self.layer.get("kdim", EMBED_DIM))
        if self.inputs == "three":
            tensors["value"] = sequence(kv_len, self.layer.get("vdim", EMBED_DIM))
        key_shape = (kv_len,) if self.batch is None else (self.batch, kv_len)
        if self.padding != "none":
            hidden = drop(*key_shape)
            bias = draw(*key_shape).masked_fill(hidden, -math.inf)
            tensors["key_padding_mask"] = hidden if self.padding == "bool" else bias
        pair_shape = (self.q_len, kv_len)
        if self.mask == "causal":
            tensors["attn_mask"] = torch.ones(pair_shape, dtype=torch.bool).triu(1)
        elif self.mask != "none":
            if self.mask[-1] == "3":
                pair_shape = ((self.batch or 1) * NUM_HEADS, *pair_shape)
            hidden = drop(*pair_shape)
            bias = draw(*pair_shape).masked_fill(hidden, -math.inf)
            tensors["attn_mask"] = hidden if self.mask.startswith("bool") else bias
        for name, kind in (("key_padding_mask", self.padding), ("attn_mask", self.mask)):
            if kind.startswith("trained"):
                tensors[name].requires_grad_()
        return tensors

    def run(self, module: nn.Module, dtype: torch.dtype) -> Result:
        """Output, weights, and the gradients of a random projection of both."""
        tensors = self.tensors(dtype)
        query = tensors["query"]
        key = tensors.get("key", query)
        value = tensors.get("value", key)
        module.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Support for mismatched", category=UserWarning)
            out, weights = module(
                query,
                key,
                value,
                key_padding_mask=tensors.get("key_padding_mask"),
                attn_mask=tensors.get("attn_mask"),
                need_weights=self.weights != "none",
                average_attn_weights=self.weights == "averaged",
                is_causal=self.is_causal,
            )
        gen = torch.Generator().manual_seed(1)
        loss = (out * torch.randn(out.shape, generator=gen, dtype=torch.float64).to(dtype)).sum()
        result = {"out": out}
        if weights is not None:
            loss = loss + (weights * torch.randn(weights.shape, generator=gen).to(dtype)).sum()
            result["weights"] = weights
        loss.backward()
        for name, x in (*tensors.items(), *module.named_parameters()):
            if x.requires_grad:
                assert x.grad is not None, name
                result[f"grad of {name}"] = x.grad
        return {name: x.detach() for name, x in result.items()}


def assert_same(actual: Result, expected: Result, tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        assert got.shape == wanted.shape, name
        assert got.dtype == wanted.dtype, name
        scale = max(wanted.abs().max().item(), 1.0) if wanted.numel() else 1.0
        torch.testing.assert_close(
            got, wanted, rtol=0.0, atol=tolerance * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def twins(dtype: torch.dtype, **layer: Any) -> tuple[nn.MultiheadAttention, StreamMultiHeadAttention]:
    """torch's layer with every parameter drawn at random, and ours with its state."""
    theirs = nn.MultiheadAttention(EMBED_DIM, NUM_HEADS, **layer, dtype=dtype)
    gen = torch.Generator().manual_seed(2)
    for parameter in theirs.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=gen, dtype=torch.float64).to(dtype)
    ours = StreamMultiHeadAttention(EMBED_DIM, NUM_HEADS, **layer, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def check_against_torch(call: Call, dtype: torch.dtype) -> None:
    theirs, ours = twins(dtype, **call.layer)
    assert_same(call.run(ours, dtype), call.run(theirs, dtype), TOLERANCE[dtype])
