"""What people wrap models in, around patched models of several families, against unpatched eager in float32.

Adapters, data parallelism and sharding, offloading, quantised linears, checkpointing, copies and hooks.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import patches.hf
from patches import patch_model, patch_report, unpatch_model
from tests.hf_families import families, present, spy_layers
from tests.hf_models import TOLERANCE
from tests.hf_wrapped import NAMES, call, layers, pair, same_step, spared_square_masks, step, training

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

ORDERS = ("patch first", "wrap first")


# Low-rank adapters


def adapted(model: Any, name: str) -> Any:
    peft = pytest.importorskip("peft", reason="LoRA is peft's")
    targets = {"GPT-2": ["c_attn", "c_proj"], "T5": ["q", "v", "o"], "BART": ["q_proj", "v_proj", "out_proj"]}
    options = {"fan_in_fan_out": name == "GPT-2"}
    config = peft.LoraConfig(
        r=4,
        target_modules=targets.get(name, ["q_proj", "v_proj", "o_proj"]),
        init_lora_weights=False,
        **options,
    )
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_low_rank_adapters(name: str, order: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, reference = pair(name)
    if order == "patch first":
        patch_model(model)
    wrapped, expected = training(adapted(model, name)), training(adapted(reference, name))
    if order == "wrap first":
        assert patch_model(wrapped) is wrapped
    count = layers(wrapped)
    assert count == layers(model) > 0
    arguments = call(name)
    with monkeypatch.context() as patch:
        calls = spy_layers(patch)
        found = step(wrapped, arguments)
        assert len(calls) == count
        assert spared_square_masks(name, calls)
    assert same_step(found, step(expected, arguments))
    assert all("lora" in parameter for parameter in found[1])

    with wrapped.disable_adapter(), expected.disable_adapter():
        assert torch.allclose(wrapped(**arguments).loss, expected(**arguments).loss, atol=TOLERANCE)
    wrapped.save_pretrained(tmp_path)
    assert "streamattn" not in (tmp_path / "adapter_config.json").read_text()

    unpatch_model(wrapped)
    assert layers(wrapped) == 0
    assert torch.equal(wrapped(**arguments).loss, expected(**arguments).loss)
    patch_model(wrapped)
    merged, plain = (each.merge_and_unload().requires_grad_() for each in (wrapped, expected))
    assert merged is model
    assert layers(merged) == count
    assert same_step(step(training(merged), arguments), step(training(plain), arguments))
    assert list(merged.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig"])
@pytest.mark.parametrize("name", ["GPT-2", "OLMo-2", *present("Llama", "Mistral", "gpt-oss")])
def test_virtual_tokens(name: str, kind: str) -> None:
    """Of a cache that the adapter fills, and of a prompt before the padding of the real one."""
    peft = pytest.importorskip("peft", reason="virtual tokens are peft's")
    models = pair(name)
    adapters = []
    for model in models:
        torch.manual_seed(2)
        adapters.append(
            peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4))
        )
    patch_model(adapters[0])
    arguments = call(name)
    assert same_step(*(step(each, arguments) for each in adapters))
    if kind == "PromptTuningConfig" and name in families("window"):
        return  # peft 0.21 gives the prompt again at each step, and so rows that see nothing
    del arguments["labels"]
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    found, expected = (each.generate(**arguments, **options) for each in adapters)
    assert torch.equal(found, expected)


# Several processes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", present("Llama", "gpt-oss", "T5"))
@pytest.mark.usefixtures("process_group")
def test_data_parallel(name: str, order: str) -> None:
    """With checkpointing too (huggingface/peft#313: "marked ready twice")."""
    model, reference = pair(name)
    training(model).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if order == "patch first":
        patch_model(model)
    wrapped = DistributedDataParallel(model)
    if order == "wrap first":
        patch_model(wrapped)
    assert layers(wrapped) == layers(model) > 0
    arguments = call(name)
    step(wrapped, arguments)
    loss, found = step(wrapped, arguments)
    found = {parameter.removeprefix("module."): gradient for parameter, gradient in found.items()}
    assert same_step((loss, found), step(training(reference), arguments))
    unpatch_model(wrapped)
    assert layers(model) == 0


@pytest.mark.parametrize("what", ["blocks", "layers"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", present("Llama", "Gemma 2", "gpt-oss", "BART"))
@pytest.mark.usefixtures("process_group")
def test_fully_sharded(name: str, order: str, what: str) -> None:
    """Sharding gives modules classes of their own, whichever comes first."""
    model, reference = pair(name)
    mesh = init_device_mesh("cpu", (1,))
    paths = list(patch_report(model).skipped)
    wrapped = paths if what == "layers" else dict.fromkeys(path.rpartition(".")[0] for path in paths)
    if order == "patch first":
        patch_model(model)
    for path in wrapped:
        fully_shard(model.get_submodule(path), mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "wrap first":
        patch_model(model)
    assert layers(model) == len(paths)
    arguments = call(name)
    loss, found = step(training(model), arguments)
    found = {parameter: gradient.full_tensor() for parameter, gradient in found.items()}  # type: ignore[attr-defined]
    assert same_step((loss, found), step(training(reference), arguments))
    unpatch_model(model)
    assert layers(model) == 0
    assert torch.allclose(model(**arguments).loss, loss, atol=TOLERANCE)


# Offloading


OFFLOADING: dict[str, Callable[..., Any]] = {
    "cpu": lambda model, folder: cpu_offload(model, torch.device("cpu")),
    "disk": lambda model, folder: disk_offload(model, folder, torch.device("cpu")),
    "device map": lambda model, folder: dispatch_model(
        model, {"": "cpu"}, force_hooks=True, offload_dir=folder
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", OFFLOADING)
@pytest.mark.parametrize("name", NAMES)
def test_offloading(name: str, how: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's hooks stand in front of the forward of every module and move its weights."""
    model, reference = pair(name)
    if order == "patch first":
        patch_model(model)
    OFFLOADING[how](model, tmp_path / "weights")
    if order == "wrap first":
        patch_model(model)
    arguments = call(name)
    with torch.no_grad():
        expected = reference(**arguments).loss
        calls = spy_layers(monkeypatch)
        assert torch.allclose(model(**arguments).loss, expected, atol=TOLERANCE)
        assert len(calls) == layers(model) > 0
        unpatch_model(model)
        assert torch.allclose(model(**arguments).loss, expected, atol=TOLERANCE)
        assert len(calls) == len(patch_report(model).skipped)
        patch_model(model)
        if how == "device map":
            remove_hook_from_submodules(model)
            assert torch.allclose(model(**arguments).loss, expected, atol=TOLERANCE)


# Quantised linears


@pytest.fixture
def quantization() -> Any:
    """torchao's, also from the folder that TORCHAO names.

    transformers imports torchao wherever it finds it, which takes a second in every process: a folder that
    only these tests know spares the others that. It stays on the path, for what was imported stays too.
    """
    if (folder := os.environ.get("TORCHAO")) is not None and folder not in sys.path:
        sys.path.append(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao.quantization", reason="torchao is not installed")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != "GPT-2"]
)  # whose projections aren't linears
def test_weights_of_eight_bits(
    name: str, order: str, quantization: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """huggingface's and our layers call the same quantised projections."""
    config = quantization.Int8WeightOnlyConfig()
    model, reference = pair(name)
    before = reference(**call(name)).loss
    if order == "patch first":
        patch_model(model)
    for each in (model, reference):
        quantization.quantize_(each, config)
    if order == "wrap first":
        patch_model(model)
    arguments = call(name)
    calls = spy_layers(monkeypatch)
    with torch.no_grad():
        found, expected = model(**arguments), reference(**arguments)
    assert len(calls) == layers(model) > 0
    assert found.loss != before  # it is quantised
    assert torch.allclose(found.loss, expected.loss, atol=TOLERANCE)
    unpatch_model(model)
    assert torch.equal(model(**arguments).logits, expected.logits)


# Checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", present("Llama", "gpt-oss", "BART", "T5"))
def test_gradient_checkpointing(name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation must not append to a cache, nor find another mask."""
    model, reference = pair(name)
    training(patch_model(model))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    arguments = call(name)
    calls = spy_layers(monkeypatch)
    found = step(model, arguments)
    assert len(calls) == 2 * layers(model)  # each is computed again
    assert same_step(found, step(training(reference), arguments))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", present("Llama", "BART"))
def test_dropout_is_redrawn_alike(name: str, reentrant: bool) -> None:
    """The recomputed forward drops what the first one dropped, or gradients would be of another function."""
    model, other = pair(name, attention_dropout=0.5)
    for each in (model, other):
        patch_model(each).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    steps = []
    for each in (model, other):
        torch.manual_seed(5)
        steps.append(step(each, call(name)))
    assert same_step(*steps)
    torch.manual_seed(6)
    assert not torch.allclose(step(model, call(name))[0], steps[0][0])


# Copies and hooks


def saved(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", present("Gemma 2", "gpt-oss", "BART", "T5"))
def test_copies(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(pair(name)[0])
    other = COPIES[how](model)
    calls = spy_layers(monkeypatch)
    arguments = call(name)
    assert torch.equal(other(**arguments).logits, model(**arguments).logits)
    assert len(calls) == 2 * layers(other) == 2 * layers(model)
    assert spared_square_masks(name, calls)
    unpatch_model(model)
    assert layers(other) == len(patch_report(model).skipped)
    other(**arguments)
    assert spared_square_masks(name, calls)
    assert other.config == model.config


@pytest.mark.parametrize("name", present("Llama", "BART"))
def test_hooks_survive_both_ways(name: str) -> None:
    model, _ = pair(name)
    seen: list[str] = []
    layer = model.get_submodule(next(iter(patch_report(model).skipped)))
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, out: seen.append("after"))
    layer.register_full_backward_hook(lambda module, inner, outer: seen.append("backward"))
    for change in (patch_model, unpatch_model, patch_model):
        change(model)
        seen.clear()
        step(model, call(name))
        assert seen == ["before", "after", "backward"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_computed_only_when_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(pair(name)[0])
    count = 0
    original = patches.hf.attention_weights

    def counting(*args: Any, **options: Any) -> Tensor:
        nonlocal count
        count += 1
        return original(*args, **options)

    monkeypatch.setattr(patches.hf, "attention_weights", counting)
    model(**call(name))
    assert count == 0
    model(**call(name), output_attentions=True)
    assert count == layers(model)
    model(**call(name), output_hidden_states=True)
    assert count == layers(model)
