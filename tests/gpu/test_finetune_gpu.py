"""The fine-tuning script on a GPU: patched layers on the kernels, in bfloat16, and a run that goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamattn import finetune
from streamattn.dispatch import Backend
from tests.finetune_jobs import losses, write_job

pytestmark = pytest.mark.gpu


def test_a_job_trains_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backends: list[Backend]
) -> None:
    job = write_job(tmp_path, max_steps=30, bf16=True, save_strategy="steps", save_steps=20)
    assert finetune.main([str(job)]) == 0
    shown = capsys.readouterr().out
    (difference,) = re.findall(r"unpatched model on 32 tokens of held-out text: (\S+)", shown)
    assert float(difference) < 0.1
    assert re.search(r"peak memory .* GiB on NVIDIA", shown)
    assert set(backends) == {Backend.TRITON, Backend.DECODE}  # its steps, and the sample of its text
    whole = losses(tmp_path / "out")
    assert whole[30] < 0.9 * whole[1]

    again = str(tmp_path / "again")
    words = [str(job), "--output_dir", again, "--resume", str(tmp_path / "out" / "checkpoint-20")]
    assert finetune.main(words) == 0
    resumed = losses(tmp_path / "again")
    for step in range(21, 31):
        assert resumed[step] == pytest.approx(whole[step], abs=0.02)
