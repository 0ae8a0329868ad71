"""QK-norm and rotary embedding on a GPU, at models' sizes: errors beside the eager steps', OLMo-2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from patches import patch_model, unpatch_model
from streamattn.kernels import qk_prologue
from tests.prologue_cases import NAMES, Prologue, eager, error, ours, results

pytestmark = pytest.mark.gpu

CASES = {
    "olmo2 7b": Prologue(heads=(32, 32), head_dim=128, q_len=1000),
    "olmo2 32b": Prologue(heads=(40, 8), head_dim=128, q_len=513, layout="fused"),
    "qwen3": Prologue(heads=(32, 8), head_dim=128, q_len=777, norm="each", half_angles=True),
    "gemma3": Prologue(heads=(8, 4), head_dim=256, q_len=300, norm="each + 1", half_angles=True),
    "partial": Prologue(heads=(16, 16), head_dim=80, q_len=400, rotary=32, layout="sequence first"),
    "interleaved": Prologue(heads=(12, 4), head_dim=64, q_len=401, interleaved=True, norm="each"),
    "one token": Prologue(heads=(32, 8), head_dim=128, q_len=1, batch=3),
    "float weights": Prologue(heads=(16, 16), head_dim=128, q_len=200, float_weights=True, batch=3),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_errors_are_no_larger_than_the_eager_steps(name, dtype, poisoned):
    case = CASES[name]
    got, theirs = results(ours, case, dtype, "cuda"), results(eager, case, dtype, "cuda")
    want = results(eager, case, dtype, "cuda", exact=True)
    floor = 3e-7 if dtype == torch.float32 else 0.0
    for at, which in enumerate(NAMES[: len(got)]):
        assert error(got[at], want[at]) <= max(1.1 * error(theirs[at], want[at]), floor), which


@pytest.mark.parametrize("name", ["olmo2 7b", "gemma3"])
def test_the_same_bits_each_time(name, poisoned):
    first, *others = (results(ours, CASES[name], torch.bfloat16, "cuda") for _ in range(5))
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("name", ["olmo2 32b", "qwen3"])
def test_compiled_and_captured_in_a_graph(name):
    """Without gradients in a CUDA graph; with them compiled."""
    case = CASES[name]
    want = results(ours, case, torch.bfloat16, "cuda")
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, results(compiled, case, torch.bfloat16, "cuda"), want))

    trained, angles, _ = case.build(torch.bfloat16, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = ours(case, *trained, *angles)
    graph.replay()
    assert all(map(torch.equal, captured, want[:2]))


def test_olmo2_is_as_near_to_float64_as_eager(monkeypatch):
    """Logits and gradients of a patched model in bfloat16, its projections' outputs read by the kernel."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = Olmo2Config(num_hidden_layers=2, intermediate_size=256, vocab_size=100, pad_token_id=0, **sizes)
    config._attn_implementation = "eager"
    model: Any = Olmo2ForCausalLM(config)
    model.cuda().double()
    tokens = torch.randint(1, 100, (2, 200), device="cuda")
    for norm in (m for name, m in model.named_modules() if name.endswith(("q_norm", "k_norm"))):
        torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    model.bfloat16().double()  # what both begin with

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(tokens, labels=tokens)
        out.loss.backward()
        grads = [x.grad for name, x in model.named_parameters() if "_norm" in name or "_proj" in name]
        return [out.logits.detach(), *(x.clone() for x in grads if x is not None)]

    want = run()
    model.bfloat16()
    theirs = run()
    calls = []
    forward = qk_prologue.prologue_forward
    monkeypatch.setattr(qk_prologue, "prologue_forward", lambda *args: calls.append(1) or forward(*args))
    patch_model(model)
    got = run()
    unpatch_model(model)
    assert len(calls) == 2
    for mine, other, exact in zip(got, theirs, want, strict=True):
        assert error(mine, exact) <= 1.1 * error(other, exact)
