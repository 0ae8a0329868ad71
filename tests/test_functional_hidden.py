"""NaN and Inf: hidden keys reach no head they are hidden from, seen ones show in the rows that see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from streamattn import attention, reference
from streamattn.kernels import cpu
from tests.cases import Case, Inputs, Result, expected, judge, run
from tests.oracle import visible_pairs

RULES: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"causal": True, "kv_len": 11},
    "window": {"window_size": (3, 2)},
    "segments": {"segments": "pair", "kv_len": 11},
    "lengths": {"lengths": "extreme", "causal": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
}


def seen_pairs(case: Case, inputs: Inputs) -> Tensor:
    """bool [B, Hkv, G, Tq, Tk]."""
    rules = ("causal", "window_size", "attn_mask", "segment_ids", "kv_lengths")
    options = {name: inputs.options[name] for name in rules if name in inputs.options}
    seen = visible_pairs(case.batch, case.q_len, case.kv_len, **options)
    seen = seen.expand(case.batch, case.q_heads, case.q_len, case.kv_len)
    return seen.unflatten(1, (case.kv_heads, -1))


def mask_by_head(case: Case, kind: str) -> Tensor:
    """Hides from every other head of a group what the heads between may see, and some pairs from all."""
    gen = torch.Generator().manual_seed(3)
    shown = torch.rand(case.q_heads, case.q_len, case.kv_len, generator=gen) < 0.8
    early = torch.arange(case.kv_len) < case.kv_len // 2
    shown[0::2] &= early
    shown[1::2] &= ~early
    if kind == "bool":
        return shown
    bias = torch.randn(shown.shape, generator=gen).masked_fill(~shown, -torch.inf)
    return bias.requires_grad_(kind == "trained")


@pytest.mark.parametrize("held", ["k", "v", "both"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 3e38], ids=str)  # products overflow
@pytest.mark.parametrize("kind", ["bool", "additive", "trained"])
@pytest.mark.parametrize(
    ("backend", "rule"),
    [("reference", rule) for rule in RULES] + [("sdpa", rule) for rule in RULES if rule != "softcap"],
)
def test_a_key_hidden_from_one_head_of_a_group(backend, rule, kind, poison, held, monkeypatch):
    case = Case(q_heads=4, kv_heads=2, **RULES[rule])
    if rule == "causal":  # several tiles and strips
        for module, name in ((reference, "BLOCK_M"), (reference, "BLOCK_N"), (cpu, "BLOCK_M")):
            monkeypatch.setattr(module, name, 3)
    inputs = case.build()
    inputs.options["attn_mask"] = mask_by_head(case, kind)
    inputs.dlse.zero_()
    want = expected(inputs)

    seen = seen_pairs(case, inputs)
    sees_key = seen.any(3)  # [B, Hkv, G, Tk]
    split = sees_key.any(2) & ~sees_key.all(2)  # seen by one head of the group, hidden from another
    poisoned = split & (torch.arange(case.kv_len) >= case.kv_len // 2)
    assert poisoned.any(), "the case poisons nothing"
    dirty = (sees_key & poisoned.unsqueeze(2)).any(-1)  # [B, Hkv, G]
    assert (~dirty).any(), "the case leaves no head to look at"
    clean_keys = ~(sees_key & dirty.unsqueeze(-1)).any(2)  # [B, Hkv, Tk]: no dirty head sees them
    with torch.no_grad():
        for x in {"k": [inputs.k], "v": [inputs.v], "both": [inputs.k, inputs.v]}[held]:
            x[poisoned] = poison

    got = run(attention, inputs, return_lse=True, backend=backend)
    keep = {name: ~dirty.flatten(1) for name in ("out", "lse", "dq")} | {"dk": clean_keys, "dv": clean_keys}
    left, right = (Result({name: x[name][rows] for name, rows in keep.items()}) for x in (got, want))
    judge(left, right, torch.float32)


@pytest.mark.parametrize(
    ("backend", "held"), [("reference", "mask"), ("sdpa", "mask"), ("sdpa", "q"), ("sdpa", "dout")]
)
def test_a_row_of_nan_reaches_no_key_that_its_head_does_not_see(backend, held):
    """k and v are finite: nothing but the gradient of the row's own head shows it."""
    case = Case(q_heads=4, kv_heads=2)
    inputs = case.build()
    mask = mask_by_head(case, "additive")
    inputs.options["attn_mask"] = mask
    inputs.dlse.zero_()
    want = expected(inputs)
    row = case.q_len - 1
    with torch.no_grad():
        if held == "mask":
            mask[0, row, 0] = torch.nan
        else:
            {"q": inputs.q, "dout": inputs.dout}[held][:, 0, row] = torch.nan
    out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend=backend)
    dk, dv = torch.autograd.grad(out, (inputs.k, inputs.v), inputs.dout)
    late = slice(case.kv_len // 2, None)  # hidden from head 0, seen by head 1 of its group
    got = Result({"dk": dk[:, :, late], "dv": dv[:, :, late]})
    judge(got, Result({name: want[name][:, :, late] for name in ("dk", "dv")}), torch.float32)
    assert dk[:, 0].isnan().any(), "the row shows nowhere"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 15, 16, 17, 33])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_row_of_nan_scores_is_nan(backend, length, causal, dtype):
    """It does not pass for one that sees nothing, which is 0: a run that diverged would go on unnoticed."""
    q, k, v = (torch.randn(1, 2, length, 8, dtype=dtype) for _ in range(3))
    row = length // 2
    q[:, :, row] = torch.nan
    q.requires_grad_()
    out, lse = attention(q, k, v, causal=causal, return_lse=True, backend=backend)
    wanted = torch.arange(length) == row
    assert torch.equal(out.isnan().all(-1), wanted.expand(1, 2, -1))
    assert torch.equal(lse.isnan(), wanted.expand(1, 2, -1))
    (dq,) = torch.autograd.grad(out.sum(), q)
    spread = wanted.expand(1, 2, -1)
    if backend == "sdpa":  # on processors that take rows of bfloat16 by pairs PyTorch's backward loses two
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        spread = spread | torch.autograd.grad(theirs.sum(), q)[0].isnan().all(-1)
    assert torch.equal(dq.isnan().all(-1), spread)
