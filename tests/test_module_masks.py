"""Masks of `StreamMultiHeadAttention`: where an entry hides, and what two masks make together."""

from __future__ import annotations

import math

import pytest
import torch

from streamattn import StreamMultiHeadAttention, attention
from streamattn.pattern import UNBOUNDED
from streamattn.weights import attention_weights, combine_masks
from tests.mha import EMBED_DIM, twins

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def test_a_mask_hides_in_the_weights_as_in_the_output() -> None:
    """A NaN shows in its row; an entry that float32 can't hold hides, whatever the mask's own dtype holds."""
    layer = StreamMultiHeadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    mask = torch.zeros(4, 4, dtype=torch.float64)
    mask[0, 1] = torch.nan
    mask[1] = mask[2, 3] = -1e39
    out, weights = layer(x, x, x, attn_mask=mask)
    assert weights is not None
    assert (
        weights.isnan().all(-1)[0].tolist() == out.isnan().all(-1)[0].tolist() == [True, False, False, False]
    )
    assert not weights[0, 1].any()
    torch.testing.assert_close(weights[0, 2:].sum(-1), torch.ones(2))
    assert weights[0, 2, 3] == 0.0


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside_another"])
@pytest.mark.parametrize(
    ("dtype", "hides", "shows"),
    [
        (torch.float16, -32752.0, -32736.0),
        (torch.float32, torch.finfo(torch.float32).min / 2, torch.finfo(torch.float32).min * 0.499),
        (torch.float64, torch.finfo(torch.float32).min, torch.finfo(torch.float32).min * 0.999),
    ],
    ids=str,
)
def test_where_a_mask_begins_to_hide(dtype: torch.dtype, hides: float, shows: float, beside: bool) -> None:
    """In the weights as in the output, by the mask's own dtype, also in a sum of another."""
    layer = StreamMultiHeadAttention(8, 2, batch_first=True)
    x, key = torch.randn(1, 2, 8), torch.randn(1, 3, 8)

    def attend(entries: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.tensor([entries], dtype=dtype)
        masks = {"key_padding_mask": mask, "attn_mask": torch.zeros(2, 3)}
        out, weights = layer(x, key, key, **(masks if beside else {"attn_mask": mask.expand(2, 3)}))
        return out, weights

    _, weights = attend([shows, shows, shows])
    assert (weights > 0).all()
    key[:, 1] = torch.nan
    out, weights = attend([0.0, hides, 0.0])
    assert out.isfinite().all()
    torch.testing.assert_close(weights[..., 1], torch.zeros(1, 2))
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("dtype", "a", "b", "total"),
    [
        (torch.float16, 60000.0, 60000.0, 120000.0),
        (torch.float16, -20000.0, -20000.0, -40000.0),  # float16 would hide that
        (torch.float16, 2048.0, 1.0, 2049.0),
        (torch.bfloat16, 256.0, 1.0, 257.0),
        (torch.float32, 1.5, -3.0, -1.5),
    ],
    ids=str,
)
def test_two_masks_are_added_at_least_in_float32(dtype: torch.dtype, a: float, b: float, total: float):
    got = combine_masks(torch.tensor([[a], [0.0]], dtype=dtype), torch.tensor([[b, 0.0]], dtype=dtype))
    assert got is not None
    assert got.dtype == torch.float32
    assert got.tolist() == [[total, a], [b, 0.0]]


@pytest.mark.parametrize("of_a", FLOATING, ids=str)
@pytest.mark.parametrize("of_b", FLOATING, ids=str)
def test_no_finite_pair_overflows_or_hides_what_neither_does(of_a: torch.dtype, of_b: torch.dtype):
    extremes = []
    for dtype in (of_a, of_b):
        largest, shown = torch.finfo(dtype).max, torch.finfo(dtype).min / 2 * (1 - 2 * torch.finfo(dtype).eps)
        extremes.append(torch.tensor([largest, shown, largest / 2, 0.0, -1.0], dtype=dtype))
    got = combine_masks(extremes[0][:, None], extremes[1])
    assert got is not None
    assert got.isfinite().all()
    assert (got > torch.finfo(got.dtype).min / 2).all()
    q = torch.zeros(1, 1, 5, 4, dtype=got.dtype)
    low = got[1].expand(5, 5)[:, 1:2]  # a row whose only key has the lowest sum
    assert attention(q, q[:, :, :1], q[:, :, :1] + 1.0, attn_mask=low).tolist() == q.add(1.0).tolist()


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("hides", [-torch.inf, "min", "half"], ids=str)
@pytest.mark.parametrize("other", [0.0, torch.inf, torch.nan, "max", "min"], ids=str)
def test_what_one_mask_hides_stays_hidden(dtype: torch.dtype, hides: float | str, other: float | str):
    """Whatever the other says: hidden is hidden, and no NaN."""
    info = torch.finfo(dtype)
    named = {"min": info.min, "half": info.min / 2, "max": info.max}
    hiding, beside = (torch.tensor([named.get(str(x), x), 0.0], dtype=dtype) for x in (hides, other))
    for pair in ((hiding, beside), (beside, hiding)):
        got = combine_masks(*pair)
        assert got is not None
        assert got.tolist() == [-torch.inf, 0.0]


@pytest.mark.parametrize("special", [torch.inf, torch.nan], ids=str)
def test_what_no_mask_hides_shows(special: float):
    got = combine_masks(torch.tensor([special, 0.0]), torch.tensor([1.0, special]))
    assert got is not None
    assert torch.equal(got.isnan(), torch.full((2,), math.isnan(special)))
    assert math.isnan(special) or got.tolist() == [torch.inf, torch.inf]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", [(60000.0, 60000.0), (-20000.0, -20000.0), (1024.0, 0.3)], ids=str)
@pytest.mark.parametrize("extras", [{}, {"add_zero_attn": True}], ids=str)
def test_two_masks_in_half_precision_equal_torch_in_float32(dtype, pair, extras):
    """torch adds them in half precision: there the first pair is inf, and its rows are NaN."""
    theirs, ours = twins(torch.float32, batch_first=True, **extras)
    ours = ours.to(dtype)
    x = torch.randn(2, 4, EMBED_DIM)
    padding, mask = (torch.full(shape, y).to(dtype) for shape, y in zip([(2, 4), (4, 4)], pair, strict=True))
    padding[0, 1] = mask[2, 3] = -math.inf
    mask[:, 2] -= 1.0  # lost where the sum is rounded to half precision
    wanted, wanted_weights = theirs(x, x, x, padding.float(), attn_mask=mask.float())
    trained = [padding.requires_grad_(), mask.requires_grad_()]
    half = x.to(dtype).requires_grad_()
    out, weights = ours(half, half, half, padding, attn_mask=mask)
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), wanted, rtol=0.0, atol=tolerance * wanted.abs().max().item())
    torch.testing.assert_close(weights.float(), wanted_weights, rtol=0.0, atol=tolerance)
    (out.sum() + weights.square().sum()).backward()
    for given in (half, *trained):
        assert given.grad is not None
        assert given.grad.dtype == dtype
        assert given.grad.isfinite().all()


def test_a_nan_in_a_query_that_sees_nothing_reaches_no_weight():
    q, k = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        q[:, :, 1] = torch.nan
    mask = torch.tensor([True, False, True]).view(1, 1, 3, 1)
    _, lse = attention(q, k, k, attn_mask=mask, return_lse=True)
    weights = attention_weights(q, k, lse, scale=0.5, window=(UNBOUNDED, UNBOUNDED), attn_mask=mask)
    assert not weights[:, :, 1].any()
    dq, dk = torch.autograd.grad(weights.square().sum(), (q, k))
    assert not dq[:, :, 1].any()
    assert dq.isfinite().all()
    assert dk.isfinite().all()
