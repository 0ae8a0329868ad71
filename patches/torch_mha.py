"""`torch.nn.MultiheadAttention` on `streamattn.attention`, wherever it stands in a model.

Contract: outputs, weights and gradients of torch's layer, computed by `StreamMultiHeadAttention`'s forward
pass on the layer's own parameters; the differences are the ones that class lists. Every attribute keeps its
name and value.

torch's encoder has two ways around its attention layers in eval mode without gradients. Both are closed where
a layer is patched, instance by instance, and opened again by `detach`:

- `nn.TransformerEncoderLayer` reads the weights off its `self_attn` and never calls it, unless some module in
  it has a forward hook: the patched layer gets one that does nothing.
- `nn.TransformerEncoder` turns a padded batch into a nested tensor if its `use_nested_tensor` is true; None
  stands in for that while a layer inside is patched. Rows of padding then hold what they hold in training,
  where the nested tensor leaves zeros.

Left out on purpose: saying that the projections are separate (`_qkv_same_embed_dim`), which closes the first
way too, for adapters and converters believe it; subclasses of the layer, which may compute something else;
`torch.fx` tracing of a patched layer (trace first, and patch the traced model).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from streamattn.module import FusedMultiHead


def keep_called(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook without effect: an encoder layer calls its attention if that has a hook."""


class StreamTorchMultiheadAttention(FusedMultiHead, nn.MultiheadAttention):
    """`nn.MultiheadAttention` with the same state, on `streamattn.attention`. Made by `patch_model`."""

    causal = False
    window_size = None

    @property
    def num_kv_heads(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As many as query heads."""
        return self.num_heads

    @staticmethod
    def unsupported(module: nn.MultiheadAttention) -> str | None:
        """The reason why `module` can't be served, or None."""
        return None

    @staticmethod
    def attach(model: nn.Module) -> None:
        """Have torch's encoders call the patched layers of `model` in every mode."""
        for layer in _patched_layers(model):
            if keep_called not in layer._forward_pre_hooks.values():
                layer.register_forward_pre_hook(keep_called)
        for encoder in _encoders(model):
            if getattr(encoder, "use_nested_tensor", False) and any(_patched_layers(encoder)):
                encoder.use_nested_tensor = None

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Undo `attach`, before the layers become torch's again."""
        for layer in _patched_layers(model):
            for key in [key for key, hook in layer._forward_pre_hooks.items() if hook is keep_called]:
                del layer._forward_pre_hooks[key]
        for encoder in _encoders(model):
            if getattr(encoder, "use_nested_tensor", False) is None:
                encoder.use_nested_tensor = True


def _patched_layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, StreamTorchMultiheadAttention))


def _encoders(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
