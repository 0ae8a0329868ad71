"""Tiny fine-tuning jobs for the tests: a corpus of a few files, a two-layer model, seconds on one core."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from streamattn import finetune

ROOT = Path(__file__).parents[1]

# Dropout on purpose: a resumed run must draw the same masks as an undisturbed one.
_SHAPE = """
model_type: gpt2
n_embd: 32
n_inner: 64
n_layer: 2
n_head: 2
n_positions: 32
vocab_size: 384
attn_pdrop: 0.1
"""
_JOB = """
shape: shape.yaml
seq_len: 32
max_steps: 4
per_device_train_batch_size: 4
per_device_eval_batch_size: 32
learning_rate: 1e-2
lr_scheduler_type: linear
logging_steps: 1
save_strategy: no
disable_tqdm: true
seed: 1
"""


def write_job(folder: Path, **values: Any) -> Path:
    """A job's YAML in ``folder``, with its corpus and shape; ``values`` change or add keys."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    source = Path(argparse.__file__).read_text(encoding="utf-8").splitlines(keepends=True)
    for start in range(0, 1600, 100):
        (corpus / f"{start}.py").write_text("".join(source[start : start + 100]), encoding="utf-8")
    (folder / "shape.yaml").write_text(_SHAPE, encoding="utf-8")
    job = folder / "job.yaml"
    paths = {
        "shape": str(folder / "shape.yaml"),
        "data": str(corpus),
        "output_dir": str(folder / "out"),
    }
    lines = dict(line.split(": ", 1) for line in textwrap.dedent(_JOB).strip().splitlines())
    lines |= {key: json.dumps(value) for key, value in (paths | values).items()}
    job.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")
    return job


def losses(output_dir: Path) -> dict[int, float]:
    """Training loss by step, as Trainer logged it."""
    state = json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def environment_of_a_job(**changes: str) -> dict[str, str]:
    """This process's variables for a job beside the tests."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **changes}


def held_out_loss(output_dir: Path) -> float:
    """The last one, as Trainer logged it."""
    state = json.loads((output_dir / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry][-1]


def start(*words: str, torchrun: int = 0, **environment: str) -> subprocess.Popen[str]:
    """Start a job in processes of its own: plain, or ``torchrun`` many under torchrun."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"] if torchrun else []
    )
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "streamattn.finetune", *words],
        cwd=ROOT,
        env=environment_of_a_job(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(*words: str, torchrun: int = 0, **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a job; see `start`."""
    process = start(*words, torchrun=torchrun, **environment)
    try:
        out, err = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # torchrun's workers too
    return process.returncode, out, err


def own_lines(err: str) -> list[str]:
    """What a job that did not start says on stderr, less what libraries print when they are imported."""
    assert "Traceback" not in err
    return [line for line in err.splitlines() if line.startswith("streamattn finetune: ")]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a job that must not start."""
    capsys.readouterr()  # what the test itself wrote, as transformers' progress bar of saving
    assert finetune.main(list(words)) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("streamattn finetune: ")
    return line


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by its path."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
