"""What a step is said to compute and hold is what a real one does, on the CPU, where both can be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from patches import patch_model
from streamattn.bench.memory import at_peak, history_on_cpu, peaks_on_cpu
from streamattn.job import load_shape
from streamattn.pattern import UNBOUNDED
from streamattn.step import Attention, Step, trace

BATCH, TOKENS = 2, 64


def config_of(name: str, layers: int = 2, dropout: float = 0.0) -> PretrainedConfig:
    config = load_shape(name)
    config.num_hidden_layers = layers
    for key in ("attn_pdrop", "attention_dropout", "resid_pdrop", "embd_pdrop"):
        if hasattr(config, key):
            setattr(config, key, dropout if key != "attention_dropout" else 0.0)
    return config


def traced(config: PretrainedConfig, dtype: torch.dtype = torch.float32, **options: Any) -> Step:
    options = {"gpu": False, "workspace": lambda call, tokens: 0} | options
    return trace(config, BATCH, TOKENS, dtype, **options)


def real(config: PretrainedConfig, checkpointing: bool = False) -> tuple[Any, Tensor]:
    model: Any = AutoModelForCausalLM.from_config(config)
    model.loss_type = "ForCausalLM"
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return patch_model(model).train(), torch.randint(2, config.vocab_size, (BATCH, TOKENS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gpt2-nano", "olmo2-nano"])
def test_memory_is_that_of_a_real_step(name: str, checkpointing: bool, dtype: torch.dtype) -> None:
    model, ids = real(config_of(name), checkpointing)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            outputs = model(input_ids=ids, labels=ids)
        outputs.logits.float()  # as accelerate does
        return outputs.loss

    def step() -> None:
        forward().backward()

    step()  # whatever is made once is made
    model.zero_grad(set_to_none=True)
    held, _ = peaks_on_cpu(forward)
    peak, _ = at_peak(history_on_cpu(step))
    found = traced(config_of(name), dtype, checkpointing=checkpointing)
    assert found.held == pytest.approx(held, rel=0.01)
    assert found.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("name", ["gpt2-nano", "olmo2-nano"])
def test_what_is_held_is_what_autograd_saves(name: str) -> None:
    model, ids = real(config_of(name))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in own:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(input_ids=ids, labels=ids).loss
    # attention saves by itself, and some of it is saved by its neighbours, too
    total = sum(saved.values())
    assert 0.85 * traced(config_of(name)).held < total <= 1.01 * traced(config_of(name)).held
    assert loss.requires_grad


@pytest.mark.parametrize("name", ["gpt2-small", "gpt2-nano", "olmo2-nano", "olmo2-1b"])
def test_parameters_are_the_models(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_shape(name))
    wanted = [parameter.numel() for parameter in model.parameters()]
    layers: Any = max((x for x in model.modules() if isinstance(x, nn.ModuleList)), key=len)
    layer = sum(parameter.numel() for parameter in layers[0].parameters())
    step = traced(load_shape(name))
    assert step.parameters == wanted
    assert step.layer_parameters == layer
    assert step.outside_parameters == sum(wanted) - len(layers) * layer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_products_are_counted_in_closed_form(checkpointing: bool) -> None:
    config = config_of("gpt2-nano", layers=3)
    step = traced(config, checkpointing=checkpointing)
    forward, backward = (sum(op.flops for op in part) for part in (step.forward, step.backward))
    head = 2 * BATCH * TOKENS * config.hidden_size * config.vocab_size
    layers = 3 * 2 * BATCH * TOKENS * 12 * config.hidden_size**2
    assert forward == layers + head
    again = layers * 2 / 3  # PyTorch stops before a layer's last product, whose result nothing needs
    assert backward == 2 * (layers + head) + again * checkpointing


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("name", "head_dim"), [("gpt2-nano", 32), ("olmo2-nano", 32)])
def test_every_call_of_attention_is_found(name: str, head_dim: int, checkpointing: bool) -> None:
    calls = traced(config_of(name), checkpointing=checkpointing).attention
    for is_backward, count in ((False, 4 if checkpointing else 2), (True, 2)):
        call = Attention(is_backward, BATCH, 4, head_dim, UNBOUNDED, 0)
        assert calls.count(call) == count
    assert len(calls) == (6 if checkpointing else 4)


def test_bytes_are_those_that_are_read_and_written() -> None:
    config = config_of("gpt2-nano")
    step = traced(config)
    states = 4 * BATCH * TOKENS * config.hidden_size
    norms = [op for op in step.forward if op.name == "aten::native_layer_norm"]
    moved = 2 * states + 2 * 4 * config.hidden_size + 2 * 4 * BATCH * TOKENS  # weights, mean and deviation
    assert [op.bytes for op in norms] == [moved] * 5
    assert not [op.name for op in step.forward if op.name in ("aten::view", "aten::t", "aten::detach")]


def test_a_workspace_counts_while_attention_runs() -> None:
    config = config_of("gpt2-nano")
    large = 1 << 40
    seen: list[tuple[bool, int]] = []

    def workspace(call: Attention, tokens: int) -> int:
        seen.append((call.is_backward, tokens))
        return large if call.is_backward else 0

    without, found = traced(config), traced(config, workspace=workspace)
    assert large < found.peak < large + without.peak
    assert found.held == without.held
    assert seen == [(False, TOKENS)] * 2 + [(True, TOKENS)] * 2


def test_a_gpus_autocast_and_dropout() -> None:
    """Powers in float32 from 16 bits, and a mask of a byte an element."""
    config = config_of("gpt2-nano", dropout=0.1)
    half = torch.bfloat16
    there, here = (traced(config, half, gpu=gpu, workspace=lambda call, tokens: 0) for gpu in (True, False))
    inner = BATCH * TOKENS * 4 * config.hidden_size
    assert {op.bytes for op in there.forward if op.name.startswith("aten::pow")} == {8 * inner}
    assert {op.bytes for op in here.forward if op.name.startswith("aten::pow")} == {4 * inner}
    assert any(op.name == "aten::native_dropout" for op in there.forward)
    assert not any("bernoulli" in op.name for op in there.forward)
    again = traced(config, half, gpu=True, checkpointing=True)
    assert {op.bytes for op in again.backward if op.name.startswith("aten::pow")} == {8 * inner}


def test_olmo2_is_planned_with_the_prologue_that_a_gpu_runs() -> None:
    name = torch.ops.streamattn.prologue_forward.default.name()
    for gpu, count in ((True, 2), (False, 0)):
        step = traced(config_of("olmo2-nano"), torch.bfloat16, gpu=gpu)
        assert sum(op.name == name for op in step.forward) == count


def test_gradients_are_counted_where_they_are_kept() -> None:
    config = config_of("gpt2-nano", layers=24)
    step, sharded = (traced(config, checkpointing=True, sharded=sharded) for sharded in (False, True))
    assert sharded.held == step.held
    assert sharded.peak < step.peak
    adds = [
        sum(op.name.startswith("aten::add_") for op in traced(config, accumulates=x).backward)
        for x in (False, True)
    ]
    assert adds[1] - adds[0] == len(step.parameters)


def test_the_loss_of_a_shared_sequence_is_the_same_work() -> None:
    config = config_of("olmo2-nano")
    one, shared = traced(config), traced(config, shared=True)
    flops = [sum(op.flops for op in (*step.forward, *step.backward)) for step in (one, shared)]
    assert flops[0] == flops[1] > 0
    assert shared.attention == one.attention
