"""Launching a fine-tuning job: what is wrong with it is said in one line, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamattn import doctor
from tests.finetune_jobs import refused, write_job

TWO = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TWO:
        monkeypatch.delenv(name, raising=False)


# EleutherAI/cookbook#59: RANK was set and WORLD_SIZE missing
@pytest.mark.parametrize("missing", [name for name in TWO if name != "RANK"])
def test_half_a_launch_says_how_to_launch(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path, ddp_timeout=1))  # does not wait if it is let through
    for name, value in TWO.items():
        if name != missing:
            monkeypatch.setenv(name, value)
    said = refused(capsys, job)
    assert f"{missing} missing" in said
    processes = "N" if missing == "WORLD_SIZE" else "2"
    assert f"torchrun --nproc-per-node {processes} -m streamattn.finetune {job}" in said


# pytorch/pytorch#68666: more processes than GPUs died of an invalid device ordinal
@pytest.mark.parametrize("gpus", [1, 7])
def test_more_processes_than_gpus(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path, ddp_timeout=1))  # does not wait if it is let through
    for name, value in {**TWO, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "look", lambda **_: doctor.Machine(gpus=((9, 0),) * gpus, nccl="2.27.5"))
    said = refused(capsys, job)
    assert f"8 processes on this host but {gpus} visible GPU" in said
    assert f"--nproc-per-node {gpus}" in said
