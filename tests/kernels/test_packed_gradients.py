"""The portable kernels write dq, dk and dv side by side into one tensor, the same bits as into three."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import attention
from streamattn.kernels import backward
from streamattn.packed import packed_attention, unpacked

CASES = [
    # dtype, heads, kv_heads, head_dim, backend, sequence first
    (torch.float32, 2, 2, 16, "triton", False),
    (torch.float32, 4, 1, 16, "triton", True),
    (torch.float16, 4, 2, 20, "triton", True),
    (torch.float16, 2, 1, 264, "wide", False),
]


def side_by_side(dtype: torch.dtype, heads: int, head_dim: int, sequence_first: bool) -> Tensor:
    """qkv [2, 37, heads, head_dim]."""
    shape = (37, 2, heads, head_dim) if sequence_first else (2, 37, heads, head_dim)
    leaf = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    return leaf.transpose(0, 1) if sequence_first else leaf


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "backend", "sequence_first"), CASES)
def test_the_same_bits_side_by_side(
    dtype, heads, kv_heads, head_dim, backend, sequence_first, use_tile, monkeypatch
):
    use_tile(16, 32)
    keys: list[Hashable] = []
    launch = backward.launch

    def recording(kernel: Any, key: Hashable, *rest: Any) -> None:
        keys.append(key)
        launch(kernel, key, *rest)

    monkeypatch.setattr(backward, "launch", recording)
    qkv = side_by_side(dtype, heads + 2 * kv_heads, head_dim, sequence_first)
    out, lse = packed_attention(qkv, num_kv_heads=kv_heads, causal=True, backend=backend)
    dout = torch.randn(out.shape).to(dtype)
    (got,) = torch.autograd.grad(out, qkv, dout)
    assert got.stride() == qkv.stride()
    parts = unpacked(qkv, heads)
    other, other_lse = attention(*parts, causal=True, backend=backend, return_lse=True)
    assert torch.equal(out, other) and torch.equal(lse, other_lse)
    for one, two in zip(unpacked(got, heads), torch.autograd.grad(other, parts, dout), strict=True):
        assert torch.isfinite(two).all() and torch.equal(one, two)
    assert backend == "wide" or len(set(keys)) == 2, "a plan holds the strides that it writes"
