"""Whole models on two processes that share sequences: loss and gradients of all weights are one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from patches import patch_model, patch_report
from streamattn import StreamMultiHeadAttention, parallel
from streamattn.shared_trainer import compare_shared, shard_inputs, shared_logits, token_loss
from tests.hf_models import FAMILIES, build, tokens
from tests.several_processes import several_processes

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]
PROCESSES = 2
DROPOUT: dict[str, dict[str, Any]] = {
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "olmo2": {"attention_dropout": 0.2},
}
NONE: dict[str, dict[str, Any]] = {family: dict.fromkeys(options, 0.0) for family, options in DROPOUT.items()}


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def shared_step(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients as `SharedTrainer` makes them; DDP and FSDP2 average over the processes."""
    items = (inputs["labels"][:, 1:] != -100).sum()
    with parallel.sharing(inputs["input_ids"].shape[1]):
        loss = token_loss(model, inputs, world()) * (PROCESSES / items)
        loss.backward()
    mean = loss.detach() / PROCESSES
    dist.all_reduce(mean)
    return mean, gradients(getattr(model, "module", model))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    limits = {name: 1e-5 * x.abs().max().clamp(min=0.1) for name, x in expected.items()}
    return all(bool((found[name] - x).abs().max() <= limits[name]) for name, x in expected.items())


def check(family: str, length: int) -> None:
    ids = tokens(2, length)
    labels = ids.clone()
    labels[0, length // 2 :] = -100  # on one rank there are fewer
    inputs = {"input_ids": ids, "labels": labels}
    model = patch_model(build(family, "sdpa", **NONE[family])).train()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    wrapped = DistributedDataParallel(model)
    found_loss, found = shared_step(wrapped, inputs)
    assert torch.allclose(found_loss, loss.detach(), rtol=1e-5), f"{family}: {found_loss}, {loss}"
    assert same(found, expected), family
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(shared_logits(model, ids, world()), logits, atol=1e-4)
    sharded = patch_model(build(family, "sdpa", **NONE[family])).train()
    for layer in patch_report(sharded).patched:
        fully_shard(sharded.get_submodule(layer.rpartition(".")[0]))
    found_loss, found = shared_step(fully_shard(sharded), inputs)
    assert torch.allclose(found_loss, loss.detach(), rtol=1e-5)
    assert same(found, expected), family


def check_mixing() -> None:
    """A model that mixes tokens outside of its attention layers is found out."""
    model = patch_model(build("gpt2", "sdpa")).eval()
    model.transformer.ln_f.register_forward_hook(lambda layer, args, out: out + out.cumsum(dim=1))
    ids = tokens(2, 24)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    with pytest.raises(
        ValueError, match=r"of GPT2LMHeadModel differ by .* mixes tokens outside of its attention"
    ):
        compare_shared(model, ids, expected, world())


def check_dropout(family: str) -> None:
    """Checkpointed layers are computed again with the same masks, and on shards."""
    inputs = {"input_ids": tokens(2, 24), "labels": tokens(2, 24)}
    model = patch_model(build(family, "sdpa", **DROPOUT[family])).train()
    wrapped = DistributedDataParallel(model)
    steps = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        steps.append(shared_step(wrapped, inputs))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert torch.equal(steps[0][0], steps[1][0])
    assert same(steps[0][1], steps[1][1]), family
    assert not torch.equal(steps[0][0], steps[2][0]), "nothing was dropped"


def check_refusals() -> None:
    model = patch_model(build("gpt2", "sdpa")).eval()
    given = shard_inputs(tokens(2, 24), world())
    padded = {**given, "attention_mask": given["attention_mask"].tril()}
    layer = patch_model(torch.nn.Sequential(torch.nn.MultiheadAttention(16, 2)))[0]
    x = torch.zeros(4, 1, 16)
    with parallel.sharing(24), torch.no_grad():
        with pytest.raises(ValueError, match=r"can't serve .*attention weights; call the model with"):
            model(**given, output_attentions=True)
        with pytest.raises(ValueError, match="can't serve a mask"):
            model(**padded)
        for one in (layer, StreamMultiHeadAttention(16, 2)):
            with pytest.raises(ValueError, match="can't be given one rank's shard"):
                one(x, x, x)


def run(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    try:
        for family in FAMILIES:
            check(family, 24)
            check(family, 27)  # with padding
            check_dropout(family)
        check_refusals()
        check_mixing()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_whole_models(tmp_path: Path) -> None:
    several_processes(run, PROCESSES, str(tmp_path / "store"))
