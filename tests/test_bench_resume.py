"""Files that are continued, processes apart, and what a row says of its machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

from streamattn.bench import resume
from streamattn.bench.resume import (
    Died,
    Mismatch,
    Stamp,
    apart,
    appended,
    code_version,
    extra,
    holds,
    rows_in,
)

ON = Stamp("abc", "GPU", 1980, "580", "2.13", None, "5.0")


@dataclass(frozen=True)
class Row(Stamp):
    case: str = ""
    layers: int | None = None


def line(case: str, on: Stamp = ON, layers: int | None = None) -> Row:
    return Row(**asdict(on), case=case, layers=layers)


def test_a_file_is_continued(tmp_path: Path) -> None:
    path = str(tmp_path / "x.csv")
    assert rows_in(path, Row) == []
    for case in ("a", "b"):
        with appended(path, Row) as write:
            write(line(case))
            assert rows_in(path, Row)[-1]["case"] == case, "there as soon as it is written"
    assert [row["case"] for row in rows_in(path, Row)] == ["a", "b"]
    assert len(Path(path).read_text().splitlines()) == 3


def test_a_run_without_a_row_writes_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with appended(str(path), Row):
        pass
    with appended(str(path), Row) as write:
        write(line("a"))
    assert len(rows_in(str(path), Row)) == 1


def test_other_columns_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(Mismatch, match="other columns"), appended(str(path), Row):
        pass
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_row_that_was_cut_is_measured_again(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with appended(str(path), Row) as write:
        write(line("a"))
        write(line("b", layers=12345))
    content = path.read_text()
    path.write_text(content[:-cut])
    assert [row["case"] for row in rows_in(str(path), Row)] == ["a"]
    assert path.read_text() == content[:-cut], "reading changes nothing"
    with appended(str(path), Row) as write:
        write(line("b", layers=12345))
    assert path.read_text() == content


def test_columns_without_the_end_of_their_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    with appended(str(path), Row) as write:
        write(line("a"))
    content = path.read_text()
    path.write_text(content.splitlines()[0])
    assert rows_in(str(path), Row) == []
    with appended(str(path), Row) as write:
        write(line("a"))
    assert path.read_text() == content
    path.write_text("a,b\n1,2")
    with pytest.raises(Mismatch, match="other columns"), appended(str(path), Row):
        pass
    assert path.read_text() == "a,b\n1,2"


@pytest.mark.parametrize(
    "content", [b"\x89PNG\r\n", "é\n".encode("utf-16"), b"a" * 200_000 + b"\n"], ids=range(3)
)
def test_a_file_of_another_kind_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(content)
    with pytest.raises(Mismatch, match="name another file"), appended(str(path), Row):
        pass
    assert path.read_bytes() == content


def test_what_a_file_holds(tmp_path: Path) -> None:
    path = str(tmp_path / "x.csv")
    with appended(path, Row) as write:
        write(line("a"))
        write(line("b", layers=4))
    rows = rows_in(path, Row)
    assert holds(rows, ON, {"case": "a", "layers": None})
    assert holds(rows, replace(ON, sm_mhz=345), {"case": "b", "layers": 4})
    assert not holds(rows, ON, {"case": "a", "layers": 4})
    for name in ("commit", "device", "driver", "torch", "triton", "transformers"):
        assert not holds(rows, replace(ON, **{name: "other"}), {"case": "a"}), name


def parent_of_a_process() -> int:
    return os.getppid()


def kill_itself() -> None:
    os._exit(9)


def test_a_process_apart() -> None:
    assert apart(parent_of_a_process) == os.getpid()


def test_the_next_process_is_begun_where_there_are_cores_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[object] = []
    make = resume._one_process

    def noting() -> object:
        began.append(pool := make())
        return pool

    monkeypatch.setattr(resume, "_one_process", noting)
    monkeypatch.setattr(resume, "_ahead", [])
    monkeypatch.setattr(resume.os, "cpu_count", lambda: resume.MANY_CORES)
    first = apart(os.getpid)
    assert len(began) == 2 and resume._ahead == began[1:], "the next one waits"
    second = apart(os.getpid)
    assert len(began) == 3
    assert len({first, second, os.getpid()}) == 3, "fresh each time"
    resume._ahead.pop().shutdown()
    monkeypatch.setattr(resume.os, "cpu_count", lambda: resume.MANY_CORES - 1)
    apart(os.getpid)
    assert len(began) == 4 and not resume._ahead, "none where a measurement would be disturbed"


def test_a_process_that_dies_is_told() -> None:
    with pytest.raises(Died):
        apart(kill_itself)


def test_an_extra_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^streamattn bench x: needs not_there.*streamattn\[bench\]"):
        extra("not_there.below", "streamattn bench x")
    assert extra("os.path", "x") is os.path


def test_an_extra_that_misses_something_itself_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_there.py").write_text("import missing_below")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="missing_below"):
        extra("half_there", "x")


def test_the_code_is_known_with_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "streamattn").mkdir()
    file = tmp_path / "streamattn" / "a.py"
    file.write_text("1")
    monkeypatch.setattr(resume, "ROOT", tmp_path)
    first = code_version()
    file.write_text("2")
    assert first.startswith("files ")
    assert code_version() not in (first, "")
    if shutil.which("git") is None:
        return

    def git(*arguments: str) -> None:
        options = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *options, *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    commit = code_version()
    assert len(commit) == 10
    file.write_text("3")
    assert code_version() == commit + "+"


def test_a_stamp_of_the_cpu() -> None:
    found = resume.stamp("cpu")
    assert (found.device, found.sm_mhz, found.driver, found.torch) == ("CPU", None, None, torch.__version__)
