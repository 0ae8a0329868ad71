"""The table of patches; and layers that torch gave a class of their own, sharded or parametrized."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

import patches.hf
import streamattn.module
from patches import patch_model, patch_report, registry, unpatch_model
from tests import torch_models
from tests.hf_models import build, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("process_group"),
]

KINDS = ("gpt2", "olmo2", "torch")
REPLACEMENTS = {
    "gpt2": "StreamGPT2Attention",
    "olmo2": "StreamOlmo2Attention",
    "torch": "StreamTorchMultiheadAttention",
}
TOLERANCE = 1e-4


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one at every call of attention by a patched layer."""
    made: list[str] = []

    def spy(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            made.append("attention")
            return original(*args, **options)

        return run

    for owner in (patches.hf, streamattn.module):
        for name in ("attention", "packed_attention"):
            monkeypatch.setattr(owner, name, spy(getattr(owner, name)))
    return made


def make(kind: str) -> Any:
    """The same model at every call; each of its attention layers has a parameter of its own, which acts."""
    if kind == "torch":
        return torch_models.build(torch_models.encoder)
    model = build(kind, "sdpa")
    for layer in layers(model):
        layer.register_parameter("gain", nn.Parameter(torch.tensor([1.5])))
        projection = layer.c_proj if kind == "gpt2" else layer.o_proj
        projection.register_forward_pre_hook(Gain(layer))
    return model


class Gain:
    """Forward pre-hook that multiplies by a layer's gain."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return args[0] * self.layer.gain, *args[1:]  # type: ignore[operator]


class Double(nn.Module):
    """A parametrization that shows."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def layers(model: nn.Module) -> list[Any]:
    report = patch_report(model)
    return [model.get_submodule(name) for name in (*report.patched, *report.skipped)]


def call(model: Any) -> Tensor:
    if isinstance(model, nn.TransformerEncoder):
        return model(torch_models.inputs(True), src_key_padding_mask=torch_models.PADDING)
    return model(tokens(2, 8), use_cache=False).logits


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output where it isn't padding, and the gradients by the parameters' names without wrappers."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.zero_grad()
    out = call(model)
    out = out[~torch_models.PADDING] if isinstance(model, nn.TransformerEncoder) else out
    out.square().mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found[name.replace("parametrizations.", "").replace(".original", "")] = grad
    return out.detach(), found


def agree(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.allclose(found[0], wanted[0], atol=TOLERANCE)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.allclose(found[1][name], gradient, atol=TOLERANCE), name


def own_tensor(layer: nn.Module) -> str:
    return "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "gain"


def shard(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (1,))
    for layer in layers(model):
        fully_shard(layer, mesh=mesh)


def parametrized(model: nn.Module) -> None:
    for layer in layers(model):
        parametrize.register_parametrization(layer, own_tensor(layer), Double())


def both(model: nn.Module) -> None:
    parametrized(model)
    shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], None]] = {
    "fully_shard": shard,
    "parametrize": parametrized,
    "both": both,
}


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[[nn.Module], None]:
    return WRAPPERS[request.param]


def is_wrapped(layer: nn.Module, wrap: Callable[[nn.Module], None]) -> bool:
    """Whether a layer is as sharded and parametrized as `wrap` makes it."""
    return isinstance(layer, FSDPModule) == (wrap is not parametrized) and parametrize.is_parametrized(
        layer
    ) == (wrap is not shard)


def hooks(model: nn.Module) -> list[int]:
    return [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("order", ["patch first", "wrap first"])
def test_a_wrapped_layer_is_patched(
    kind: str, wrap: Callable[[nn.Module], None], order: str, calls: list[str]
) -> None:
    reference = make(kind)
    if wrap is not shard:
        parametrized(reference)
    model = make(kind)
    if order == "patch first":
        patch_model(model)
    wrap(model)
    patch_model(model)
    report = patch_report(model)
    assert set(report.patched.values()) == {REPLACEMENTS[kind]}
    assert len(report.patched) == len(layers(reference)) > 1
    assert not report.skipped
    assert all(is_wrapped(layer, wrap) for layer in layers(model))
    classes, hooked = [type(module) for module in model.modules()], hooks(model)
    assert patch_model(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert hooks(model) == hooked
    expected = step(reference)
    assert not calls
    agree(step(model), expected)
    assert len(calls) == len(report.patched)


@pytest.mark.parametrize("order", ["patch first", "wrap first"])
def test_unpatching_leaves_the_wrapper(
    kind: str, wrap: Callable[[nn.Module], None], order: str, calls: list[str]
) -> None:
    untouched, model, other = make(kind), make(kind), make(kind)
    wrap(untouched)
    for each in (model, other):
        if order == "patch first":
            patch_model(each)
        wrap(each)
        patch_model(each)
    call(model)
    calls.clear()
    assert unpatch_model(model) is model
    assert not patch_report(model).patched
    assert len(patch_report(model).skipped) == len(layers(other))
    assert all(is_wrapped(layer, wrap) for layer in layers(model))
    assert not any("Stream" in cls.__name__ for m in model.modules() for cls in type(m).__mro__)
    assert [type(m).__name__ for m in model.modules()] == [type(m).__name__ for m in untouched.modules()]
    assert hooks(model) == hooks(untouched)
    if kind == "torch":
        assert model.use_nested_tensor is untouched.use_nested_tensor is True
    agree(step(model), step(untouched))
    assert not calls
    # classes may be shared with other models
    assert len(patch_report(other).patched) == len(layers(model))
    call(other)
    assert len(calls) == len(layers(other))


def test_layers_of_one_class_share_one_afterwards(kind: str) -> None:
    """A class each would be compiled each."""
    model = make(kind)
    shard(model)
    for change in (patch_model, unpatch_model, patch_model):
        assert len({type(layer) for layer in layers(change(model))}) == 1


@pytest.mark.parametrize("order", ["patch first", "wrap first"])
@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("patched", [True, False])
def test_parametrizations_come_off_on_both_sides(
    kind: str, order: str, leave: bool, patched: bool, calls: list[str]
) -> None:
    plain, model = make(kind), make(kind)
    if order == "patch first":
        patch_model(model)
    parametrized(model)
    patch_model(model)
    if not patched:
        unpatch_model(model)
    before = call(model)
    calls.clear()
    for layer in layers(model):
        parametrize.remove_parametrizations(layer, own_tensor(layer), leave_parametrized=leave)
    assert torch.equal(call(model), before) == leave
    assert len(calls) == len(patch_report(model).patched) == patched * len(layers(plain))
    wanted = {REPLACEMENTS[kind]} if patched else {type(layer).__name__ for layer in layers(plain)}
    assert {type(layer).__name__ for layer in layers(model)} == wanted


def test_a_copy_is_unpatched_alone(kind: str, calls: list[str]) -> None:
    """Copies of a parametrized layer share its class."""
    model = patch_model(make(kind))
    parametrized(model)
    other = copy.deepcopy(model)
    unpatch_model(other)
    assert not patch_report(other).patched
    assert not patch_report(model).skipped
    call(model)
    assert len(calls) == len(layers(model))


# Classes of others


def subclassed(model: nn.Module) -> nn.Module:
    """The last attention layer of a model, of a class that somebody made of the one it had."""
    layer = layers(model)[-1]
    cls = type(layer)
    layer.__class__ = type("Watched", (cls,), {"extra_repr": lambda self: "watched"})
    return layer


def test_a_patched_layer_of_another_class_cannot_be_unpatched(kind: str, calls: list[str]) -> None:
    model = patch_model(make(kind))
    name = list(patch_report(model).patched)[-1]
    subclassed(model)
    assert len(patch_report(model).patched) == len(layers(model))
    assert patch_report(model).patched[name] == REPLACEMENTS[kind]
    patch_model(model)
    before, state = call(model), [dict(module.__dict__) for module in model.modules()]
    classes, hooked = [type(module) for module in model.modules()], hooks(model)
    with pytest.raises(ValueError, match=rf"{name}: .*Watched\n.*the class that it had before"):
        unpatch_model(model)
    assert [type(module) for module in model.modules()] == classes
    assert [dict(module.__dict__) for module in model.modules()] == state
    assert hooks(model) == hooked
    calls.clear()
    assert torch.equal(call(model), before)
    assert len(calls) == len(layers(model))
    layer: Any = model.get_submodule(name)
    layer.__class__ = type(layer).__bases__[0]
    assert not patch_report(unpatch_model(model)).patched


def test_a_layer_of_another_class_is_not_patched(kind: str) -> None:
    model = make(kind)
    layer = subclassed(model)
    shard(model)  # is looked through
    name = list(patch_report(model).skipped)[-1]
    with pytest.raises(ValueError, match=rf"{name}: .*Watched is a subclass of .*patch before wrapping"):
        patch_model(model)
    assert not patch_report(model).patched
    patch_model(model, strict=False)
    assert list(patch_report(model).skipped) == [name]
    assert model.get_submodule(name) is layer


def test_of_a_partly_patched_model_the_rest_is_left(kind: str) -> None:
    model = patch_model(make(kind), filter_fn=lambda module, name: "0" in name)
    shard(model)
    skipped = patch_report(model).skipped
    classes = {name: type(model.get_submodule(name)) for name in skipped}
    assert set(patch_report(model).patched.values()) == {REPLACEMENTS[kind]}
    unpatch_model(model)
    assert not patch_report(model).patched
    assert {name: type(model.get_submodule(name)) for name in skipped} == classes


@pytest.mark.parametrize("path", registry.REPLACEMENTS)
def test_replacements_are_importable_subclasses_without_state(path: str) -> None:
    module, name = path.split(":")
    original = getattr(importlib.import_module(module), name)
    replacement = registry.replacement_for(original)
    assert registry.path_of(replacement) == registry.REPLACEMENTS[path]
    added = set(replacement.__mro__) - set(original.__mro__)
    assert replacement in added
    assert issubclass(replacement, original)
    assert not any("__init__" in vars(cls) or "__slots__" in vars(cls) for cls in added)
    assert isinstance(inspect.getattr_static(replacement, "unsupported"), staticmethod)


class ToyAttention(nn.Module):
    """Stands for a further kind of layer."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class StreamToyAttention(ToyAttention):
    """Its replacement."""

    @staticmethod
    def unsupported(module: ToyAttention) -> str | None:
        return "it is in training" if module.training else None

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_a_further_kind_is_one_more_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.REPLACEMENTS, f"{__name__}:ToyAttention", f"{__name__}:StreamToyAttention")
    model = nn.Sequential(ToyAttention(), ToyAttention())
    with pytest.raises(ValueError, match="0: it is in training"):
        patch_model(model)
    model[1].eval()
    patch_model(model, strict=False)
    assert patch_report(model).patched == {"1": "StreamToyAttention"}
    assert patch_report(model).skipped == {"0": "it is in training"}
    assert model(torch.ones(1)) == 2
    assert unpatch_model(model)(torch.ones(1)) == 1
