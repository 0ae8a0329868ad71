"""On what machine measurements are made, as NVIDIA's management library tells it.

That library comes with the driver and is asked in this process, so that an answer takes no longer than a
piece of the work that is measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
SM_CLOCK = 1
"""The library's number for the clock of the multiprocessors."""


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
    return Machine(device, driver_version(), torch.__version__, triton)


def library() -> Any:
    """The management library, ready to be asked; None where there is no GPU or no such library."""
    if not torch.cuda.is_available():
        return None
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return None if found.nvmlInit_v2() else found


def driver_version() -> str | None:
    """Of the driver; None without one that says it."""
    found, text = library(), ctypes.create_string_buffer(80)
    if found is None or found.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
        return None
    return text.value.decode()


def sm_clock(device: str) -> Callable[[], int | None]:
    """Finds the clock of the current GPU's multiprocessors.

    Args:
        device: ``cuda`` or ``cpu``, where it is measured.

    Returns:
        What reads it, in MHz; None on a CPU, and where the driver doesn't say. A GPU that has nothing to do
        lowers it after a while: read it as soon as the work is done, and outside of what is timed.
    """
    found = None if device == "cpu" else library()
    if found is None:
        return lambda: None
    gpu, mhz = ctypes.c_void_p(), ctypes.c_uint()
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
    if found.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(gpu)):
        return lambda: None

    def read() -> int | None:
        failed = found.nvmlDeviceGetClockInfo(gpu, SM_CLOCK, ctypes.byref(mhz))
        return None if failed else mhz.value

    return read
