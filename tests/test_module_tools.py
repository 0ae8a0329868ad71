"""`StreamMultiHeadAttention` in the hands of torch's tools, as torch's own layer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from streamattn import StreamMultiHeadAttention
from tests.mha import EMBED_DIM, NUM_HEADS, twins


def swapped(model: nn.Module) -> nn.Module:
    """A copy with every attention layer of torch's replaced, its state taken over."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MultiheadAttention):
                layer = StreamMultiHeadAttention(
                    child.embed_dim, child.num_heads, batch_first=child.batch_first
                )
                layer.load_state_dict(child.state_dict())
                setattr(parent, name, layer.train(child.training))
    return model


@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "all"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_whole_transformer(batch_first: bool, training: bool, masks: str) -> None:
    """Encoder, decoder and cross-attention, with gradients where it trains."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor", category=UserWarning)
        theirs: Any = nn.Transformer(EMBED_DIM, NUM_HEADS, 2, 2, 16, 0.0, batch_first=batch_first)
    theirs.encoder.use_nested_tensor = False
    ours: Any = swapped(theirs)
    source, target = torch.randn(2, 6, EMBED_DIM), torch.randn(2, 4, EMBED_DIM)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    options: dict[str, Any] = {}
    if masks in ("padding", "all"):
        hidden = torch.arange(6) >= torch.tensor([[4], [6]])
        options |= {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    if masks in ("causal", "all"):
        options |= {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4), "tgt_is_causal": True}
    if masks == "all":
        options |= {"src_mask": torch.randn(6, 6)}
    outs = []
    for model in (ours, theirs):
        with torch.set_grad_enabled(training):
            outs.append(model.train(training)(source, target, **options))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-4)
    if training:
        weight = torch.randn_like(outs[0])
        gradients = [
            torch.autograd.grad((out * weight).sum(), list(model.parameters()))
            for out, model in zip(outs, (ours, theirs), strict=True)
        ]
        for found, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * max(1.0, float(wanted.abs().max())))


def test_functional_call() -> None:
    theirs, ours = twins(torch.float64, batch_first=True)
    x = torch.randn(2, 5, EMBED_DIM, dtype=torch.float64)
    other = {name: p.detach() + 0.1 for name, p in theirs.named_parameters()}
    found = torch.func.functional_call(ours, other, (x, x, x))
    torch.testing.assert_close(found, torch.func.functional_call(theirs, other, (x, x, x)))
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))


@pytest.mark.parametrize("need_weights", [False, True])
def test_vmap(need_weights: bool) -> None:
    _, ours = twins(torch.float64, batch_first=True)

    def call(x: Tensor) -> Any:
        out, weights = ours(x, x, x, need_weights=need_weights)
        return out if weights is None else (out, weights)

    x = torch.randn(3, 2, 5, EMBED_DIM, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop", category=UserWarning)
        found = torch.func.vmap(call)(x)
    one_by_one = [call(each) for each in x]
    wanted = (
        tuple(map(torch.stack, zip(*one_by_one, strict=True))) if need_weights else torch.stack(one_by_one)
    )
    torch.testing.assert_close(found, wanted)


def test_pruning() -> None:
    """By a hook that sets the weight anew before each call."""
    outs, x = [], torch.randn(2, 5, EMBED_DIM, dtype=torch.float64)
    for layer in twins(torch.float64, batch_first=True):
        before = layer(x, x, x)[0]
        torch.manual_seed(1)
        prune.random_unstructured(layer, "in_proj_weight", 0.5)
        outs.append(layer(x, x, x)[0])
        assert not torch.allclose(outs[-1], before)
    torch.testing.assert_close(outs[1], outs[0])


def test_dynamic_quantization_passes_it_over() -> None:
    """Its projections are parameters, and the output projection is of the class that torch leaves alone."""
    quantization = pytest.importorskip("torch.ao.quantization", reason="this release has it no more")
    theirs = nn.TransformerEncoderLayer(EMBED_DIM, NUM_HEADS, 16, 0.0, batch_first=True).eval()
    layers, x = [theirs, swapped(theirs)], torch.randn(2, 5, EMBED_DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized: list[Any] = [
            quantization.quantize_dynamic(layer, {nn.Linear}, dtype=torch.qint8) for layer in layers
        ]
        outs = [layer(x) for layer in quantized]
    assert "quantized" in type(quantized[1].linear1).__module__
    assert type(quantized[1].self_attn) is StreamMultiHeadAttention
    assert type(quantized[1].self_attn.out_proj) is type(quantized[0].self_attn.out_proj)
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-5)


def test_export_with_lengths_of_any_size() -> None:
    _, ours = twins(torch.float32, batch_first=True)
    x, y = torch.randn(2, 5, EMBED_DIM), torch.randn(2, 9, EMBED_DIM)
    length = {1: torch.export.Dim("length", min=2)}
    shapes = {"query": length, "key": length, "value": length}
    exported: Any = torch.export.export(ours, (x, x, x), dynamic_shapes=shapes).module()
    torch.testing.assert_close(exported(y, y, y), ours(y, y, y))
