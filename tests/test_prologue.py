"""QK-norm and rotary embedding as PyTorch sees them: formulas on the CPU, operators, compiling, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3 import modeling_qwen3

import streamattn
from streamattn import qk_norm_rope
from tests.prologue_cases import NAMES, Prologue, eager, error, ours, results

CASES = {
    "olmo2": Prologue(),
    "grouped": Prologue(heads=(4, 2), head_dim=12),
    "qwen3": Prologue(norm="each", heads=(4, 2), half_angles=True),
    "gemma3": Prologue(norm="each + 1", half_angles=True),
    "partial": Prologue(rotary=6, layout="fused"),
    "interleaved": Prologue(interleaved=True, layout="sequence first", norm="each"),
    "one head": Prologue(heads=(1, 1), norm="each"),
    "float weights": Prologue(float_weights=True, batch=3),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_the_eager_steps_and_gradients_no_further_off(name, dtype):
    """Forward the same bits; backward in float32 throughout, where eager steps round."""
    case = CASES[name]
    got, theirs = results(ours, case, dtype), results(eager, case, dtype)
    want = results(eager, case, dtype, exact=True)
    for at, (which, left, right) in enumerate(zip(NAMES, got, theirs, strict=True)):
        if at < 2:
            assert torch.equal(left, right), which
        limit = {torch.float64: 1e-14, torch.float32: 2e-7}.get(dtype, 0.0)
        assert error(left, want[at]) <= max(1.1 * error(right, want[at]), limit), which


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_eager_steps_are_those_of_the_models(dtype):
    """What the other tests compare with, against transformers' own modules."""
    case = Prologue(heads=(4, 4), head_dim=12)
    (q, k, q_weight, k_weight), (cos, sin), _ = case.build(dtype)
    norm = modeling_olmo2.Olmo2RMSNorm(48, 1e-6)
    made: list[Any] = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        norm.weight.data = weight.detach()
        made.append(norm(x).unflatten(2, (-1, 12)).transpose(1, 2))
    want = modeling_olmo2.apply_rotary_pos_emb(made[0], made[1], cos, sin)
    assert all(map(torch.equal, ours(case, q, k, q_weight, k_weight, cos, sin), want))

    for name, module in (("each", modeling_qwen3.Qwen3RMSNorm), ("each + 1", Gemma3RMSNorm)):
        case = Prologue(heads=(4, 2), head_dim=12, norm=name, half_angles=True)
        (q, k, q_weight, k_weight), (cos, sin), _ = case.build(dtype)
        norm, made = module(12, eps=1e-6), []
        for x, weight in ((q, q_weight), (k, k_weight)):
            norm.weight.data = weight.detach()
            made.append(norm(x.unflatten(2, (-1, 12))).transpose(1, 2))
        want = modeling_qwen3.apply_rotary_pos_emb(made[0], made[1], cos, sin)
        assert all(map(torch.equal, ours(case, q, k, q_weight, k_weight, cos, sin), want))


def test_a_weight_in_float32_loses_nothing_of_float64():
    """What is added to it is formed in float64 too."""
    q, angles = torch.randn(1, 3, 8, dtype=torch.float64), torch.randn(1, 3, 8, dtype=torch.float64)
    weight = torch.randn(8)
    got = [
        qk_norm_rope(q, q, x, x, angles.cos(), angles.sin(), head_dim=8, weight_offset=1 / 3)[0]
        for x in (weight, weight.double())
    ]
    assert torch.equal(*got)


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    trained, angles, _ = CASES[name].build(torch.float64)
    call = lambda *xs: ours(CASES[name], *xs, *angles)  # noqa: E731
    assert torch.autograd.gradcheck(call, trained, fast_mode=True)


def op_arguments(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    case = CASES[name]
    trained, angles, _ = case.build(dtype)
    options = case.options
    numbers = (case.head_dim, 1e-6, options.get("weight_offset", 0.0))
    return *trained, *angles, *numbers, case.interleaved, options.get("round_before_weight", False)


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    torch.library.opcheck(torch.ops.streamattn.prologue_forward.default, op_arguments(name))


@pytest.mark.parametrize("name", CASES)
def test_opcheck_of_the_backward(name):
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in op_arguments(name)]
    outs = torch.ops.streamattn.prologue_forward(*arguments)
    torch.library.opcheck(
        torch.ops.streamattn.prologue_backward.default,
        (*outs, *arguments[:-1]),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["olmo2", "partial"])
def test_compiles_into_one_graph(name, backend):
    case = CASES[name]
    torch._dynamo.reset()
    got = results(torch.compile(ours, backend=backend, fullgraph=True), case, torch.float32)
    assert all(map(torch.equal, got, results(ours, case, torch.float32)))


def test_checkpointed_and_used_twice():
    case = Prologue()
    trained, angles, douts = case.build(torch.float64)

    def block(*xs: Tensor) -> Tensor:
        q, k = ours(case, *xs, *angles)
        return (q * k).sum() + (q * douts[0]).sum() + xs[0].sum()

    want = torch.autograd.grad(block(*trained), trained)
    got = torch.autograd.grad(checkpoint(block, *trained, use_reentrant=False), trained)
    assert all(map(torch.equal, got, want))


def test_gradients_are_contiguous_whatever_strides_come():
    """The fake kernel says so, and a compiled graph relies on it."""
    trained, angles, douts = CASES["olmo2"].build(torch.float64)
    outs = ours(CASES["olmo2"], *trained, *angles)
    dq, dk, _, _ = torch.autograd.grad(outs, trained, [x.mT.contiguous().mT for x in douts])
    assert dq.is_contiguous() and dk.is_contiguous()


def test_other_derivatives_are_refused():
    trained, angles, _ = CASES["olmo2"].build(torch.float64)
    out, _ = ours(CASES["olmo2"], *trained, *angles)
    (grad,) = torch.autograd.grad(out.sin().sum(), trained[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), trained[0])
    with pytest.raises(NotImplementedError, match=r"no torch\.func derivative"):
        torch.func.grad(lambda x: ours(CASES["olmo2"], x, *trained[1:], *angles)[0].sum())(trained[0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(trained[0].detach(), torch.ones_like(trained[0]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            ours(CASES["olmo2"], dual, *trained[1:], *angles)
        angles[0] = forward_ad.make_dual(angles[0], torch.ones_like(angles[0]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            ours(CASES["olmo2"], *trained, *angles)


@pytest.mark.parametrize("shape", [(0, 7), (2, 0)])
def test_empty_tensors(shape):
    q, k = (torch.zeros(*shape, width, requires_grad=True) for width in (64, 32))
    q_weight, k_weight = (torch.ones(x.shape[2], requires_grad=True) for x in (q, k))
    cos, sin = torch.zeros(1, shape[1], 16), torch.zeros(1, shape[1], 16)
    outs = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, head_dim=16)
    assert [x.shape for x in outs] == [(shape[0], 4, shape[1], 16), (shape[0], 2, shape[1], 16)]
    (outs[0].sum() + outs[1].sum()).backward()
    assert q.grad is not None and q.grad.shape == q.shape
    assert q_weight.grad is not None and not q_weight.grad.any()


@pytest.mark.parametrize("trained", ["q", "k_weight", ""])
def test_whatever_wants_gradients_gets_them_and_nothing_else(trained):
    case = Prologue(heads=(4, 2))
    tensors, angles, douts = case.build(torch.float32)
    names = ("q", "k", "q_weight", "k_weight")
    want = dict(zip(names, results(ours, case, torch.float32)[2:], strict=True))
    for name, x in zip(names, tensors, strict=True):
        x.requires_grad_(name == trained)
    outs = ours(case, *tensors, *angles)
    assert all(x.requires_grad is bool(trained) for x in outs)
    if trained:
        torch.autograd.backward(outs, douts)
    for name, x in zip(names, tensors, strict=True):
        assert (x.grad is not None) is (name == trained)
        assert x.grad is None or torch.equal(x.grad, want[name])


def test_autocast_changes_nothing():
    """The projections have cast already; norms and rotation stay in float32 inside."""
    case = Prologue(float_weights=True, batch=3)
    want = results(ours, case, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(ours, case, torch.bfloat16)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("changes", "error_class", "match"),
    [
        ({"q": torch.zeros(2, 4, 7, 16)}, ValueError, r"q and k must be \[B, T, heads \* head_dim\]"),
        ({"k": torch.zeros(2, 6, 64)}, ValueError, r"q and k must be \[B, T, heads \* head_dim\]"),
        ({"head_dim": 24}, ValueError, "whole heads of head_dim=24"),
        ({"head_dim": 0}, ValueError, "whole heads of head_dim=0"),
        ({"head_dim": 16.0}, TypeError, "head_dim must be an int, got 16.0 of float"),
        ({"q_weight": None}, TypeError, "q_weight must be a tensor, got NoneType"),
        ({"k": torch.zeros(2, 7, 64, dtype=torch.float64)}, TypeError, "one floating dtype"),
        ({"k_weight": torch.ones(64, dtype=torch.int64)}, TypeError, "must be floating"),
        ({"cos": torch.zeros(7, 16), "sin": torch.zeros(7, 16)}, ValueError, r"cos and sin must be \[B or 1"),
        ({"sin": torch.zeros(1, 7, 8)}, ValueError, "cos and sin must be"),
        ({"cos": torch.zeros(2, 7, 15), "sin": torch.zeros(2, 7, 15)}, ValueError, "an even R"),
        ({"cos": torch.zeros(2, 7, 16, requires_grad=True)}, TypeError, "need no gradient"),
        ({"head_dim": 1}, ValueError, "head_dim=1 columns, even"),
        ({"q_weight": torch.ones(16)}, ValueError, "q_weight and k_weight must be"),
        ({"q": torch.zeros(2, 7, 64, device="meta")}, ValueError, "on q's device"),
    ],
)
def test_errors(changes, error_class, match):
    given = {
        "q": torch.zeros(2, 7, 64),
        "k": torch.zeros(2, 7, 64),
        "cos": torch.zeros(2, 7, 16),
        "sin": torch.zeros(2, 7, 16),
        "head_dim": 16,
        "q_weight": torch.ones(64),
        "k_weight": torch.ones(64),
        **changes,
    }
    with pytest.raises(error_class, match=match):
        qk_norm_rope(**given)


def test_it_is_exported():
    assert "qk_norm_rope" in streamattn.__all__
