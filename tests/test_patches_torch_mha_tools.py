"""What the patch of `nn.MultiheadAttention` refuses, and the tools that meet patched models."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.nn.quantizable import MultiheadAttention as QuantizableMultiheadAttention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from patches import patch_model, patch_report, unpatch_model
from streamattn import StreamMultiHeadAttention
from tests.torch_models import (
    BATCH,
    HEADS,
    LENGTH,
    PADDING,
    Build,
    E,
    assert_close,
    build,
    encoder,
    encoder_layer,
    inputs,
    outputs_and_gradients,
    ran,
    randomised,
    run_eval,
    spy_on_attention,
    vision,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return spy_on_attention(monkeypatch)


# What is refused


class OwnAttention(nn.MultiheadAttention):
    """A user's subclass."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OwnAttention(E, HEADS), "OwnAttention is a subclass of MultiheadAttention"),
        (lambda: QuantizableMultiheadAttention(E, HEADS), "quantizable.*is a subclass of MultiheadAttention"),
        (
            lambda: nn.MultiheadAttention(E, HEADS, dropout=1.0),
            r"dropout must be a probability in \[0, 1\), got 1.0",
        ),
    ],
)
def test_a_layer_that_is_not_served_is_reported(make: Build, reason: str) -> None:
    model = nn.ModuleDict({"good": encoder_layer(), "bad": make()})
    with pytest.raises(ValueError, match=f"bad: .*{reason}"):
        patch_model(model)
    assert not patch_report(model).patched
    report = patch_report(patch_model(model, strict=False))
    assert list(report.patched) == ["good.self_attn"]
    assert list(report.skipped) == ["bad"]


def test_our_own_layer_is_left_alone() -> None:
    model = nn.ModuleDict({"ours": StreamMultiHeadAttention(E, HEADS), "theirs": encoder_layer()})
    patch_model(model)
    assert type(model["ours"]) is StreamMultiHeadAttention
    assert not model["ours"]._forward_pre_hooks
    assert list(patch_report(model).patched) == ["theirs.self_attn"]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.zeros(3, E), torch.zeros(5, E)], layout=layout)
    layer = patch_model(nn.MultiheadAttention(E, HEADS, batch_first=True))
    with pytest.raises(TypeError, match="must be a padded tensor, got a nested tensor"):
        layer(x, x, x)


def test_errors_are_those_of_our_layer() -> None:
    layer = patch_model(nn.MultiheadAttention(E, HEADS))
    x = torch.zeros(LENGTH, BATCH, E)
    with pytest.raises(ValueError, match="attn_mask must have shape"):
        layer(x, x, x, attn_mask=torch.zeros(2, 3))
    with pytest.raises(TypeError, match=r"attn_mask must be bool .* got torch\.int64"):
        layer(x, x, x, attn_mask=torch.zeros(LENGTH, LENGTH, dtype=torch.int64))


# Tools around the model


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_stay_patched_and_can_be_unpatched(how: str, calls: list[str]) -> None:
    model = build()
    x = inputs(True)
    original = run_eval(model, x)
    patch_model(model)
    wanted = run_eval(model, x)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    ran(calls)
    assert torch.equal(run_eval(other, x), wanted)
    assert ran(calls) == ["stream"] * 2
    assert torch.equal(run_eval(unpatch_model(other), x), original)
    assert ran(calls) == ["torch"] * 2
    assert len(patch_report(model).patched) == 2


def test_state_dicts_go_both_ways() -> None:
    plain, patched = build(), patch_model(build())
    randomised(plain, seed=1)
    patched.load_state_dict(plain.state_dict())
    x = inputs(True)
    torch.testing.assert_close(run_eval(patched, x, False), run_eval(plain, x, False), atol=1e-5, rtol=1e-5)
    plain.load_state_dict(patched.state_dict())


def test_hooks_of_the_user_run_and_survive() -> None:
    layer = nn.MultiheadAttention(E, HEADS)
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, out: seen.append("after"))
    layer.out_proj.register_forward_hook(lambda module, args, out: seen.append("projected"))
    x = torch.randn(LENGTH, BATCH, E)
    patch_model(layer)(x, x, x)
    assert seen == ["before", "projected", "after"]
    seen.clear()
    unpatch_model(layer)(x, x, x)
    assert seen == ["before", "after"]  # torch's layer reads the weights of out_proj


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_compiles_without_a_graph_break(training: bool, padded: bool) -> None:
    torch._dynamo.reset()
    model = patch_model(build(training=training))
    options = {"src_key_padding_mask": PADDING} if padded else {}
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    wanted = outputs_and_gradients(model, training, inputs(True), batch_first=True, **options)
    found = outputs_and_gradients(compiled, training, inputs(True), batch_first=True, **options)
    assert_close({name.replace("_orig_mod.", ""): x for name, x in found.items()}, wanted)


@pytest.mark.parametrize("make", [encoder, vision])
def test_exports(make: Build) -> None:
    model = patch_model(build(make))
    x = inputs(True)
    exported = torch.export.export(model, (x,))
    assert any("streamattn" in str(node.target) for node in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(x), model(x), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("order", ["patch first", "wrap first"])
@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(order: str, calls: list[str]) -> None:
    theirs = build(training=True)
    ours = copy.deepcopy(theirs)
    wanted = outputs_and_gradients(theirs, True, inputs(True), batch_first=True, src_key_padding_mask=PADDING)
    ran(calls)
    if order == "patch first":
        patch_model(ours)
    wrapped = DistributedDataParallel(ours)
    patch_model(wrapped)
    found = outputs_and_gradients(wrapped, True, inputs(True), batch_first=True, src_key_padding_mask=PADDING)
    assert ran(calls) == ["stream"] * 2
    assert_close({name.replace("module.", "", 1): x for name, x in found.items()}, wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    """Dropout is drawn again alike."""
    model = patch_model(build(lambda: encoder_layer(dropout=0.3), training=True))
    gradients = []
    for checkpointed in (False, True):
        model.zero_grad()
        x = inputs(True).requires_grad_()
        torch.manual_seed(4)
        if checkpointed:
            out = checkpoint(model, x, use_reentrant=reentrant)
        else:
            out = model(x)
        out.square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None] + [x.grad])
    torch.testing.assert_close(gradients[1], gradients[0])
