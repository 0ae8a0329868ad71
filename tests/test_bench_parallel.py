"""The benchmark of shared sequences: one real group, and what becomes of wrong and impossible modes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streamattn import cli
from streamattn.bench import parallel
from streamattn.bench.parallel import ParallelCase, rows_of
from streamattn.bench.resume import stamp
from tests.test_bench_comm import no_gpu  # noqa: F401

CASE = ParallelCase("gloo", 2, 1, 3, 3, 32, 8, "float32")


@pytest.mark.distributed
def test_modes_beside_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.csv"
    argv = [
        "bench",
        "parallel",
        "--csv",
        str(path),
        "--seq-lens",
        "16",
        "--num-heads",
        "2",
        "--head-dim",
        "8",
    ]
    assert cli.main([*argv, "--modes", "ring", "ulysses"]) == 0
    rows = list(csv.DictReader(path.open()))
    assert [(row["mode"], row["status"]) for row in rows] == [
        ("alone", "ok"),
        ("ring", "ok"),
        ("ulysses", "ok"),
    ]
    alone = float(rows[0]["step_ms"])
    for row in rows[1:]:
        assert float(row["error"]) < 1e-5
        assert float(row["speedup"]) == pytest.approx(alone / float(row["step_ms"]), rel=0.02, abs=1e-3)
    assert "ulysses" in capsys.readouterr().out
    assert cli.main([*argv, "--modes", "ring"]) == 0
    assert "every case is in the file already" in capsys.readouterr().out


def test_what_is_wrong_or_impossible_has_no_time() -> None:
    found = [
        ("alone", [], 8.0, 1980),
        ("ring", [1e-6, 0.5, 0.0, 0.0], 4.0, 1970),
        ("ulysses", [], 0.0, 1960),
        ("gather", [1e-6] * 4, 4.0, 1950),
    ]
    alone, ring, ulysses, gather = rows_of(CASE, found, stamp("cpu"))
    assert (alone.step_ms, alone.speedup, alone.error) == (8.0, 1.0, None)
    assert (ring.step_ms, ring.error) == (None, 0.5)
    assert ring.status == "wrong: it is off by 5.0e-01 of the largest entry"
    assert (ulysses.step_ms, ulysses.status) == (None, "unsupported: it needs a multiple of 2 query heads")
    assert (gather.step_ms, gather.speedup, gather.status) == (4.0, 2.0, "ok")
    assert [row.sm_mhz for row in (alone, ring, ulysses, gather)] == [1980, 1970, None, 1950]


def test_the_clock_is_read_after_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def compared(options: Any, device: Any) -> Any:
        for mode in ("alone", "ring"):
            done.append(mode)
            yield mode, [], 8.0

    monkeypatch.setattr(parallel, "join", lambda *arguments: torch.device("cpu"))
    monkeypatch.setattr(parallel, "compared", compared)
    monkeypatch.setattr(parallel.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(parallel, "sm_clock", lambda device: lambda: len(done))
    parallel.member(0, 2, "gloo", str(tmp_path), CASE, ["ring"])
    assert json.loads((tmp_path / "found.json").read_text()) == [["alone", [], 8.0, 1], ["ring", [], 8.0, 2]]


def test_the_exit_status_tells_of_a_wrong_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(function: Any, world_size: int, backend: str, *arguments: Any) -> Any:
        return [("alone", [], 8.0, None), ("ring", [float("inf")] * 4, 4.0, None)]

    monkeypatch.setattr(parallel, "group", group)
    argv = ["bench", "parallel", "--csv", str(tmp_path / "x.csv"), "--modes", "ring"]
    assert cli.main(argv) == 1


def test_what_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "parallel", "--csv", str(tmp_path / "x.csv")]
    with pytest.raises(SystemExit, match="NCCL needs a GPU a process"):
        cli.main([*argv, "--backend", "nccl"])
    with pytest.raises(SystemExit):
        cli.main([*argv, "--num-heads", "4", "--num-kv-heads", "3"])
    assert "expected a multiple of 3 key heads" in capsys.readouterr().err
