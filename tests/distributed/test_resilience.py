"""A process is killed: another says so, torchrun starts them again, and no loss differs from then on."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamattn import finetune
from tests.distributed.test_finetune_ddp import without_dropout
from tests.finetune_jobs import ROOT, environment_of_a_job, losses, write_job

pytestmark = pytest.mark.distributed

_KILLED = """if True:
    import os, signal, sys, time
    from unittest import mock
    from streamattn import finetune, processes
    name, step, job = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    original = getattr(finetune.Trainer, name)

    def killed(trainer, *words, **options):
        if os.environ["RANK"] == "1" and trainer.state.global_step == step and not RESTARTED:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(trainer, *words, **options)

    def slowly(environment):  # torchrun looks ten times a second: its SIGTERM comes meanwhile
        time.sleep(1)
        return first_to_speak(environment)

    first_to_speak, processes._is_first_to_speak = processes._is_first_to_speak, slowly
    RESTARTED = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    with mock.patch.object(finetune.Trainer, name, killed):
        sys.exit(finetune.main([job]))
"""


def run_and_kill(folder: Path, job: Path, method: str, step: int, restarts: int) -> tuple[int, str, str]:
    """A job on two processes; the second is killed where it calls Trainer's ``method`` at ``step``."""
    script = folder / "killed.py"
    script.write_text(_KILLED, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, f"--max-restarts={restarts}", str(script), method, str(step), str(job)],
        cwd=ROOT,
        env=environment_of_a_job(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout, done.stderr


def said(err: str) -> list[str]:
    """Our lines; torchrun's report of what failed, with a traceback of its own code, stands beside them."""
    assert "streamattn/" not in err, "a traceback of ours"
    return [line for line in err.splitlines() if line.startswith("streamattn finetune: ")]


def test_a_process_killed_in_mid_step_ends_the_job_and_one_process_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With as many blocks a step, in the same order, so that the losses are those of an undisturbed run."""
    shape = str(without_dropout(tmp_path))
    job = write_job(tmp_path, max_steps=6, save_strategy="steps", save_steps=2, shape=shape)
    began = time.monotonic()
    status, _, err = run_and_kill(tmp_path, job, "training_step", step=5, restarts=0)
    assert status != 0
    assert time.monotonic() - began < 100
    checkpoint = tmp_path / "out" / "checkpoint-4"
    (line,) = said(err)
    assert re.search("another process of th(is|e) launch (was|is) lost", line)
    assert line.endswith(f"; go on from {checkpoint} with --resume")

    capsys.readouterr()
    assert finetune.main([str(job), "--resume"]) == 0
    out = capsys.readouterr().out
    assert f"resuming from {checkpoint} of 2 process(es) with 1" in out
    assert "gradient_accumulation_steps: 2 instead of 1, for a step of the run in" in out
    undisturbed = ["--gradient_accumulation_steps", "2", "--output_dir", str(tmp_path / "undisturbed")]
    assert finetune.main([str(job), *undisturbed]) == 0
    expected = losses(tmp_path / "undisturbed")
    assert losses(tmp_path / "out").keys() == expected.keys()
    assert list(losses(tmp_path / "out").values()) == pytest.approx(list(expected.values()), rel=2e-5)


def test_killed_while_it_saves_and_started_again_by_torchrun(tmp_path: Path) -> None:
    """The second checkpoint lacks a file, so the first is still there, though only one is to be kept.

    Each step behind it is trained twice, with dropout, and printed.
    """
    job = write_job(tmp_path, max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=1)
    status, out, err = run_and_kill(tmp_path, job, "_save_rng_state", step=4, restarts=1)
    assert status == 0, err
    (line,) = said(err)
    assert line.endswith("; torchrun starts it again")
    output = tmp_path / "out"
    assert f"skipping {output / 'checkpoint-4'}: no readable trainer_state.json" in out
    assert f"resuming from {output / 'checkpoint-2'}\n" in out
    steps = re.findall(r"step (\d)/6: (loss .*)", out)
    assert [int(number) for number, _ in steps] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert steps[2:4] == steps[4:6]
    assert losses(output).keys() == set(range(1, 7))
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-6"]
