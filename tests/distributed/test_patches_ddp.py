"""Patched models on two processes, wrapped before and after the patch: steps as of unpatched ones so wrapped.

Each process has a row of its own, one of them with padding. The processes are started once, for all models.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from patches import patch_model, patch_report, unpatch_model
from tests.hf_families import present
from tests.hf_wrapped import call, layers, pair, same_step, training
from tests.several_processes import several_processes

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]

PROCESSES = 2
NAMES = ["GPT-2", "OLMo-2", *present("Llama")]
ORDERS = ("patch first", "wrap first")


def data_parallel(model: Any) -> Any:
    return DistributedDataParallel(model)


def sharded(model: Any) -> Any:
    """The attention layers, which get classes of their own by it, then their blocks, and the rest."""
    report = patch_report(model)
    names = (*report.patched, *report.skipped)
    for path in (*names, *dict.fromkeys(name.rpartition(".")[0] for name in names)):
        fully_shard(model.get_submodule(path))
    return fully_shard(model)


@dataclass(frozen=True)
class Checkpointed:
    """A wrapper that other processes can be told."""

    reentrant: bool

    def __call__(self, model: Any) -> Any:
        options = {"use_reentrant": self.reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        return DistributedDataParallel(model)


def adapted(model: Any) -> Any:
    """Low-rank adapters whose only way to a gradient leads through the checkpoints (huggingface/peft#313)."""
    import peft

    names = ["c_attn"] if hasattr(model, "transformer") else ["q_proj", "v_proj"]
    config = peft.LoraConfig(
        r=4, target_modules=names, init_lora_weights=False, fan_in_fan_out=names == ["c_attn"]
    )
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    return DistributedDataParallel(wrapped)


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def steps(model: Any, arguments: dict[str, Tensor]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of three steps of training."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    found = []
    for _ in range(3):
        loss = model(**arguments).loss
        loss.backward()
        gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), gradients))
        optimizer.step()
        optimizer.zero_grad()
    return found


def check(name: str, order: str, wrap: Callable[[Any], Any], arguments: dict[str, Tensor]) -> None:
    model, reference = pair(name)
    count = len(patch_report(model).skipped)
    if order == "patch first":
        patch_model(model)
    wrapped = wrap(training(model))
    if order == "wrap first":
        assert patch_model(wrapped) is wrapped
    assert layers(wrapped) == count > 0
    expected = steps(wrap(training(reference)), arguments)
    found = steps(wrapped, arguments)
    for one, other in zip(found, expected, strict=True):
        assert same_step(one, other), f"{name}, {order}, {wrap}"
    assert not torch.equal(found[0][0], found[2][0])  # it trains
    # Processes with rows of their own have the same gradients: those of all rows.
    for gradient in found[0][1].values():
        theirs = gradient.clone()
        dist.broadcast(theirs, src=0)
        assert torch.equal(theirs, gradient)
    losses = [torch.zeros(()) for _ in range(PROCESSES)]
    dist.all_gather(losses, found[0][0])
    assert losses[0] != losses[1]
    unpatch_model(wrapped)
    assert layers(wrapped) == 0
    assert steps(wrapped, arguments)


Wraps = tuple[Callable[[Any], Any], ...]


def run(rank: int, store: str, cases: list[tuple[list[str], Wraps]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    try:
        for names, wraps in cases:
            for name in names:
                arguments = {key: value[rank : rank + 1] for key, value in call(name).items()}
                for wrap in wraps:
                    for order in ORDERS:
                        check(name, order, wrap, arguments)
    finally:
        dist.destroy_process_group()


def test_steps_are_those_of_an_unpatched_model(tmp_path: Path) -> None:
    """Data parallel, checkpointed in both ways too (huggingface/accelerate#2017: "marked ready twice"); fully
    sharded; and with adapters whose layers are checkpointed (huggingface/peft#313).
    """
    cases: list[tuple[list[str], Wraps]] = [
        (NAMES, (data_parallel, Checkpointed(False), Checkpointed(True))),
        ([*NAMES, *present("gpt-oss")], (sharded,)),
    ]
    if importlib.util.find_spec("peft") is not None:
        cases.append((["GPT-2", *present("Llama")], (adapted,)))
    several_processes(run, PROCESSES, str(tmp_path / "store"), cases)
