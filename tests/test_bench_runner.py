"""A run: who is stopped, what is written and when, with clocks that are given."""

from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamattn import attention, cli
from streamattn.bench import runner
from streamattn.bench.cases import SETS, Case, Sweep
from streamattn.bench.providers import PROVIDERS, Call, Provider, Unsupported
from streamattn.bench.results import Machine, csv_file
from streamattn.bench.runner import Plan, run, worth_compiling
from streamattn.bench.tables import Row

CPU = torch.device("cpu")
CASE = Case("sweep", "float32", 2, 4, 2, 32, 16, True)
FULL = replace(CASE, causal=False)
MACHINE = Machine("Imagined GPU", "1.2", "2.11", "3.6")
SPEEDS = {"ours": 1.0, "slow": 4.0, "fast": 2.0}


def provider(time: float, ours: bool = False, change: Callable[[Tensor], Tensor] | None = None) -> Provider:
    """Attention whose clock shows ``time`` milliseconds, four times that for the backward."""

    @contextmanager
    def around():
        clock.append(time)
        yield
        clock.pop()

    def bind(case: Case, device: torch.device) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = attention(q, k, v, causal=case.causal)
            return out if change is None else change(out)

        return call

    return Provider(bind, "version 1", ours, around)


clock: list[float] = []


def timer(factor: float, turns: list[str] | None = None):
    """Gives the entered provider's time, the second turn 1.5 times as long."""

    def prepare(work, repeats: int):
        found = work()
        time = clock[-1] * factor * (1.0 if found is None else 4.0)
        slower = iter([1.0, 1.5])

        def measure() -> float:
            assert clock, "measured where its provider is entered"
            if turns is not None:
                turns.append(str(clock[-1]))
            return time * next(slower)

        return measure

    return prepare


def plan(*passes: str, timers=None) -> Plan:
    return Plan(passes, timers or {"events": timer(1.0)}, 3, 2, CPU)


def run_all(cases: list[Case], providers: dict[str, Provider], wanted: Plan) -> tuple[list[Row], dict, list]:
    messages: list[str] = []
    rows, stopped = run(
        cases, providers, lambda name, case: True, wanted, MACHINE, lambda row: None, messages.append
    )
    return rows, stopped, messages


OTHERS = {"ours": provider(1.0, ours=True), "slow": provider(4.0), "fast": provider(2.0)}


def test_rows_have_times_speeds_and_ratios_to_the_best_peer() -> None:
    timers = {"events": timer(1.0), "graph": timer(0.5)}
    rows, stopped, _ = run_all([CASE], OTHERS, plan("forward", "backward", timers=timers))
    assert stopped == {}
    assert [row.provider for row in rows] == list(OTHERS)
    for row in rows:
        time = SPEEDS[row.provider]
        assert (row.forward_ms, row.backward_ms) == (time, 4 * time)
        assert (row.forward_graph_ms, row.backward_graph_ms) == (time / 2, 2 * time)
        for name, ms in (("forward", time), ("forward_graph", time / 2)):
            assert getattr(row, f"{name}_tflops") == round(CASE.flops("forward") / ms / 1e9, 4)
            assert getattr(row, f"{name}_to_best") == 2.0 / time
        assert row.backward_to_best == 2.0 / time
        assert row.spread == 0.5
        assert (row.device, row.driver, row.torch, row.triton) == ("Imagined GPU", "1.2", "2.11", "3.6")
        assert (row.case, row.causal, row.num_kv_heads, row.status) == ("sweep", True, 2, "ok")


def test_providers_take_turns_the_second_time_the_other_way_around() -> None:
    turns: list[str] = []
    run_all([CASE], OTHERS, plan("forward", timers={"events": timer(1.0, turns)}))
    assert turns == ["1.0", "4.0", "2.0", "2.0", "4.0", "1.0"]


def test_what_was_not_asked_for_stays_empty() -> None:
    rows, _, _ = run_all([CASE], OTHERS, plan("forward"))
    assert all(row.backward_ms is row.forward_graph_ms is row.backward_to_best is None for row in rows)


@pytest.mark.parametrize("ours", [False, True])
def test_a_wrong_provider_is_stopped_and_not_timed(ours: bool) -> None:
    providers = OTHERS | {"wrong": provider(0.1, ours, change=lambda out: out * 1.1)}
    rows, stopped, messages = run_all([CASE, FULL], providers, plan("forward"))
    (bad,) = [row for row in rows if row.provider == "wrong"]
    assert bad.causal, "it isn't asked again"
    assert bad.forward_ms is bad.forward_tflops is None
    assert bad.status.startswith("wrong: forward: out is off by 1.0e-01")
    assert list(stopped) == ["wrong"]
    assert "causal, S 32, D 16: forward: out is off by" in stopped["wrong"]
    assert messages == [f"wrong is stopped: {stopped['wrong']}"]
    assert [row.forward_to_best for row in rows if row.provider == "ours"] == [2.0, 2.0]


def failing(ours: bool, error: Exception) -> Provider:
    def bind(case: Case, device: torch.device) -> Call:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise error

        return call

    return Provider(bind, "version 2", ours)


def test_what_a_peer_cannot_do_is_noted_and_ours_is_an_error() -> None:
    def bind(case: Case, device: torch.device) -> Call:
        raise Unsupported("it has no heads")

    def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.requires_grad:
            raise RuntimeError("no backward\nin this build")
        return attention(q, k, v, causal=True)

    providers = {
        "broken": failing(False, RuntimeError("bad\nluck")),
        "full": failing(True, torch.OutOfMemoryError("no room")),
        "unable": Provider(bind, "version 3"),
        "half": replace(provider(3.0), bind=lambda case, device: forward_only),
        "ours": failing(True, ValueError("lost")),
    }
    rows, stopped, _ = run_all([CASE], providers, plan("forward", "backward"))
    status = {row.provider: row.status for row in rows}
    assert status == {
        "broken": "forward: RuntimeError: bad; backward: RuntimeError: bad",
        "full": "forward: out of memory; backward: out of memory",
        "unable": "unsupported: it has no heads",
        "half": "backward: RuntimeError: no backward",
        "ours": "wrong: forward fails: ValueError: lost",
    }
    assert list(stopped) == ["ours"]
    (half,) = [row for row in rows if row.provider == "half"]
    assert (half.forward_ms, half.backward_ms, half.forward_to_best) == (3.0, None, 1.0)


def test_a_killed_run_keeps_the_cases_that_ended(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"

    def cases():
        yield CASE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), csv_file(str(path), Row) as write:
        run(cases(), OTHERS, lambda name, case: True, plan("forward"), MACHINE, write, print)
    assert [row["provider"] for row in csv.DictReader(path.open())] == list(OTHERS)


def test_flex_takes_part_where_it_is_worth_its_compiling() -> None:
    sweep = Sweep((64, 128, 256), (512, 4096), 16384, 2048, "bfloat16")
    cases = [case for make in SETS.values() for case in make(sweep)]
    found = [case for case in cases if worth_compiling(case, longest=4096)]
    assert len(found) <= 8
    assert {case.case for case in found} == {"sweep", "gpt2", "window", "documents"}
    assert {(case.head_dim, case.seq_len) for case in found if case.case == "sweep"} == {(128, 4096)}


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "x.csv"
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "kernel", "--csv", str(path)])
    assert str(stop.value) == (
        "streamattn bench kernel: needs a CUDA device, and none is visible; --device cpu measures the CPU"
    )
    assert not path.exists()


def test_the_cpu_is_measured_beside_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the host's clock; what needs a GPU is noted, and the sum of both passes is compared."""
    monkeypatch.setitem(runner.SETS, "cpu", lambda sweep: [replace(CASE, case="cpu", num_kv_heads=4)])
    path = tmp_path / "x.csv"
    argv = ["bench", "kernel", "--device", "cpu", "--cases", "cpu", "--passes", "forward", "backward"]
    argv += ["--providers", "streamattn", "streamattn-portable", "sdpa_flash", "--csv", str(path)]
    assert cli.main(argv) == 0
    ours, portable, peer = csv.DictReader(path.open())
    assert ours["device"] == peer["device"] == "CPU"
    assert "NVIDIA GPU" in portable["status"]
    assert portable["forward_ms"] == ours["peak_mib"] == ""
    total, best = (float(row["forward_ms"]) + float(row["backward_ms"]) for row in (ours, peer))
    shown = capsys.readouterr().out
    assert "forward + backward, ms" in shown
    assert f"{total / best:.3f}" in shown


def test_there_are_no_graphs_on_the_cpu(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(SystemExit, match="--timer graph needs a CUDA device"):
        cli.main(["bench", "kernel", "--device", "cpu", "--timer", "events", "graph", "--csv", str(path)])
    assert not path.exists()


def test_the_set_of_the_cpu_is_asked_for_by_name() -> None:
    assert runner.parse(["--csv", "x.csv"]).cases == [
        name for name in SETS if name not in ("cpu", "single", "headless")
    ]


def test_who_holds_all_scores_is_asked_for_by_name() -> None:
    left = set(PROVIDERS) - set(runner.parse(["--csv", "x.csv"]).providers)
    assert left == {"eager", "eager_compiled"}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> dict[str, Provider]:
    """The command with a GPU that is none: tensors on the CPU, clocks that are given."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(runner, "DEVICE", CPU)
    monkeypatch.setattr(runner, "this_machine", lambda: MACHINE)
    monkeypatch.setattr(runner, "ask_driver", lambda what: lambda seconds: "1755")
    monkeypatch.setattr(runner, "peak_mib", lambda work: 12.5)
    for name in ("events", "graph"):
        monkeypatch.setitem(runner.TIMERS, name, timer(1.0))
    providers = {"streamattn": provider(1.0, ours=True), "sdpa_flash": provider(2.0)}
    monkeypatch.setattr(
        runner,
        "find",
        lambda names: (providers, {name: "not installed" for name in names if name not in providers}),
    )
    return providers


SHORT = [
    "--seq-lens",
    "16",
    "32",
    "--head-dims",
    "16",
    "--tokens",
    "64",
    "--hidden",
    "32",
    "--dtype",
    "float32",
]


def test_the_command_writes_and_shows(
    pretended: dict[str, Provider], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    argv = ["bench", "kernel", "--csv", str(path), "--cases", "sweep", *SHORT]
    assert cli.main([*argv, "--passes", "forward", "backward", "--timer", "events", "graph"]) == 0
    rows = list(csv.DictReader(path.open()))
    assert [(row["seq_len"], row["batch"], row["causal"], row["provider"]) for row in rows] == [
        (seq_len, batch, causal, name)
        for causal in ("False", "True")
        for seq_len, batch in (("16", "4"), ("32", "2"))
        for name in pretended
    ]
    for row in rows:
        assert (row["sm_mhz"], row["peak_mib"], row["window"]) == ("1755", "12.5", "")
        assert float(row["backward_graph_to_best"]) == (2.0 if row["provider"] == "streamattn" else 1.0)
    shown = capsys.readouterr()
    for name in runner.PEERS:
        assert name in shown.out
    assert "absent: not installed" in shown.out
    assert "to best" in shown.out
    assert "2.000" in shown.out, "the geometric mean"


def test_the_exit_status_tells_of_a_wrong_provider(
    pretended: dict[str, Provider], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretended["sdpa_flash"] = provider(2.0, change=lambda out: out + 1.0)
    argv = ["bench", "kernel", "--csv", str(tmp_path / "x.csv"), "--cases", "sweep", *SHORT]
    assert cli.main(argv) == 1
    assert (
        "sdpa_flash was stopped: sweep, full, S 16, D 16: forward: out is off by" in capsys.readouterr().err
    )


def test_help_shows_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "kernel", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for word in (*SETS, *PROVIDERS, "forward", "backward", "events", "graph", "--all-flex", "16384"):
        assert word in shown


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--cases", "sweeps"], "invalid choice: 'sweeps'"),
        (["--passes", "sideways"], "invalid choice"),
        (["--providers", "fa5"], "invalid choice"),
        (["--seq-lens"], "expected at least one argument"),
    ],
)
def test_wrong_options_are_refused(wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "kernel", "--csv", "x.csv", *wrong])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err
