"""What `StreamMultiHeadAttention` refuses: every message names what was expected and what came."""

from __future__ import annotations

import math
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
        ((8, 4, 1.0), {}, ValueError, r"dropout .* in \[0, 1\), got 1\.0; pass 0\.0 for none"),
        ((8, 4, -0.1), {}, ValueError, "dropout"),
        ((8, 4, math.nan), {}, ValueError, r"dropout .* in \[0, 1\), got nan"),
        ((8, 4, None), {}, TypeError, r"dropout must be a number in \[0, 1\), got None; pass 0\.0"),
        ((8, 4, "0.1"), {}, TypeError, "dropout must be a number .* got '0.1'"),
        ((8.0, 4), {}, TypeError, r"embed_dim must be an int, got 8\.0; convert it with int"),
        (("8", 4), {}, TypeError, "embed_dim must be an int, got '8'"),
        ((8, True), {}, TypeError, "num_heads must be an int, got True"),
        ((8, 4), {"num_kv_heads": 2.0}, TypeError, r"num_kv_heads must be an int, got 2\.0"),
        ((8, 4), {"kdim": 0}, ValueError, "greater than 0, got .* kdim=0"),
        ((8, 4), {"vdim": -1}, ValueError, "greater than 0, got .* vdim=-1"),
        ((8, 4), {"kdim": 8.0}, TypeError, r"kdim must be an int, got 8\.0"),
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
        (
            (X.to_sparse(), X, X),
            {},
            TypeError,
            r"query must be a dense tensor, got torch.sparse_coo; .*to_dense",
        ),
        ((X, X, X), {"attn_mask": torch.zeros(5, 5).to_sparse()}, TypeError, "attn_mask must be a dense"),
        (
            (X, X, X),
            {"key_padding_mask": torch.zeros(2, 5, device="meta")},
            ValueError,
            "key_padding_mask must be on query's device cpu, got meta; move it",
        ),
        (
            (X, X, X),
            {"attn_mask": torch.zeros(5, 5, device="meta")},
            ValueError,
            "attn_mask must be on query's device cpu",
        ),
    ],
)
def test_forward_errors(inputs: tuple, masks: dict[str, Tensor], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        StreamMultiHeadAttention(8, 4)(*inputs, **masks)


@pytest.mark.parametrize("padding", [None, torch.zeros(2, 5), torch.zeros(2, 5).bool()], ids=str)
def test_a_float8_mask_is_refused(padding: Tensor | None):
    """Alone and beside another, and with this layer's meaning of True."""
    mask = torch.zeros(5, 5).to(torch.float8_e4m3fn)
    with pytest.raises(
        TypeError, match=r"attn_mask must be bool \(True = hidden\) .*float8_e4m3fn; .*float\(\)"
    ):
        StreamMultiHeadAttention(8, 4)(X, X, X, padding, attn_mask=mask)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("sizes", [{}, {"kdim": 8, "vdim": 6}], ids=["fused", "separate"])
def test_inputs_are_of_the_parameters_dtype(sizes: dict[str, Any], dtype: torch.dtype, name: str):
    inputs = {"query": X, "key": X, "value": X[..., : sizes.get("vdim", 8)]}
    inputs[name] = inputs[name].to(dtype)
    with pytest.raises(TypeError) as caught:
        StreamMultiHeadAttention(8, 4, **sizes)(**inputs)
    message = str(caught.value)
    assert f"{name} must be torch.float32" in message
    assert f"got {dtype}; convert it with {name}.to(torch.float32)" in message
    assert (f"layer.to({dtype})" in message) == dtype.is_floating_point


@pytest.mark.parametrize("layer_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_under_autocast_inputs_are_of_any_dtype_it_casts(dtype: torch.dtype, layer_dtype: torch.dtype):
    layer = StreamMultiHeadAttention(8, 4, dtype=layer_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(X.to(dtype), X, X)
        assert out.dtype == torch.bfloat16
        with pytest.raises(TypeError, match="key must be"):
            layer(X, X.double(), X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_a_nested_mask_is_refused(name: str):
    mask = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)])
    with pytest.raises(TypeError, match=f"{name} must be a dense tensor, got a nested tensor"):
        StreamMultiHeadAttention(8, 4)(X, X, X, **{name: mask})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_refused(layout: torch.layout):
    x = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=layout)
    with pytest.raises(TypeError, match=r"nested tensor; .*key_padding_mask.*enable_nested_tensor=False"):
        StreamMultiHeadAttention(8, 4, batch_first=True)(x, x, x)
