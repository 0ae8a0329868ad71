"""The kernels for wide heads on a GPU at real sizes: numbers, options, determinism, memory, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from streamattn import attention
from streamattn.dispatch import Backend, Masks, choose
from streamattn.kernels import tiles
from streamattn.pattern import UNBOUNDED
from tests.cases import Case, Inputs, Result, expected, judge, keep_of, run
from tests.gpu.peers import compare
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]


def ours(inputs: Inputs, **extra: Any) -> Result:
    return run(attention, inputs, return_lse=True, backend="wide", **extra)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [257, 512, 8192])
def test_auto_is_the_kernel(head_dim, dtype):
    q = torch.zeros(1, 1, 16, head_dim, device="cuda", dtype=dtype)
    options: dict[str, Any] = {"masks": Masks(), "scale": 1.0, "window_left": UNBOUNDED}
    assert choose(Backend.AUTO, q, q, q, softcap=5.0, dropout_p=0.1, **options) is Backend.WIDE


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "head_dim"), [(2048, 512), (913, 320), (256, 1024), (64, 4096)], ids=str)
def test_error_is_that_of_sdpa_efficient(size, head_dim, causal, dtype, poisoned):
    case = Case(batch=2, q_heads=2, kv_heads=2, q_len=size, kv_len=size, head_dim=head_dim, causal=causal)
    compare(case.build(dtype, "cuda"), ours, SDPBackend.EFFICIENT_ATTENTION, f"{case}, {dtype}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("size", "head_dim"), [(16, 512), (64, 8192), (256, 4096), (512, 2048), (1024, 512)], ids=str
)
def test_float32_error_is_that_of_sdpa_math(size, head_dim, causal, poisoned):
    case = Case(batch=1, q_heads=4, kv_heads=4, q_len=size, kv_len=size, head_dim=head_dim, causal=causal)
    compare(case.build(torch.float32, "cuda"), ours, SDPBackend.MATH, case)


OPTIONS: dict[str, list[Any]] = {
    "heads": [(2, 2), (4, 2), (4, 1)],
    "sizes": [(200, 200), (50, 50), (33, 300), (300, 40)],
    "dims": [(257, 257), (320, 512), (512, 64), (1030, 1030)],
    "causal": [False, True],
    "window_size": [None, 40, (30, 50)],
    "mask": ["none", "none", "bool", "additive", "trained", "additive_keys"],
    "segments": ["none", "ids", "pair"],
    "lengths": ["none", "ragged", "extreme"],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "dropout_p": [0.0, 0.3],
    "layout": ["bhtd", "bthd", "fused", "sliced", "expanded", "strided"],
    "dtype": [*HALF, torch.float32],
}


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options(row, poisoned):
    row = dict(row)
    (q_heads, kv_heads), (q_len, kv_len), (head_dim, value_dim) = (
        row.pop(x) for x in ("heads", "sizes", "dims")
    )
    dtype = row.pop("dtype")
    if row["segments"] == "ids" and q_len != kv_len:
        row["segments"] = "pair"
    case = Case(
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        **row,
    )
    inputs = case.build(dtype, "cuda")
    keep = keep_of(case, 11, "cuda")
    torch.manual_seed(11)
    judge(ours(inputs), expected(inputs, keep), dtype, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cutting_queries_and_heads_changes_nothing(dtype, monkeypatch, poisoned):
    case = Case(batch=2, q_heads=4, kv_heads=2, q_len=700, kv_len=700, head_dim=512, causal=True)
    inputs = case.build(dtype, "cuda")
    whole, want = ours(inputs), expected(inputs)
    for cap in (3 << 20, 1):
        monkeypatch.setattr(tiles, "WIDE_WORKSPACE_BYTES", cap)
        got = ours(inputs)
        judge(got, want, dtype, cap)
        for name in ("out", "lse"):
            torch.testing.assert_close(got[name], whole[name])  # sums may be of other tiles


def test_the_same_inputs_give_the_same_bits():
    inputs = Case(batch=2, q_heads=4, kv_heads=2, q_len=1000, kv_len=1000, head_dim=512, causal=True).build(
        torch.bfloat16, "cuda"
    )
    first = ours(inputs)
    for _ in range(5):
        again = ours(inputs)
        for name, x in first.tensors.items():
            assert torch.equal(x, again[name]), name


def test_memory_is_linear_in_the_number_of_tokens():
    peaks = []
    for tokens in (8192, 16384):
        q, k, v = (
            torch.randn(1, 1, tokens, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, backend="wide").sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    linear = 16384 * 512 * 2  # bytes of a tensor
    assert peaks[1] < 2 * tiles.WIDE_WORKSPACE_BYTES + 16 * linear
    assert peaks[1] - peaks[0] < 16 * linear


@pytest.mark.parametrize("size", [16, 64, 512])
def test_cuda_graphs_capture(size):
    q, k, v = (torch.randn(1, 4, size, 1024, device="cuda") for _ in range(3))
    want = attention(q, k, v, backend="wide")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, backend="wide")
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


def test_offsets_beyond_32_bits():
    """The last of the heads start behind 2^31 elements."""
    q = torch.randn(1, 4, 64, 8192, device="cuda", dtype=torch.bfloat16)
    large = torch.empty(3 * (1 << 30) + 64 * 8192, device="cuda", dtype=torch.bfloat16)
    k = large.as_strided((1, 4, 64, 8192), (0, 1 << 30, 8192, 1))
    k.copy_(torch.randn(1, 4, 64, 8192, device="cuda"))
    got = attention(q, k, k, backend="wide")
    want = attention(q, k.contiguous(), k.contiguous(), backend="wide")
    assert torch.equal(got, want)
