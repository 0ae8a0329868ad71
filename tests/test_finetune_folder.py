"""An output folder that is new, or can't be written: what a job says and leaves there."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest

from streamattn import finetune
from tests.finetune_jobs import refused, write_job


def test_resume_with_nothing_to_resume_starts_afresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, max_steps=1)
    assert finetune.main([str(job), "--resume"]) == 0
    note = f"nothing to resume: no complete checkpoint in {tmp_path / 'out'}, starting from the beginning\n"
    assert capsys.readouterr().out.startswith(note)
    # torchrun --max-restarts runs the same command line again: that resumes too.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert finetune.main([str(job)]) == 0
    assert f"the run in {tmp_path / 'out'} is finished at step 1 of 1" in capsys.readouterr().out
    assert finetune.main([str(job), "--max_steps", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(note)
    assert "moved the finished run" in out


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        # The tokenizer, the blocks of text, model.safetensors, optimizer.pt.
        (10_000, "File too large .*; make room there, or pass another --output_dir$"),
        (50_000, r"\d+ requested and \d+ written\); make room there, or pass another --output_dir$"),
        (110_000, r".*os error 27\)\); .*; the run can't go on .*; --resume moves it aside"),
        (200_000, r"a file was cut short\); .*; the run can't go on .*; --resume moves it aside"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], longest: int, expected: str
) -> None:
    """As on a full disk: the system refuses files beyond a length."""
    job = write_job(tmp_path, save_strategy="steps", save_steps=4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, hard))
    try:
        line = refused(capsys, str(job))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.search(
        rf"output_dir: can't write to {tmp_path / 'out'}, where \S+ MiB are free .{expected}", line
    )
