"""Attention on q, k and v that lie side by side: the same results, and one gradient that is written once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from streamattn import StreamMultiHeadAttention, attention, ops
from streamattn.compat import flash_attn_qkvpacked_func, flash_attn_varlen_qkvpacked_func
from streamattn.packed import packed_attention, unpacked
from streamattn.pattern import UNBOUNDED

B, T, HQ, HKV, D = 2, 11, 4, 2, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": 3, "scale": 0.4},
    "softcap": {"softcap": 2.0, "causal": True},
    "mask": {"attn_mask": "trained"},
    "segments": {"segment_ids": "ids", "causal": True},
    "lengths": {"kv_lengths": "ragged"},
    "sinks": {"sinks": "trained"},
    "dropout": {"dropout_p": 0.25},
}


def options_of(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    options = dict(OPTIONS[name])
    gen = torch.Generator().manual_seed(3)
    if "attn_mask" in options:
        options["attn_mask"] = torch.randn(1, HQ, T, T, generator=gen).to(dtype).requires_grad_()
    if "sinks" in options:
        options["sinks"] = torch.randn(HQ, generator=gen).to(dtype).requires_grad_()
    if "segment_ids" in options:
        options["segment_ids"] = torch.arange(T).expand(B, T).div(4, rounding_mode="floor").int()
    if "kv_lengths" in options:
        options["kv_lengths"] = torch.tensor([T, 5], dtype=torch.int32)
    return options


def packed(dtype: torch.dtype = torch.float64, layout: str = "plain") -> Tensor:
    """A leaf's view [B, T, HQ + 2 HKV, D] in the layouts that projections give."""
    gen = torch.Generator().manual_seed(1)
    heads = HQ + 2 * HKV
    if layout == "sequence first":
        leaf = torch.randn(T, B, heads, D, generator=gen).to(dtype).requires_grad_()
        return leaf.transpose(0, 1)
    if layout == "with gaps":
        leaf = torch.randn(B, T, heads + 3, D, generator=gen).to(dtype).requires_grad_()
        return leaf[:, :, 1:-2]
    if layout == "head_dim apart":
        leaf = torch.randn(B, T, D, heads, generator=gen).to(dtype).requires_grad_()
        return leaf.transpose(2, 3)
    return torch.randn(B, T, heads, D, generator=gen).to(dtype).requires_grad_()


def gradients(call: Any, qkv: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """out, lse and the gradients of qkv and of what else is trained, for one seed and the same cotangents."""
    torch.manual_seed(5)
    out, lse = call(qkv, **options)
    gen = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(x.shape, generator=gen).to(x.dtype) for x in (out, lse)]
    wanted = [qkv, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)]
    return [out, lse, *torch.autograd.grad([out, lse], wanted, cotangents)]


def apart(qkv: Tensor, **options: Any) -> Any:
    return attention(*unpacked(qkv, HQ), **options, return_lse=True)


def together(qkv: Tensor, **options: Any) -> Any:
    return packed_attention(qkv, num_kv_heads=HKV, **options)


@pytest.mark.parametrize("layout", ["plain", "sequence first", "with gaps", "head_dim apart"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_gradients_are_those_of_three_tensors(name, backend, layout):
    options = {**options_of(name), "backend": backend}
    qkv = packed(layout=layout)
    for got, want in zip(gradients(together, qkv, options), gradients(apart, qkv, options), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_so_in_lower_precision(dtype):
    qkv = packed(dtype)
    pairs = zip(*(gradients(f, qkv, {"causal": True}) for f in (together, apart)), strict=True)
    assert all(torch.equal(got, want) and got.dtype == want.dtype for got, want in pairs)


def op_arguments(name: str, dtype: torch.dtype, qkv: Tensor) -> tuple[Any, ...]:
    """Arguments of ``packed_forward``."""
    options = options_of(name, dtype)
    segments, mask, sinks = (options.get(x) for x in ("segment_ids", "attn_mask", "sinks"))
    seed = torch.tensor([7]) if "dropout_p" in options else None
    masks = (mask, segments, segments, options.get("kv_lengths"), seed, sinks)
    numbers = (0.3, UNBOUNDED, 0, options.get("softcap", 0.0), options.get("dropout_p", 0.0))
    return qkv, HQ, *masks, *numbers, "auto", None


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(name):
    torch.library.opcheck(
        torch.ops.streamattn.packed_forward.default, op_arguments(name, torch.float32, packed(torch.float32))
    )


@pytest.mark.parametrize("layout", ["plain", "sequence first", "with gaps"])
@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck_of_the_backward(name, layout):
    qkv, heads, *rest = (
        x.detach() if isinstance(x, Tensor) else x
        for x in op_arguments(name, torch.float32, packed(torch.float32, layout))
    )
    out, lse = torch.ops.streamattn.packed_forward(qkv, heads, *rest)
    trained = (rest[0] is not None, rest[5] is not None)
    torch.library.opcheck(
        torch.ops.streamattn.packed_backward.default,
        (torch.randn_like(out), None, qkv, out, lse, *rest, *trained),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("layout", ["plain", "sequence first", "with gaps"])
def test_the_gradient_has_the_strides_of_the_projection(layout):
    qkv = packed(torch.float32, layout)
    _, _, grad = gradients(together, qkv, {})
    if layout == "with gaps":
        assert grad.is_contiguous()
    else:
        assert grad.stride() == qkv.stride()


class Seen(TorchDispatchMode):
    """The names of all operators but views, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_put_together():
    qkv = packed(torch.float32)
    with Seen() as seen:
        out, _ = together(qkv, causal=True)
        torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert seen.names == ["packed_forward", "ones_like", "packed_backward"]


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_layer_that_projects_once_puts_nothing_together(batch_first):
    layer = StreamMultiHeadAttention(32, 4, num_kv_heads=2, batch_first=batch_first, bias=False)
    x = torch.randn(3, 7, 32, requires_grad=True)
    with Seen() as seen:
        out, _ = layer(x, x, x, need_weights=False)
        torch.autograd.grad(out, [x, *layer.parameters()], torch.ones_like(out))
    names = [name for name in seen.names if name not in ("mm", "_unsafe_view")]
    turned = [] if batch_first else ["clone"]  # the output, which is sequence first
    assert names == ["packed_forward", *turned, "ones_like", *turned, "packed_backward"]


@pytest.mark.parametrize("rank", [5, 4])
def test_functions_of_flash_attn_put_nothing_together(rank):
    qkv = torch.randn(2, 7, 3, 4, 8, requires_grad=True)
    bounds = torch.tensor([0, 5, 14], dtype=torch.int32)
    with Seen() as seen:
        if rank == 5:
            out = flash_attn_qkvpacked_func(qkv, causal=True)
        else:
            out = flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), bounds, 9, causal=True)
        torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert not {"stack", "cat", "clone", "copy_", "new_zeros", "add"} & set(seen.names)
    assert [x for x in seen.names if x.startswith("packed")] == ["packed_forward", "packed_backward"]


def test_heads_of_flash_attn_that_lie_apart_are_read_in_place():
    """[B, 3, T, H, D] viewed as [B, T, 3, H, D] has no row of all heads."""
    qkv = torch.randn(2, 3, 7, 4, 8, dtype=torch.float64, requires_grad=True)
    got = flash_attn_qkvpacked_func(qkv.transpose(1, 2), causal=True)
    want = attention(*(x.transpose(1, 2) for x in qkv.unbind(1)), causal=True).transpose(1, 2)
    assert torch.equal(got, want)
    pair = [torch.autograd.grad(x, qkv, torch.ones_like(x))[0] for x in (got, want)]
    assert torch.equal(*pair)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["causal", "mask", "segments", "lengths", "sinks"])
def test_compiles_into_one_graph(name, dynamic):
    options, qkv = options_of(name), packed()
    torch._dynamo.reset()
    compiled = torch.compile(together, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    pairs = zip(gradients(compiled, qkv, options), gradients(together, qkv, options), strict=True)
    for got, want in pairs:
        assert torch.equal(got, want)
        assert got.stride() == want.stride()


def test_inductor_serves_it():
    qkv = packed(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, **o: together(2 * x, **o), fullgraph=True)
    pairs = zip(
        gradients(compiled, qkv, {"causal": True}),
        gradients(lambda x, **o: together(2 * x, **o), qkv, {"causal": True}),
        strict=True,
    )
    for got, want in pairs:
        torch.testing.assert_close(got, want)


def test_twice_used_and_checkpointed():
    weight = torch.randn(16, (HQ + 2 * HKV) * D, dtype=torch.float64, requires_grad=True)
    x = torch.randn(B, T, 16, dtype=torch.float64, requires_grad=True)

    def block(x: Tensor, weight: Tensor, call: Any) -> Tensor:
        qkv = (x @ weight).unflatten(2, (-1, D))
        return call(qkv, causal=True)[0] * call(qkv)[0] + qkv[:, :, :HQ].transpose(1, 2)

    want = torch.autograd.grad(block(x, weight, apart).sin().sum(), [x, weight])
    for out in (
        block(x, weight, together),
        checkpoint(block, x, weight, together, use_reentrant=False),
        checkpoint(block, x, weight, together, use_reentrant=True),
    ):
        assert out.grad_fn is not None
        got = (
            torch.autograd.grad(out.sin().sum(), [x, weight])
            if out.grad_fn.name() != "CheckpointFunctionBackward"
            else None
        )
        if got is None:
            x.grad = weight.grad = None
            out.sin().sum().backward()
            got = (x.grad, weight.grad)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_of_two_results_one_may_be_unused():
    qkv = packed()
    out, lse = together(qkv)
    for x, y in zip((out, lse), apart(qkv), strict=True):
        pair = [torch.autograd.grad(z.sin().sum(), qkv, retain_graph=True)[0] for z in (x, y)]
        assert torch.equal(*pair)


def test_gradcheck():
    call = lambda x: together(x, causal=True)  # noqa: E731
    assert torch.autograd.gradcheck(call, packed(), fast_mode=True)


def test_autocast_casts_the_projection_once():
    qkv = packed(torch.float32)
    with torch.autocast("cpu", torch.bfloat16), Seen() as seen:
        out, _ = together(qkv)
    assert out.dtype == torch.bfloat16
    assert seen.names == ["_to_copy", "packed_forward"]
    (grad,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert grad.dtype == torch.float32


def test_a_second_derivative_is_refused():
    qkv = packed()
    (grad,) = torch.autograd.grad(together(qkv)[0].sin().sum(), qkv, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), qkv)


def test_other_derivatives_are_refused():
    with pytest.raises(NotImplementedError, match=r"no torch\.func derivative"):
        torch.func.grad(lambda x: together(x)[0].sum())(packed().detach())
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(packed(), torch.ones_like(packed()))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            together(dual)


def test_without_gradient_nothing_else_runs(monkeypatch):
    monkeypatch.setattr("streamattn.packed._Packed.apply", None)
    with torch.no_grad():
        assert torch.equal(together(packed())[0], apart(packed())[0])


def test_short_ways_are_taken_for_plain_calls(monkeypatch):
    """The operators are for whom listens; other calls go without the dispatcher."""
    monkeypatch.setattr(torch.ops.streamattn, "packed_forward", None)
    monkeypatch.setattr(torch.ops.streamattn, "packed_backward", None)
    qkv = packed()
    assert ops.plain_call(qkv)
    torch.autograd.grad(together(qkv)[0].sum(), qkv)


@pytest.mark.parametrize(
    ("qkv", "options", "error", "match"),
    [
        (torch.zeros(2, 3, 24), {}, ValueError, r"qkv must be a tensor \[B, T, Hq \+ 2 Hkv, D\]"),
        ([1.0], {}, ValueError, "qkv must be a tensor"),
        (torch.zeros(2, 3, 7, 8), {}, ValueError, "qkv must hold num_kv_heads heads"),
        (torch.zeros(2, 3, 6, 8), {"num_kv_heads": 3}, ValueError, "qkv must hold num_kv_heads heads"),
        (torch.zeros(2, 3, 7, 8), {"num_kv_heads": 2}, ValueError, "qkv must hold num_kv_heads heads"),
        (torch.zeros(2, 3, 6, 8, dtype=torch.int32), {}, TypeError, "q must be float16"),
        (torch.zeros(2, 3, 6, 8), {"backend": "hopper"}, ValueError, "can't serve this call"),
        (torch.zeros(2, 3, 6, 8), {"window_size": 0}, ValueError, "window_size must be positive"),
    ],
)
def test_errors(qkv, options, error, match):
    with pytest.raises(error, match=match):
        packed_attention(qkv, **options)
