"""Where measurements go, a CSV file with a line for each, and on what machine they were made."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any

import torch


@dataclass(frozen=True)
class Machine:
    """What the rows of a run share: the GPU's name, its driver, the versions of torch and Triton."""

    device: str
    driver: str | None
    torch: str
    triton: str | None


def this_machine() -> Machine:
    """The current GPU, or the CPU where there is none, and the versions."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return Machine(device, ask_driver("driver_version")(20.0), torch.__version__, triton)


def ask_driver(what: str) -> Callable[[float], str | None]:
    """Asks ``nvidia-smi`` for a property of the current GPU, such as ``clocks.sm`` in MHz.

    Args:
        what: its name for the property.

    Returns:
        What gives the answer, after so many seconds at most; None where there is none by then.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None or not torch.cuda.is_available():
        return lambda seconds: None
    gpu = f"GPU-{torch.cuda.get_device_properties().uuid}"
    query = [tool, f"--id={gpu}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def answer(seconds: float) -> str | None:
        try:
            text, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        return text.strip() if process.returncode == 0 else None

    return answer


@contextmanager
def csv_file(path: str, row: type) -> Iterator[Callable[[Any], None]]:
    """A CSV file that holds every line as soon as it is written, so that a run that is killed loses none.

    Args:
        path: of the file; an older one is replaced when the first line is there, or the block ends without.
        row: the dataclass of the lines; the names of its fields are those of the columns.

    Yields:
        What writes one line; None is an empty cell.
    """
    with ExitStack() as stack:
        writer: csv.DictWriter[str] | None = None

        def begin() -> csv.DictWriter[str]:
            file = stack.enter_context(open(path, "w", buffering=1, newline="", encoding="utf-8"))
            begun = csv.DictWriter(file, [field.name for field in fields(row)], lineterminator="\n")
            begun.writeheader()
            return begun

        def write(line: Any) -> None:
            nonlocal writer
            writer = writer or begin()
            writer.writerow(asdict(line))

        yield write
        if writer is None:
            begin()
