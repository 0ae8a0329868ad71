"""Masks that hide whole rows or tiles, and windows: faults that users of other attention layers reported."""

from __future__ import annotations

import pytest
import torch

from streamattn import attention
from tests.cases import Case, expected, judge, run


def blind_row(hide: object, device: str) -> torch.Tensor:
    """[8, 8] masks whose rows 0 and 5 see nothing."""
    mask = torch.ones(8, 8, dtype=torch.bool, device=device)
    mask[[0, 5]] = False
    if hide is False:
        return mask
    return torch.zeros(8, 8, device=device).masked_fill(~mask, float(hide))  # pyright: ignore[reportArgumentType]


# pytorch/pytorch#103963, #103749, #109517: a fully masked row gave NaN
@pytest.mark.parametrize("hide", [False, float("-inf"), torch.finfo(torch.float32).min], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_fully_masked_row_is_zero_with_finite_gradients(hide, causal, device, backend):
    inputs = Case(causal=causal).build(device=device)
    inputs.options["attn_mask"] = blind_row(hide, device)
    got = run(attention, inputs, return_lse=True, backend=backend)
    assert not got["out"][:, :, [0, 5]].any()
    assert (got["lse"][:, :, [0, 5]] == -torch.inf).all()
    assert not got["dq"][:, :, [0, 5]].any()
    judge(got, expected(inputs), torch.float32)


# pytorch/pytorch#103963: the same for a whole sequence, as a batch that is all padding makes it
def test_a_fully_masked_sequence_is_zero_and_leaves_the_others_alone(device, backend):
    inputs = Case(batch=3).build(device=device)
    mask = torch.ones(3, 1, 1, 8, dtype=torch.bool, device=device)
    mask[1] = False
    inputs.options["attn_mask"] = mask
    got = run(attention, inputs, return_lse=True, backend=backend)
    for name in ("out", "dq", "dk", "dv"):
        assert not got[name][1].any()
    judge(got, expected(inputs), torch.float32)


# pytorch/pytorch#103749: a trained mask must not get NaN where it hides
def test_the_gradient_of_a_mask_is_zero_where_it_hides(device, backend):
    inputs = Case(mask="trained").build(device=device)
    mask = inputs.options["attn_mask"]
    got = run(attention, inputs, return_lse=True, backend=backend)
    assert not got["dmask"][mask == -torch.inf].any()
    judge(got, expected(inputs), torch.float32)


# FlagOpen/FlagAttention#25: a window smaller than a tile left a whole tile at -inf
@pytest.mark.parametrize("window_size", [1, 3, 17, (4, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("sizes", [(300, 300), (40, 300), (300, 40)], ids=str)
def test_a_window_smaller_than_a_tile(window_size, sizes, device, backend):
    inputs = Case(batch=1, q_len=sizes[0], kv_len=sizes[1], window_size=window_size).build(device=device)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# FlagOpen/FlagAttention#25: as above, by a mask that hides whole tiles, of 512 keys on the CPU, before others
@pytest.mark.parametrize("hidden", [slice(0, 600), slice(600, None), slice(100, 1100)], ids=str)
def test_whole_tiles_hidden_by_a_mask(hidden, device, backend):
    inputs = Case(batch=1, q_len=70, kv_len=1200).build(device=device)
    mask = torch.ones(70, 1200, dtype=torch.bool, device=device)
    mask[:, hidden] = False
    inputs.options["attn_mask"] = mask
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# huggingface/transformers#39408: a window of 4 must show 4 keys, the query's own included
def test_a_window_of_four_shows_four_keys(device, backend):
    zeros = torch.zeros(1, 1, 16, 16, device=device)
    eye = torch.eye(16, device=device).expand(1, 1, 16, 16)
    weights = attention(zeros, zeros, eye, window_size=4, backend=backend)[0, 0]
    for i in range(16):
        assert weights[i].nonzero().flatten().tolist() == list(range(max(0, i - 3), i + 1))


# Dao-AILab/flash-attention#1133: a window as long as the sequence is no window
@pytest.mark.parametrize("size", [1, 8, 65, 300])
@pytest.mark.parametrize("beyond", [0, 1, 1000])
def test_a_window_of_the_whole_sequence_is_causal(size, beyond, device, backend):
    inputs = Case(q_len=size, kv_len=size).build(device=device)
    causal = attention(inputs.q, inputs.k, inputs.v, causal=True, backend=backend)
    window = attention(inputs.q, inputs.k, inputs.v, window_size=size + beyond, backend=backend)
    torch.testing.assert_close(window, causal, rtol=0, atol=5e-6)


# Dao-AILab/flash-attention#1133: and both sides open are no window at all
def test_an_open_window_is_full_attention(device, backend):
    inputs = Case(q_len=9, kv_len=40).build(device=device)
    full = attention(inputs.q, inputs.k, inputs.v, backend=backend)
    for window_size in ((-1, -1), (1000, 1000), (2**30, 2**31)):
        window = attention(inputs.q, inputs.k, inputs.v, window_size=window_size, backend=backend)
        torch.testing.assert_close(window, full, rtol=0, atol=5e-6)
