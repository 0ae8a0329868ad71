"""What runs in a patched attention layer, forward and backward: its products, its attention, and no copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from patches import patch_model
from tests.hf_models import build


class Seen(TorchDispatchMode):
    """The names of all operators but views, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket is not torch.ops.aten._unsafe_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators(layer: Any, x: Tensor, **arguments: Any) -> tuple[list[str], list[str]]:
    """Those of a layer's forward, and those of its backward."""
    leaves = [x, *layer.parameters()]
    with Seen() as forward:
        out = layer(x, **arguments)[0]
    dout = torch.randn_like(out)
    with Seen() as backward:
        torch.autograd.grad(out, leaves, dout)
    return forward.names, backward.names


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_gpt2(attn: str) -> None:
    """The gradients of q, k and v are written side by side: autograd's own split would copy them together."""
    layer = patch_model(build("gpt2", attn)).transformer.h[0].attn.eval()
    x = torch.randn(2, 9, 48, requires_grad=True)
    forward, backward = operators(layer, x)
    assert forward == ["addmm", "packed_forward", "addmm"]
    linear = ["mm", "mm", "sum"]
    assert sorted(backward) == sorted([*linear, "packed_backward", *linear])
