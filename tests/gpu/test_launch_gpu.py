"""Launches on a GPU: devices, streams, graphs, compilation, memory and sizes beyond 32 bits."""

from __future__ import annotations

import threading
import weakref
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import attention, kinds
from streamattn.dispatch import Backend, unavailable
from streamattn.packed import packed_attention, unpacked
from tests.cases import Case, Result, expected, judge, relative_errors, run
from tests.oracle import attend

pytestmark = pytest.mark.gpu


def ours(inputs, **extra: Any) -> Result:
    return run(attention, inputs, return_lse=True, backend="triton", **extra)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_the_second_gpu_while_the_first_is_current():
    """triton-lang/triton#2441, #5205: forward and backward must run where the tensors are."""
    inputs = Case(q_len=300, kv_len=300, head_dim=64, causal=True, mask="trained").build(
        torch.bfloat16, "cuda:1"
    )
    assert torch.cuda.current_device() == 0
    got = ours(inputs)
    assert torch.cuda.current_device() == 0
    for x in got.tensors.values():
        assert x.device == torch.device("cuda:1")
    judge(got, expected(inputs), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"q_heads": 8, "window_size": 100}], ids=str)
def test_the_chosen_kernel_runs_on_the_second_gpu(options):
    """triton-lang/triton#2441, #5205: what `auto` takes there, under autograd's own thread too."""
    inputs = Case(q_len=500, kv_len=500, head_dim=128, **options).build(torch.bfloat16, "cuda:1")
    assert torch.cuda.current_device() == 0
    got = run(attention, inputs, return_lse=True)
    assert torch.cuda.current_device() == 0
    assert {x.device for x in got.tensors.values()} == {torch.device("cuda:1")}
    judge(got, expected(inputs), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_two_gpus_are_refused():
    q = torch.randn(1, 1, 8, 16, device="cuda:0")
    k = q.to("cuda:1")
    with pytest.raises(ValueError, match="cuda:1"):
        attention(q, k, k)


def test_the_kernels_run_on_the_current_stream():
    """The producer on a side stream is slow; a launch elsewhere would read old values."""
    side = torch.cuda.Stream()
    slow = torch.randn(6000, 6000, device="cuda")
    inputs = Case(q_len=300, kv_len=300, head_dim=64).build(torch.bfloat16, "cuda")
    q, k, v = (torch.zeros_like(x.detach()).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    ours(inputs)  # compiled before it matters
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            slow = slow @ slow * 1e-4
        with torch.no_grad():
            for x, y in ((q, inputs.q), (k, inputs.k), (v, inputs.v)):
                x.copy_(y)
        out = attention(q, k, v, backend="triton")
        grads = torch.autograd.grad(out, [q, k, v], inputs.dout)
    side.synchronize()
    inputs.dlse.zero_()
    want = expected(inputs)
    got = Result(dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True)))
    del want.tensors["lse"]
    judge(got, want, torch.bfloat16)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"lengths": "ragged"}, {"dropout_p": 0.2}, {"segments": "ids"}], ids=str
)
def test_a_call_never_waits_for_the_gpu(options):
    inputs = Case(q_len=128, kv_len=128, head_dim=64, **options).build(torch.bfloat16, "cuda")
    ours(inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lengths_on_the_gpu_are_clamped():
    inputs = Case(q_len=100, kv_len=200, head_dim=64, causal=True).build(torch.bfloat16, "cuda")
    inputs.options["kv_lengths"] = torch.tensor([-7, 10_000], device="cuda")
    got = ours(inputs)
    inputs.options["kv_lengths"] = torch.tensor([0, 200], device="cuda")
    judge(got, expected(inputs), torch.bfloat16)


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": "trained"}, {"lengths": "ragged"}], ids=str)
def test_a_cuda_graph_replays_forward_and_backward(options):
    inputs = Case(q_len=256, kv_len=256, head_dim=64, **options).build(torch.bfloat16, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            ours(inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(inputs)
    with torch.no_grad():  # new values in the captured inputs
        for x in (inputs.q, inputs.k, inputs.v):
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    judge(captured, expected(inputs), torch.bfloat16)
    eager = ours(inputs)
    for name, x in captured.tensors.items():
        assert torch.equal(x, eager[name]), name


def test_each_replay_of_a_cuda_graph_draws_a_new_dropout_mask():
    q = torch.zeros(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    eye = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(1, 1, 64, 64)
    attention(q, q, eye, dropout_p=0.5, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, q, eye, dropout_p=0.5, backend="triton")
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append((out != 0).clone())
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"q_heads": 8, "mask": "trained"}, {"segments": "ids"}], ids=str
)
def test_cold_compile_has_no_graph_break(options, dynamic):
    torch._dynamo.reset()
    inputs = Case(q_len=256, kv_len=256, head_dim=64, **options).build(torch.bfloat16, "cuda")
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic)
    judge(run(compiled, inputs, return_lse=True), expected(inputs), torch.bfloat16)


def test_compiled_dropout_reproduces_after_a_seed():
    torch._dynamo.reset()
    inputs = Case(q_len=256, kv_len=256, head_dim=64).build(torch.bfloat16, "cuda")
    compiled = torch.compile(attention, fullgraph=True)

    def call() -> Tensor:
        return compiled(inputs.q, inputs.k, inputs.v, dropout_p=0.3).detach()

    torch.manual_seed(0)
    first, second = call(), call()
    torch.manual_seed(0)
    assert torch.equal(first, call())
    assert not torch.equal(first, second)


def peak_bytes(fn) -> int:
    """Memory that a call takes beyond what is live before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = fn()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"mask": "bool_keys"}, {"window_size": 256}], ids=str
)
def test_peak_memory_grows_linearly_with_the_sequence(options):
    def peak(size: int) -> int:
        case = Case(batch=1, q_heads=4, kv_heads=4, q_len=size, kv_len=size, head_dim=64, **options)
        inputs = case.build(torch.bfloat16, "cuda")
        return peak_bytes(lambda: ours(inputs))

    small, large = peak(4096), peak(16384)
    assert large <= 4.2 * small, f"{small} bytes at 4096, {large} at 16384"


@pytest.mark.parametrize("layout", ["fused", "bthd", "sliced", "expanded"])
def test_strided_inputs_are_read_in_place(layout):
    """The forward allocates out and lse, no copy of its inputs."""
    inputs = Case(batch=2, q_heads=8, kv_heads=8, q_len=2048, kv_len=2048, head_dim=64, layout=layout).build(
        torch.bfloat16, "cuda"
    )
    attention(inputs.q, inputs.k, inputs.v, backend="triton")
    out_bytes = inputs.q.numel() * 2
    assert peak_bytes(lambda: attention(inputs.q, inputs.k, inputs.v, backend="triton")) < 1.2 * out_bytes


def test_a_broadcast_mask_stays_unmaterialised():
    inputs = Case(batch=8, q_heads=8, kv_heads=8, q_len=1024, kv_len=1024, head_dim=64).build(
        torch.bfloat16, "cuda"
    )
    row = torch.zeros(8, 1, 1, 1024, device="cuda", dtype=torch.bfloat16)
    inputs.options["attn_mask"] = row.expand(8, 8, 1024, 1024)
    assert peak_bytes(lambda: ours(inputs)) < 8 * 8 * 1024 * 1024


@pytest.mark.parametrize("shape", [(8300, 16, 1, 128), (1, 70_000, 3, 16), (70_000, 1, 3, 16)], ids=str)
def test_grid_axes_beyond_65535(shape):
    """Dao-AILab/flash-attention#2260: batch 8300 with 16 heads, backward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)
    out = attention(q, k, v, backend="triton")
    got = (out.detach(), *torch.autograd.grad(out, [q, k, v], dout))
    parts = [torch.arange(64), torch.arange(shape[0] - 64, shape[0])] if shape[0] > 1 else [torch.arange(1)]
    for part in parts:
        part = part.cuda()
        leaves = [x.detach()[part].requires_grad_() for x in (q, k, v)]
        want_out = attend(*leaves)[0]
        want = (want_out.detach(), *torch.autograd.grad(want_out, leaves, dout[part].double()))
        for x, right in zip(got, want, strict=True):
            assert relative_errors(x[part], right, 0.05)[0] < 1.5e-2
    assert all(x.isfinite().all() for x in got)


@pytest.mark.slow
def test_expanded_inputs_whose_outputs_pass_two_to_the_31st():
    """fla-org/flash-linear-attention#1080: q, k, v are small, out and gradients pass 2**31 elements."""
    torch.manual_seed(0)
    batch, heads, size, head_dim = 2056, 16, 512, 128
    assert batch * heads * size * head_dim > 2**31
    small = [torch.randn(1, heads, size, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (x.expand(batch, -1, -1, -1).requires_grad_() for x in small)
    dout = torch.randn_like(small[0])
    out = attention(q, k, v, causal=True, backend="triton")
    leaves = [x.clone().requires_grad_() for x in small]
    want_out = attend(*leaves, causal=True)[0]
    want = (want_out.detach(), *torch.autograd.grad(want_out, leaves, dout.double()))
    got = (out.detach(), *torch.autograd.grad(out, [q, k, v], dout.expand(batch, -1, -1, -1)))
    for x, right in zip(got, want, strict=True):
        assert relative_errors(x[:1], right)[0] < 1.5e-2
        for start in range(0, batch, 257):
            assert torch.equal(x[start : start + 257], x[:1].expand_as(x[start : start + 257]))


@pytest.mark.slow
def test_rows_whose_offsets_pass_two_to_the_31st():
    """One head of k and v in a storage of 36,000 x 65,536: the last rows lie beyond 2**31 elements."""
    torch.manual_seed(0)
    kv_len, pitch, head_dim = 36_000, 65_536, 64
    storage = torch.zeros(kv_len, pitch, device="cuda", dtype=torch.bfloat16)
    k, v = storage[:, :head_dim], storage[:, head_dim : 2 * head_dim]
    for x in (k, v):
        x.copy_(torch.randn(kv_len, head_dim, device="cuda"))
    q = torch.randn(64, head_dim, device="cuda", dtype=torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, backend="triton")
    want_out = attend(*leaves)[0]
    dout = torch.randn_like(out)
    assert relative_errors(out.detach(), want_out.detach())[0] < 1.5e-2
    copies = [x.detach().clone().requires_grad_() for x in leaves]
    want = torch.autograd.grad(attend(*copies)[0], copies, dout.double())
    for x, right in zip(torch.autograd.grad(out, leaves, dout), want, strict=True):
        assert relative_errors(x, right, 1e-4)[0] < 1.5e-2


@pytest.mark.slow
def test_a_mask_whose_offsets_pass_two_to_the_31st():
    torch.manual_seed(0)
    size = 47_000  # its square passes 2**31
    q, k, v = (torch.randn(size, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    mask = torch.rand(size, size, device="cuda", dtype=torch.float16) < 0.5
    out = attention(q, k, v, attn_mask=mask, backend="triton")
    dout = torch.randn_like(out)
    (dq,) = torch.autograd.grad(out, q, dout)
    rows = torch.tensor([0, 1, size // 2, size - 2, size - 1], device="cuda")
    part = q.detach()[rows].requires_grad_()
    want = attend(part, k.detach(), v.detach(), attn_mask=mask[rows])[0]
    assert relative_errors(out.detach()[rows], want.detach(), 1e-4)[0] < 1.5e-2
    (want_dq,) = torch.autograd.grad(want, part, dout[rows].double())
    assert relative_errors(dq[rows], want_dq, 1e-5)[0] < 2e-2


@pytest.mark.parametrize("backend", ["triton", "decode"])
def test_no_length_compiles_another_kernel(backend):
    """vllm-project/vllm#14448: generating token by token reuses what is compiled."""
    from streamattn.kernels.decode import decode_combine_kernel, decode_fwd_kernel
    from streamattn.kernels.forward import attention_fwd_kernel

    kernels = [attention_fwd_kernel] if backend == "triton" else [decode_fwd_kernel, decode_combine_kernel]

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    k = torch.randn(1, 4, 2048, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(1, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    counts = []
    for length in [1000, *range(1001, 1065)]:
        attention(q, k[:, :, :length], k[:, :, :length], causal=True, backend=backend)
        counts.append(compiled())
    assert counts[-1] - counts[0] <= 2


class TestTensorMaps:
    """What the Hopper kernel reads and writes is told to it by encoded maps, which are kept by address."""

    @pytest.fixture(autouse=True)
    def encodings(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The addresses of the maps that the short way has encoded."""
        reason = unavailable(Backend.HOPPER, torch.device("cuda"))
        if reason is not None:
            pytest.skip(reason)
        from streamattn.kernels import launch

        encoded: list[int] = []
        original = launch._Maps.__missing__

        def noting(maps: Any, address: int) -> Any:
            encoded.append(address)
            return original(maps, address)

        monkeypatch.setattr(launch._Maps, "__missing__", noting)
        monkeypatch.setattr(launch, "_plans", {})
        monkeypatch.setattr(launch, "_maps", weakref.WeakValueDictionary())
        kinds.KINDS.clear()  # which have plans of their own
        return encoded

    @staticmethod
    def tensors(size: int = 300, heads: int = 4) -> list[Tensor]:
        return list(torch.randn(3, 2, heads, size, 64, device="cuda", dtype=torch.bfloat16))

    @staticmethod
    def check(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None) -> None:
        """A causal call, or the ``out`` of one, against float64."""
        if out is None:
            out = attention(q, k, v, causal=True, backend="hopper")
        want, _ = attend(q, k, v, causal=True)
        assert relative_errors(out, want)[0] < 1.5e-2

    def test_the_functions_in_c_are_called(self):
        """Triton's Python between is not needed on any release that the kernel is for."""
        from streamattn.kernels import launch

        for size in (128, 300):
            self.check(*self.tensors(size))
        launchers = [plan.launcher for plan in launch._plans.values()]
        assert launchers
        assert {type(launcher) for launcher in launchers} == {BuiltinFunctionType}

    def test_tensors_that_lie_where_they_lay_are_not_encoded_again(self, encodings):
        q, k, v = self.tensors()
        self.check(q, k, v)
        self.check(q, k, v)
        assert {x.data_ptr() for x in (q, k, v)} <= set(encodings)
        kept = [q, k, v]
        for _ in range(4):
            before = len(encodings)
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
            out = attention(q, k, v, causal=True, backend="hopper")
            assert encodings[before:] in ([], [out.data_ptr()])
            self.check(q, k, v, out)
            kept.append(out)  # so that each output lies elsewhere
        assert len(set(encodings)) == len(encodings)

    def test_other_addresses_are_encoded(self, encodings):
        kept = [self.tensors() for _ in range(3)]
        self.check(*kept[0])
        for tensors in kept:
            self.check(*tensors)
            assert {x.data_ptr() for x in tensors} <= set(encodings)

    def test_memory_that_was_freed_and_has_another_layout_now(self):
        """One block of memory as fused [B, T, 3, H, D], as [3, B, H, T, D], of another length, and so on."""
        store = torch.empty(2 * 384 * 3 * 4 * 64, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            for fused in (True, False):
                for size in (384, 256, 100):
                    part = store[: 2 * size * 3 * 4 * 64].normal_()
                    if fused:
                        q, k, v = part.view(2, size, 3, 4, 64).permute(2, 0, 3, 1, 4)
                    else:
                        q, k, v = part.view(3, 2, 4, size, 64)
                    assert q.data_ptr() == store.data_ptr()
                    self.check(q, k, v)

    def test_lengths_of_keys_at_one_address(self):
        """Slices of a cache differ in nothing but the length that their maps end at."""
        _, k, v = self.tensors(512)
        for size in [*range(200, 260, 7), *range(200, 260, 7)]:
            q = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
            self.check(q, k[:, :, :size], v[:, :, :size])

    @pytest.mark.parametrize("causal", [False, True])
    def test_a_graph_keeps_its_own_addresses(self, causal):
        """Eager calls between its replays, elsewhere, change none; the kernel copies its maps at launch."""
        q, k, v = self.tensors(1024, heads=40)
        attention(q, k, v, causal=causal, backend="hopper")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            first = attention(q, k, v, causal=causal, backend="hopper")
            second = attention(first, k, v, causal=causal, backend="hopper")
        for _ in range(3):
            for x in (q, k, v):
                x.copy_(torch.randn_like(x))
            attention(*self.tensors(1024, heads=40), causal=causal, backend="hopper")
            graph.replay()
            one = attention(q, k, v, causal=causal, backend="hopper")
            assert torch.equal(first, one)
            assert torch.equal(second, attention(one, k, v, causal=causal, backend="hopper"))

    def test_threads_on_streams_of_their_own(self):
        calls = [self.tensors(200 + 100 * n) for n in range(3)]
        want = [attention(*tensors, causal=True, backend="hopper") for tensors in calls]
        torch.cuda.synchronize()
        right: list[bool] = []

        def repeat(n: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(200):
                    got = attention(*calls[n], causal=True, backend="hopper")
                    right.append(torch.equal(got, want[n]))

        threads = [threading.Thread(target=repeat, args=(n % 3,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(right) == 1200
        assert all(right)

    def test_no_length_compiles_another_kernel(self):
        from streamattn.kernels.hopper_forward import hopper_fwd_kernel

        def compiled() -> int:
            return sum(len(cache[0]) for cache in hopper_fwd_kernel.device_caches.values())

        _, k, v = self.tensors(2048)
        counts = []
        for size in [1000, *range(1001, 1065)]:
            q = torch.randn(2, 4, size, 64, device="cuda", dtype=torch.bfloat16)
            attention(q, k[:, :, :size], v[:, :, :size], causal=True, backend="hopper")
            counts.append(compiled())
        assert counts[-1] == counts[0]


def training_call(layout: str, dtype: torch.dtype = torch.bfloat16, length: int = 300, **options: Any):
    """One forward and backward on new inputs, as out and the gradients, and what float64 makes of them."""
    made = torch.randn(2, length, 12, 64, device="cuda", dtype=dtype)
    dout = torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    if layout == "packed":
        leaves = [made.requires_grad_()]
        out = packed_attention(*leaves, **options)[0]
    else:
        leaves = [x.transpose(1, 2) for x in made.split(4, dim=2)]
        leaves = [(x.contiguous() if layout == "bhtd" else x).requires_grad_() for x in leaves]
        out = attention(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    doubles = [x.detach().to(out.dtype).double().requires_grad_() for x in leaves]
    parts = unpacked(doubles[0], 4) if layout == "packed" else doubles
    want = attention(*parts, backend="reference", **options)
    return (out, *grads), (want, *torch.autograd.grad(want, doubles, dout.double()))


def check_training(layout: str, **options: Any) -> None:
    got, want = training_call(layout, **options)
    for x, y in zip(got, want, strict=True):
        assert relative_errors(x, y)[0] < 1e-2


def repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels each repeated call launches from now on."""
    from streamattn.kernels import hopper_repeat

    heard: list[int] = []
    start_plans = hopper_repeat.start_plans

    def noting(device: int, *launches: Any) -> bool:
        done = start_plans(device, *launches)
        heard.append(len(launches) if done else 0)
        return done

    monkeypatch.setattr(hopper_repeat, "start_plans", noting)
    kinds.KINDS.clear()
    return heard


hopper_only = pytest.mark.skipif(
    unavailable(Backend.HOPPER, torch.device("cuda")) is not None if torch.cuda.is_available() else True,
    reason="needs the Hopper kernels",
)


@hopper_only
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "window_size": 100}, {"softcap": 20.0}, {"deterministic": True}],
    ids=str,
)
@pytest.mark.parametrize("length", [300, 1500])
@pytest.mark.parametrize("layout", ["bhtd", "bthd", "packed"])
def test_a_training_step_is_repeated_on_other_tensors(layout, length, options, monkeypatch):
    heard = repeats(monkeypatch)
    for _ in range(4):
        check_training(layout, length=length, **options)
    assert heard == [1, 3, 1, 3, 1, 3]


@hopper_only
def test_what_changes_between_training_steps_is_seen(monkeypatch):
    heard = repeats(monkeypatch)
    for _ in range(2):
        for layout in ("bhtd", "bthd", "packed"):
            for options in ({}, {"causal": True}, {"scale": 0.3}, {"length": 301}, {"deterministic": True}):
                check_training(layout, **options)
                with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                    x = torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16)
                    y = attention(x, x + 1, x + 2, causal=True)
                    z = attention(*(t.double() for t in (x, x + 1, x + 2)), causal=True, backend="reference")
                    assert relative_errors(y, z)[0] < 1e-2
    assert 0 not in heard
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            check_training("packed", dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        (out, *grads), _ = training_call("bthd", length=2000)
        kind = [kind for alike in kinds.KINDS.values() for kind in alike if kind._backwards][-1]
        assert kind._backwards[-1].deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(x).all() for x in grads)


@hopper_only
def test_a_repeated_step_is_captured_offloaded_and_on_other_streams(monkeypatch):
    heard = repeats(monkeypatch)
    for _ in range(2):
        check_training("bthd", causal=True)
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            check_training("bthd", causal=True)
    with torch.autograd.graph.save_on_cpu():
        check_training("bthd", causal=True)
    q, k, v = (
        torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in "qkv"
    )
    dout = torch.randn_like(q)
    graph = torch.cuda.CUDAGraph()
    attention(q, k, v, causal=True).backward(dout)
    torch.cuda.synchronize()
    before = len(heard)
    with torch.cuda.graph(graph):
        out = attention(q, k, v, causal=True)
        grads = torch.autograd.grad(out, (q, k, v), dout)
    assert heard[before:] == [1, 3]
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.normal_()
        graph.replay()
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        want = attention(*doubles, causal=True, backend="reference")
        for x, y in zip(
            (out, *grads), (want, *torch.autograd.grad(want, doubles, dout.double())), strict=True
        ):
            assert relative_errors(x, y)[0] < 1e-2
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as listening:
        check_training("bthd", causal=True)
    assert "streamattn::attention_backward" in {event.key for event in listening.key_averages()}
