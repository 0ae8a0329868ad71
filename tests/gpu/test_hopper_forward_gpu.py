"""The Hopper forward on a GPU: numbers at its tiles' edges, strides, repeats, and what is left to others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

from streamattn import attention
from streamattn.dispatch import Backend, Masks, choose, unavailable
from streamattn.kernels import hopper_launch, launch
from streamattn.pattern import UNBOUNDED
from tests.cases import LAYOUTS, Case, Inputs, expected, keep_of, relative_errors
from tests.gpu.peers import sdpa

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]
OPTIONS: dict[str, Any] = {
    "masks": Masks(),
    "scale": 0.1,
    "window_left": UNBOUNDED,
    "softcap": 0.0,
    "dropout_p": 0.0,
}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = unavailable(Backend.HOPPER, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)


def compare(case: Case, dtype: torch.dtype) -> None:
    """out and lse against float64: no worse than the portable kernel, whose error is held against flash."""
    compare_on(case.build(dtype, "cuda"), case)


def compare_on(inputs: Inputs, case: object, keep: torch.Tensor | None = None, seed: int = 0) -> None:
    want, dtype = expected(inputs, keep), inputs.q.dtype
    with torch.no_grad():
        torch.manual_seed(seed)
        out, lse = attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, backend="hopper"
        )
        torch.manual_seed(seed)
        theirs, _ = attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True, backend="triton"
        )
    rms, peak = relative_errors(out.double(), want["out"], 1e-30)
    their_rms, their_peak = relative_errors(theirs.double(), want["out"], 1e-30)
    assert rms <= 1.1 * their_rms, f"{case}, {dtype}: RMS {rms:.3e} against {their_rms:.3e}"
    assert peak <= 2 * their_peak, f"{case}, {dtype}: maximum {peak:.3e} against {their_peak:.3e}"
    blind = want["lse"] == -torch.inf
    assert torch.equal(lse == -torch.inf, blind)
    assert (out.masked_select(blind[..., None]) == 0).all()
    torch.testing.assert_close(lse[~blind].double(), want["lse"][~blind], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("sizes", [(64, 64), (513, 513), (2048, 2048), (1000, 1000)], ids=str)
def test_out_and_lse(sizes, head_dim, causal, dtype, poisoned):
    case = Case(q_heads=4, kv_heads=2, q_len=sizes[0], kv_len=sizes[1], head_dim=head_dim, causal=causal)
    compare(case, dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "sizes", [(64, 1), (64, 127), (65, 129), (100, 613), (333, 1000), (900, 450), (1100, 900)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_queries_and_keys_of_different_number(sizes, head_dim, causal, poisoned):
    compare(Case(q_len=sizes[0], kv_len=sizes[1], head_dim=head_dim, causal=causal), torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "window", [1, 17, 64, 128, 300, (100, 30), (0, 0), (5, 200), (-1, 77), (40, -1)], ids=str
)
@pytest.mark.parametrize("sizes", [(1024, 1024), (1500, 1500), (777, 777), (700, 500)], ids=str)
def test_windows(sizes, window, head_dim, poisoned):
    compare(Case(q_len=sizes[0], kv_len=sizes[1], head_dim=head_dim, window_size=window), torch.bfloat16)


FEATURES: dict[str, dict[str, Any]] = {
    "ragged": {"lengths": "ragged"},
    "extreme": {"lengths": "extreme"},
    "documents": {"segments": "ids"},
    "pair": {"segments": "pair"},
    "capped": {"softcap": 3.0, "scale": 0.5},
    "dropped": {"dropout_p": 0.2},
    "all": {"segments": "ids", "softcap": 20.0, "dropout_p": 0.1},
    "capped ragged": {"lengths": "ragged", "softcap": 20.0},
}


@pytest.mark.parametrize("window", [None, "causal", (90, 40)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("batch", "size"), [(2, 64), (2, 333), (8, 700), (4, 1300)], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, batch, size, head_dim, window, poisoned):
    """Few heads: fixed work; many: drawn. With 700 and 1300 queries head_dim 64 has tiles of its own."""
    case = Case(
        batch=batch,
        q_heads=6,
        kv_heads=3,
        q_len=size,
        kv_len=size,
        head_dim=head_dim,
        causal=window == "causal",
        window_size=window if isinstance(window, tuple) else None,
        layout="bthd",
        **FEATURES[feature],
    )
    inputs = case.build(torch.bfloat16 if batch > 2 else torch.float16, "cuda")
    if batch > 2 and "segment_ids" in inputs.options:
        ids = inputs.options["segment_ids"]
        ids = ids[1] if isinstance(ids, tuple) else ids
        ids[1, ::7] = -1  # padding in every tile, and nothing else in one row
        ids[2] = -1
    compare_on(inputs, case, keep_of(case, 5, "cuda"), seed=5)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(100, 700), (700, 100)], ids=str)
def test_lengths_of_other_keys(size, causal, head_dim, poisoned):
    case = Case(
        batch=5, q_heads=4, q_len=size[0], kv_len=size[1], head_dim=head_dim, causal=causal, lengths="ragged"
    )
    compare(case, torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [(100, 700), (700, 100), (513, 900)], ids=str)
def test_segments_of_other_keys(size, causal, head_dim, poisoned):
    case = Case(
        batch=5, q_heads=4, q_len=size[0], kv_len=size[1], head_dim=head_dim, causal=causal, segments="pair"
    )
    compare(case, torch.bfloat16)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["kv_lengths", "segment_ids", "pair"])
def test_what_padding_holds_reaches_nothing(feature, causal, head_dim):
    size = 700
    q, k, v = torch.randn(3, 6, 4, size, head_dim, device="cuda", dtype=torch.bfloat16)
    at = torch.arange(size, device="cuda")
    options: dict[str, Any]
    if feature == "kv_lengths":
        options = {feature: torch.tensor([700, 699, 640, 130, 1, 0], device="cuda")}
        hidden = at >= options[feature][:, None]
    else:
        ids = (at // 300).int().repeat(6, 1)
        ids[0, :200], ids[1, 500:], ids[2, ::3], ids[3, 64:128], ids[4] = -1, -2, -1, -1, -9
        options, hidden = {feature: ids}, ids < 0
        if feature == "pair":
            q_ids = ids.clone()
            q_ids[:3].clamp_(min=0)  # padded queries see what is before them, and nobody what they hold
            q_ids[5] = 7  # none of these queries' keys
            q_ids[5, -1] = 0  # which sees another's document
            options, hidden = {"segment_ids": (q_ids, ids)}, hidden.clone()
            hidden[5] = ids[5] != 0
            assert (ids[5] == 0).any()
    want = attention(q, k, v, causal=causal, return_lse=True, backend="hopper", **options)
    for poison in (torch.nan, torch.inf):
        dirty = [x.masked_fill(hidden[:, None, :, None], poison) for x in (k, v)]
        got = attention(q, *dirty, causal=causal, return_lse=True, backend="hopper", **options)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("head_dim", [160, 256])
def test_the_portable_backward_fits_the_forward_of_features(head_dim, feature):
    """A deterministic one beyond 128 columns: it takes this out and lse, and drops what was dropped."""
    case = Case(
        batch=3, q_heads=4, q_len=500, kv_len=500, head_dim=head_dim, causal=True, **FEATURES[feature]
    )
    inputs = case.build(torch.bfloat16, "cuda")
    gradients = []
    for backend in ("hopper", "triton"):
        torch.manual_seed(3)
        out = attention(inputs.q, inputs.k, inputs.v, backend=backend, deterministic=True, **inputs.options)
        gradients.append(torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout))
    for ours, theirs in zip(*gradients, strict=True):
        rms, _ = relative_errors(ours.double(), theirs.double(), 1e-30)
        assert rms < 3e-3


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("growth", [0.01, 0.05, 0.5, 5.0, -0.05])
def test_maxima_that_grow(growth, causal, head_dim, poisoned):
    """Each key's scores exceed the next key's by this: a kept maximum is outgrown now and then, or always."""
    case = Case(q_len=1000, kv_len=1000, head_dim=head_dim, causal=causal)
    inputs = case.build(torch.bfloat16, "cuda")
    with torch.no_grad():
        inputs.q[..., 0] = 16.0
        steps = torch.arange(1000, 0, -1, device="cuda") * (growth * head_dim**0.5 / 16)
        inputs.k[..., 0] = steps.to(torch.bfloat16)
    compare_on(inputs, (case, growth))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(8, 2), (3, 1), (6, 6)], ids=str)
def test_layouts_and_groups(layout, heads, poisoned):
    case = Case(batch=3, q_heads=heads[0], kv_heads=heads[1], q_len=300, kv_len=300, causal=True)
    for head_dim in (64, 128):
        inputs = replace(case, head_dim=head_dim, layout=layout).build(torch.bfloat16, "cuda")
        if choose(Backend.AUTO, inputs.q, inputs.k, inputs.v, **OPTIONS) is Backend.HOPPER:
            compare(replace(case, head_dim=head_dim, layout=layout), torch.bfloat16)
        else:
            assert layout in ("expanded", "strided", "sliced")


@pytest.mark.parametrize("size", [512, 2048])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_fit_the_forward(size, head_dim):
    """The portable backward takes this forward's out and lse."""
    case = Case(q_heads=4, kv_heads=4, q_len=size, kv_len=size, head_dim=head_dim, causal=True)
    inputs = case.build(torch.bfloat16, "cuda")
    inputs.dlse.zero_()
    want, theirs = expected(inputs), sdpa(inputs, SDPBackend.FLASH_ATTENTION)
    out = attention(inputs.q, inputs.k, inputs.v, causal=True, backend="hopper")
    grads = torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        rms, peak = relative_errors(grad.double(), want[name], 1e-30)
        their_rms, their_peak = relative_errors(theirs[name], want[name], 1e-30)
        assert rms <= 1.1 * their_rms, name
        assert peak <= 2 * their_peak, name


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 200], ids=str)
def test_a_hundred_repeats_are_the_same_bits(window, head_dim):
    q, k, v = torch.randn(3, 4, 6, 1000, head_dim, device="cuda", dtype=torch.bfloat16)
    first = attention(q, k, v, causal=True, window_size=window, return_lse=True, backend="hopper")
    for _ in range(100):
        again = attention(q, k, v, causal=True, window_size=window, return_lse=True, backend="hopper")
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_small_sequences(head_dim, poisoned):
    """More work items than programs, of one or two tiles each."""
    compare(
        Case(batch=60, q_heads=12, kv_heads=12, q_len=130, kv_len=130, head_dim=head_dim, causal=True),
        HALF[0],
    )


def test_large_strides():
    """A batch stride beyond 2^31 elements."""
    store = torch.empty(2, 2**30 + 64, 2, device="cuda", dtype=torch.bfloat16)
    x = store.as_strided((2, 2, 256, 64), (store.stride(0), 64, 128, 1)).normal_()
    assert x.stride(0) > 2**31
    out = attention(x, x, x, causal=True, backend="hopper")
    torch.testing.assert_close(
        out, attention(*[x.contiguous()] * 3, causal=True, backend="hopper"), rtol=0, atol=0
    )


def test_new_lengths_compile_nothing(monkeypatch):
    q = torch.randn(1, 2, 2000, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, q, q, causal=True, backend="hopper")
    from streamattn.kernels.hopper_forward import hopper_fwd_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in hopper_fwd_kernel.device_caches.values())

    before = compiled()
    for length in (1999, 1536, 1100):
        x = q[:, :, :length]
        attention(x, x, x, causal=True, backend="hopper")
    assert compiled() <= before + 1  # a diagonal that lies in two tiles is another kernel
    assert launch._plans


def test_in_a_cuda_graph():
    q, k, v = torch.randn(3, 2, 4, 600, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, k, v, causal=True, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True, backend="hopper")
    for _ in range(3):
        q.normal_()
        graph.replay()
        torch.testing.assert_close(out, attention(q, k, v, causal=True, backend="hopper"), rtol=0, atol=0)


@pytest.fixture
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been launched before; what older graphs know of is kept."""
    monkeypatch.setattr(hopper_launch, "_counters", {})
    monkeypatch.setattr(hopper_launch, "_spare", {})


def drawn_call(seed: int = 0) -> Inputs:
    """A causal call of 256 work items, more than there are multiprocessors."""
    sizes: dict[str, Any] = dict(batch=4, q_heads=16, kv_heads=16, q_len=1000, kv_len=1000, head_dim=64)
    return Case(**sizes, causal=True, seed=seed).build(torch.bfloat16, "cuda")


def drawn(call: Inputs) -> torch.Tensor:
    """Its out."""
    with torch.no_grad():
        return attention(call.q, call.k, call.v, causal=True, backend="hopper")


@pytest.mark.parametrize("spare", [True, False], ids=["counters", "none left"])
def test_launches_side_by_side_draw_from_counters_of_their_own(spare, no_counters):
    """Many on two streams while two graphs, captured on one stream, are replayed on two others."""
    calls = [drawn_call(seed) for seed in range(4)]
    for call in calls:
        compare_on(call, "alone")
    right = [drawn(call) for call in calls]
    if not spare:
        hopper_launch._spare.clear()
    graphs, outs = [], []
    for call in calls[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append([drawn(call) for _ in range(20)])
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        for x in (*outs[0], *outs[1]):
            x.fill_(torch.nan)
        torch.cuda.synchronize()
        eager: list[list[torch.Tensor]] = [[], []]
        for graph, stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                graph.replay()
        for _ in range(20):
            for call, stream, found in zip(calls[2:], streams[2:], eager, strict=True):
                with torch.cuda.stream(stream):
                    found.append(drawn(call))
        torch.cuda.synchronize()
        for found, alone in zip((*outs, *eager), right, strict=True):
            assert all(torch.equal(x, alone) for x in found)
        assert all(not chunk.any() for chunk in hopper_launch._chunks)


def test_a_graph_has_the_kernel_and_nothing_else():
    call = drawn_call()
    drawn(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            drawn(call)
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        graph.replay()
        torch.cuda.synchronize()
    names = [x.name for x in found.events() or [] if x.device_type.name == "CUDA"]
    assert names == ["hopper_fwd_kernel"] * 3


def test_counters_are_none_of_a_pools_memory(no_counters):
    """When torch.compile warms up for its graphs, it allocates from a pool that may keep nothing."""
    call = drawn_call()
    pool = torch.cuda.MemPool()
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.use_mem_pool(pool):
        out = drawn(call)
    torch.cuda.synchronize()
    assert pool.snapshot(), "what the call returns comes from there"
    del out
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert not [block for block in blocks if block["state"] == "active_allocated"]


def test_compiled_to_graphs_from_the_first_call_on(no_counters):
    """Warm-up, recording and replays of torch.compile's own graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def twice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(attention(q, k, v, causal=True), k, v, causal=True)

    for seed in range(5):
        call = drawn_call(seed)
        with torch.no_grad():
            got = twice(call.q, call.k, call.v).clone()
        call.q = drawn(call)
        assert torch.equal(got, drawn(call))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({}, {"masks": Masks(attn_mask=torch.zeros(1, 1, 1, 1))}),
        ({}, {"masks": Masks(sinks=torch.zeros(2))}),
        ({}, {"scale": -1.0}),
        ({"dtype": torch.float32}, {}),
        ({"head_dim": 60}, {}),
        ({"q_len": 40}, {}),
        ({"kv_len": 300}, {"window_left": 9}),
    ],
    ids=str,
)
def test_what_it_can_not_goes_to_the_portable_kernel(shapes, options):
    shapes = {"head_dim": 64, "q_len": 200, "kv_len": 200, "dtype": torch.bfloat16} | shapes
    q = torch.zeros(1, 2, shapes["q_len"], shapes["head_dim"], device="cuda", dtype=shapes["dtype"])
    k = torch.zeros(1, 2, shapes["kv_len"], shapes["head_dim"], device="cuda", dtype=shapes["dtype"])
    assert choose(Backend.AUTO, q, k, k, **(OPTIONS | options)) is Backend.TRITON
    with pytest.raises(ValueError, match="backend='hopper' can't serve"):
        choose(Backend.HOPPER, q, k, k, **(OPTIONS | options))


def test_a_hidden_nan_reaches_nothing():
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    k[:, :, :100], v[:, :, :100] = torch.nan, torch.nan
    assert not attention(q, k, v, window_size=64).isnan().any()
