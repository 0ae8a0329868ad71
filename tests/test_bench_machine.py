"""What is known of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamattn.bench import machine
from streamattn.bench.machine import ask_driver, this_machine


def test_the_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = this_machine()
    assert (found.device, found.driver, found.torch) == ("CPU", None, torch.__version__)


def pretend(monkeypatch: pytest.MonkeyPatch, tool: Path, script: str) -> None:
    """A GPU, and a tool that knows it."""

    class Properties:
        uuid = "abc"

    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(machine.shutil, "which", lambda name: str(tool))


def test_the_driver_is_asked_for_the_current_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path / "tool", 'echo "$@"')
    assert ask_driver("clocks.sm")(50.0) == "--id=GPU-abc --query-gpu=clocks.sm --format=csv,noheader,nounits"


@pytest.mark.parametrize(("script", "seconds"), [("echo 1980; exit 9", 50.0), ("exec sleep 100", 0.1)])
def test_a_driver_that_fails_or_is_slow_says_nothing(
    script: str, seconds: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path / "tool", script)
    assert ask_driver("clocks.sm")(seconds) is None
