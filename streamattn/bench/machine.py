"""On what machine measurements are made."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

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
