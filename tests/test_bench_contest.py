"""One case: who is judged and timed, in which turns, and what its rows say, with clocks that are given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from streamattn import attention
from streamattn.bench import contest as module
from streamattn.bench.cases import Case
from streamattn.bench.contest import Plan, contest, elsewhere, figures_of, measure, prepared, steps
from streamattn.bench.providers import Call, Provider, Unsupported
from streamattn.bench.tables import Row

CPU = torch.device("cpu")
CASE = Case("sweep", "float32", 2, 4, 2, 32, 16, True)
PLAN = Plan(("forward",), ("events",), 3, 2, "cpu")
MOST = (2.0, 500.0)
SPEEDS = {"ours": 1.0, "slow": 4.0, "fast": 2.0}

clock: list[float] = []
entered: list[float] = []
turns: list[float] = []


@pytest.fixture(autouse=True)
def imagined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks show the entered provider's time, half as long again the second time; three calls around it."""
    for seen in (clock, entered, turns):
        seen.clear()

    def prepare(work: Callable[[], object], repeats: int) -> Callable[[], list[float]]:
        found = work()
        factor = 1.0 if isinstance(found, Tensor) else 4.0
        slower = iter([1.0, 1.5])

        def measure() -> list[float]:
            turns.append(clock[-1])
            ms = clock[-1] * factor * next(slower)
            return [ms, 1.1 * ms, 0.9 * ms]

        return measure

    monkeypatch.setattr(module, "clock", prepare)
    monkeypatch.setattr(module, "ceilings", lambda device, dtype: MOST)


def provider(
    time: float, ours: bool = False, change: Callable[[Tensor], Tensor] | None = None, causal: bool = True
) -> Provider:
    """Attention on whose clock a forward takes ``time`` milliseconds and all else four times that."""

    @contextmanager
    def around():
        clock.append(time)
        entered.append(time)
        try:
            yield
        finally:
            clock.pop()

    def bind(case: Case, device: torch.device) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attention(q, k, v, causal=causal)
            return out if change is None else change(out)

        return call

    return Provider(bind, "version 1", ours, around)


OTHERS = {"ours": provider(1.0, ours=True), "slow": provider(4.0), "fast": provider(2.0)}


def test_rows_have_times_speeds_and_speedups() -> None:
    rows = contest(CASE, OTHERS, replace(PLAN, passes=("forward", "backward", "both")))
    assert [(row.provider, row.part) for row in rows] == [
        (name, part) for name in OTHERS for part in ("forward", "backward", "both")
    ]
    for row in rows:
        ms = SPEEDS[row.provider] * (1.0 if row.part == "forward" else 4.0)
        assert (row.median_ms, row.status, row.timer) == (ms, "ok", "events")
        assert (row.p20_ms, row.p80_ms) == pytest.approx((0.94 * ms, 1.06 * ms))
        assert row.speedup == 2.0 / SPEEDS[row.provider]
        assert row.spread == 0.5
        assert row.backend == "flash", "of PyTorch, which serves ours too on a CPU"
        assert row.error is not None
        assert 0.0 < row.error < 1e-5
        assert (row.case, row.causal, row.num_kv_heads, row.version) == ("sweep", True, 2, "version 1")
        assert (row.device, row.torch, row.held_mib) == ("CPU", torch.__version__, None)


def test_figures_are_of_the_quickest_turn_and_of_what_the_machine_can() -> None:
    found = figures_of(CASE, "forward", [[3.0, 2.0, 4.0], [9.0, 8.0, 7.0]], MOST)
    speed, moved = CASE.flops("forward") / 3e-3, CASE.moved("forward") / 3e-3
    assert found["median_ms"] == 3.0
    assert (found["p20_ms"], found["p80_ms"]) == pytest.approx((2.4, 3.6))
    assert found["tflops"] == pytest.approx(speed / 1e12, abs=1e-4)
    assert found["peak_share"] == pytest.approx(speed / 2e12, abs=1e-4)
    assert found["gb_s"] == pytest.approx(moved / 1e9, abs=0.1)
    assert found["copy_share"] == pytest.approx(moved / 500e9, abs=1e-4)
    assert found["flop_per_byte"] == pytest.approx(speed / moved, abs=0.01)
    assert found["spread"] == pytest.approx(8 / 3 - 1, abs=1e-3)


def test_providers_take_turns_the_second_time_the_other_way_around() -> None:
    contest(CASE, OTHERS, PLAN)
    assert turns == [1.0, 4.0, 2.0, 2.0, 4.0, 1.0]


def test_passes_are_pieces_of_work_of_their_own() -> None:
    inputs, calls = CASE.tensors(CPU), []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q.requires_grad)
        return attention(q, k, v, causal=True)

    prepared("forward", call, inputs)()
    assert calls == [False]
    backward = prepared("backward", call, inputs)
    assert calls == [False, True], "run once before"
    gradients = [backward(), backward()]
    assert calls == [False, True]
    both = prepared("both", call, inputs)
    gradients.append(both())
    assert calls == [False, True, True]
    forward, rest = steps("both", call, inputs)
    gradients.append(rest(forward()))
    for found in gradients:
        assert isinstance(found, tuple)
        torch.testing.assert_close(found, gradients[0])


@pytest.mark.parametrize("ours", [False, True])
def test_what_is_wrong_is_not_timed(ours: bool) -> None:
    wrong = provider(0.1, ours, change=lambda out: out * 1.1)
    rows = {row.provider: row for row in contest(CASE, OTHERS | {"wrong": wrong}, PLAN)}
    assert rows["wrong"].status.startswith("wrong: out is off by 1.0e-01")
    assert rows["wrong"].median_ms is rows["wrong"].tflops is rows["wrong"].error is None
    assert 0.1 not in turns
    assert rows["ours"].speedup == 2.0, "it is no peer"


def test_memory_that_others_have_taken_since_is_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = module.clock

    def scarce(work: Callable[[], object], repeats: int) -> Callable[[], list[float]]:
        measure = prepare(work, repeats)

        def measured() -> list[float]:
            if clock[-1] == SPEEDS["slow"] and SPEEDS["slow"] in turns:
                raise torch.OutOfMemoryError("no room")
            return measure()

        return measured

    monkeypatch.setattr(module, "clock", scarce)
    rows = {row.provider: row for row in contest(CASE, OTHERS, PLAN)}
    assert {name: row.status for name, row in rows.items()} == {
        "ours": "ok",
        "slow": "out of memory",
        "fast": "ok",
    }
    assert rows["slow"].median_ms is rows["slow"].speedup is None
    assert rows["ours"].speedup == 2.0


def test_a_cache_is_decoded_in_places_that_outgrow_the_second_level_cache() -> None:
    case = replace(CASE, causal=False, queries=1)
    inputs = case.tensors(CPU)
    others = elsewhere(inputs, 2 * case.kv_bytes())
    assert len(others) == 5, "six caches: three times one that holds two"
    read: list[int] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        read.append(k.data_ptr())
        return attention(q, k, v)

    work = prepared("forward", call, inputs, others)
    outs = [work() for _ in range(12)]
    assert len(set(read)) == 6
    assert read[:6] == read[6:], "around and around"
    for out in outs:
        assert isinstance(out, Tensor)
        torch.testing.assert_close(out, outs[0], atol=0, rtol=0)
    assert elsewhere(inputs, 0) == elsewhere(inputs, case.kv_bytes() // 3) == []
    assert len(elsewhere(inputs, 1 << 40)) < 100


def test_another_pattern_is_wrong() -> None:
    (row,) = contest(CASE, {"full": provider(1.0, causal=False)}, PLAN)
    assert row.status.startswith("wrong: out is off")


def test_what_a_peer_cannot_do_is_noted_and_ours_is_wrong() -> None:
    def failing(ours: bool, error: Exception) -> Provider:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise error

        return Provider(lambda case, device: call, "version 2", ours)

    def unable(case: Case, device: torch.device) -> Call:
        raise Unsupported("it has no heads")

    def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.requires_grad:
            raise RuntimeError("no backward\nin this build")
        return attention(q, k, v, causal=True)

    providers = {
        "broken": failing(False, RuntimeError("bad\nluck")),
        "full": failing(True, torch.OutOfMemoryError("no room")),
        "unable": Provider(unable, "version 3"),
        "half": replace(provider(3.0), bind=lambda case, device: forward_only),
        "ours": failing(True, ValueError("lost")),
    }
    rows = contest(CASE, providers, replace(PLAN, passes=("forward", "backward")))
    assert {row.provider: row.status for row in rows if row.part == "backward"} == {
        "broken": "RuntimeError: bad",
        "full": "out of memory",
        "unable": "unsupported: it has no heads",
        "half": "RuntimeError: no backward",
        "ours": "wrong: fails: ValueError: lost",
    }
    forward, backward = (row for row in rows if row.provider == "half")
    assert (forward.median_ms, forward.status, forward.speedup) == (3.0, "ok", 1.0)
    assert backward.median_ms is None


def seen_by_profilers(monkeypatch: pytest.MonkeyPatch, kernels: dict[float, list[str]]) -> None:
    """Names of kernels by the time of who was entered last; each profiler is a 0 among the turns."""

    @contextmanager
    def recording(device: str):
        turns.append(0.0)
        names: list[str] = []
        try:
            yield names
        finally:
            names += kernels[entered[-1]]

    monkeypatch.setattr(module, "recording", recording)


CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16"
FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>"


def test_what_ran_is_looked_at_once_a_row_and_after_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a profiler slows down what is timed after it was open."""
    seen_by_profilers(monkeypatch, {1.0: ["hopper_fwd_kernel"], 4.0: [CUDNN], 2.0: ["gemm"]})
    rows = contest(CASE, OTHERS, replace(PLAN, passes=("forward", "both")))
    assert len(turns) == 12 + 6
    assert turns[12:] == [0.0] * 6
    served = {(row.provider, row.part): row.backend for row in rows}
    assert served == {
        (name, part): backend
        for name, backend in (("ours", "hopper"), ("slow", "cudnn"), ("fast", "fast"))
        for part in ("forward", "both")
    }


def test_where_no_profiler_can_look_the_prediction_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by_profilers(monkeypatch, {1.0: []})
    chooses = replace(provider(1.0), backend=lambda case, q, k, v, backward: f"{case.case} {backward}")
    rows = contest(CASE, {"it": chooses}, replace(PLAN, passes=("forward", "both")))
    assert [row.backend for row in rows] == ["sweep False (predicted)", "sweep True (predicted)"]


@pytest.mark.parametrize("error", [RuntimeError("no room for CUPTI"), torch.OutOfMemoryError("no room")])
def test_figures_outlive_a_failing_recording_and_prediction(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a piece of work may have run what the whole one doesn't: its kernels count for nothing."""
    seen_by_profilers(monkeypatch, {time: [CUDNN] for time in (1.0, 4.0, 2.0, 8.0)})

    def fails_while_recorded(out: Tensor) -> Tensor:
        if 0.0 in turns:
            raise error
        return out

    def unforeseen(*arguments: object) -> str:
        raise error

    unknown, slow = provider(1.0, change=fails_while_recorded), provider(4.0, change=fails_while_recorded)
    providers = {
        "unknown": unknown,
        "named": replace(slow, backend=lambda *arguments: "flash", named=True),
        "unforeseen": replace(provider(2.0), backend=unforeseen),
        "both": replace(provider(8.0, change=fails_while_recorded), backend=unforeseen),
    }
    rows = contest(CASE, providers, PLAN)
    assert [(row.provider, row.status, row.median_ms, row.backend) for row in rows] == [
        ("unknown", "ok", 1.0, "unknown"),
        ("named", "ok", 4.0, "flash (predicted)"),
        ("unforeseen", "ok", 2.0, "cudnn"),
        ("both", "ok", 8.0, "both"),
    ]


def test_the_figures_of_another_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(time: float) -> Provider:
        return replace(provider(time), backend=lambda *arguments: "cudnn", named=True)

    seen_by_profilers(monkeypatch, {1.0: ["hopper_fwd_kernel"], 0.5: [FLASH], 2.0: [CUDNN]})
    providers = {"ours": OTHERS["ours"], "falls": named(0.5), "stays": named(2.0)}
    rows = {row.provider: row for row in contest(CASE, providers, PLAN)}
    assert rows["falls"].status == "unsupported: flash served it, not cudnn"
    assert rows["falls"].median_ms is rows["falls"].backend is rows["falls"].speedup is None
    assert (rows["stays"].status, rows["stays"].backend) == ("ok", "cudnn")
    assert rows["ours"].speedup == 2.0, "it is no peer"


def test_a_row_has_the_clock_right_after_its_last_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def sm_clock(device: str) -> Callable[[], int]:
        assert device == "cpu"
        return lambda: 100 * len(turns) + round(turns[-1])

    monkeypatch.setattr(module, "sm_clock", sm_clock)
    wrong = provider(0.1, change=lambda out: out * 1.1)
    rows = contest(CASE, OTHERS | {"wrong": wrong}, PLAN)
    assert {row.provider: row.sm_mhz for row in rows} == {
        "ours": 601,
        "slow": 504,
        "fast": 402,
        "wrong": None,
    }


def test_a_case_is_measured_by_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real clock, and products of TF32 in its own cases alone."""
    monkeypatch.undo()
    seen: list[str] = []

    def noting(case: Case, device: torch.device) -> Call:
        seen.append(torch.get_float32_matmul_precision())
        return lambda q, k, v: attention(q, k, v, causal=True)

    monkeypatch.setitem(module.find.__globals__["PROVIDERS"], "fa4", lambda: Provider(noting, "1"))
    plan = Plan(("forward", "both"), ("events",), 2, 1, "cpu")
    rows: list[Row] = []
    for dtype in ("float32", "tf32"):
        rows += measure(replace(CASE, dtype=dtype), ["fa4"], plan)
    assert seen == ["highest", "high"]
    assert all(row.median_ms and row.peak_share and row.copy_share and row.spread == 0.0 for row in rows)
    assert [row.part for row in rows] == ["forward", "both"] * 2
