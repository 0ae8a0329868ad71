"""OLMo-2's own matters: the norms of q and k, the rotary function, grouped heads, wrapped projections.

Each holds with norms and rotation in one pass, as on a GPU, and apart.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention

import patches.hf
import patches.olmo2
from patches import patch_model
from tests.hf_models import (
    TOLERANCE,
    build,
    error_where,
    gradient_error,
    gradients,
    left_padding,
    patched_pair,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True, params=["apart", "one pass"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "one pass":
        monkeypatch.setattr(patches.olmo2, "_ONE_PASS_DEVICE", "cpu")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_and_gradients_equal_eager(kv_heads: int, bias: bool) -> None:
    """The norms' weights are not one here, so that a norm over each head would show."""
    patched, reference = patched_pair("olmo2", "sdpa", num_key_value_heads=kv_heads, attention_bias=bias)
    ids, mask = left_padding(tokens(2, 13), 0, 4)
    a, b = patched(ids, attention_mask=mask).logits, reference(ids, attention_mask=mask).logits
    assert error_where(mask, a, b) < TOLERANCE
    assert gradient_error(gradients(patched, ids, mask), gradients(reference, ids, mask)) < TOLERANCE


def test_grouped_heads_reach_attention_unrepeated(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = patch_model(build("olmo2", "sdpa"))
    shapes = []
    original = patches.hf.attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return original(q, k, v, **options)

    monkeypatch.setattr(patches.hf, "attention", spy)
    patched(tokens(2, 5))
    assert shapes == [((2, 4, 5, 12), (2, 2, 5, 12), (2, 2, 5, 12))] * 3


def test_the_output_projection_reads_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = patch_model(build("olmo2", "sdpa", num_hidden_layers=1))
    seen: dict[str, Tensor] = {}
    original = patches.hf.attention

    def spy(*args: Any, **options: Any) -> Any:
        out = original(*args, **options)
        seen.update(out=out)
        return out

    monkeypatch.setattr(patches.hf, "attention", spy)
    layer = patched.model.layers[0].self_attn
    layer.o_proj.register_forward_pre_hook(lambda module, args: seen.update(merged=args[0]))
    with torch.no_grad():
        patched(tokens(2, 5), use_cache=False)
    assert seen["merged"].data_ptr() == seen["out"].data_ptr()


def test_the_rotary_function_is_looked_up_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = patch_model(build("olmo2"))
    ids = tokens(1, 6)
    before = patched(ids).logits
    calls = []

    def without_rotation(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return q, k

    monkeypatch.setattr(modeling_olmo2, "apply_rotary_pos_emb", without_rotation)
    assert error_where(None, patched(ids).logits, before) > 1e-2
    assert len(calls) == 3


class LowRank(nn.Module):
    """A frozen projection with a trained low-rank part, as adapters wrap it; no `weight` of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def test_wrapped_projections_are_called_as_modules() -> None:
    reference = build("olmo2")
    torch.manual_seed(3)
    for layer in reference.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    patched = patch_model(copy.deepcopy(reference))
    ids = tokens(2, 8)
    found = []
    for model in (patched, reference):
        out = model(ids, labels=ids)
        out.loss.backward()
        found.append((out.logits, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    assert error_where(None, found[0][0], found[1][0]) < TOLERANCE
    assert gradient_error(found[0][1], found[1][1]) < TOLERANCE


def test_float32_norms_under_a_bfloat16_model() -> None:
    """huggingface/transformers#30019: q and k in float32, v in bfloat16."""
    patched = patch_model(build("olmo2").to(torch.bfloat16))
    for layer in patched.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.register_forward_hook(lambda module, args, out: out.float())
    logits = patched(tokens(1, 7)).logits
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()


def test_autocast_stays_near_float32() -> None:
    patched, reference = patched_pair("olmo2", "sdpa")
    ids = tokens(1, 9)
    with torch.autocast("cpu", torch.bfloat16):
        low = patched(ids).logits
        eager = reference(ids).logits
    exact = reference(ids).logits
    assert error_where(None, low.float(), exact) < 2 * error_where(None, eager.float(), exact)


def test_arguments_by_position() -> None:
    """The layer keeps the positional order of the installed release."""
    layer = patch_model(build("olmo2")).model.layers[0].self_attn
    x = torch.randn(1, 4, 48)
    angles = torch.randn(1, 4, 12)
    names = list(inspect.signature(Olmo2Attention.forward).parameters)[1:]
    given = {"hidden_states": x, "position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    args = [given[name] for name in names[:3]]
    assert torch.equal(layer(*args)[0], layer(**given)[0])


def test_frozen_norms_and_checkpoints() -> None:
    patched, reference = patched_pair("olmo2", "sdpa")
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    ids, found = tokens(2, 8), []
    for model in (patched, reference):
        model.train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_norm" not in name)
        model(ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradient_error(*found) < TOLERANCE


def test_generates_what_eager_does() -> None:
    patched, reference = patched_pair("olmo2", "sdpa")
    ids, mask = left_padding(tokens(2, 6), 0, 2)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(patched.generate(ids, **options), reference.generate(ids, **options))


def test_compiles_into_one_graph() -> None:
    patched, reference = patched_pair("olmo2", "sdpa", num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(patched, backend="aot_eager", fullgraph=True)
    ids = tokens(2, 8)
    assert error_where(None, compiled(ids).logits, reference(ids).logits) < TOLERANCE
