"""Lines reach the file as soon as they are written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from streamattn.bench import results
from streamattn.bench.results import ask_driver, csv_file, this_machine


@dataclass
class Line:
    name: str
    ms: float | None


def test_lines_are_there_before_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("older\n")
    with csv_file(str(path), Line) as write:
        assert path.read_text() == "older\n"
        write(Line("a", 1.5))
        assert path.read_text() == "name,ms\na,1.5\n"
        write(Line("b", None))
        assert path.read_text() == "name,ms\na,1.5\nb,\n"


def test_a_run_that_ends_before_its_first_line_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("older\n")
    with pytest.raises(KeyboardInterrupt), csv_file(str(path), Line):
        raise KeyboardInterrupt
    assert path.read_text() == "older\n"
    with csv_file(str(path), Line):
        pass
    assert path.read_text() == "name,ms\n", "nothing was measured, and nothing older passes for it"


def test_the_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = this_machine()
    assert (machine.device, machine.driver, machine.torch) == ("CPU", None, torch.__version__)


def pretend(monkeypatch: pytest.MonkeyPatch, tool: Path, script: str) -> None:
    """A GPU, and a tool that knows it."""

    class Properties:
        uuid = "abc"

    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(results.shutil, "which", lambda name: str(tool))


def test_the_driver_is_asked_for_the_current_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path / "tool", 'echo "$@"')
    assert ask_driver("clocks.sm")(50.0) == "--id=GPU-abc --query-gpu=clocks.sm --format=csv,noheader,nounits"


@pytest.mark.parametrize(("script", "seconds"), [("echo 1980; exit 9", 50.0), ("exec sleep 100", 0.1)])
def test_a_driver_that_fails_or_is_slow_says_nothing(
    script: str, seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path / "tool", script)
    assert ask_driver("clocks.sm")(seconds) is None
