"""float32 is float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from streamattn import attention
from tests.cases import Case, expected, relative_errors, run


# triton-lang/triton#1671: float32 products were silently rounded to TF32
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_float32_is_as_exact_as_pytorchs_plain_formula(head_dim, causal, device, backend):
    inputs = Case(q_len=256, kv_len=256, head_dim=head_dim, causal=causal).build(device=device)
    inputs.dlse.zero_()
    want = expected(inputs)
    got = run(attention, inputs, return_lse=True, backend=backend)
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal)
        grads = torch.autograd.grad(out, [inputs.q, inputs.k, inputs.v], inputs.dout)
    for name, peer in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True):
        ours, theirs = relative_errors(got[name], want[name])[0], relative_errors(peer, want[name])[0]
        assert ours <= 2 * theirs + 1e-8, f"{name}: {ours:.3g} against {theirs:.3g}"


# triton-lang/triton#1671: the scores themselves, where TF32's ten bits would show at once
def test_scores_keep_24_bits(device, backend):
    q = torch.full((1, 1, 1, 16), 1.0 + 2.0**-18, device=device)
    k = torch.full((1, 1, 1, 16), 1.0 + 2.0**-17, device=device)
    _, lse = attention(q, k, k, scale=1.0, return_lse=True, backend=backend)
    assert abs(float(lse) - 16 * (1.0 + 2.0**-18) * (1.0 + 2.0**-17)) < 4e-6
