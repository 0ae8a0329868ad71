"""Patched models of several families compiled and exported, against unpatched eager in float32."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from patches import patch_model
from tests.hf_families import LENGTH, present
from tests.hf_models import TOLERANCE, cache_argument, static_cache, tokens
from tests.hf_wrapped import NAMES, call, pair, same_step, training

pytest.importorskip("transformers.masking_utils", reason="this release makes masks in each model")

SEQ2SEQ = present("BART", "T5")
STRICT = ["GPT-2", *present("Llama", "BART")]  # which takes longer


def model_inputs(name: str) -> dict[str, Tensor]:
    """What a call takes but for labels, from which graphs don't compute losses in every release."""
    arguments = call(name)
    labels = arguments.pop("labels")
    return {**arguments, "decoder_input_ids": labels} if name in SEQ2SEQ else arguments


def valid(name: str, arguments: dict[str, Tensor], logits: Tensor) -> Tensor:
    """Logits without those of padding."""
    return logits if name in SEQ2SEQ else logits * arguments["attention_mask"].unsqueeze(-1)


@pytest.mark.parametrize("name", present("Llama", "gpt-oss"))
def test_compiled_training_step(name: str) -> None:
    """Forward and backward, without a graph break."""
    torch._dynamo.reset()
    model, reference = (training(each) for each in pair(name))
    patch_model(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    arguments = model_inputs(name)
    steps = []
    for run, each in ((compiled, model), (reference, reference)):
        loss = torch.tanh(valid(name, arguments, run(**arguments).logits) / 4).square().mean()
        loss.backward()
        gradients = {key: p.grad for key, p in each.named_parameters() if p.grad is not None}
        steps.append((loss.detach(), gradients))
    assert same_step(*steps)


@pytest.mark.parametrize("name", present("Llama", "Gemma 2"))
def test_compiled_steps_on_a_static_cache(name: str) -> None:
    """One graph for all steps; windows slide out of the prompt."""
    torch._dynamo.reset()
    model, reference = pair(name)
    ids = tokens(2, LENGTH)
    with torch.no_grad():
        expected = reference(ids).logits
        patch_model(model)
        cache = {cache_argument(model): static_cache(model, 2, 24)}
        first = model(ids[:, :8], **cache).logits
        compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
        steps = []
        for place in range(8, LENGTH):
            with torch.compiler.set_stance("fail_on_recompile" if place > 10 else "default"):
                steps.append(compiled(ids[:, place : place + 1], **cache).logits)
    assert float((torch.cat([first, *steps], dim=1) - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in NAMES), *((name, True) for name in STRICT)]
)
def test_exports(name: str, strict: bool) -> None:
    """A program that computes what eager attention does, padding included."""
    model, reference = pair(name, use_cache=False)
    arguments = model_inputs(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(patch_model(model), (), arguments, strict=strict)
        found = program.module()(**arguments).logits
        expected = reference(**arguments).logits
    assert float(valid(name, arguments, found - expected).abs().max()) < TOLERANCE
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("streamattn" in target for target in operators)
