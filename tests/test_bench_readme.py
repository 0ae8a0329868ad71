"""One command for all figures: what it runs, and what it makes of the files."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from streamattn import bench, cli
from streamattn.bench import readme
from streamattn.bench.readme import COMMANDS, figures

MEASUREMENTS = Path(__file__).parents[1] / "docs" / "measurements"


def test_the_command_runs_the_others_and_prints_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    ran: list[list[str]] = []
    run = bench.main

    def noting(argv: list[str]) -> int:
        if argv[0] == "readme":
            return run(argv)
        ran.append(argv)
        file = Path(argv[-1])
        shutil.copy(MEASUREMENTS / file.name, file)
        return 1 if argv[0] == "decode" else 0

    monkeypatch.setattr(bench, "main", noting)
    monkeypatch.setattr(readme.report, "draw", lambda file, folder: [f"{folder}/{Path(file).stem}.png"])
    out = tmp_path / "new" / "folder"
    assert cli.main(["bench", "readme", "--out", str(out)]) == 1, "the status of the one that failed"
    assert ran == [[*command, "--csv", f"{out}/{name}.csv"] for name, command in COMMANDS.items()]
    shown = capsys.readouterr().out.splitlines()
    assert shown == [str(out / "report.md"), *figures(MEASUREMENTS)]
    page = (out / "report.md").read_text()
    assert [f"({name}.png)" in page for name in COMMANDS] == [True] * 3


def test_another_figure_in_a_file_is_another_figure_in_the_text(tmp_path: Path) -> None:
    for name in COMMANDS:
        shutil.copy(MEASUREMENTS / f"{name}.csv", tmp_path)
    before = figures(tmp_path)
    for name, column in (("attention_h200", "tflops"), ("decode_h200", "median_ms")):
        path = tmp_path / f"{name}.csv"
        rows = list(csv.DictReader(path.open()))
        for row in rows:
            if row["provider"] == "streamattn" and row[column]:
                row[column] = str(2 * float(row[column]))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    after = figures(tmp_path)
    assert [a == b for a, b in zip(before, after, strict=True)] == [False] * 12 + [True] * 2 + [False] + [
        True
    ] * 2


def test_what_the_cpu_measures_has_less_figures(tmp_path: Path) -> None:
    """Its lengths are others, and it has no cuDNN."""
    for name in COMMANDS:
        rows = list(csv.DictReader((MEASUREMENTS / f"{name}.csv").open()))
        kept = [row | {"seq_len": "256"} for row in rows if row.get("provider") != "sdpa_cudnn"]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]) + (["seq_len"] if "seq_len" not in rows[0] else []))
            writer.writeheader()
            writer.writerows(kept)
    assert [figure.split()[0] for figure in figures(tmp_path)] == ["takes", "and"]
