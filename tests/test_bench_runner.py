"""The command: which cases run with whom, what is written and when, and what it refuses."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from streamattn import cli
from streamattn.bench import runner
from streamattn.bench.cases import SETS, Case, Sweep
from streamattn.bench.contest import Plan, measure
from streamattn.bench.providers import PROVIDERS
from streamattn.bench.resume import Died, stamp
from streamattn.bench.runner import cases_of, parse, worth_compiling
from streamattn.bench.tables import Row

SMALL = [
    "--cases",
    "sweep",
    "--seq-lens",
    "16",
    "32",
    "--head-dims",
    "16",
    "--tokens",
    "64",
    "--hidden",
    "32",
]
TWO = ["--providers", "streamattn", "sdpa_flash"]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Processes:
    """In place of processes: the cases that were asked for, and rows with the time that is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[Case] = []
        self.status: dict[str, str] = {}
        self.fails: BaseException | None = None
        monkeypatch.setattr(runner, "apart", self.apart)

    def apart(self, function: Any, *arguments: Any) -> Any:
        if function is not measure:
            return function(*arguments)
        case, names, plan = arguments
        self.ran.append(case)
        if self.fails is not None:
            raise self.fails
        return [self.row(case, name, part, timer) for name, part, timer in product_of(names, plan)]

    def row(self, case: Case, name: str, part: str, timer: str) -> Row:
        figures: dict[str, Any] = dict(median_ms=2.0, tflops=20.0, speedup=1.25, flop_per_byte=3.0)
        status = self.status.get(name, "ok")
        on: dict[str, Any] = asdict(stamp("cpu")) | asdict(case)
        return Row(**on, provider=name, part=part, timer=timer, status=status, **figures)


def product_of(names: Sequence[str], plan: Plan) -> list[tuple[str, str, str]]:
    return [(name, part, timer) for name in names for part in plan.passes for timer in plan.timers]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def kernel(path: Path, *arguments: str) -> int:
    return cli.main(["bench", "kernel", "--csv", str(path), *arguments])


def test_the_command_writes_and_shows(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    assert kernel(path, *SMALL, "--passes", "forward", "both", "--dtypes", "float32", "tf32") == 0
    rows = list(csv.DictReader(path.open()))
    present = [name for name in runner.PEERS if name in runner.find(list(runner.PEERS))[0] and name != "flex"]
    assert [(row["dtype"], row["causal"], row["seq_len"], row["provider"], row["part"]) for row in rows] == [
        (dtype, causal, seq_len, name, part)
        for dtype in ("float32", "tf32")
        for causal in ("False", "True")
        for seq_len in ("16", "32")
        for name in present
        for part in ("forward", "both")
    ]
    shown = capsys.readouterr().out
    for word in (*runner.PEERS, "both, tf32, TFLOP/s", "speedup", "1.250"):
        assert word in shown


def test_a_run_goes_on_where_it_stopped(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    assert kernel(path, *SMALL, *TWO) == 0
    assert len(processes.ran) == 4
    assert kernel(path, *SMALL, *TWO) == 0
    assert len(processes.ran) == 4
    assert "every case is in the file already" in capsys.readouterr().out
    assert kernel(path, *SMALL, *TWO, "--passes", "forward", "both") == 0
    assert len(processes.ran) == 8, "another pass is another row"
    assert kernel(path, *SMALL, *TWO, "eager") == 0
    assert len(processes.ran) == 12, "a row's contestants are of one run"


def test_an_interrupted_run_keeps_the_cases_that_ended(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    run = processes.apart

    def interrupted(function: Any, *arguments: Any) -> Any:
        if len(processes.ran) == 2:
            raise KeyboardInterrupt
        return run(function, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "apart", interrupted)
        assert kernel(path, *SMALL, *TWO) == 130
    assert len(list(csv.DictReader(path.open()))) == 2 * 2
    assert kernel(path, *SMALL, *TWO) == 0
    assert len(processes.ran) == 4


def test_the_exit_status_tells_of_what_is_wrong(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes.status["sdpa_flash"] = "wrong: out is off by 1.0e-01"
    assert kernel(tmp_path / "x.csv", *SMALL, *TWO) == 1
    assert "sdpa_flash, sweep, full, S 16, D 16: wrong: out is off by" in capsys.readouterr().err


def test_a_process_that_dies_is_told_and_the_next_runs(
    processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processes.fails = Died("its process ended")
    assert kernel(tmp_path / "x.csv", *SMALL, *TWO) == 1
    assert len(processes.ran) == 4
    assert capsys.readouterr().err.count("its process ended") == 4


def test_other_columns_are_refused(processes: Processes, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("older\n1\n")
    with pytest.raises(SystemExit, match="other columns"):
        kernel(path, *SMALL, *TWO)
    assert path.read_text() == "older\n1\n"


def test_pictures_are_drawn(processes: Processes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "pictures"
    assert kernel(tmp_path / "x.csv", *SMALL, *TWO, "--plot", str(folder)) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        f"x-forward-bfloat16-16-{mask}.png" for mask in ("causal", "full")
    ]
    assert str(folder) in capsys.readouterr().out


def test_the_cpu_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    """For once a real one; what needs a GPU is noted."""
    path = tmp_path / "x.csv"
    argv = [*SMALL[:2], "--seq-lens", "16", "--head-dims", "16", "--tokens", "16", "--hidden", "16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "cases_of", lambda options: cases_of(options)[:1])
        assert kernel(path, *argv, "--providers", "streamattn", "streamattn-portable", "sdpa_flash") == 0
    ours, portable, peer = csv.DictReader(path.open())
    assert ours["device"] == peer["device"] == "CPU"
    assert (ours["backend"], peer["backend"]) == ("flash", "flash")
    assert portable["status"] == "unsupported: its kernels need an NVIDIA GPU"
    assert portable["median_ms"] == ours["peak_mib"] == ""
    assert float(peer["median_ms"]) / float(ours["median_ms"]) == pytest.approx(
        float(ours["speedup"]), rel=0.1
    )


def test_the_cpu_gets_small_cases_by_itself() -> None:
    assert parse(["--csv", "x.csv"]).cases == ["cpu"]
    options = parse(["--csv", "x.csv", "--cases", *(name for name in SETS if name != "cpu")])
    cases = cases_of(options)
    assert {case.case for case in cases} == set(SETS) - {"cpu"}
    assert max(case.seq_len * case.batch * case.num_heads for case in cases) <= 2048
    assert len(set(cases)) == len(cases)
    options = parse(["--csv", "x.csv", "--cases", "single", "decode", "--seq-lens", "4096"])
    lengths = {case.case: case.seq_len for case in cases_of(options)}
    assert lengths == {"single": 4096, "decode": 256}


def test_decoding_is_timed_in_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["--csv", "x.csv", "--cases", "decode"]).timer == ["events"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse(["--csv", "x.csv", "--cases", "decode"]).timer == ["graph"]
    assert parse(["--csv", "x.csv", "--cases", "drafts", "decode"]).timer == ["graph"]
    assert parse(["--csv", "x.csv", "--cases", "decode", "--timer", "events"]).timer == ["events"]
    options = parse(["--csv", "x.csv"])
    assert options.timer == ["events"]
    assert options.cases == [name for name in SETS if name not in ("cpu", "single", "headless", "drafts")]


def test_the_study_of_one_head_is_one_set() -> None:
    argv = ["--csv", "x.csv", "--cases", "single", "--dtypes", "float32", "bfloat16"]
    options = parse([*argv, "--device", "cpu"])
    options.device = "cuda"
    cases = cases_of(options)
    assert len(cases) == 2 * 4 * 10
    assert {(case.batch, case.num_heads, case.causal) for case in cases} == {(1, 1, True)}
    assert {case.seq_len for case in cases} == {2**power for power in range(7, 17)}


def test_flex_takes_part_where_it_is_worth_its_compiling() -> None:
    cases = [case for make in SETS.values() for case in make(Sweep("bfloat16", (64, 128), (512, 4096)))]
    found = [case for case in cases if worth_compiling(case, longest=4096)]
    assert len(found) <= 8
    assert {case.case for case in found} == {"sweep", "gpt2", "window", "documents"}
    assert {(case.head_dim, case.seq_len) for case in found if case.case == "sweep"} == {(128, 4096)}


def test_flex_takes_part_in_all_cases_where_it_is_asked_for(processes: Processes, tmp_path: Path) -> None:
    for path, arguments, count in ((tmp_path / "a", (), 0), (tmp_path / "b", ("--all-flex",), 4)):
        assert kernel(path, *SMALL, "--providers", "streamattn", "flex", *arguments) == 0
        assert sum(row["provider"] == "flex" for row in csv.DictReader(path.open())) == count


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--device", "cuda"], "needs a CUDA device, and none is visible"),
        (["--timer", "events", "graph"], "--timer graph needs a CUDA device"),
        (["--tiles"], "--tiles needs a CUDA device"),
    ],
)
def test_without_a_gpu_one_line_says_so(argv: list[str], words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with pytest.raises(SystemExit, match=f"^streamattn bench kernel: {words}"):
        kernel(path, *argv)
    assert not path.exists()


def test_who_holds_all_scores_is_asked_for_by_name() -> None:
    left = set(PROVIDERS) - set(parse(["--csv", "x.csv"]).providers)
    assert left == {"eager", "eager_compiled", "cupy"}


def test_help_shows_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "kernel", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for word in (*SETS, *PROVIDERS, "forward", "both", "events", "graph", "--all-flex", "--tiles", "tf32"):
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
