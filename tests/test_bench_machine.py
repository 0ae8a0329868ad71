"""What is known of the machine, asked of a library that is made up."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from streamattn.bench import machine
from streamattn.bench.machine import sm_clock, this_machine
from streamattn.bench.resume import stamp


class Library:
    """NVIDIA's, of one GPU; a function that is to fail answers with a number that is not 0."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.mhz, self.asked = failing, 1980, []

    def nvmlInit_v2(self) -> int:
        return 9 * ("init" in self.failing)

    def nvmlSystemGetDriverVersion(self, text: Any, size: ctypes.c_uint) -> int:
        assert size.value == len(text)
        text.value = b"580.1"
        return 3 * ("driver" in self.failing)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.asked.append(uuid)
        handle._obj.value = 77
        return 6 * ("gpu" in self.failing)

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, which: int, mhz: Any) -> int:
        assert (handle.value, which) == (77, 1)
        mhz._obj.value = self.mhz
        return 3 * ("clock" in self.failing)


def pretend(monkeypatch: pytest.MonkeyPatch, library: Library | None) -> None:
    """A GPU, and the library that knows it; None = it can't be loaded."""

    class Properties:
        uuid = "abc"

    def load(name: str) -> Library:
        assert name == "libnvidia-ml.so.1"
        if library is None:
            raise OSError("cannot open shared object file")
        return library

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(machine.ctypes, "CDLL", load)


def test_the_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = this_machine()
    assert (found.device, found.driver, found.torch) == ("CPU", None, torch.__version__)
    assert sm_clock("cuda")() is None


def test_the_clock_of_the_current_gpu_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    pretend(monkeypatch, library)
    read = sm_clock("cuda")
    assert read() == 1980
    library.mhz = 345
    assert read() == 345
    assert library.asked == [b"GPU-abc"], "found once"
    assert sm_clock("cpu")() is None, "the CPU is measured"


def test_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Library())
    assert (this_machine().device, this_machine().driver) == ("a GPU", "580.1")
    assert (stamp("cuda").driver, stamp("cpu").driver) == ("580.1", None)


@pytest.mark.parametrize("failing", ["init", "gpu", "clock"])
def test_a_library_that_fails_says_no_clock(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Library(failing))
    assert sm_clock("cuda")() is None


@pytest.mark.parametrize("library", [None, Library("init"), Library("driver")])
def test_no_driver_version(library: Library | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, library)
    assert this_machine().driver is None
