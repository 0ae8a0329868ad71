"""The decode kernel on a GPU against float64 and beside PyTorch's kernels: options, splits, pages, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from streamattn import attention
from streamattn.dispatch import Backend, Masks, choose
from streamattn.kernels import decode
from streamattn.pattern import UNBOUNDED
from tests.cases import MASKS, Case, Inputs, Result, expected, judge, paged, run
from tests.gpu.peers import compare
from tests.rounding import rounded

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"q_len": 4, "causal": True},
    {"q_len": 16, "causal": True, "sinks": True, "softcap": 5.0},
    {"window_size": 700},
    {"q_len": 3, "window_size": (300, 20), "lengths": "ragged"},
    {"lengths": "extreme", "sinks": True, "q_len": 2},
    {"segments": "pair", "lengths": "ragged"},
    {"value_dim": 40, "scale": -0.2, "layout": "bthd"},
    {"layout": "sliced", "head_dim": 80},
]


@torch.no_grad()
def decoded(inputs: Inputs, **more: Any) -> Result:
    options = {**inputs.options, **more}
    out, lse = attention(inputs.q, inputs.k, inputs.v, **options, return_lse=True, backend="decode")
    return Result({"out": out, "lse": lse})


def wanted(inputs: Inputs) -> Result:
    result = expected(inputs)
    return Result({name: result[name] for name in ("out", "lse")})


def check(case: Case, dtype: torch.dtype) -> None:
    inputs = case.build(dtype, "cuda")
    judge(decoded(inputs), wanted(inputs), dtype, case, peer=rounded(inputs, None))


def test_auto_takes_it_for_few_queries():
    q = torch.zeros(1, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"masks": Masks(), "scale": 1.0, "window_left": UNBOUNDED, "softcap": 0.0}
    assert choose(Backend.AUTO, q, q, q, dropout_p=0.0, **options) is Backend.DECODE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, heads, dtype, poisoned):
    sizes = {"q_len": 1, "kv_len": 1777, "head_dim": 64, "q_heads": heads[0], "kv_heads": heads[1]}
    check(Case(**{**sizes, **options}), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [x for x in MASKS if x != "none" and not x.startswith("trained")])
def test_masks(mask, dtype, poisoned):
    check(Case(q_len=3, kv_len=1777, head_dim=64, mask=mask), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 192, 256])
def test_head_dims(head_dim, dtype, poisoned):
    check(Case(q_heads=8, kv_heads=2, q_len=2, kv_len=3000, head_dim=head_dim, causal=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (16, 2)], ids=str)
def test_error_is_that_of_sdpa_flash(heads, dtype):
    case = Case(1, *heads, q_len=1, kv_len=8192, head_dim=128)
    compare(
        case.build(dtype, "cuda"),
        lambda inputs: run(attention, inputs, return_lse=True, backend="decode"),
        SDPBackend.FLASH_ATTENTION,
    )


@pytest.mark.parametrize("splits", [1, 2, 7, 128])
def test_any_number_of_splits(splits, monkeypatch, poisoned):
    monkeypatch.setattr(decode, "split_count", lambda *given: splits)
    for kv_len in (1, 63, 64, 65, 1000):
        check(Case(2, 4, 2, 1, kv_len, 64, sinks=True), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [1, 16, 48, 256])
@pytest.mark.parametrize("options", OPTIONS[:7], ids=str)
def test_paged_caches(options, page, dtype, poisoned):
    sizes = {"q_len": 1, "kv_len": 2304, "head_dim": 64, "q_heads": 8, "kv_heads": 2, "lengths": "ragged"}
    case = Case(**{**sizes, **options})
    inputs = case.build(dtype, "cuda")
    k, v, table = paged(inputs, page)
    got = decoded(replace(inputs, k=k, v=v), block_table=table)
    judge(got, wanted(inputs), dtype, case, peer=rounded(inputs, None))


def test_a_graph_follows_lengths_and_pages():
    """Captured once, replayed on a cache that grows and moves, with no launch by the host."""
    q = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 40, 16, 2, 128, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    lengths = torch.zeros(2, dtype=torch.int32, device="cuda")
    table = torch.zeros(2, 16, dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"kv_lengths": lengths, "block_table": table, "causal": True}
    attention(q, k, v, **options, backend="decode")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, **options, backend="decode")
    for filled in ((1, 256), (200, 0), (17, 16)):
        lengths.copy_(torch.tensor(filled))
        table.copy_(torch.randperm(40)[:32].view(2, 16))
        graph.replay()
        want = attention(q.double(), k.double(), v.double(), **options, backend="reference")
        torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("paged_cache", [False, True])
def test_it_waits_for_no_device(paged_cache):
    q = torch.randn(2, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"kv_lengths": torch.tensor([9, 500], device="cuda")}
    if paged_cache:
        options["block_table"] = torch.tensor([[0], [1]], device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(q, k, v, **options, backend="decode")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_two_streams_at_once():
    """Nothing is shared between calls: each has parts of its own."""
    calls = [torch.randn(3, 1, 4, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    caches = [torch.randn(2, 1, 4, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    want = [attention(q[0], *kv, backend="decode") for q, kv in zip(calls, caches, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(20):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(attention(calls[n][0], *caches[n], backend="decode"))
    torch.cuda.synchronize()
    assert all(torch.equal(x, want[n]) for n in (0, 1) for x in got[n])


@pytest.mark.slow
def test_offsets_beyond_32_bits():
    k = torch.zeros(3, 1, (1 << 30) // 64, 64, device="cuda", dtype=torch.bfloat16)
    k[2, :, -1] = 1.0
    q = torch.ones(3, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    out = attention(q, k, k, scale=100.0, backend="decode")
    assert torch.equal(out[:, 0, 0, 0].float().cpu(), torch.tensor([0.0, 0.0, 1.0]))
    table = torch.tensor([[2], [0], [1]], device="cuda", dtype=torch.int32)
    lengths = torch.full((3,), k.shape[2], device="cuda")
    paged_out = attention(q, k, k, scale=100.0, block_table=table, kv_lengths=lengths)
    assert torch.equal(paged_out[:, 0, 0, 0].float().cpu(), torch.tensor([1.0, 0.0, 0.0]))
