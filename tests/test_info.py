"""``streamattn info``: every fact is there, also where packages and GPUs aren't."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from streamattn import dispatch, info

ROOT = Path(__file__).parents[1]


def test_report_names_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main([]) == 0
    report = capsys.readouterr().out
    assert torch.__version__ in report
    for word in ("versions", "devices", "backends", "python", "triton", "transformers", "einops", "cpu"):
        assert word in report


def test_each_backend_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows = dict(info.backends())
    assert rows["reference on cpu"] == "ok"
    assert rows["triton on cpu"].startswith("no: ")
    assert {name.removesuffix(" on cpu") for name in rows} == set(dispatch.BACKEND_NAMES) - {"auto"}


def test_gpus_are_listed_with_capability_and_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("PATH", "")
    rows = dict(info.devices())
    assert rows["cuda:1"] == "NVIDIA H100, compute capability 9.0, 80 GiB"
    assert "unknown (no nvidia-smi)" in rows["driver"]
    assert "CUDA_VISIBLE_DEVICES=2,3" in rows["driver"]


def test_the_driver_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert info._driver_version() == "580.65.06"
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    assert info._driver_version().startswith("unknown (nvidia-smi: ")


def test_it_works_without_triton_and_transformers() -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(['triton', 'transformers', 'accelerate', 'rich']))"
    code = f"{hidden}; from streamattn.cli import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "backends" in done.stdout


HELP = (
    "usage: streamattn info [--plan MODEL --seq S --gpus N ...]\n"
    "`streamattn info --plan MODEL --help` lists the rest of a plan's options\n"
)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main([word]) == 0
    assert capsys.readouterr().out == HELP


def test_the_module_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["info", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(info.__file__, run_name="__main__")
    assert capsys.readouterr().out == HELP


def test_it_takes_no_arguments() -> None:
    with pytest.raises(SystemExit, match="takes no arguments but --plan and its own, got --verbose"):
        info.main(["--verbose"])
