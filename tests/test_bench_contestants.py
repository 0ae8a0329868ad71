"""Models with one attention or another: shared weights, the same function but for the ceiling."""

from __future__ import annotations

import pytest
import torch
import transformers

from patches import patch_report
from streamattn.bench import contestants
from streamattn.bench.contestants import CONTESTANTS, base_model, configuration, contestant
from streamattn.bench.providers import Unsupported

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "set_attn_implementation"),
    reason="this transformers can't change a model's attention",
)


@pytest.fixture(params=["gpt2-nano", "olmo2-nano"])
def base(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    return base_model(configuration(request.param, 1, 32, 0.0), "cpu")


def test_all_share_the_weights_and_compute_the_same_but_the_ceiling(
    base, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contestants, "NAMED", {})  # what is written for cuDNN is right on any backend
    ids = torch.randint(0, 4096, (2, 16))
    want = base(input_ids=ids).logits
    for name in CONTESTANTS:
        model = contestant(base, name)
        for mine, theirs in zip(model.parameters(), base.parameters(), strict=True):
            assert mine is theirs
        logits = model(input_ids=ids).logits
        close = torch.allclose(logits, want, atol=1e-4)
        assert close == (name != "removed"), name
        assert (len(patch_report(model).patched) == 1) == (name == "streamattn")
    assert base.config._attn_implementation == "sdpa"
    assert torch.equal(base(input_ids=ids).logits, want)


def test_no_name_promises_on_a_cpu_what_is_not_there(base) -> None:
    with pytest.raises(Unsupported, match="cudnn needs an NVIDIA GPU"):
        contestant(base, "sdpa_cudnn")


def test_the_ceiling_keeps_the_work_of_every_projection(base) -> None:
    """Else compilation would leave out the projections of queries and keys, which any attention needs."""
    ids = torch.randint(0, 4096, (2, 16))
    model = contestant(base, "removed")
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_configuration() -> None:
    config = configuration("gpt2-nano", 2, 1000, 0.1)
    assert (config.n_layer, config.n_positions, config.attn_pdrop, config.resid_pdrop) == (2, 1000, 0.1, 0.0)
    assert configuration("gpt2-nano", None, 10, 0.0).n_positions == 256
    assert configuration("olmo2-nano", None, 10, 0.2).attention_dropout == 0.2


def test_only_weights_have_the_dtype() -> None:
    model = base_model(configuration("olmo2-nano", 1, 10, 0.0), "cpu", torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {x.dtype for x in model.buffers() if x.is_floating_point()} == {torch.float32}


def test_no_shape_is_said(base) -> None:
    with pytest.raises(ValueError, match="gpt2-mega"):
        configuration("gpt2-mega", None, 10, 0.0)


def test_a_release_without_masks_interface(base, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.masking_utils as utils

    monkeypatch.delattr(utils, "AttentionMaskInterface")
    with pytest.raises(Unsupported, match=r"4\.53"):
        contestant(base, "removed")
    monkeypatch.delattr(transformers.PreTrainedModel, "set_attn_implementation")
    with pytest.raises(Unsupported, match=r"4\.54"):
        contestants.contestant(base, "eager")
