"""Patched GPT-2 and OLMo-2 on a GPU: eager attention's results, and that the kernels computed them."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel, Olmo2Config, Olmo2ForCausalLM

from patches import patch_model
from streamattn import kinds
from streamattn.dispatch import Backend, unavailable
from tests.hf_models import (
    FAMILIES,
    TOLERANCE,
    error_where,
    gradient_error,
    gradients,
    greedy,
    left_padding,
    patched_pair,
    tokens,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.parametrize("family", FAMILIES),
]


def on(device: str, family: str, attn: str = "sdpa", **config: Any) -> tuple[Any, Any]:
    """(patched, unpatched eager) models of the same weights on a device."""
    patched, reference = patched_pair(family, attn, **config)
    return patched.to(device), reference.to(device)


def batch(device: str, length: int, *pads: int) -> tuple[Tensor, Tensor]:
    ids, mask = left_padding(tokens(2, length), *pads)
    return ids.to(device), mask.to(device)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits_and_gradients_equal_eager(family, attn, padding, device, backends, monkeypatch):
    monkeypatch.setattr(kinds, "_GUARDS", None)  # no call repeats another
    patched, reference = on(device, family, attn)
    ids, mask = batch(device, 90, 0, 40 if padding == "left" else 0)
    if padding == "right":
        mask[1, 60:] = 0
    given = None if padding == "none" else mask
    with torch.no_grad():
        a, b = (model(input_ids=ids, attention_mask=given).logits for model in (patched, reference))
    assert error_where(given, a, b) < TOLERANCE
    assert gradient_error(gradients(patched, ids, given), gradients(reference, ids, given)) < TOLERANCE
    assert len(backends) == 9  # three layers: without gradients, with them, and backward
    assert set(backends) == {Backend.TRITON}


@pytest.mark.slow  # a static cache has `generate` compile the steps
@pytest.mark.parametrize("pads", [(0, 0), (0, 9)], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation_token_for_token(family, cache, pads, device, backends):
    torch.compiler.reset()
    patched, reference = on(device, family)
    ids, mask = batch(device, 16, *pads)
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
    assert torch.equal(greedy(patched, ids, mask, **options), greedy(reference, ids, mask))
    assert set(backends) == {Backend.DECODE}  # for the prompt too, which is short


def test_training_under_autocast_follows_float32(family, device, backends):
    """bfloat16 products on float32 weights, left padding, with and without checkpointing."""
    off: dict[str, Any] = (
        {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    )
    patched, reference = on(device, family, **off)
    checkpointed = copy.deepcopy(patched)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = []
    for model in (patched.train(), checkpointed.train(), reference.train()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(20):
            ids, mask = batch(device, 70, 0, 3 + step % 5)
            labels = ids.masked_fill(mask == 0, -100).scatter(1, mask.argmax(1, keepdim=True), -100)
            with torch.autocast(device, torch.bfloat16, enabled=model is not reference):
                loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[2][-1] < 0.9 * found[2][0]
    for losses in found[:2]:
        assert losses == pytest.approx(found[2], rel=0.03)
    assert backends
    assert Backend.REFERENCE not in backends


def test_dropout_follows_the_seed_and_the_checkpoint(family, device, backends):
    dropout: dict[str, Any] = {"attn_pdrop": 0.3} if family == "gpt2" else {"attention_dropout": 0.3}
    plain, _ = on(device, family, **dropout)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids, _ = batch(device, 40, 0, 0)
    found = []
    for model, seed in ((plain, 3), (checkpointed, 3), (plain, 4)):
        torch.manual_seed(seed)
        found.append(gradients(model.train(), ids))
    assert gradient_error(found[0], found[1]) < 1e-5
    assert gradient_error(found[0], found[2]) > 1e-2
    assert set(backends) == {Backend.TRITON}


@pytest.mark.slow
def test_a_compiled_model_has_no_graph_break(family, device):
    torch.compiler.reset()
    patched, reference = on(device, family)
    ids, mask = batch(device, 40, 0, 7)
    options = {"attention_mask": mask, "use_cache": False}
    compiled = torch.compile(patched, fullgraph=True)
    logits = compiled(ids, **options).logits
    assert error_where(mask, logits, reference(ids, **options).logits) < TOLERANCE
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in patched.parameters())


def kernels_of(step: Callable[[], Any]) -> Counter[str]:
    """CUDA kernels of a step without linear layers' matrix products; those that aren't ours as "other"."""
    for _ in range(2):  # what is compiled, planned or filled once
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    names = [x.name for x in found.events() or [] if x.device_type.name == "CUDA"]
    names = [name for name in names if not re.search("nvjet|gemm|cutlass|splitK|Memset", name)]
    return Counter(name if re.match("hopper_|qk_prologue_", name) else "other" for name in names)


def test_kernels_of_a_layer(family):
    """No copy and no pass that nobody needs, forward or backward.

    Of the others, GPT-2's backward has the sums of two biases' gradients, and OLMo-2's adds three gradients
    of its input.
    """
    reason = unavailable(Backend.HOPPER, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    sizes: dict[str, Any] = dict(num_hidden_layers=1, vocab_size=100)
    model: Any
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))
    else:
        sizes |= dict(hidden_size=1024, intermediate_size=64, num_attention_heads=8, num_key_value_heads=8)
        model = Olmo2ForCausalLM(Olmo2Config(**sizes))
    patch_model(model.cuda().bfloat16().train())
    options: dict[str, Any] = {}
    x = torch.randn(2, 1024, model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    if family == "gpt2":
        layer = model.transformer.h[0].attn
    else:
        layer = model.model.layers[0].self_attn
        places = torch.arange(1024, device="cuda")[None]
        options = dict(position_embeddings=model.model.rotary_emb(x, places), attention_mask=None)
    x.requires_grad_()
    leaves = [x, *layer.parameters()]
    out = layer(x, **options)[0]
    dout = torch.randn_like(out)
    forward = kernels_of(lambda: layer(x, **options))
    backward = kernels_of(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    hopper = dict.fromkeys(("hopper_bwd_prepare_kernel", "hopper_bwd_kernel", "hopper_bwd_finish_kernel"), 1)
    if family == "gpt2":
        assert forward == {"hopper_fwd_kernel": 1}
        assert backward == hopper | {"other": 2}
    else:
        assert forward == {"qk_prologue_fwd_kernel": 1, "hopper_fwd_kernel": 1}
        ours = dict.fromkeys(("qk_prologue_bwd_kernel", "qk_prologue_sum_kernel"), 1)
        assert backward == hopper | ours | {"other": 2}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu(family):
    patched, reference = on("cuda:1", family)
    ids, mask = batch("cuda:1", 40, 0, 7)
    a, b = (model(ids, attention_mask=mask).logits for model in (patched, reference))
    assert error_where(mask, a, b) < TOLERANCE
    assert gradient_error(gradients(patched, ids, mask), gradients(reference, ids, mask)) < TOLERANCE
    assert torch.equal(greedy(patched, ids, mask, count=16), greedy(reference, ids, mask, count=16))
    assert torch.cuda.current_device() == 0
