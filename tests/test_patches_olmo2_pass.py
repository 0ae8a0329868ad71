"""Where OLMo-2's norms and rotation are one pass: only where nothing else happens in a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import patches.olmo2
from patches import patch_model
from tests.hf_models import TOLERANCE, build, error_where, patched_pair, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes it one pass on the CPU too; grows by one with every such pass."""
    seen: list[int] = []
    original = patches.olmo2.qk_norm_rope

    def spy(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append(1)
        return original(*args, **options)

    monkeypatch.setattr(patches.olmo2, "qk_norm_rope", spy)
    monkeypatch.setattr(patches.olmo2, "_ONE_PASS_DEVICE", "cpu")
    return seen


def scaled(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Any:
    return out * 1.5 if "RMSNorm" in type(module).__name__ else out


def replace_forward(norm: nn.Module) -> None:
    norm.forward = lambda x: x * 1.5


def wrap(norm: nn.Module) -> None:
    norm.__class__ = type("Other", (type(norm),), {"forward": lambda self, x: x * 1.5})


@pytest.mark.parametrize(
    "disturb",
    [
        None,
        lambda norm: norm.register_forward_hook(scaled),
        lambda norm: norm.register_forward_pre_hook(lambda module, args: args[0].square()),
        replace_forward,
        wrap,
    ],
    ids=["nothing", "hook", "pre-hook", "forward", "class"],
)
def test_one_pass_only_where_nothing_else_happens_in_a_norm(
    disturb: Callable[[nn.Module], object] | None, passes: list[int]
) -> None:
    models = patched_pair("olmo2", "sdpa")
    if disturb is not None:
        for model in models:
            for name in ("q_norm", "k_norm"):
                disturb(getattr(model.model.layers[1].self_attn, name))
    ids = tokens(1, 6)
    assert error_where(None, *(model(ids).logits for model in models)) < TOLERANCE
    assert len(passes) == (3 if disturb is None else 2)


def test_no_pass_under_a_hook_of_all_modules(passes: list[int]) -> None:
    patched, reference = patched_pair("olmo2", "sdpa")
    handle = register_module_forward_hook(scaled)
    try:
        a, b = patched(tokens(1, 6)).logits, reference(tokens(1, 6)).logits
    finally:
        handle.remove()
    assert error_where(None, a, b) < TOLERANCE
    assert not passes


def test_projections_of_two_dtypes_go_apart(passes: list[int]) -> None:
    patched = patch_model(build("olmo2").to(torch.bfloat16))
    patched.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, out: out.float())
    assert torch.isfinite(patched(tokens(1, 6)).logits).all()
    assert len(passes) == 2


def test_learned_frequencies_go_apart(passes: list[int]) -> None:
    models = patched_pair("olmo2", "sdpa")
    for model in models:
        model.model.rotary_emb.register_forward_hook(
            lambda module, args, out: tuple(x.detach().requires_grad_() for x in out)
        )
    assert error_where(None, *(model(tokens(1, 6)).logits for model in models)) < TOLERANCE
    assert not passes
