"""flash-attn's functions on a GPU: the CPU's results, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streamattn.compat import flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.gpu


def unwatched_then_watched(call: Callable[[], Tensor]) -> Tensor:
    """The second result; kernels are compiled by the first call, and a wait in the second one raises."""
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_documents(same, alibi):
    torch.manual_seed(0)
    bounds = torch.tensor([0, 300, 300, 800], dtype=torch.int32)
    q, k, v = (torch.randn(800, heads, 64, requires_grad=True) for heads in (4, 2, 2))
    slopes = torch.rand(4) if alibi else None

    def call(device: str) -> Callable[[], Tensor]:
        cu = bounds.to(device)
        other = cu if same else cu.clone()
        moved = [x.detach().to(device).requires_grad_() for x in (q, k, v)]
        rates = None if slopes is None else slopes.to(device)

        def once() -> Tensor:
            out = flash_attn_varlen_func(
                moved[0], moved[1], moved[2], cu, other, 500, 500, causal=True, alibi_slopes=rates
            )
            return torch.cat([out.detach(), *torch.autograd.grad(out.sum(), moved)], dim=1)

        return once

    got = unwatched_then_watched(call("cuda")).cpu()
    torch.testing.assert_close(got, call("cpu")(), rtol=1e-4, atol=1e-4)


def test_a_cache():
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, heads, 64) for heads in (4, 2, 2))
    caches = torch.randn(2, 5, 400, 2, 64)
    filled, rows, pads = (torch.tensor(x, dtype=torch.int32) for x in ([5, 398, 17], [4, 0, 2], [0, 30, 17]))

    def call(device: str) -> Callable[[], Tensor]:
        k_cache, v_cache = caches.to(device, copy=True)
        new = [x.to(device) for x in (q, k, v)]
        lengths, index, left = filled.to(device), rows.to(device), pads.to(device)

        def once() -> Tensor:
            return flash_attn_with_kvcache(
                new[0],
                k_cache,
                v_cache,
                new[1],
                new[2],
                cache_seqlens=lengths,
                cache_batch_idx=index,
                cache_leftpad=left,
                causal=True,
            )

        return once

    got = unwatched_then_watched(call("cuda")).cpu()
    torch.testing.assert_close(got, call("cpu")(), rtol=1e-4, atol=1e-4)
