"""Which cases the benchmark has, and how many pairs and operations they count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from streamattn.bench.cases import SETS, Case, Sweep, precision, shrunk
from streamattn.bench.providers import eager
from tests.oracle import visible_pairs

SWEEP = Sweep("float16")
SMALL = Case("sweep", "float32", 2, 4, 2, 48, 16, True)


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, causal=False),
        replace(SMALL, window=5),
        replace(SMALL, window=100),
        replace(SMALL, document=16),
        replace(SMALL, document=16, causal=False),
        replace(SMALL, document=16, window=5),
    ],
    ids=lambda case: case.label,
)
def test_pairs_are_those_that_can_be_seen(case: Case) -> None:
    seen = visible_pairs(
        1,
        case.seq_len,
        case.seq_len,
        causal=case.causal,
        window_size=case.window,
        segment_ids=None if case.document is None else torch.arange(48)[None] // case.document,
    )
    pairs = int(seen.sum())
    assert case.pairs() == pairs
    assert case.flops("forward") == 4 * 2 * 4 * 16 * pairs
    assert case.flops("backward") == 2.5 * case.flops("forward")
    assert case.flops("both") == case.flops("forward") + case.flops("backward")


def test_operations_are_those_that_pytorch_counts() -> None:
    """Of attention as it is written down, whose backward computes no scores again."""
    case = replace(SMALL, causal=False, num_kv_heads=4)
    q, k, v, dout = case.tensors(torch.device("cpu"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with FlopCounterMode(display=False) as forward:
        out = eager(case, *leaves)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(out, leaves, dout)
    assert forward.get_total_flops() == case.flops("forward")
    assert backward.get_total_flops() == case.flops("backward") * 4 / 5


def test_bytes_are_those_of_all_tensors_once() -> None:
    q, k, v, dout = (x.nbytes for x in SMALL.tensors(torch.device("cpu")))
    assert SMALL.moved("forward") == q + k + v + dout
    assert SMALL.moved("backward") == 2 * (q + k + v + dout)
    assert SMALL.moved("both") == 3 * (q + k + v + dout)


def test_what_is_shrunk_is_of_the_same_kind() -> None:
    for make in SETS.values():
        for case in make(SWEEP):
            small = shrunk(case)
            assert small.batch * small.num_heads <= 8
            assert small.seq_len <= 256
            assert (small.num_heads > small.num_kv_heads) == (case.num_heads > case.num_kv_heads)
            assert (small.causal, small.plain) == (case.causal, case.plain)
            assert (small.case, small.dtype, small.head_dim) == (case.case, case.dtype, case.head_dim)


def test_tf32_is_allowed_in_its_own_cases_alone() -> None:
    before = torch.get_float32_matmul_precision()
    for dtype, wanted in (("tf32", "high"), ("float32", "highest")):
        with precision(dtype):
            assert torch.get_float32_matmul_precision() == wanted
        assert torch.get_float32_matmul_precision() == before


def test_the_sweep_keeps_tokens_and_hidden_size() -> None:
    cases = SETS["sweep"](replace(SWEEP, head_dims=(64, 128), seq_lens=(512, 32768)))
    shapes = [(case.head_dim, case.causal, case.batch, case.seq_len, case.num_heads) for case in cases]
    assert shapes == [
        (head_dim, causal, batch, seq_len, heads)
        for head_dim, heads in ((64, 32), (128, 16))
        for causal in (False, True)
        for batch, seq_len in ((32, 512), (1, 32768))
    ]
    assert all(case.dtype == "float16" and case.plain for case in cases)


def test_gpt2_and_grouped_heads() -> None:
    (gpt2,) = SETS["gpt2"](SWEEP)
    assert (gpt2.batch, gpt2.seq_len, gpt2.num_heads, gpt2.head_dim, gpt2.causal) == (16, 1024, 12, 64, True)
    assert {(case.num_heads, case.num_kv_heads) for case in SETS["grouped"](SWEEP)} == {(32, 8)}


def test_decoding_is_one_query_on_a_cache() -> None:
    cases = SETS["decode"](SWEEP)
    assert [round(case.kv_bytes() / 2**20) for case in cases] == [64, 512, 128, 1024, 192, 24]
    small = replace(cases[2], batch=2, seq_len=48, head_dim=16)
    q, k, v, dout = small.tensors(torch.device("cpu"))
    assert (q.shape, dout.shape) == ((2, 32, 1, 16),) * 2
    assert k.shape == v.shape == (2, 8, 48, 16)
    assert k.is_contiguous()
    assert small.kv_bytes() == 2 * k.numel() * k.element_size()
    assert small.pairs() == 48


def test_drafts_are_a_few_queries_on_the_same_caches() -> None:
    cases = SETS["drafts"](SWEEP)
    assert len(cases) == 4 * len(SETS["decode"](SWEEP))
    assert {case.queries for case in cases} == {2, 4, 8, 16}
    small = replace(cases[1], batch=2, num_heads=4, num_kv_heads=2, seq_len=48, head_dim=16)
    q, k, v, dout = small.tensors(torch.device("cpu"))
    assert (q.shape, dout.shape) == ((2, 4, 4, 16),) * 2
    assert k.shape == v.shape == (2, 2, 48, 16)
    assert small.pairs() == 4 * 48
    assert replace(small, causal=True).pairs() == 45 + 46 + 47 + 48
    assert small.label == "full q 4"


def test_wide_heads_come_with_few_tokens_and_with_many() -> None:
    cases = SETS["wide"](SWEEP)
    few = [case for case in cases if case.dtype == "float32"]
    assert {(case.seq_len, case.head_dim) for case in few} == {
        (seq_len, head_dim) for seq_len in (16, 64, 256, 512) for head_dim in (512, 2048, 4096, 8192)
    }
    assert [(case.dtype, case.batch * case.num_heads, case.seq_len) for case in cases if case not in few] == [
        ("float16", 16, 4096),
        ("float16", 1, 4096),
    ]
    assert all(case.plain and not case.causal for case in cases)


def test_one_head_from_short_to_long() -> None:
    cases = SETS["single"](SWEEP)
    assert {(case.batch, case.num_heads, case.causal) for case in cases} == {(1, 1, True)}
    assert sorted({case.seq_len for case in cases}) == [2**power for power in range(7, 17)]
    assert {case.head_dim for case in cases} == {16, 32, 64, 128}
    assert {case.dtype for case in cases} == {SWEEP.dtype}
    few = SETS["single"](replace(SWEEP, head_dims=(32,), seq_lens=(64, 96)))
    assert [(case.head_dim, case.seq_len) for case in few] == [(32, 64), (32, 96)]
    headless = SETS["headless"](SWEEP)
    assert {(case.batch, case.num_heads) for case in headless} == {(8, 1)}
    assert sorted({case.seq_len for case in headless}) == [2**power for power in range(8, 15)]


def test_the_case_of_the_cpu_is_float32_whatever_is_asked_for() -> None:
    (case,) = SETS["cpu"](SWEEP)
    assert (case.dtype, case.causal, case.plain) == ("float32", True, True)
    assert (case.batch, case.num_heads, case.num_kv_heads, case.seq_len, case.head_dim) == (
        4,
        12,
        12,
        1024,
        64,
    )


@pytest.mark.parametrize("name", ["window", "documents", "dropout"])
def test_patterns_stand_beside_the_same_work_without_them(name: str) -> None:
    cases = SETS[name](SWEEP)
    for head_dim in (64, 128):
        pattern, plain = [case for case in cases if case.head_dim == head_dim]
        assert not pattern.plain
        assert plain.plain
        assert pattern.batch * pattern.seq_len == plain.batch * plain.seq_len
        if name != "window":
            assert pattern.flops("forward") == plain.flops("forward")
    assert all(case.case == name for case in cases)


def test_inputs_are_stored_token_by_token_and_differ() -> None:
    q, k, v, dout = replace(SMALL, dtype="bfloat16").tensors(torch.device("cpu"))
    assert [x.shape for x in (q, k, v, dout)] == [(2, heads, 48, 16) for heads in (4, 2, 2, 4)]
    assert all(x.transpose(1, 2).is_contiguous() and x.dtype == torch.bfloat16 for x in (q, k, v, dout))
    assert not torch.equal(k, v)
    assert not torch.equal(q, dout)


def test_segments_number_the_documents() -> None:
    segments = replace(SMALL, document=16).segments(torch.device("cpu"))
    assert segments is not None
    assert segments.dtype == torch.int32
    assert torch.equal(segments, (torch.arange(48) // 16).int().expand(2, 48))
    assert SMALL.segments(torch.device("cpu")) is None


def test_documents_fill_the_row() -> None:
    with pytest.raises(ValueError, match="divisor of seq_len, got 20 and 48"):
        replace(SMALL, document=20)


def test_a_window_is_causal() -> None:
    with pytest.raises(ValueError, match="causal=True"):
        replace(SMALL, window=4, causal=False)
