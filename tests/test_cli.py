"""The command line finds the command and hands over its arguments and its exit status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import streamattn
from streamattn import cli, finetune
from tests.finetune_jobs import own_lines

ROOT = Path(__file__).parents[1]


def test_arguments_and_status_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setattr(finetune, "main", run)
    assert cli.main(["finetune", "x.yaml", "--resume", "--max_steps", "2"]) == 7
    assert seen == [["x.yaml", "--resume", "--max_steps", "2"]]


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr()
    assert "info" in shown.out
    assert "finetune" in shown.out
    assert shown.err == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"streamattn {streamattn.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["fine-tune"], ["--versions"], ["--version", "info"]])
def test_without_a_known_command_the_usage_goes_to_stderr(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "usage: streamattn" in shown.err
    assert all(word in shown.err for word in argv)


def test_a_reader_that_leaves_is_no_error() -> None:
    """As in ``streamattn info | head -3``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "streamattn", "--help"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=400)
    assert (process.returncode, err) == (1, "")


def test_ctrl_c_while_the_command_is_imported_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupt)
    assert cli.main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamattn", "finetune", "configs/gpt2-nano.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = own_lines(done.stderr)
    assert line.startswith("streamattn finetune: no file 'configs/gpt2-nano.yaml'; near it: ")
    assert "gpt2-nano_stdlib_cpu.yaml" in line
