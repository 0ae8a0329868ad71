"""The dropout mask: new at every call, the same after a seed, the same in the backward."""

from __future__ import annotations

import torch

from streamattn import attention
from tests.cases import Case, run
from tests.oracle import kept_probability


# Dao-AILab/flash-attention#314: every call drew the same mask
def test_the_generator_advances_and_a_seed_reproduces(device, backend):
    inputs = Case(q_len=64, kv_len=64).build(device=device)

    def call() -> torch.Tensor:
        return attention(inputs.q, inputs.k, inputs.v, dropout_p=0.5, backend=backend).detach()

    torch.manual_seed(0)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(first, call())
    assert torch.equal(second, call())


# Dao-AILab/flash-attention#314: batches and heads have masks of their own
def test_no_two_heads_share_a_mask(device, backend):
    zeros = torch.zeros(3, 4, 64, 16, device=device)
    eye = torch.eye(64, device=device).expand(3, 4, 64, 64)
    kept = attention(zeros, zeros, eye, dropout_p=0.5, backend=backend) != 0
    rows = kept.flatten(0, 2)
    assert len(torch.unique(rows, dim=0)) == len(rows)


# Dao-AILab/flash-attention#314: the backward applies the forward's mask
def test_the_backward_uses_the_mask_of_its_forward(device, backend):
    """out is linear in v, so dv of <out, dout> is the dropped weights' transpose times dout."""
    inputs = Case(q_len=40, kv_len=50).build(device=device)
    eye = torch.eye(50, device=device).expand(2, 2, 50, 50)
    torch.manual_seed(4)
    weights = attention(inputs.q, inputs.k, eye, dropout_p=0.3, backend=backend).detach()
    torch.manual_seed(4)
    got = run(attention, inputs, dropout_p=0.3, return_lse=True, backend=backend)
    torch.testing.assert_close(got["dv"], weights.mT @ inputs.dout, rtol=0, atol=1e-5)
    torch.testing.assert_close(got["out"], weights @ inputs.v.detach(), rtol=0, atol=1e-5)


# Dao-AILab/flash-attention#314: no dropout draws no number
def test_without_dropout_the_generator_stays(device, backend):
    inputs = Case().build(device=device)
    torch.manual_seed(0)
    attention(inputs.q, inputs.k, inputs.v, dropout_p=0.0, backend=backend)
    after = torch.rand(1, device=device)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1, device=device))


def test_lse_is_taken_before_dropout(device, backend):
    inputs = Case(q_len=40, kv_len=40).build(device=device)
    _, plain = attention(inputs.q, inputs.k, inputs.v, return_lse=True, backend=backend)
    _, dropped = attention(inputs.q, inputs.k, inputs.v, return_lse=True, dropout_p=0.5, backend=backend)
    torch.testing.assert_close(dropped, plain, rtol=0, atol=5e-6)


def test_survivors_are_scaled_by_the_rounded_probability(device, backend):
    zeros = torch.zeros(1, 1, 64, 16, device=device)
    eye = torch.eye(64, device=device).expand(1, 1, 64, 64)
    out = attention(zeros, zeros, eye, dropout_p=0.3, backend=backend)
    want = torch.full_like(out, 1 / 64 / kept_probability(0.3))
    torch.testing.assert_close(out[out != 0], want[out != 0], rtol=1e-6, atol=0)
