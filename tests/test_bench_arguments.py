"""Both benchmarks refuse what can't be measured or written in one line, before anything is measured."""

from __future__ import annotations

import csv
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from streamattn import cli
from streamattn.bench import decode_layer
from streamattn.bench.arguments import positive, writable, writable_folder


def refusal(benchmark: str, *argv: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says last; everything before it is its usage."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", benchmark, *argv])
    assert stop.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("usage: ")
    return shown.err.splitlines()[-1]


@pytest.mark.parametrize("text", ["0", "-64", "1.5", "many", ""])
@pytest.mark.parametrize(
    ("benchmark", "option"),
    [
        ("kernel", "--head-dims"),
        ("kernel", "--seq-lens"),
        ("kernel", "--tokens"),
        ("kernel", "--hidden"),
        ("kernel", "--repeats"),
        ("kernel", "--rounds"),
        ("decode-layer", "--keys"),
        ("decode-layer", "--layers"),
        ("decode-layer", "--repeats"),
    ],
)
def test_a_number_that_counts_nothing(
    benchmark: str, option: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("older\n")
    assert refusal(benchmark, "--csv", str(path), option, text, capsys=capsys) == (
        f"streamattn bench {benchmark}: error: argument {option}: "
        f"expected a whole number of 1 or more, got {text!r}"
    )
    assert path.read_text() == "older\n"


@pytest.mark.parametrize("benchmark", ["kernel", "decode-layer"])
@pytest.mark.parametrize(
    ("name", "why"), [("none/x.csv", "No such file or directory"), (".", "Is a directory")]
)
def test_a_path_that_cannot_be_written(
    benchmark: str, name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / name)
    assert refusal(benchmark, "--csv", path, capsys=capsys) == (
        f"streamattn bench {benchmark}: error: argument --csv: can't write {path!r}: {why}"
    )


def test_asking_whether_a_path_can_be_written_changes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    old.write_text("older\n")
    assert [writable(str(path)) for path in (old, new)] == [str(old), str(new)]
    assert old.read_text() == "older\n"
    assert not new.exists()
    with pytest.raises(ArgumentTypeError, match="can't write ''"):
        writable("")


def test_numbers_of_one_and_more_are_taken() -> None:
    assert [positive("1"), positive("16384")] == [1, 16384]


def test_an_interrupted_run_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    turns = iter([[3.0, 2.0, 1.0]])

    def medians(*args: object) -> list[float]:
        for turn in turns:
            return turn
        raise KeyboardInterrupt

    monkeypatch.setattr(decode_layer, "medians", medians)
    monkeypatch.setattr(decode_layer.torch.cuda, "is_available", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        decode_layer.main(["--csv", str(path), "--keys", "8", "--layers", "1"])
    with path.open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["case"], row["streamattn_us"]) == ("attention", "1.0")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("kernel", "--csv", "x.csv"), "--plot"),
        (("memory", "--csv", "x.csv"), "--plot"),
        (("memory", "--csv", "x.csv"), "--snapshots"),
        (("model", "--csv", "x.csv"), "--plot"),
        (("e2e", "--csv", "x.csv"), "--plot"),
        (("report",), "--out"),
        (("readme",), "--out"),
    ],
)
def test_a_folder_that_cannot_be_used(
    command: tuple[str, ...],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("older\n")
    assert refusal(*command, option, "file/pictures", capsys=capsys).endswith(
        f"error: argument {option}: can't use 'file/pictures' as a folder: Not a directory"
    )


def test_asking_for_a_folder_makes_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "new" / "one"):
        assert writable_folder(str(path)) == str(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "benchmark", ["kernel", "parallel", "model", "e2e", "memory", "precision", "comm", "ddp"]
)
def test_help_tells_defaults_that_are_there(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", benchmark, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: None)" not in shown
    assert "(default: " in shown
