"""What `StreamMultiHeadAttention` refuses: every message names what was expected and what came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import StreamMultiHeadAttention


@pytest.mark.parametrize(
    ("arguments", "options", "error", "match"),
    [
        ((0, 1), {}, ValueError, "greater than 0, got embed_dim=0"),
        ((8, -1), {}, ValueError, "greater than 0, .* num_heads=-1"),
        ((8, 3), {}, ValueError, "multiple of num_heads, got embed_dim=8 and num_heads=3; choose"),
        (
            (8, 4),
            {"num_kv_heads": 3},
            ValueError,
            "multiple of num_kv_heads, got num_heads=4 and num_kv_heads=3",
        ),
        ((8, 4), {"num_kv_heads": 0}, ValueError, "greater than 0"),
        ((8, 4, 1.0), {}, ValueError, r"dropout .* in \[0, 1\), got 1.0"),
        ((8, 4, -0.1), {}, ValueError, "dropout"),
        ((8, 4), {"window_size": 0}, ValueError, "window_size must be positive"),
        ((8, 4), {"window_size": (1, -2)}, ValueError, "window_size"),
        ((8, 4), {"window_size": 1.5}, TypeError, "window_size"),
    ],
)
def test_constructor_errors(arguments: tuple, options: dict[str, Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        StreamMultiHeadAttention(*arguments, **options)


X = torch.zeros(5, 2, 8)  # length 5, batch 2


@pytest.mark.parametrize(
    ("inputs", "masks", "error", "match"),
    [
        ((X[None], X[None], X[None]), {}, ValueError, "3-D .* 2-D .*, got 4-D"),
        ((X, X[:, 0], X), {}, ValueError, "got 3-D, 2-D and 3-D"),
        ((X[:, 0], X, X), {}, ValueError, "got 2-D, 3-D and 3-D"),
        ((X[..., :7], X, X), {}, ValueError, r"query must have 8 features .*\[5, 2, 7\]"),
        ((X, X[..., :7], X), {}, ValueError, "key must have 8 features"),
        ((X, X, X[..., :7]), {}, ValueError, "value must have 8 features"),
        ((X, X, X[:4]), {}, ValueError, r"agree in length .*\[5, 2, 8\] and \[4, 2, 8\]"),
        ((X, X[:, :1], X[:, :1]), {}, ValueError, "batch size.*batch_first=False"),
        (
            (X, X, X),
            {"key_padding_mask": torch.zeros(5, 2).bool()},
            ValueError,
            r"shape \[2, 5\], got \[5, 2\]",
        ),
        (
            (X, X, X),
            {"key_padding_mask": torch.zeros(5).bool()},
            ValueError,
            "key_padding_mask must have shape",
        ),
        (
            (X[:, 0], X[:, 0], X[:, 0]),
            {"key_padding_mask": torch.zeros(1, 5).bool()},
            ValueError,
            r"shape \[5\]",
        ),
        ((X, X, X), {"attn_mask": torch.zeros(5, 4)}, ValueError, r"\[5, 5\] or \[8, 5, 5\], got \[5, 4\]"),
        ((X, X, X), {"attn_mask": torch.zeros(2, 5, 5)}, ValueError, "attn_mask must have shape"),
        ((X, X, X), {"attn_mask": torch.zeros(2, 4, 5, 5)}, ValueError, "attn_mask must have shape"),
        (
            (X, X, X),
            {"attn_mask": torch.zeros(5, 5).long()},
            TypeError,
            "attn_mask must be bool .* got torch.int64",
        ),
        (([[0.0]], X, X), {}, TypeError, "query must be a torch.Tensor, got list"),
        ((X, X, None), {}, TypeError, "value must be a torch.Tensor, got NoneType"),
        ((X, X, X), {"attn_mask": [[0.0]]}, TypeError, "attn_mask must be a torch.Tensor, got list"),
        (
            (X, X, X),
            {"key_padding_mask": [0]},
            TypeError,
            "key_padding_mask must be a torch.Tensor, got list",
        ),
        ((X, X, X), {"key_padding_mask": torch.zeros(2, 5).byte()}, TypeError, "got torch.uint8; convert"),
    ],
)
def test_forward_errors(inputs: tuple, masks: dict[str, Tensor], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        StreamMultiHeadAttention(8, 4)(*inputs, **masks)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_refused(layout: torch.layout):
    x = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=layout)
    with pytest.raises(TypeError, match=r"nested tensor; .*key_padding_mask.*enable_nested_tensor=False"):
        StreamMultiHeadAttention(8, 4, batch_first=True)(x, x, x)
