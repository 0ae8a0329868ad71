"""Small models around `nn.MultiheadAttention`, run and compared: for the tests of its patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import streamattn.module

E, HEADS, LENGTH, BATCH = 16, 4, 7, 3
PADDING = torch.arange(LENGTH) >= torch.tensor([LENGTH, 5, 4]).unsqueeze(1)
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)

Build = Callable[..., nn.Module]


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter drawn at random: the initial biases of zero would hide where they act."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(E, HEADS, 32, **{"dropout": 0.0, "batch_first": True, **options})


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(encoder_layer(**options), 2)


def build(make: Build = encoder, training: bool = False) -> Any:
    """The same model at every call."""
    torch.manual_seed(0)
    return randomised(make()).train(training)


def spy_on_attention(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, in order, as a list that grows: "stream" for ours, "torch" for a layer of torch's."""
    calls: list[str] = []

    def spy(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            calls.append(label)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, run)

    spy(streamattn.module, "attention", "stream")
    spy(streamattn.module, "packed_attention", "stream")
    spy(torch, "_transformer_encoder_layer_fwd", "torch")
    spy(torch, "_native_multi_head_attention", "torch")
    spy(torch.nn.functional, "multi_head_attention_forward", "torch")
    return calls


def ran(calls: list[str]) -> list[str]:
    """What ran since the last call of this."""
    seen = calls.copy()
    calls.clear()
    return seen


def inputs(batch_first: bool, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, length, E, generator=generator)
    return x if batch_first else x.transpose(0, 1).contiguous()


def outputs_and_gradients(model: nn.Module, training: bool, *args: Any, **options: Any) -> dict[str, Tensor]:
    """The output where it isn't padding, and in training the gradients of all parameters."""
    batch_first = options.pop("batch_first")
    padding = options.get("tgt_key_padding_mask", options.get("src_key_padding_mask"))
    model.zero_grad()
    with torch.set_grad_enabled(training):
        out = model(*args, **options)
        out = out if batch_first else out.transpose(0, 1)
        out = out if padding is None else out[~padding]
    result = {"out": out.detach()}
    if training:
        generator = torch.Generator().manual_seed(1)
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            result[name] = parameter.grad.clone()
    return result


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    # a gradient of rounding alone, as the bias of keys has, is measured by the largest
    floor = max(x.abs().max().item() for x in expected.values())
    for name, wanted in expected.items():
        error = (actual[name] - wanted).abs().max().item()
        assert error <= tolerance * max(wanted.abs().max().item(), 0.1 * floor), (name, error)


def pair_mask(kind: str | None) -> Tensor | None:
    if kind == "bias":
        return torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(5))
    return None if kind is None else nn.Transformer.generate_square_subsequent_mask(LENGTH)


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    """A user's layer that does more and leaves the rest to torch's."""

    def forward(self, src: Tensor, *args: Any, **options: Any) -> Tensor:
        return 2.0 * super().forward(src, *args, **options)


class OwnEncoder(nn.TransformerEncoder):
    """A user's encoder likewise."""

    def forward(self, src: Tensor, *args: Any, **options: Any) -> Tensor:
        return 2.0 * super().forward(src, *args, **options)


class VisionBlock(nn.Module):
    """A pre-norm block that holds its attention itself, as vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.self_attention = nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(E, 32), nn.GELU(), nn.Linear(32, E))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


def own_layers() -> nn.Module:
    return nn.TransformerEncoder(OwnEncoderLayer(E, HEADS, 32, 0.0, batch_first=True), 2)


def own_encoder() -> nn.Module:
    return OwnEncoder(encoder_layer(), 2)


def vision() -> nn.Module:
    return nn.Sequential(VisionBlock(), VisionBlock())


MODELS = [encoder_layer, encoder, own_layers, own_encoder, vision]


def run_eval(model: nn.Module, x: Tensor, padded: bool = True) -> Tensor:
    options = {"src_key_padding_mask": PADDING} if padded and not isinstance(model, nn.Sequential) else {}
    with torch.no_grad():
        return model(x, **options)
