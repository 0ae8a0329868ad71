"""Fewer or more queries than keys: causal attention is aligned at the bottom right."""

from __future__ import annotations

import pytest
import torch

from streamattn import attention
from tests.cases import Case, expected, judge, run


def seen(q_len: int, kv_len: int, device: str, backend: str, **options) -> list[list[int]]:
    """For each query the keys that get a weight."""
    q, k = torch.zeros(1, 1, q_len, 16, device=device), torch.zeros(1, 1, kv_len, 16, device=device)
    eye = torch.zeros(1, 1, kv_len, 16, device=device)
    eye[0, 0, torch.arange(kv_len), torch.arange(kv_len)] = 1.0
    out = attention(q, k, eye, backend=backend, **options)[0, 0]
    return [row.nonzero().flatten().tolist() for row in out]


# Dao-AILab/flash-attention#282, #402: two queries on five keys
def test_two_queries_on_five_keys(device, backend):
    assert seen(2, 5, device, backend, causal=True) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]


# Dao-AILab/flash-attention#1778: five queries on two keys; the first three see nothing
def test_five_queries_on_two_keys(device, backend):
    assert seen(5, 2, device, backend, causal=True) == [[], [], [], [0], [0, 1]]
    inputs = Case(q_len=5, kv_len=2, causal=True).build(device=device)
    got = run(attention, inputs, return_lse=True, backend=backend)
    assert not got["out"][:, :, :3].any()
    assert not got["dq"][:, :, :3].any()
    judge(got, expected(inputs), torch.float32)


# pytorch/pytorch#108108: one query sees all of its cache
@pytest.mark.parametrize("kv_len", [1, 8, 300])
def test_one_query_sees_its_whole_cache(kv_len, device, backend):
    inputs = Case(q_len=1, kv_len=kv_len, causal=True).build(device=device)
    causal = attention(inputs.q, inputs.k, inputs.v, causal=True, backend=backend)
    full = attention(inputs.q, inputs.k, inputs.v, backend=backend)
    torch.testing.assert_close(causal, full, rtol=0, atol=5e-6)


# QwenLM/Qwen#979: a chunk of five on a cache of two equals one token after the other
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": 3}], ids=str)
@pytest.mark.parametrize(("cached", "chunk"), [(2, 5), (0, 7), (250, 20)])
def test_a_chunk_equals_token_by_token(cached, chunk, options, device, backend):
    total = cached + chunk
    inputs = Case(q_len=total, kv_len=total).build(device=device)
    q, k, v = inputs.q.detach(), inputs.k.detach(), inputs.v.detach()
    at_once = attention(q[:, :, cached:], k, v, **options, backend=backend)
    for i in range(cached, total):
        step = attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], **options, backend=backend)
        torch.testing.assert_close(at_once[:, :, i - cached], step[:, :, 0], rtol=0, atol=5e-6)


# QwenLM/Qwen#979: the same in a cache with room, its fill level in kv_lengths
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": 3}, {"window_size": (2, 1)}], ids=str)
def test_a_static_cache_equals_the_filled_part(options, device, backend):
    inputs = Case(batch=3, q_len=4, kv_len=64).build(device=device)
    lengths = torch.tensor([4, 17, 64], device=device)
    with torch.no_grad():
        for b, n in enumerate(lengths.tolist()):
            inputs.k[b, :, n:] = float("nan")
            inputs.v[b, :, n:] = float("nan")
    out = attention(inputs.q, inputs.k, inputs.v, kv_lengths=lengths, **options, backend=backend)
    for b, n in enumerate(lengths.tolist()):
        q, k, v = inputs.q[b : b + 1], inputs.k[b : b + 1, :, :n], inputs.v[b : b + 1, :, :n]
        torch.testing.assert_close(
            out[b : b + 1], attention(q, k, v, **options, backend=backend), rtol=0, atol=5e-6
        )
