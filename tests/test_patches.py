"""The mechanics of patching: in place, reversible, isolated, all or nothing, no loss to the model."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import patches.hf
import streamattn
from patches import patch_model, patch_report, unpatch_model
from tests.hf_models import (
    FAMILIES,
    TOLERANCE,
    build,
    error_where,
    gradient_error,
    gradients,
    patched_pair,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

ATTENTION = {"gpt2": "transformer.h.{}.attn", "olmo2": "model.layers.{}.self_attn"}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def names(family: str, layers: int = 3) -> list[str]:
    return [ATTENTION[family].format(i) for i in range(layers)]


def runs(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """How many layers of a model call `attention`."""
    count = 0
    original = patches.hf.attention

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    with monkeypatch.context() as context, torch.no_grad():
        context.setattr(patches.hf, "attention", counting)
        model(tokens(1, 4), **options)
    return count


class Ordinary(nn.Module):
    """A model without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


# In place, idempotent, reversible


def test_patches_in_place_and_returns_the_same_object(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    config, layers = model.config, [model.get_submodule(name) for name in names(family)]
    assert patch_model(model) is model
    assert model.config == config  # a view of it, where the release makes masks by its name
    assert [model.get_submodule(name) for name in names(family)] == layers
    assert runs(model, monkeypatch) == 3


def test_is_idempotent(family: str) -> None:
    once = patch_model(build(family))
    classes = [type(m) for m in once.modules()]
    assert patch_model(once) is once
    assert [type(m) for m in once.modules()] == classes


def test_unpatch_restores_exactly(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, untouched = build(family), build(family)
    classes = [type(m) for m in model.modules()]
    before = model(tokens(2, 6)).logits
    state = [dict(m.__dict__) for m in model.modules()]
    patch_model(model)
    assert [type(m) for m in model.modules()] != classes
    assert unpatch_model(model) is model
    assert [type(m) for m in model.modules()] == classes
    assert [dict(m.__dict__) for m in model.modules()] == state
    assert runs(model, monkeypatch) == 0
    assert torch.equal(model(tokens(2, 6)).logits, before)
    assert torch.equal(untouched(tokens(2, 6)).logits, before)
    assert unpatch_model(model) is model


def test_other_models_and_the_classes_are_untouched(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """unslothai/unsloth#1713."""
    other = build(family)
    cls = type(other.get_submodule(names(family)[0]))
    namespace = dict(vars(cls))
    patch_model(build(family))
    assert dict(vars(cls)) == namespace
    assert runs(other, monkeypatch) == 0
    assert runs(build(family), monkeypatch) == 0


def test_the_instance_is_patched_not_the_class(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """linkedin/Liger-Kernel#170: the model was built before the patch."""
    model = build(family)
    assert runs(model, monkeypatch) == 0
    assert runs(patch_model(model), monkeypatch) == 3


def test_models_that_share_a_config(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    config, kept = model.config, dict(model.config.__dict__)
    sibling = type(model)(config).eval()
    patch_model(model)
    assert runs(sibling, monkeypatch) == 0
    assert sibling.config is config
    assert config.__dict__ == kept
    assert config._attn_implementation == "eager"
    assert unpatch_model(model).config is config


@pytest.mark.skipif(not patches.hf.MASKS_PASS_UNCHANGED, reason="models of this release make their masks")
def test_a_wholly_patched_model_makes_masks_of_this_implementation(family: str) -> None:
    model = patch_model(build(family), filter_fn=lambda module, name: ".1." in name)
    assert model.config._attn_implementation == "eager"
    patch_model(model)
    for module in model.modules():
        config = module.__dict__.get("config")
        assert config is None or config is model.config
        assert config is None or config._attn_implementation == "streamattn"
    model.config.some_setting = 3
    assert unpatch_model(model).config.some_setting == 3
    assert model.config._attn_implementation == "eager"


# The report


def test_report_lists_every_attention_layer(family: str) -> None:
    model = patch_model(build(family), filter_fn=lambda module, name: ".1." not in name)
    report = patch_report(model)
    first, second, third = names(family)
    assert list(report.patched) == [first, third]
    assert list(report.skipped) == [second]
    assert report.skipped[second]
    assert all(name in str(report) for name in names(family))
    assert report.skipped[second] in str(report)


def test_report_of_untouched_and_restored_models(family: str) -> None:
    model = build(family)
    for report in (patch_report(model), patch_report(unpatch_model(patch_model(model)))):
        assert not report.patched
        assert list(report.skipped) == names(family)


def test_report_of_a_model_without_attention() -> None:
    report = patch_report(Ordinary())
    assert not report.patched
    assert not report.skipped


def test_repr_shows_the_patch(family: str) -> None:
    assert "Stream" in repr(patch_model(build(family)))
    assert "Stream" not in repr(unpatch_model(patch_model(build(family))))


# Selection and strictness


def test_filter_sees_module_and_name(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[nn.Module, str]] = []
    model = build(family)

    def last_layer(module: nn.Module, name: str) -> bool:
        seen.append((module, name))
        return getattr(module, "layer_idx", None) == 2

    patch_model(model, filter_fn=last_layer)
    assert [name for _, name in seen] == names(family)
    assert all(model.get_submodule(name) is module for module, name in seen)
    assert runs(model, monkeypatch) == 1


def test_a_partial_patch_still_equals_eager(family: str) -> None:
    model, reference = build(family), build(family)
    patch_model(model, filter_fn=lambda module, name: ".1." in name)
    ids = tokens(2, 9)
    assert error_where(None, model(ids).logits, reference(ids).logits) < TOLERANCE


def unserveable(family: str) -> tuple[nn.Module, str]:
    """A model whose second layer has had its forward replaced on the instance."""
    model = build(family)
    name = names(family)[1]
    layer = model.get_submodule(name)
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return model, name


def test_strict_raises_and_leaves_the_model_unchanged(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, name = unserveable(family)
    with pytest.raises(ValueError, match=f"{name}: its forward has been replaced"):
        patch_model(model)
    assert runs(model, monkeypatch) == 0
    assert not patch_report(model).patched


def test_not_strict_leaves_the_layer_alone_and_reports_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, name = unserveable(family)
    patch_model(model, strict=False)
    report = patch_report(model)
    assert list(report.skipped) == [name]
    assert "forward has been replaced" in report.skipped[name]
    assert runs(model, monkeypatch) == 2


def test_filter_leaves_out_what_cannot_be_served(family: str) -> None:
    model, name = unserveable(family)
    patch_model(model, filter_fn=lambda module, layer: layer != name)
    assert len(patch_report(model).patched) == 2


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_matched_raises(family: str, strict: bool) -> None:
    with pytest.raises(ValueError, match="no attention layer to patch in Ordinary"):
        patch_model(Ordinary(), strict=strict)
    with pytest.raises(ValueError, match="among those that filter_fn selects"):
        patch_model(build(family), strict=strict, filter_fn=lambda module, name: False)


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_of_unknown_attention_raises(strict: bool) -> None:
    class SomeAttention(nn.Module):
        pass

    with pytest.raises(ValueError, match=r"there is no patch for .*SomeAttention"):
        patch_model(nn.Sequential(SomeAttention()), strict=strict)


def test_a_dropout_of_everything_is_refused(family: str) -> None:
    options: dict[str, Any] = {"attn_pdrop" if family == "gpt2" else "attention_dropout": 1.0}
    with pytest.raises(ValueError, match=r"its dropout must be a probability in \[0, 1\), got 1\.0"):
        patch_model(build(family, **options))


@pytest.mark.parametrize("name", ["OwnAttention", "Own"])
def test_subclasses_of_this_package_s_layer_are_left_alone(family: str, name: str) -> None:
    own = type(name, (streamattn.StreamMultiHeadAttention,), {})(8, 2)
    report = patch_report(patch_model(nn.ModuleList([build(family), own])))
    assert (len(report.patched), report.skipped) == (3, {})


def test_a_mixed_model(family: str) -> None:
    class SomeAttention(nn.Module):
        pass

    class AroundAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SomeAttention()

    model = nn.ModuleDict({"known": build(family), "unknown": AroundAttention()})
    with pytest.raises(ValueError, match=r"unknown\.inner: there is no patch for"):
        patch_model(model)
    assert not patch_report(model).patched
    report = patch_report(patch_model(model, strict=False))
    assert len(report.patched) == 3
    assert list(report.skipped) == ["unknown.inner"]


def test_a_subclass_is_not_taken_for_the_class(family: str) -> None:
    model = build(family)
    layer = model.get_submodule(names(family)[0])
    layer.__class__ = type("Mine", (type(layer),), {})
    with pytest.raises(ValueError, match="which may compute something else"):
        patch_model(model)


@pytest.mark.parametrize("wrong", [None, "gpt2", [nn.Linear(1, 1)]])
def test_not_a_module(wrong: Any) -> None:
    for function in (patch_model, unpatch_model, patch_report):
        with pytest.raises(
            TypeError, match=rf"{function.__name__} expected a torch\.nn\.Module, got .*; pass"
        ):
            function(wrong)


def test_not_a_filter(family: str) -> None:
    filter_fn: Any = "h.0"
    with pytest.raises(TypeError, match=r"filter_fn must be a function .*, got 'h\.0'; None selects"):
        patch_model(build(family), filter_fn=filter_fn)


def test_a_layer_that_is_the_whole_model_has_a_name() -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=1.0)
    with pytest.raises(ValueError, match=r"\n  \(the model itself\): its dropout must .*; set it to 0\.0"):
        patch_model(layer)
    assert "\n  (the model itself): not patched, its dropout" in str(patch_report(layer))


def test_an_argument_renamed_by_a_release_is_a_reason(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """unslothai/unsloth-zoo#281: told from the signature, before anything is changed."""
    model = build(family)
    cls = type(model.get_submodule(names(family)[0]))

    def forward(self: nn.Module, hidden_states: Tensor, position_embeddings: Any, kv_store: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(ValueError, match="calls the layer differently: no argument attention_mask"):
        patch_model(model)


# What the model must not lose


def test_state_dict_keys(family: str) -> None:
    model = build(family)
    before = model.state_dict()
    after = patch_model(model).state_dict()
    assert list(before) == list(after)
    assert all(before[key].data_ptr() == after[key].data_ptr() for key in before)


def test_save_and_load(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build(family, "sdpa"))
    plain = unpatch_model(copy.deepcopy(model))
    model.save_pretrained(tmp_path / "patched")
    plain.save_pretrained(tmp_path / "plain")
    saved, expected = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("patched", "plain"))
    assert saved == expected
    assert not any("streamattn" in file.read_text() for file in (tmp_path / "patched").glob("*.json"))
    loaded = type(model).from_pretrained(tmp_path / "patched").eval()
    assert runs(loaded, monkeypatch) == 0
    ids = tokens(1, 7)
    assert torch.equal(patch_model(loaded)(ids).logits, model(ids).logits)


def test_deepcopy_is_independent(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build(family))
    ids = tokens(1, 7)
    before = model(ids).logits
    other = copy.deepcopy(model)
    assert runs(other, monkeypatch) == 3
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert not torch.allclose(other(ids).logits, before, atol=1e-2)
    assert torch.equal(model(ids).logits, before)
    name = model.config._attn_implementation
    assert type(unpatch_model(other).config) is type(build(family).config)
    assert other.config._attn_implementation == "eager"
    assert model.config._attn_implementation == name
    assert len(patch_report(model).patched) == 3


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickling(family: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build(family))
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
    assert runs(loaded, monkeypatch) == 3
    ids = tokens(1, 7)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config._attn_implementation == model.config._attn_implementation
    assert loaded.config is not model.config
    assert unpatch_model(loaded).config._attn_implementation == "eager"
    assert len(patch_report(model).patched) == 3


def test_hooks_survive_both_ways(family: str) -> None:
    model = build(family)
    called: list[str] = []
    layer = model.get_submodule(names(family)[0])
    layer.register_forward_pre_hook(lambda module, args: called.append("before"))
    layer.register_forward_hook(lambda module, args, out: called.append("after"))
    layer.register_full_backward_hook(lambda module, grad_in, grad_out: called.append("backward"))
    for change in (patch_model, unpatch_model):
        called.clear()
        change(model)(tokens(1, 5)).logits.sum().backward()
        assert called == ["before", "after", "backward"]


def test_recorded_outputs_survive(family: str) -> None:
    """Releases install recording hooks, or rebind forward on the instance, at the first recorded call."""
    model, reference = build(family), build(family)
    ids = tokens(1, 6)
    for change in (lambda m: m, patch_model, unpatch_model, patch_model):
        out = change(model)(ids, output_attentions=True, output_hidden_states=True)
        expected = reference(ids, output_attentions=True, output_hidden_states=True)
        assert len(out.attentions) == len(expected.attentions) == 3
        assert len(out.hidden_states) == len(expected.hidden_states) == 4
        for a, b in zip(out.attentions, expected.attentions, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    assert len(patch_report(model).patched) == 3
    assert error_where(None, model(ids).logits, reference(ids).logits) < TOLERANCE


def test_a_layer_recorded_before_the_patch_is_patched(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family)
    model(tokens(1, 4), output_attentions=True)
    assert runs(patch_model(model), monkeypatch) == 3
    model(tokens(1, 4), output_attentions=True)
    assert runs(unpatch_model(model), monkeypatch) == 0


@pytest.mark.parametrize("after", ["eager", "sdpa"])
def test_set_attn_implementation_does_not_undo_the_patch(
    family: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch_model(build(family, "eager" if after == "sdpa" else "sdpa"))
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(after)
    else:
        model.config._attn_implementation = after
    assert runs(model, monkeypatch) == 3
    ids = tokens(2, 9)
    assert error_where(None, model(ids).logits, build(family)(ids).logits) < TOLERANCE


class Recorder(ModelHook):
    """An accelerate hook, as device maps and offloading attach them."""

    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


def test_accelerate_hooks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the original forward in `_old_forward`, which outlives a change of class."""
    model, hook = build(family), Recorder()
    ids = tokens(1, 6)
    expected = model(ids).logits
    for name in names(family):
        add_hook_to_module(model.get_submodule(name), hook)
    assert runs(patch_model(model), monkeypatch) == 3
    assert hook.calls == 3
    assert error_where(None, model(ids).logits, expected) < TOLERANCE
    assert runs(unpatch_model(model), monkeypatch) == 0
    assert torch.equal(model(ids).logits, expected)
    patch_model(model)
    for name in names(family):
        remove_hook_from_module(model.get_submodule(name))
    assert runs(model, monkeypatch) == 3
    assert runs(unpatch_model(model), monkeypatch) == 0


# Wrappers


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.usefixtures("process_group")
def test_data_parallel(family: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrapped before the patch, with checkpointing too (huggingface/peft#313: "marked ready twice")."""
    inner, reference = patched_pair(family)
    unpatch_model(inner)
    if checkpointing:
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        inner.train()
        for module in inner.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    wrapped = DistributedDataParallel(inner)
    assert patch_model(wrapped) is wrapped
    assert list(patch_report(wrapped).patched) == [f"module.{name}" for name in names(family)]
    assert runs(wrapped, monkeypatch) == 3
    ids = tokens(2, 8)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad for name, p in inner.named_parameters()}
    assert gradient_error(found, gradients(reference, ids)) < TOLERANCE


@pytest.mark.usefixtures("process_group")
def test_fully_sharded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharding gives blocks classes of their own, whichever comes first."""
    mesh = init_device_mesh("cpu", (1,))
    ids = tokens(2, 8)
    for order in ("patch first", "shard first"):
        model, reference = patched_pair(family)
        if order == "shard first":
            unpatch_model(model)
        for name in names(family):
            fully_shard(model.get_submodule(name.rpartition(".")[0]), mesh=mesh)
        fully_shard(model, mesh=mesh)
        patch_model(model)
        assert runs(model, monkeypatch) == 3
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        assert gradient_error(found, gradients(reference, ids)) < TOLERANCE


def test_through_a_compiled_module(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: Any = torch.compile(build(family), backend="eager")
    assert patch_model(compiled) is compiled
    assert runs(compiled._orig_mod, monkeypatch) == 3
    assert list(patch_report(compiled).patched) == [f"_orig_mod.{name}" for name in names(family)]


class Adapter(nn.Module):
    """A wrapper as adapters make them: the model two levels down."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model["model"](*args, **kwargs)


def test_through_an_adapter(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = patch_model(Adapter(build(family)))
    assert runs(wrapped, monkeypatch) == 3
    assert runs(unpatch_model(wrapped), monkeypatch) == 0


def test_a_single_layer(family: str) -> None:
    layer = build(family).get_submodule(names(family)[0])
    assert patch_model(layer) is layer
    assert list(patch_report(layer).patched) == [""]


def test_transformers_is_not_needed() -> None:
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import torch, patches\n"
        "layer = patches.patch_model(torch.nn.MultiheadAttention(8, 2))\n"
        "print(list(patches.patch_report(layer).patched))"
    )
    root = Path(patches.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=100)
    assert done.stdout.strip() == "['']", done.stderr


def test_the_package_exports_it() -> None:
    assert streamattn.patch_model is patch_model
    assert streamattn.unpatch_model is unpatch_model
    assert streamattn.patch_report is patch_report
