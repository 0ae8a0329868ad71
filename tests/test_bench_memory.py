"""Peaks, what is alive at them, and who asked for it."""

from __future__ import annotations

import csv
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from streamattn import cli
from streamattn.bench import memory
from streamattn.bench.memory import (
    Change,
    Course,
    MemoryCase,
    MemoryRow,
    at_peak,
    draw_course,
    history_on_cpu,
    history_on_gpu,
    label,
    measure,
    place,
)
from streamattn.bench.resume import stamp
from tests.test_bench_models import on_the_cpu  # noqa: F401

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.PreTrainedModel, "set_attn_implementation"),
    reason="this transformers can't change a model's attention",
)
CASE = MemoryCase("gpt2-nano", 1, 1, 16, "float32")


def test_the_peak_and_what_is_alive_then() -> None:
    changes = [
        Change(5, 1, "a"),
        Change(-5, 1, ""),
        Change(3, 2, "b"),
        Change(4, 3, "c"),  # the peak, 7
        Change(-7, 99, ""),  # from before
        Change(6, 1, "d"),
    ]
    assert at_peak(changes) == (7, [Change(4, 3, "c"), Change(3, 2, "b")])
    assert at_peak([]) == at_peak([Change(-3, 1, "")]) == (0, [])


def test_allocations_of_known_size_are_seen_on_the_cpu() -> None:
    kept = []

    def work() -> None:
        x = torch.ones(1 << 18)
        kept.append(x * 2)

    changes = history_on_cpu(work)
    peak, alive = at_peak(changes)
    assert peak == pytest.approx(2 << 20, abs=64), "scalars too"
    assert sum(change.size for change in changes) == 1 << 20
    assert [(change.size, change.where) for change in alive[:2]] == [
        (1 << 20, "aten::ones"),
        (1 << 20, "aten::mul"),
    ]


def test_lines_of_python_are_found_among_frames() -> None:
    def frame(filename: str) -> dict[str, Any]:
        return {"filename": filename, "line": 7, "name": "f"}

    inside = f"{Path(torch.__file__).parent}/nn/functional.py"
    assert place([frame(inside), frame("/a/model.py"), frame("/a/main.py")]) == "model.py:7 f"
    assert place([frame(inside)]) == "functional.py:7 f"
    assert place([]) == "no Python: the backward"


def test_the_history_of_a_gpu_is_recorded_read_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    trace = [
        {"action": "segment_alloc", "size": 99, "addr": 0},
        {"action": "alloc", "size": 8, "addr": 1, "frames": [{"filename": "a.py", "line": 1, "name": "f"}]},
        {"action": "free_requested", "size": 8, "addr": 1},
        {"action": "free_completed", "size": 8, "addr": 1},
    ]
    for name, value in {
        "_record_memory_history": lambda *args, **options: said.append(options.get("enabled", "all")),
        "_dump_snapshot": lambda path: said.append(path),
        "_snapshot": lambda: {"device_traces": [trace]},
    }.items():
        monkeypatch.setattr(torch.cuda.memory, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    changes = history_on_gpu(lambda: said.append("work"), "x.pickle")
    assert changes == [Change(8, 1, "a.py:1 f"), Change(-8, 1, "no Python: the backward")]
    assert said == ["all", "work", "x.pickle", None]


def test_a_model_is_measured() -> None:
    rows, courses = measure(CASE, ["eager", "streamattn"], "cpu", None)
    for row, course in zip(rows, courses, strict=True):
        assert row.status == "ok" and row.contestant == course.contestant
        assert row.backend == {"eager": "math", "streamattn": "flash"}[row.contestant]
        held, after = row.held_before_mib, row.held_after_forward_mib
        assert held and after and row.forward_peak_mib and row.step_peak_mib and row.largest
        parameters = 4096 * 128 + 256 * 128 + 12 * 128**2 + 13 * 128 + 2 * 128
        assert held == pytest.approx(3 * 4 * parameters / 2**20, abs=0.1), "weights and two moments"
        assert row.forward_peak_mib >= held + after
        assert row.step_peak_mib >= held + 4 * parameters / 2**20 - 0.1, "gradients too"
        assert max(course.sizes) == pytest.approx(row.step_peak_mib, abs=0.1)
        assert course.sizes[-1] == pytest.approx(held, abs=0.1), "a step leaves nothing"
        assert len(row.largest.split("; ")) == 5


def test_the_clock_is_read_and_another_backend_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "sm_clock", lambda device: lambda: 1980)
    monkeypatch.setattr(memory, "NAMED", {"sdpa": "cudnn"})
    rows, courses = measure(CASE, ["eager", "sdpa"], "cpu", None)
    assert [(row.status, row.sm_mhz) for row in rows] == [
        ("ok", 1980),
        ("unsupported: flash served it, not cudnn", None),
    ]
    assert rows[1].step_peak_mib is None
    assert [course.contestant for course in courses] == ["eager"]


def test_the_course_of_a_step_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = Path(draw_course(CASE, [Course("a", [1.0, 3.0, 2.0], [])], str(tmp_path)))
    assert path == tmp_path / "gpt2-nano-1_layers-1x16-float32-step.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_no_snapshot_takes_the_place_of_another() -> None:
    cases = [CASE, *(replace(CASE, **{name: value}) for name, value in (("dtype", "bfloat16"), ("batch", 2)))]
    cases += [replace(CASE, layers=None), replace(CASE, seq_len=2), replace(CASE, shape="gpt2-small")]
    assert len({label(case) for case in cases}) == 6


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def apart(function: Any, *arguments: Any) -> Any:
        if function is stamp:
            return stamp(*arguments)
        found = [
            MemoryRow(**asdict(stamp("cpu")), **asdict(arguments[0]), contestant=name, step_peak_mib=7.0)
            for name in arguments[1]
        ]
        return found, [Course("eager", [1.0], [(9.0, "somebody")])]

    monkeypatch.setattr(memory, "apart", apart)
    path = tmp_path / "x.csv"
    command = ["bench", "memory", "--csv", str(path), "--seq-lens", "8", "16"]
    assert cli.main(command) == 0
    assert "somebody" in capsys.readouterr().out
    assert len(list(csv.DictReader(path.open()))) == 2 * 2 * 3
    assert cli.main(command) == 0
    assert "in the file already" in capsys.readouterr().out
    drawn: list[str] = []
    monkeypatch.setattr(memory, "draw_course", lambda case, courses, folder: drawn.append(label(case)) or "x")
    monkeypatch.setattr(memory.report, "draw", lambda file, folder: [f"{file} in {folder}"])
    folder = str(tmp_path / "pictures")
    assert cli.main([*command, "32", "--plot", folder]) == 0
    assert drawn == [f"gpt2-nano-2x32-{dtype}" for dtype in ("bfloat16", "float32")], "what was measured now"
    assert f"{path} in {folder}" in capsys.readouterr().out, "and all that the file holds"
    with pytest.raises(SystemExit, match="--snapshots needs a CUDA device"):
        cli.main([*command, "--snapshots", str(tmp_path)])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"needs matplotlib.*streamattn\[bench\]"):
        cli.main([*command, "--plot", str(tmp_path)])
