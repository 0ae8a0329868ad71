"""The Hopper backward on a GPU: numbers, repeats, strides, graphs; what is left to the portable kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from streamattn import attention, kinds
from streamattn.dispatch import Backend, unavailable
from streamattn.kernels.tiles import HOPPER_BACKWARD_TILES
from tests.cases import Beside, Case, Inputs, Result, expected, keep_of, relative_errors, run
from tests.gpu.peers import compare
from tests.hopper_cases import HIDING, feature_case
from tests.oracle import visible_pairs
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

GRADS = ("dq", "dk", "dv")


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call that the Hopper backward serves, in order only where a call asks for it."""
    reason = unavailable(Backend.HOPPER, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    from streamattn.kernels import hopper_backward, hopper_repeat

    calls: list[int] = []
    original, start_plans = hopper_backward.attention_backward, hopper_repeat.start_plans

    def counting(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(1)
        return original(*args)

    def repeating(device: int, *launches: Any) -> bool:
        done = start_plans(device, *launches)
        calls.extend([1] if done and len(launches) == 3 else [])
        return done

    monkeypatch.setattr(hopper_backward, "attention_backward", counting)
    monkeypatch.setattr(hopper_repeat, "start_plans", repeating)
    kinds.KINDS.clear()  # which hold what a call did with tiles of its own
    for head_dim, tile in HOPPER_BACKWARD_TILES.items():
        monkeypatch.setitem(HOPPER_BACKWARD_TILES, head_dim, replace(tile, IN_ORDER=0))
    return calls


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv of the Hopper backward, unless the options say otherwise."""
    options = {"backend": "hopper", "deterministic": False} | options
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, **options), leaves, dout)


def ours(inputs: Inputs) -> Result:
    leaves = (inputs.q, inputs.k, inputs.v)
    out = attention(*leaves, **inputs.options, backend="hopper", deterministic=False)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    return Result(dict(zip(("out", *GRADS), (out.detach(), *grads), strict=True)))


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def capture(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A graph of a step, and the tensors that its replays fill."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


SIZES = [(64, 64), (513, 513), (1000, 1000), (2048, 2048), (100, 613)]


# under a causal mask (900, 450) has queries without keys, of which PyTorch's lower-right mask warns
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("sizes", "causal"), [*((x, False) for x in [*SIZES, (900, 450)]), *((x, True) for x in SIZES)], ids=str
)
def test_gradients(sizes, causal, head_dim, served, poisoned):
    kv_heads = 2 if sizes[0] == sizes[1] else 4  # PyTorch takes no groups with its lower-right mask
    case = Case(
        q_heads=4, kv_heads=kv_heads, q_len=sizes[0], kv_len=sizes[1], head_dim=head_dim, causal=causal
    )
    compare(case.build(torch.bfloat16, "cuda"), ours, SDPBackend.FLASH_ATTENTION, case)
    assert served


@pytest.mark.parametrize("layout", ["bhtd", "bthd", "fused"])
@pytest.mark.parametrize("heads", [(6, 1), (3, 3), (9, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_and_layouts(head_dim, heads, layout, served, poisoned):
    case = Case(
        batch=3, q_heads=heads[0], kv_heads=heads[1], q_len=513, kv_len=513, head_dim=head_dim, causal=True,
        layout=layout,
    )  # fmt: skip
    compare(case.build(torch.bfloat16, "cuda"), ours, SDPBackend.FLASH_ATTENTION, case)
    assert served


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float16(head_dim, served, poisoned):
    case = Case(q_heads=4, kv_heads=2, q_len=1000, kv_len=1000, head_dim=head_dim, causal=True)
    compare(case.build(torch.float16, "cuda"), ours, SDPBackend.FLASH_ATTENTION, case)
    assert served


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_items_than_multiprocessors(head_dim, served, poisoned):
    case = Case(batch=20, q_heads=12, kv_heads=12, q_len=300, kv_len=300, head_dim=head_dim, causal=True)
    compare(case.build(torch.bfloat16, "cuda"), ours, SDPBackend.FLASH_ATTENTION, case)
    assert served


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sizes", [(513, 513), (900, 450)], ids=str)
def test_the_gradient_through_lse(sizes, head_dim, served, poisoned):
    """As close to float64 as the portable kernel."""
    case = Case(q_heads=4, kv_heads=2, q_len=sizes[0], kv_len=sizes[1], head_dim=head_dim, causal=True)
    inputs = case.build(torch.bfloat16, "cuda")
    want = expected(inputs)
    got = run(attention, inputs, return_lse=True, backend="hopper", deterministic=False)
    assert served
    theirs = run(attention, inputs, return_lse=True, backend="triton")
    for name in GRADS:
        rms, peak = relative_errors(got[name], want[name], 1e-30)
        their_rms, their_peak = relative_errors(theirs[name], want[name], 1e-30)
        assert rms <= 1.1 * their_rms, name
        assert peak <= 2 * their_peak, name


def beside_the_portable_kernel(
    case: Case, dtype: torch.dtype, served: list[int], deterministic: bool = False
) -> None:
    """As close to float64 as the portable kernel, gradient through lse and dropout included."""
    inputs = case.build(dtype, "cuda")
    want = expected(inputs, keep_of(case, seed=1, device="cuda"))
    results = []
    for options in ({"backend": "hopper", "deterministic": deterministic}, {"backend": "triton"}):
        torch.manual_seed(1)
        results.append(run(attention, inputs, return_lse=True, **options))
    assert len(served) == 1
    beside = Beside(dtype)
    beside.add(results[0], want, results[1])
    beside.judge(case)


FEATURES: dict[str, list[Any]] = {
    "size": [(64, 64), (513, 513), (1000, 1000), (300, 700), (700, 300), (1111, 90)],
    "head_dim": [64, 80, 128, 192, 256],
    "heads": [(4, 4), (6, 2), (3, 1)],
    "window": [None, "causal", (170, 0), (100, 240), (-1, 30)],
    "extra": ["nothing", "pair", "lengths", "softcap", "dropout", "pair and softcap", "pair and dropout"],
    "dtype": [torch.bfloat16, torch.float16],
    "layout": ["bthd", "bhtd", "fused"],
}


@pytest.mark.parametrize("row", pairwise(FEATURES), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_features(row, served, poisoned):
    beside_the_portable_kernel(feature_case(row), row["dtype"], served)


@pytest.mark.parametrize("segments", ["ids", "pair"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_many_documents(head_dim, segments, served, poisoned):
    case = Case(q_heads=8, q_len=4096, kv_len=4096, head_dim=head_dim, causal=True, segments=segments)
    inputs = case.build(torch.bfloat16, "cuda")
    ids = torch.arange(4096, device="cuda", dtype=torch.int32).expand(2, -1) // 300
    ids = ids.masked_fill(torch.arange(4096, device="cuda") >= 4000, -1).contiguous()
    inputs.options["segment_ids"] = ids if segments == "ids" else (ids, ids.clone())
    got = run(attention, inputs, return_lse=True, backend="hopper", deterministic=False)
    want = run(attention, inputs, return_lse=True, backend="triton")
    assert served
    for name in GRADS:
        assert relative_errors(got[name], want[name], 1e-30)[0] < 4e-3, name


@pytest.mark.parametrize("options", HIDING, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_nobody_sees_reaches_nothing(head_dim, options, served, poisoned):
    """Keys and values that no query sees, queries that see no key and their gradients hold NaN."""
    case = Case(q_heads=4, kv_heads=2, q_len=700, kv_len=700, head_dim=head_dim, layout="bthd", **options)
    inputs = case.build(torch.bfloat16, "cuda")
    clean = run(attention, inputs, return_lse=True, backend="hopper", deterministic=False)
    rule = {name: x for name, x in inputs.options.items() if name in ("causal", "kv_lengths", "segment_ids")}
    seen = visible_pairs(case.batch, 700, 700, **rule, device="cuda")
    unseen, blind = (~seen.any(dim) for dim in (2, 3))

    def filled(x: Tensor, where: Tensor, value: float = torch.nan) -> Tensor:
        return x.detach().masked_fill(where[..., None], value).requires_grad_()

    poisoned_inputs = replace(
        inputs,
        q=filled(inputs.q, blind),
        k=filled(inputs.k, unseen),
        v=filled(inputs.v, unseen),
        dout=filled(inputs.dout, blind).detach(),
    )
    got = run(attention, poisoned_inputs, return_lse=True, backend="hopper", deterministic=False)
    assert len(served) == 2
    assert torch.equal(got["dk"], clean["dk"])
    assert torch.equal(got["dv"], clean["dv"])
    assert got["dq"].isfinite().all()
    assert (got["dq"].masked_select(blind[..., None]) == 0).all()
    assert relative_errors(got["dq"], clean["dq"], 1e-30)[0] < 2e-3


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sizes", [(900, 450), (513, 100)], ids=str)
def test_what_a_query_without_keys_holds_reaches_nothing(sizes, head_dim, served, poisoned):
    blind = sizes[0] - sizes[1]
    q, dout = randn(2, 2, 4, sizes[0], head_dim)
    k, v = randn(2, 2, 2, sizes[1], head_dim)
    clean = gradients(q, k, v, dout, causal=True)
    q[:, :, :blind], dout[:, :, :blind] = torch.nan, torch.inf
    dq, dk, dv = gradients(q, k, v, dout, causal=True)
    assert len(served) == 2
    assert (dq[:, :, :blind] == 0).all()
    assert dq.isfinite().all()
    assert torch.equal(dk, clean[1])
    assert torch.equal(dv, clean[2])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_hundred_repeats(causal, head_dim, served):
    """dk and dv are the same bits each time; dq is the same but for the order of its sums."""
    q, k, v, dout = randn(4, 2, 6, 1000, head_dim)
    first = gradients(q, k, v, dout, causal=causal)
    for _ in range(100):
        again = gradients(q, k, v, dout, causal=causal)
        assert torch.equal(again[1], first[1])
        assert torch.equal(again[2], first[2])
        assert relative_errors(again[0], first[0], 1e-30)[0] < 2e-3
    assert len(served) == 101


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_an_expanded_gradient(head_dim, served):
    q, k, v = (x.requires_grad_() for x in randn(3, 2, 6, 1000, head_dim))
    grads = torch.autograd.grad(attention(q, k, v, causal=True).sum(), (q, k, v))
    want = gradients(q, k, v, torch.ones_like(q), causal=True)
    assert len(served) == 2
    assert torch.equal(grads[1], want[1])
    assert torch.equal(grads[2], want[2])


def test_a_gradient_that_can_not_be_copied_as_it_is(served, poisoned):
    """Rows that start at odd places are the portable kernel's, which takes this kernel's out and lse."""
    case = Case(q_heads=6, q_len=1000, kv_len=1000, head_dim=64, causal=True)
    inputs = case.build(torch.bfloat16, "cuda")
    odd = torch.empty(*inputs.dout.shape[:3], 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
    compare(replace(inputs, dout=odd.copy_(inputs.dout)), ours, SDPBackend.FLASH_ATTENTION, case)
    assert not served


def test_large_strides(served):
    """Batch strides beyond 2^31 elements."""
    store = torch.empty(2, 2**30 + 64, 2, device="cuda", dtype=torch.bfloat16)
    x = store.as_strided((2, 2, 256, 64), (store.stride(0), 64, 128, 1)).normal_()
    assert x.stride(0) > 2**31
    got = gradients(x, x, x, x, causal=True)
    want = gradients(*[x.contiguous()] * 4, causal=True)
    assert len(served) == 2
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[2], want[2])
    assert relative_errors(got[0], want[0], 1e-30)[0] < 2e-3


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shapes_in_turn(head_dim, served):
    """Memory that was one call's sums is another's gradient: each has tensor maps of its own."""
    shapes = [(2, 4, 1000), (1, 3, 513), (3, 2, 2048)]
    inputs = [randn(4, *shape, head_dim) for shape in shapes]
    first = [gradients(*x, causal=True) for x in inputs]
    for _ in range(5):
        for x, want in zip(inputs, first, strict=True):
            got = gradients(*x.clone(), causal=True)
            assert torch.equal(got[1], want[1])
            assert torch.equal(got[2], want[2])
            assert relative_errors(got[0], want[0], 1e-30)[0] < 2e-3
    assert len(served) == 18


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_in_a_cuda_graph(head_dim, served):
    q, k, v, dout = randn(4, 2, 6, 1000, head_dim).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*leaves, causal=True), leaves, dout)

    graph, captured = capture(step)
    assert len(served) == 2
    for _ in range(3):
        with torch.no_grad():
            for x in (*leaves, dout):
                x.normal_()
        graph.replay()
        want = step()
        assert torch.equal(captured[1], want[1])
        assert torch.equal(captured[2], want[2])
        assert relative_errors(captured[0], want[0], 1e-30)[0] < 2e-3


# whoever adds in order waits for others: last, so that what hangs keeps no other test from its result
@pytest.mark.parametrize("row", pairwise(FEATURES | {"head_dim": [64, 80, 128]}), ids=str)
def test_deterministic_every_pair_of_features(row, served, poisoned):
    beside_the_portable_kernel(feature_case(row), row["dtype"], served, deterministic=True)


REPEATED = {
    "full": {},
    "causal": {"causal": True},
    "grouped": {"causal": True, "q_heads": 12, "kv_heads": 2},
    "window": {"window_size": (170, 30)},
    "lengths": {"causal": True, "lengths": "ragged"},
    "softcap": {"softcap": 3.0, "kv_len": 1500},
    "dropout": {"causal": True, "dropout_p": 0.2},
    "segments": {"segments": "pair"},
    "causal segments": {"causal": True, "segments": "ids", "q_len": 3000, "kv_len": 3000},
    "many items": {"batch": 20, "q_heads": 12, "kv_heads": 12, "q_len": 700, "kv_len": 700},
    "many causal items": {
        "batch": 20, "q_heads": 12, "kv_heads": 12, "q_len": 700, "kv_len": 700, "causal": True,
    },
    "many tiles": {"batch": 1, "q_len": 9000, "kv_len": 9000},
    "many causal tiles": {"batch": 1, "q_len": 9000, "kv_len": 9000, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("options", REPEATED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_a_hundred_repeats(head_dim, options, served):
    shape = {"q_heads": 6, "kv_heads": 6, "q_len": 1000, "kv_len": 1000} | REPEATED[options]
    inputs = Case(head_dim=head_dim, layout="bthd", **shape).build(torch.bfloat16, "cuda")
    leaves = (inputs.q, inputs.k, inputs.v)
    torch.manual_seed(1)
    out = attention(*leaves, **inputs.options, backend="hopper", deterministic=True)
    first = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    for _ in range(100):
        assert same(torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True), first)
    assert len(served) == 101


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_by_torchs_flag(head_dim, served):
    q, k, v, dout = randn(4, 2, 6, 1000, head_dim).unbind()
    want = gradients(q, k, v, dout, causal=True, deterministic=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=True)
    try:
        torch.use_deterministic_algorithms(True)
        flagged = torch.autograd.grad(out, leaves, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(served) == 2
    assert same(flagged, want)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_in_a_cuda_graph(head_dim, causal, served):
    q, k, v, dout = randn(4, 2, 6, 1000, head_dim).unbind()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*leaves, causal=causal, deterministic=True), leaves, dout)

    graph, captured = capture(step)
    for _ in range(3):
        with torch.no_grad():
            for x in (*leaves, dout):
                x.normal_()
        for _ in range(10):
            graph.replay()
            assert same(captured, step())
    assert len(served) == 32


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic_on_two_streams_at_once(head_dim, causal, served):
    """Programs of two calls share the multiprocessors."""
    options = {"causal": causal, "deterministic": True}
    inputs = [randn(4, 2, 8, length, head_dim) for length in (2000, 3000)]
    want = [gradients(*x, **options) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(10):
        for x, stream, results in zip(inputs, streams, got, strict=True):
            with torch.cuda.stream(stream):
                results.append(gradients(*x, **options))
    torch.cuda.synchronize()
    assert len(served) == 22
    assert all(same(each, first) for results, first in zip(got, want, strict=True) for each in results)
