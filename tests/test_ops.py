"""The operators as PyTorch sees them: schemas, fake kernels, torch.compile, autograd, transforms."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from streamattn import attention, ops
from streamattn.dispatch import Backend
from streamattn.pattern import UNBOUNDED
from tests.cases import Case, Inputs, expected, judge, run
from tests.oracle import attend

CASES = {
    "full": Case(),
    "causal": Case(causal=True),
    "grouped": Case(q_heads=4, causal=True, kv_len=11),
    "window": Case(window_size=3, q_len=9, kv_len=9),
    "bool": Case(mask="bool"),
    "additive": Case(mask="additive_heads", value_dim=24),
    "trained": Case(mask="trained"),
    "trained_keys": Case(mask="trained_keys", softcap=3.0),
    "segments": Case(segments="ids", causal=True),
    "lengths": Case(lengths="ragged", q_len=3, kv_len=9, causal=True),
    "softcap": Case(softcap=3.0),
    "sinks": Case(sinks=True, causal=True, q_len=9, kv_len=5),
    "fused": Case(layout="fused", causal=True),
    "transposed": Case(layout="bthd"),
    "empty": Case(q_len=0, kv_len=4),
}


def op_arguments(inputs: Inputs, *, seed: Tensor | None = None, backend: str = "auto") -> tuple[Any, ...]:
    """Arguments of torch.ops.streamattn.attention_forward."""
    options = inputs.options
    window = options.get("window_size")
    left, right = (window - 1, 0) if isinstance(window, int) else (UNBOUNDED, UNBOUNDED)
    segments = options.get("segment_ids")
    return (
        inputs.q,
        inputs.k,
        inputs.v,
        options.get("attn_mask"),
        segments,
        segments,
        options.get("kv_lengths"),
        seed,
        options.get("sinks"),
        inputs.q.shape[-1] ** -0.5,
        left,
        0 if options.get("causal") else right,
        options.get("softcap", 0.0),
        0.25 if seed is not None else 0.0,
        backend,
        None,
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_opcheck_of_the_forward(name, backend):
    arguments = op_arguments(CASES[name].build(), backend=backend)
    torch.library.opcheck(torch.ops.streamattn.attention_forward.default, arguments)


def test_opcheck_of_the_forward_with_dropout():
    arguments = op_arguments(Case().build(), seed=torch.tensor([7]))
    torch.library.opcheck(torch.ops.streamattn.attention_forward.default, arguments)


def paged_arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of `attention` on a paged cache stored [pages, page, Hkv, D]."""
    q = torch.randn(2, 4, 1, 16, dtype=dtype)
    k, v = torch.randn(2, 5, 4, 2, 16, dtype=dtype).transpose(2, 3)
    lengths, table = torch.tensor([3, 12]), torch.tensor([[4, -1, -1], [0, 3, 1]], dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "kv_lengths": lengths, "block_table": table}


def test_opcheck_of_the_forward_on_a_paged_cache():
    given = paged_arguments()
    q, k, v, lengths = (given[x] for x in ("q", "k", "v", "kv_lengths"))
    arguments = (q, k, v, *(None,) * 3, lengths, None, None, 0.25, UNBOUNDED, 0, 0.0, 0.0, "auto", None)
    forward = torch.ops.streamattn.attention_forward.default
    torch.library.opcheck(forward, arguments, {"block_table": given["block_table"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_paged_cache_compiles_into_one_graph(dtype):
    given = paged_arguments(dtype)

    def call(**arguments: Any) -> tuple[Tensor, Tensor]:
        return attention(**arguments, causal=True, window_size=7, return_lse=True)

    torch._dynamo.reset()
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(**given)
    with torch.inference_mode():
        torch.testing.assert_close(call(**given), got, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_opcheck_of_the_backward(name, backend, with_dlse, dtype):
    inputs = CASES[name].build(dtype)
    q, k, v, *rest = (
        x.detach() if isinstance(x, Tensor) else x for x in op_arguments(inputs, backend=backend)
    )
    out, lse = torch.ops.streamattn.attention_forward(q, k, v, *rest)
    mask = inputs.options.get("attn_mask")
    mask_grad = mask is not None and mask.requires_grad
    sink_grad = "sinks" in inputs.options
    dlse = inputs.dlse.to(lse.dtype) if with_dlse else None
    torch.library.opcheck(
        torch.ops.streamattn.attention_backward.default,
        (inputs.dout, dlse, q, k, v, out, lse, *rest, mask_grad, sink_grad),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_fake_kernels_know_shapes_dtypes_and_strides(name, backend, dtype):
    inputs = CASES[name].build(dtype)
    mask = inputs.options.get("attn_mask")
    mask_grad = mask is not None and mask.requires_grad
    sink_grad = "sinks" in inputs.options
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in op_arguments(inputs, backend=backend)]

    def both(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
        out, lse = torch.ops.streamattn.attention_forward(q, k, v, *rest)
        dout = torch.ones_like(out)
        grads = torch.ops.streamattn.attention_backward(
            dout, None, q, k, v, out, lse, *rest, mask_grad, sink_grad
        )
        return [out, lse, *grads]

    real = both(*arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = both(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    for left, right in zip(real, fake, strict=True):
        assert (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device)
        if left.numel():
            assert left.stride() == right.stride()


@pytest.mark.parametrize("name", [name for name in CASES if name != "empty"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradcheck(name, backend):
    inputs = CASES[name].build(torch.float64)
    options = dict(inputs.options)
    mask = options.pop("attn_mask", None)
    tensors = [inputs.q, inputs.k, inputs.v, mask]

    def call(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, attn_mask=attn_mask, **options, return_lse=True, backend=backend)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(call, tensors, fast_mode=True)


def test_gradcheck_entry_by_entry_in_slow_mode():
    inputs = Case(batch=1, q_heads=2, kv_heads=1, q_len=3, kv_len=4, head_dim=2, causal=True).build(
        torch.float64
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v: attention(q, k, v, causal=True, return_lse=True), (inputs.q, inputs.k, inputs.v)
    )


DIFFERENTIATED = {
    "full": {},
    "causal": {"causal": True},
    "softcap": {"softcap": 2.0},
    "window": {"window_size": 3},
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_double_backward_is_refused(name, backend):
    inputs = Case().build(torch.float64)
    out = attention(inputs.q, inputs.k, inputs.v, **DIFFERENTIATED[name], backend=backend)
    (dq,) = torch.autograd.grad(out.sin().sum(), inputs.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(dq.square().sum(), [inputs.q, inputs.k, inputs.v])


def test_a_penalty_on_gradients_never_loses_the_gradient_silently():
    """With create_graph the first gradient is no constant, even of a loss that is linear in the output."""
    inputs = Case().build(torch.float64)
    (dq,) = torch.autograd.grad(attention(inputs.q, inputs.k, inputs.v).sum(), inputs.q, create_graph=True)
    assert dq.requires_grad
    with pytest.raises(NotImplementedError, match="differentiable once"):
        torch.autograd.grad(dq.sum(), inputs.k)


@pytest.mark.parametrize("carrier", ["q", "k", "v", "attn_mask"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(carrier, backend, grad):
    inputs = Case().build(torch.float64)
    named: dict[str, Any] = {
        "q": inputs.q,
        "k": inputs.k,
        "v": inputs.v,
        "attn_mask": torch.randn(8, 8, dtype=torch.float64),
    }
    named = {name: x.detach().requires_grad_(grad) for name, x in named.items()}
    with forward_ad.dual_level():
        named[carrier] = forward_ad.make_dual(named[carrier], torch.randn_like(named[carrier]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attention(**named, backend=backend)


def test_functional_jvp_is_refused():
    inputs = Case(causal=True).build(torch.float64)
    primals = tuple(x.detach() for x in (inputs.q, inputs.k, inputs.v))
    tangents = tuple(torch.randn_like(x) for x in primals)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda *a: attention(*a, causal=True), primals, tangents)


def test_plain_calls_inside_a_dual_level_still_work():
    inputs = Case().build(torch.float64)
    with forward_ad.dual_level():
        out = attention(inputs.q, inputs.k, inputs.v)
    torch.testing.assert_close(out, attend(inputs.q, inputs.k, inputs.v)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 0, 0)], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_vmap_equals_the_oracle_under_vmap(in_dims, grad):
    inputs = Case(batch=3, q_heads=2, kv_heads=2).build(torch.float64)
    stacked = [
        torch.stack([x.detach(), 2 * x.detach()], dim) if dim is not None else x.detach()
        for x, dim in zip((inputs.q, inputs.k, inputs.v), in_dims, strict=True)
    ]
    stacked = [x.requires_grad_(grad) for x in stacked]
    got = torch.vmap(lambda q, k, v: attention(q, k, v, causal=True), in_dims)(*stacked)
    want = torch.vmap(lambda q, k, v: attend(q, k, v, causal=True)[0], in_dims)(*stacked)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    if grad:
        got, want = (torch.autograd.grad(out.sin().sum(), stacked) for out in (got, want))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


FUNCTIONAL_DERIVATIVES = {
    "grad": lambda fn, q: torch.func.grad(fn)(q),
    "vjp": lambda fn, q: torch.func.vjp(fn, q),
    "vmap_of_grad": lambda fn, q: torch.vmap(torch.func.grad(fn))(torch.stack([q, 2 * q])),
}


@pytest.mark.parametrize("name", FUNCTIONAL_DERIVATIVES)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_functional_derivatives_are_refused(name, backend):
    inputs = Case().build(torch.float64)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        FUNCTIONAL_DERIVATIVES[name](lambda q: attention(q, k, v, backend=backend).sin().sum(), q)


@pytest.mark.parametrize(
    "name", ["full", "causal", "grouped", "bool", "trained", "segments", "lengths", "fused"]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_cold_compile_has_no_graph_break(name, dynamic):
    """Forward and backward through AOT autograd; fullgraph raises at any break."""
    torch._dynamo.reset()
    case = CASES[name]
    inputs = case.build()
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    judge(run(compiled, inputs, return_lse=True), expected(inputs), torch.float32, name)


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout_p": 0.3}], ids=str)
def test_inductor_compiles_the_function(options):
    torch._dynamo.reset()
    inputs = Case().build()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 2.0, k, v, **options).transpose(1, 2).reshape(2, 8, 32).sin()

    compiled = torch.compile(step, fullgraph=True)
    out = compiled(inputs.q, inputs.k, inputs.v)
    grads = torch.autograd.grad(out.sum(), [inputs.q, inputs.k, inputs.v])
    assert all(x.isfinite().all() for x in (out, *grads))
    if "dropout_p" not in options:
        want = step(inputs.q, inputs.k, inputs.v)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(grads, torch.autograd.grad(want.sum(), [inputs.q, inputs.k, inputs.v]))


def test_one_graph_serves_every_length():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    frames = []
    for size in (8, 12, 40, 17):
        inputs = Case(q_len=size, kv_len=size, causal=True).build()
        judge(run(compiled, inputs, return_lse=True), expected(inputs), torch.float32)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


def test_lengths_out_of_range_are_clamped_where_they_are_not_read():
    """A compiled call can't look at values: it clamps to [0, Tk] as the kernels do."""
    torch._dynamo.reset()
    inputs = Case(causal=True).build()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    out = compiled(inputs.q, inputs.k, inputs.v, causal=True, kv_lengths=torch.tensor([-3, 99]))
    want = attend(inputs.q, inputs.k, inputs.v, causal=True, kv_lengths=torch.tensor([0, 8]))[0]
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


def test_autocast_casts_as_sdpa_does():
    inputs = Case(causal=True).build()
    with torch.no_grad():
        for x in (inputs.q, inputs.k, inputs.v):
            x.copy_(x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        got = run(lambda *a, **o: attention(*a, **o, return_lse=True), inputs)
        sdpa = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
    assert got["out"].dtype == sdpa.dtype == torch.bfloat16
    assert got["lse"].dtype == torch.float32
    assert got["dq"].dtype == torch.float32
    judge(got, expected(inputs), torch.bfloat16)


def test_autocast_aligns_mixed_dtypes():
    q, k, v = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v))


def test_float64_stays_float64_under_autocast():
    inputs = Case().build(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(inputs.q, inputs.k, inputs.v)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, attend(inputs.q, inputs.k, inputs.v)[0], rtol=0, atol=1e-12)


BATCHED = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 2)},
    "lengths": {"kv_lengths": torch.tensor([3, 8])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients_are_those_one_by_one(name, result, backend):
    inputs = Case(q_heads=2, kv_heads=2).build(torch.float64)
    leaves = (inputs.q, inputs.k, inputs.v)
    y = attention(*leaves, **BATCHED[name], return_lse=True, backend=backend)[result]
    douts = torch.randn(3, *y.shape, dtype=torch.float64)
    got = torch.autograd.grad(y, leaves, douts, is_grads_batched=True, retain_graph=True, allow_unused=True)
    single = [torch.autograd.grad(y, leaves, dout, retain_graph=True) for dout in douts]
    for left, right in zip(got, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(left, torch.stack(right), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_vectorized_jacobian_is_the_jacobian(backend):
    inputs = Case(batch=1, q_len=3, kv_len=3, head_dim=4).build(torch.float64)
    k, v = inputs.k.detach(), inputs.v.detach()

    def call(q: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend=backend)

    jacobian = torch.autograd.functional.jacobian
    got, want = (jacobian(call, inputs.q.detach(), vectorize=vectorize) for vectorize in (True, False))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_vmap_over_lengths():
    inputs = Case().build(torch.float64)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    lengths = torch.tensor([[1, 2], [3, 8]])
    got = torch.vmap(lambda x: attention(q, k, v, kv_lengths=x))(lengths)
    want = torch.stack([attend(q, k, v, kv_lengths=x)[0] for x in lengths])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_trace_holds_the_operator(tracing_mode, pre_dispatch):
    inputs = Case(causal=True).build()
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True)

    graph = make_fx(call, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(q, k, v)
    targets = {node.target for node in graph.graph.nodes}
    assert torch.ops.streamattn.attention_forward.default in targets
    assert torch.equal(graph(q, k, v), call(q, k, v))


def test_a_function_mode_sees_the_operator():
    class Listens(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.heard.append(str(func))
            return func(*args, **(kwargs or {}))

    inputs = Case().build()
    with Listens() as mode:
        attention(inputs.q, inputs.k, inputs.v)
    assert any("streamattn" in name for name in mode.heard)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_window_that_follows_the_length(strict):
    class Windowed(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            half = q.shape[2] // 2
            return attention(q, k, v, window_size=half), attention(q, k, v, window_size=(half, 1))

    length = torch.export.Dim("length", min=2, max=64)
    example = tuple(torch.randn(2, 2, 8, 16) for _ in range(3))
    shapes = ({2: length},) * 3
    exported = torch.export.export(Windowed(), example, dynamic_shapes=shapes, strict=strict).module()
    longer = tuple(torch.randn(2, 2, 21, 16) for _ in range(3))
    for got, want in zip(exported(*longer), Windowed()(*longer), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("carrier", [0, 1, 2])
@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused_by_the_operators_themselves(carrier, grad):
    inputs = Case().build(torch.float64)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in op_arguments(inputs)]
    out, lse = torch.ops.streamattn.attention_forward(*arguments)
    with forward_ad.dual_level():
        x = arguments[carrier].clone().requires_grad_(grad)
        arguments[carrier] = forward_ad.make_dual(x, torch.randn_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.ops.streamattn.attention_forward(*arguments)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.ops.streamattn.attention_backward(
                torch.ones_like(out), None, *arguments[:3], out, lse, *arguments[3:], False, False
            )


def test_checkpointing_replays_the_same_dropout_mask():
    inputs = Case().build(torch.float64)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, dropout_p=0.4)

    torch.manual_seed(3)
    plain = step(inputs.q, inputs.k, inputs.v)
    want = torch.autograd.grad(plain, [inputs.q, inputs.k, inputs.v], inputs.dout)
    torch.manual_seed(3)
    out = checkpoint(step, inputs.q, inputs.k, inputs.v, use_reentrant=False)
    got = torch.autograd.grad(out, [inputs.q, inputs.k, inputs.v], inputs.dout)
    assert torch.equal(out, plain)
    for left, right in zip(got, want, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_values_that_memory_does_not_hold_are_made_first(backend, monkeypatch):
    """Lazy negatives and gradients that are zero without memory don't take the shorter way of eager calls."""
    lazily: list[bool] = []

    def spy(name: str) -> None:
        original = getattr(ops, name)

        def recording(*args: Any, **options: Any) -> Any:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            lazily.append(any(x.is_neg() or x._is_zerotensor() for x in tensors))
            return original(*args, **options)

        monkeypatch.setattr(ops, name, recording)

    spy("run_forward")
    spy("run_backward")
    inputs = Case(causal=True).build()
    leaves = (inputs.q, inputs.k, inputs.v)
    out = attention(*leaves, causal=True, backend=backend)
    want = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    assert len(lazily) == 2
    lazy = [torch.ops.aten._neg_view(-x.detach()) for x in leaves]
    assert torch.equal(attention(*lazy, causal=True, backend=backend), out)
    dout = torch.ops.aten._neg_view(-inputs.dout)
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    zero = torch.autograd.grad(out, leaves, torch.ops.aten._efficientzerotensor(out.shape))
    assert not any(x.any() for x in zero)
    assert not any(lazily)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trained", [False, True])
def test_whoever_listens_sees_the_ops(trained):
    """Eager calls take a shorter way only where nothing could tell."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=trained) for _ in range(3))
    names = ["streamattn.attention_forward.default", "streamattn.attention_backward.default"]

    def step() -> Tensor:
        out = attention(q, k, v, causal=True)
        if trained:
            out.sum().backward()
        return out.detach()

    alone = step()
    with _Recorder() as recorder:
        assert torch.equal(step(), alone)
    assert [name for name in recorder.seen if name in names] == names[: 1 + trained]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(step(), alone)
    assert "streamattn::attention_forward" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    ("deterministic", "flag", "ordered"),
    [
        (None, False, False),
        (None, True, True),
        (True, False, True),
        (False, True, False),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_which_backward_for_hopper_adds_in_order(compiled, deterministic, flag, ordered, monkeypatch):
    """True and False are the call's own; None is the flag when the backward runs, not when it was called.

    A compiled backward refuses by itself to run under another flag than the forward's.
    """
    asked: list[bool] = []

    def attention_backward(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest):
        *_, asked_for, _ = rest
        asked.append(asked_for)
        return tuple(torch.zeros_like(x) for x in (q, k, v))

    stand_in = SimpleNamespace(attention_backward=attention_backward)
    monkeypatch.setitem(sys.modules, "streamattn.kernels.hopper_backward", stand_in)
    leaves = [torch.randn(1, 2, 8, 64, requires_grad=True) for _ in range(3)]
    torch._dynamo.reset()
    call = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    try:
        torch.use_deterministic_algorithms(flag and compiled)
        out = call(*leaves, causal=True, deterministic=deterministic)
        monkeypatch.setattr(ops, "choose", lambda *args: Backend.HOPPER)
        torch.use_deterministic_algorithms(flag)
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [ordered]
