"""Runs that go on where they stopped: each case in a process of its own, each row in the file as it comes.

A row says on what it was measured: the commit of the code, the GPU, its clock and driver, the versions. What
a file already holds of the same case, code and machine is not measured again. A process of its own leaves the
next case nothing: no cached memory, no graphs, no warm libraries, and no crash.
"""

from __future__ import annotations

import csv
import hashlib
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeVar

from streamattn.bench.machine import this_machine

ROOT = Path(__file__).parents[2]
Result = TypeVar("Result")


class Mismatch(Exception):
    """A file holds rows of another kind."""


class Died(Exception):
    """A process ended without an answer."""


@dataclass(frozen=True)
class Stamp:
    """What a row was measured on.

    Attributes:
        commit: of the code; ``+`` behind it: with changes; ``files`` and a digest where git doesn't know.
        device: the GPU's name, or CPU.
        sm_mhz: clock of its multiprocessors right after the work of this row; None on a CPU, and where none
            of it was done.
        driver: its version; None on a CPU.
        torch: version.
        triton: version; None = not installed.
        transformers: version.
    """

    commit: str
    device: str
    sm_mhz: int | None
    driver: str | None
    torch: str
    triton: str | None
    transformers: str


MANY_CORES = 8
"""From so many on, `apart` begins the next call's process beside this one."""

_ahead: list[ProcessPoolExecutor] = []
"""The process of the next call of `apart`, where it was begun."""

SAME = ("commit", "device", "driver", "torch", "triton", "transformers")
"""What two rows share that were measured on the same."""


def code_version() -> str:
    """The commit of this package's code, or a digest of its files where it lies in no clone."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != ROOT:
            raise FileNotFoundError
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "streamattn", "patches")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        digest = hashlib.sha256()
        for package in ("streamattn", "patches"):
            for file in sorted((ROOT / package).rglob("*.py")):
                digest.update(file.read_bytes())
        return f"files {digest.hexdigest()[:10]}"


def stamp(device: str) -> Stamp:
    """Of this process's machine, its clock not read yet.

    Args:
        device: ``cuda`` or ``cpu``, where the rows are measured.
    """
    machine = asdict(this_machine())
    if device == "cpu":
        machine |= {"device": "CPU", "driver": None}
    return Stamp(commit=code_version(), sm_mhz=None, transformers=metadata.version("transformers"), **machine)


def text(value: Any) -> str:
    """A value as a cell of a CSV."""
    return "" if value is None else str(value)


def rows_in(path: str, row: type) -> list[dict[str, str]]:
    """The rows of a file; none where there is no file, or an empty one.

    A last row without the end of its line was cut while it was written, and counts as not measured.

    Raises:
        Mismatch: its columns are not those of ``row``, or it is no CSV.
    """
    columns = [field.name for field in fields(row)]
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames is not None and list(reader.fieldnames) != columns:
                raise Mismatch(f"{path} has other columns than this benchmark writes; name another file")
            rows = list(reader)
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, csv.Error) as error:
        raise Mismatch(f"{path} is no CSV that a benchmark wrote ({error}); name another file") from error
    return rows if _whole(Path(path).read_bytes()) else rows[:-1]


def _whole(content: bytes) -> bool:
    """Whether the last line of a file has its end."""
    return not content or content.endswith(b"\n")


def holds(rows: Sequence[dict[str, str]], on: Stamp, wanted: dict[str, Any]) -> bool:
    """Whether a row of the same code and machine has these values.

    Args:
        rows: as `rows_in` reads them.
        on: what would be measured on.
        wanted: values by column.
    """
    cells = {name: text(value) for name, value in wanted.items()}
    cells |= {name: text(getattr(on, name)) for name in SAME}
    return any(cells.items() <= row.items() for row in rows)


@contextmanager
def appended(path: str, row: type) -> Iterator[Callable[[Any], None]]:
    """A CSV file that rows are added to, each in the file as soon as it is written; a cut last row goes.

    Args:
        path: of the file; one that isn't there begins with the names of the columns.
        row: the dataclass of the rows.

    Yields:
        What writes one row; None is an empty cell.

    Raises:
        Mismatch: as `rows_in`.
    """
    rows_in(path, row)  # raises before anything changes
    content = Path(path).read_bytes() if Path(path).is_file() else b""
    if not _whole(content):
        head, end, _ = content.rpartition(b"\n")
        content = head + end if end else content + b"\n"  # columns alone lack no more than their end
        Path(path).write_bytes(content)
    begun = bool(content)
    with open(path, "a", buffering=1, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(row)], lineterminator="\n")

        def write(line: Any) -> None:
            nonlocal begun
            if not begun:
                writer.writeheader()
                begun = True
            writer.writerow(asdict(line))

        yield write


def _one_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def apart(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function in a fresh process.

    Where there are cores to spare, the process of the next call begins to import what this one needs: that
    takes longer than many a case, touches no GPU, and is over about when this call's own imports are.

    Args:
        function: of a module, so that the process finds it by its name.
        arguments: and its result must be picklable.

    Raises:
        Died: the process ended without an answer, killed for memory for instance.
    """
    with _ahead.pop() if _ahead else _one_process() as pool:
        try:
            answer = pool.submit(function, *arguments)
            if (os.cpu_count() or 1) >= MANY_CORES:
                _ahead.append(_one_process())
                _ahead[-1].submit(import_module, function.__module__)
            return answer.result()
        except BrokenProcessPool as error:
            raise Died("its process ended without an answer") from error


def extra(module: str, command: str) -> Any:
    """A module that only the extra ``bench`` brings.

    Raises:
        SystemExit: it is not there; one line says what to install.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise SystemExit(
            f"{command}: needs {package}, which is not installed; pip install 'streamattn[bench]' brings it"
        ) from None
