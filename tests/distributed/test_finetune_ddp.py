"""Several processes: the same losses as one, checkpointing of activations, and launches that can't work."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from streamattn import finetune
from tests.finetune_jobs import held_out_loss, losses, own_lines, run, start, write_job

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def one_output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 6 steps with the global batch of two processes, accumulated in one."""
    folder = tmp_path_factory.mktemp("one")
    job = write_job(folder, max_steps=6, gradient_accumulation_steps=2, shape=str(without_dropout(folder)))
    assert finetune.main([str(job)]) == 0
    return folder / "out"


@pytest.fixture(scope="module")
def one_process(one_output: Path) -> dict[int, float]:
    """Its losses."""
    return losses(one_output)


def without_dropout(folder: Path) -> Path:
    """Processes draw different masks, so dropout has no counterpart in one process."""
    write_job(folder)
    shape = (folder / "shape.yaml").read_text(encoding="utf-8").replace("attn_pdrop: 0.1", "attn_pdrop: 0.0")
    path = folder / "still.yaml"
    path.write_text(shape + "embd_pdrop: 0.0\nresid_pdrop: 0.0\n", encoding="utf-8")
    return path


def test_two_processes_train_as_one(one_process: dict[int, float], tmp_path: Path) -> None:
    """With checkpointing, where parameters must not be marked ready twice (huggingface/accelerate#2017).

    Without it two processes train as one up to where `test_resilience` kills one of them.
    """
    job = write_job(tmp_path, max_steps=6, shape=str(without_dropout(tmp_path)), gradient_checkpointing=True)
    output = tmp_path / "out"
    output.mkdir()
    (output / "model.safetensors").write_bytes(b"an earlier run's")
    status, out, err = run(str(job), torchrun=2)
    assert status == 0, err
    assert (tmp_path / "out.1" / "model.safetensors").read_bytes() == b"an earlier run's"
    assert out.count("moved the finished run") == 1
    assert not (tmp_path / "out.2").exists()
    assert "over 2 process(es)" in out
    assert out.count("attention layers patched") == 1, "only one process prints"
    together = losses(tmp_path / "out")
    assert together.keys() == one_process.keys() == set(range(1, 7))
    assert list(together.values()) == pytest.approx(list(one_process.values()), rel=2e-5)
    assert together[6] < together[1]


@pytest.mark.sweep
def test_four_processes_that_share_sequences_in_pairs_train_as_one(one_output: Path, tmp_path: Path) -> None:
    """Data parallelism of two pairs, whose batches are those of two processes; and the same held-out loss."""
    job = write_job(
        tmp_path,
        max_steps=6,
        shape=str(without_dropout(tmp_path)),
        context_parallel_size=2,
        gradient_checkpointing=True,
    )
    status, out, err = run(str(job), torchrun=4)
    assert status == 0, err
    assert out.count("the same of 2 processes that share the sequence") == 1
    together, alone = losses(tmp_path / "out"), losses(one_output)
    assert together.keys() == alone.keys() == set(range(1, 7))
    assert list(together.values()) == pytest.approx(list(alone.values()), rel=2e-5)
    assert held_out_loss(tmp_path / "out") == pytest.approx(held_out_loss(one_output), rel=2e-5)


def test_one_process_says_why_the_job_is_refused(tmp_path: Path) -> None:
    """Which both know at once; and the finished run stays, with nothing beside it."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "model.safetensors").write_bytes(b"an earlier run's")
    status, _, err = run(str(write_job(tmp_path)), "--adam_beta1", "2", torchrun=2)
    assert status != 0
    (line,) = [line for line in err.splitlines() if line.startswith("streamattn finetune: ")]
    assert "transformers.Trainer: Invalid beta parameter at index 0" in line
    assert [path.name for path in output.iterdir()] == ["model.safetensors"]
    assert not (tmp_path / "out.1").exists()


def test_processes_without_a_launcher_say_it_once_too(tmp_path: Path) -> None:
    """What the main process finds, before the other looks; neither is ended by the other's end."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "a.png").write_bytes(b"\x89PNG\xff")
    words = [str(write_job(tmp_path)), "--data", str(tmp_path / "bin")]
    processes = [
        start(*words, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in ("0", "1")
    ]
    try:
        first, second = (process.communicate(timeout=150)[1] for process in processes)
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [2, 2]
    (line,) = own_lines(first)
    assert "data: expected at least 2 files of UTF-8 text" in line
    assert "found 0 among 1 files; add some, or pass one file" in line
    assert own_lines(second) == []


def test_a_worker_without_its_master_ends_in_time_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    began = time.monotonic()
    status, _, err = run(
        str(write_job(tmp_path, ddp_timeout=2)),
        RANK="1",
        LOCAL_RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    assert status == 2
    assert time.monotonic() - began < 60
    (line,) = own_lines(err)
    assert line.startswith(f"streamattn finetune: no master at MASTER_ADDR=127.0.0.1 MASTER_PORT={port}")


def test_a_master_whose_workers_never_come_ends_in_time(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    status, _, err = run(
        str(write_job(tmp_path, ddp_timeout=3)),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    assert status == 2
    (line,) = own_lines(err)
    assert "can't join the process group" in line
    assert "frame #" not in err, "a stack of C++"
