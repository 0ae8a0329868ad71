"""What lies in a job's output folder: a killed job goes on as if nothing happened, a finished one stays."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamattn import finetune
from tests.finetune_jobs import ROOT, contents, losses, refused, run, start, write_job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 24 steps with a checkpoint every 8, run to its end; its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert finetune.main([str(write_job(folder, max_steps=24, save_strategy="steps", save_steps=8))]) == 0
    return folder


def beside_a_finished_run(undisturbed: Path, folder: Path) -> tuple[Path, Path, dict[str, bytes]]:
    """A job of one step, its output folder, where a finished run lies, and what that holds."""
    job, output = write_job(folder, max_steps=1), folder / "out"
    shutil.copytree(undisturbed / "out", output)
    return job, output, contents(output)


def test_a_killed_job_goes_on_with_the_same_losses(undisturbed: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, max_steps=24, save_strategy="steps", save_steps=8)
    output = tmp_path / "out"
    process = start(str(job))
    try:
        deadline = time.monotonic() + 100
        while finetune.last_checkpoint(output)[0] is None:  # right behind it the run is in its middle
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (output / "model.safetensors").exists(), "it ended before it was killed"

    # What was being written when the next checkpoint was cut short.
    found, _ = finetune.last_checkpoint(output)
    assert found is not None
    half_written = output / "checkpoint-23"
    shutil.copytree(found, half_written)
    (half_written / "trainer_state.json").unlink()

    status, out, err = run(str(job), "--resume")
    assert status == 0, err
    # Warnings of transformers whose cause is known, and bars where there is no terminal.
    assert not re.search("loss_type|missing keys|it/s", err)
    assert f"resuming from {found}" in out
    assert f"skipping {half_written}: no readable trainer_state.json" in out
    assert losses(output) == losses(undisturbed / "out")
    ends = [path / "out" / "model.safetensors" for path in (undisturbed, tmp_path)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_resume_takes_no_half_written_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(undisturbed / "out", output)
    best, broken = finetune.last_checkpoint(output)
    assert (best, broken) == (output / "checkpoint-24", {})

    def damage(name: str, keep: float | None, inside: bytes = b"") -> str:
        shutil.rmtree(output / "checkpoint-24")
        shutil.copytree(undisturbed / "out" / "checkpoint-24", output / "checkpoint-24")
        file = output / "checkpoint-24" / name
        content = file.read_bytes()
        file.unlink()
        if keep is not None:
            middle = len(content) // 2
            content = content[:middle] + inside + content[middle + len(inside) :]
            file.write_bytes(content[: int(len(content) * keep)])
        best, broken = finetune.last_checkpoint(output)
        assert best == output / "checkpoint-16"
        return broken[output / "checkpoint-24"]

    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert damage(name, None) == f"no {name}"
        assert damage(name, 0.9) == f"{name} is cut off"
        assert damage(name, 0.0) == f"{name} is cut off"
    for name in ("scheduler.pt", "rng_state.pth"):
        assert damage(name, 1.0, inside=b"?" * 64) == f"{name} is damaged"
    assert damage("model.safetensors", None) == "no *.safetensors"
    assert damage("model.safetensors", 0.9) == "model.safetensors is cut off"
    assert damage("trainer_state.json", None) == "no readable trainer_state.json"
    assert damage("trainer_state.json", 0.9) == "no readable trainer_state.json"
    sound = json.loads((undisturbed / "out" / "checkpoint-24" / "trainer_state.json").read_text())
    wrong = [{"global_step": "24"}, {"max_steps": None}, {"log_history": {}}, {"stateful_callbacks": []}]
    wrong += [{"stateful_callbacks": {"RecordWorldSize": []}}]
    for text in ("[]", "{}", '{"stateful_callbacks": {}}', *(json.dumps(sound | one) for one in wrong)):
        (output / "checkpoint-24" / "trainer_state.json").write_text(text, encoding="utf-8")
        assert finetune.last_checkpoint(output)[0] == output / "checkpoint-16"


def test_a_checkpoint_of_two_processes_needs_both_generators(undisturbed: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-24"
    shutil.copytree(undisturbed / "out" / "checkpoint-24", checkpoint)
    state = (checkpoint / "trainer_state.json").read_text(encoding="utf-8")
    assert '"world_size": 1' in state
    (checkpoint / "trainer_state.json").write_text(
        state.replace('"world_size": 1', '"world_size": 2'), encoding="utf-8"
    )
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    assert finetune.last_checkpoint(tmp_path) == (None, {checkpoint: "no rng_state_1.pth"})
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    assert finetune.last_checkpoint(tmp_path) == (checkpoint, {})


def test_an_unfinished_run_is_not_started_over(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, max_steps=24)
    shutil.copytree(undisturbed / "out" / "checkpoint-16", tmp_path / "out" / "checkpoint-16")
    line = refused(capsys, str(job))
    assert "holds an unfinished run at step 16 of 24; go on with --resume" in line
    # Nor is it buried under the steps that follow another run's checkpoint.
    assert "holds an unfinished run" in refused(
        capsys, str(job), "--resume", str(undisturbed / "out" / "checkpoint-8")
    )


@pytest.mark.parametrize(
    ("damaged", "keep", "reason"),
    [
        (("optimizer.pt", "scheduler.pt", "rng_state.pth"), None, "save_only_model left out its optimizer"),
        (("optimizer.pt",), None, "no optimizer.pt"),
        (("optimizer.pt",), 99, "optimizer.pt is cut off"),
        (("scheduler.pt",), 99, "scheduler.pt is cut off"),
        (("rng_state.pth",), None, "no rng_state.pth"),
        (("trainer_state.json",), None, "no readable trainer_state.json"),
        (("model.safetensors",), 99, "model.safetensors is cut off"),
    ],
)
def test_checkpoints_that_cannot_be_resumed_are_kept(
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damaged: tuple[str, ...],
    keep: int | None,
    reason: str,
) -> None:
    """They were once overwritten, and deleted by save_total_limit, as if there were no run."""
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    shutil.copytree(
        undisturbed / "out", output, ignore=shutil.ignore_patterns("model.s*", "trainer_s*", "*-24")
    )
    for step in (8, 16):
        shutil.copytree(
            undisturbed / "out" / f"checkpoint-{step}", output / f"checkpoint-{step}", dirs_exist_ok=True
        )
        for name in damaged:
            file = output / f"checkpoint-{step}" / name
            content = file.read_bytes()
            file.unlink()
            if keep is not None:
                file.write_bytes(content[:keep])
    before = contents(output)
    line = refused(capsys, str(job))
    assert f"{output} holds an unfinished run that can't go on (checkpoint-16: {reason}); --resume" in line
    elsewhere = str(undisturbed / "out" / "checkpoint-8")
    assert "that can't go on" in refused(capsys, str(job), "--resume", elsewhere)
    assert f"not a complete checkpoint ({reason})" in refused(
        capsys, str(job), "--resume", str(output / "checkpoint-8")
    )
    # What stops the new run leaves the old one where it is.
    assert "Invalid beta parameter" in refused(capsys, str(job), "--resume", "--adam_beta1", "2")
    assert contents(output) == before
    assert finetune.main([str(job), "--resume"]) == 0
    out = capsys.readouterr().out
    assert f"skipping {output / 'checkpoint-16'}: {reason}\n" in out
    assert f"moved the unfinished run in {output} to {output}.1\n" in out
    assert contents(tmp_path / "out.1") == before
    assert losses(output).keys() == {1, 2}


def test_an_interrupted_run_that_saves_only_models_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart by torchrun moves it aside too, for it has to start from the beginning."""
    original, done, output = finetune.Trainer.training_step, [], tmp_path / "out"

    def interrupt(self: Any, *args: Any, **options: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(1)
        return original(self, *args, **options)

    job = write_job(tmp_path, save_strategy="steps", save_steps=1, save_only_model=True)
    with monkeypatch.context() as patch:
        patch.setattr(finetune.Trainer, "training_step", interrupt)
        assert finetune.main([str(job)]) == 130
    reason = "can't go on (checkpoint-3: save_only_model left out its optimizer); --resume moves it aside"
    assert f"streamattn finetune: interrupted; the run {reason}" in capsys.readouterr().err
    before = contents(output)
    assert reason in refused(capsys, str(job))
    assert contents(output) == before
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert finetune.main([str(job)]) == 0
    assert f"moved the unfinished run in {output} to {output}.1\n" in capsys.readouterr().out
    assert contents(tmp_path / "out.1") == before


def test_a_checkpoint_that_a_user_renamed_is_not_deleted(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer takes it for one of its own; nor does a run go on from it because it was copied last."""
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=25, data=str(undisturbed / "corpus"), save_strategy="epoch")
    shutil.copytree(undisturbed / "out", output)
    shutil.copytree(output / "checkpoint-8", output / "checkpoint-8-best")
    os.utime(output / "checkpoint-8-best" / "trainer_state.json")
    before = contents(output)
    line = refused(capsys, str(job), "--resume", "--save_total_limit", "1")
    assert f"output_dir: save_total_limit may delete {output / 'checkpoint-8-best'}; give it a name" in line
    assert contents(output) == before
    assert finetune.main([str(job), "--resume"]) == 0
    assert f"resuming from {output / 'checkpoint-24'}\n" in capsys.readouterr().out
    kept = contents(output / "checkpoint-8-best")
    assert kept == {k.partition("/")[2]: v for k, v in before.items() if k.startswith("checkpoint-8-best/")}


def test_a_finished_run_is_moved_aside(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, output, before = beside_a_finished_run(undisturbed, tmp_path)
    line = refused(capsys, str(job), "--model", str(output))
    assert f"output_dir: {output} holds a finished run" in line
    assert f"but also {output}, which this job needs there" in line
    monkeypatch.chdir(output)
    assert f"but also {output}, which" in refused(capsys, str(job))
    monkeypatch.chdir(tmp_path)
    assert contents(output) == before

    assert finetune.main([str(job)]) == 0
    assert f"moved the finished run in {output} to {output}.1\n" in capsys.readouterr().out
    assert contents(tmp_path / "out.1") == before
    assert losses(output).keys() == {1}
    # Without checkpoints, and from a checkpoint elsewhere, by a way through the folder that moves.
    second = contents(output)
    elsewhere = str(output / ".." / "out.1" / "checkpoint-16")
    assert finetune.main([str(job), "--resume", elsewhere, "--max_steps", "17"]) == 0
    assert f"moved the finished run in {output} to {output}.2\n" in capsys.readouterr().out
    assert contents(tmp_path / "out.2") == second


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "./no-such-model"], "model: no folder './no-such-model'"),
        (["--tokenizer", "./no-such-tokenizer"], "tokenizer: no folder './no-such-tokenizer'"),
        (["--data", "short.txt"], "the held-out part of .* is shorter than one block"),
        (["--dataloader_drop_last", "--per_device_train_batch_size", "5000"], "expected at most"),
        (["--report_to", "nothing-known"], "nothing-known"),
        # Found when Trainer has begun to set up.
        (["--adam_beta1", "2"], "Invalid beta parameter at index 0: 2.0"),
        (["--resume", "elsewhere/checkpoint-16", "--max_steps", "8"], "this job ends at step 8"),
    ],
)
def test_a_refused_job_leaves_the_finished_run_where_it_is(
    undisturbed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    expected: str,
) -> None:
    job = write_job(tmp_path, max_steps=1)
    shutil.copytree(undisturbed / "out", tmp_path / "out")
    (tmp_path / "elsewhere").symlink_to(undisturbed / "out")
    (tmp_path / "short.txt").write_text("a few words\n" * 20, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    before, beside = contents(tmp_path / "out"), sorted(tmp_path.iterdir())
    assert re.search(expected, refused(capsys, str(job), *words))
    assert contents(tmp_path / "out") == before
    assert not (tmp_path / "out" / ".prepared").exists()
    assert sorted(tmp_path.iterdir()) == beside


def test_ctrl_c_before_the_first_step_leaves_the_finished_run_where_it_is(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    job = write_job(tmp_path, max_steps=1)
    shutil.copytree(undisturbed / "out", tmp_path / "out")
    before = contents(tmp_path / "out")
    for place in ("check_batches", "Trainer.create_optimizer"):
        with monkeypatch.context() as patch:
            patch.setattr(f"streamattn.finetune.{place}", interrupt)
            assert finetune.main([str(job)]) == 130
        line = capsys.readouterr().err
        assert line == (
            "streamattn finetune: interrupted; no step was trained, so give the same command again\n"
        )
        assert contents(tmp_path / "out") == before


def test_a_finished_run_that_cannot_be_moved(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, output, before = beside_a_finished_run(undisturbed, tmp_path)

    def busy(self: Path, target: Path) -> None:
        raise OSError(16, "Device or resource busy", str(self), None, str(target))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", busy)
        line = refused(capsys, str(job))
    assert re.search("output_dir: .*Device or resource busy.*out.1", line)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == output)
    assert "can't be moved aside, for it is a mount point; pass another --output_dir" in refused(
        capsys, str(job)
    )
    assert contents(output) == before


@pytest.mark.parametrize("name", ["blocks", "tokenizer", "checkpoint-4"])
def test_a_corpus_in_the_output_dir_with_one_of_our_names_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    output = tmp_path / "out"
    job = write_job(tmp_path, data=str(output / name))
    shutil.copytree(tmp_path / "corpus", output / name)
    before = contents(tmp_path)
    for words in ([], ["--resume"], ["--data", str(tmp_path / "corpus")]):
        line = refused(capsys, str(job), *words)
        assert str(output / name) in line
        assert line.endswith("pass another --output_dir") or "pass another --output_dir, or" in line
        assert contents(tmp_path) == before


def test_a_second_job_in_one_output_dir_is_refused(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It once moved the running one aside, after whose first checkpoint the second came to begin."""
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=100_000, save_strategy="steps", save_steps=8)
    shutil.copytree(undisturbed / "out", output)
    process = start(str(job))
    try:
        deadline = time.monotonic() + 100
        while not (tmp_path / "out.1").exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for words in ([], ["--resume"]):
            line = refused(capsys, str(job), *words)
            assert f"output_dir: a run of process {process.pid} on " in line
            assert f" is using {output}; wait for its end, or pass another --output_dir" in line
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out", "out.1"]
    assert contents(tmp_path / "out.1") == contents(undisturbed / "out")


def test_brackets_in_a_path_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, max_steps=1, output_dir=str(tmp_path / "m[/b]"))
    for _ in range(2):  # the second moves the first
        assert finetune.main([str(job)]) == 0
        assert "m[/b]" in capsys.readouterr().out.split("saved in")[1]
    assert (tmp_path / "m[/b].1" / "model.safetensors").exists()


def test_an_output_dir_that_cannot_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for name, expected in (
        ("loop", "can't use .*loop as a folder"),
        ("job.yaml", "can't use .*job.yaml as a folder"),
        ("job.yaml/x", "can't use .*job.yaml/x as a folder .Not a directory"),
    ):
        line = refused(capsys, str(write_job(tmp_path)), "--output_dir", str(tmp_path / name))
        assert re.search(f"output_dir: {expected}.*; pass another --output_dir", line)


def test_a_linked_output_dir_stays_on_its_disk(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    link = tmp_path / "out"
    job = write_job(tmp_path, max_steps=1)
    link.symlink_to(disk / "run")  # its target is made
    assert finetune.main([str(job)]) == 0
    first = contents(disk / "run")
    assert finetune.main([str(job)]) == 0
    assert f"moved the finished run in {link} to {disk / 'run.1'}\n" in capsys.readouterr().out
    assert link.readlink() == disk / "run"
    assert contents(disk / "run.1") == first
    assert losses(disk / "run").keys() == {1}
    assert sorted(disk.iterdir()) == [disk / "run", disk / "run.1"]
    assert not list(tmp_path.glob("out.*"))
    # What the job needs is found behind the link too.
    line = refused(capsys, str(job), "--model", str(disk / "run"))
    assert f"but also {disk / 'run'}, which this job needs there" in line


def test_a_run_moves_before_anything_is_written(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other callbacks write when training begins, TensorBoard's for one."""

    def write(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        (Path(args.output_dir) / "events").write_text("")

    monkeypatch.setattr(finetune.RecordWorldSize, "on_train_begin", write)
    shutil.copytree(undisturbed / "out", tmp_path / "out")
    assert finetune.main([str(write_job(tmp_path, max_steps=1))]) == 0
    assert (tmp_path / "out" / "events").exists()
    assert contents(tmp_path / "out.1") == contents(undisturbed / "out")


def test_a_checkpoint_without_steps_left_is_evaluated_beside_the_finished_run(
    undisturbed: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path, max_steps=1)
    assert finetune.main([str(job)]) == 0
    before = contents(tmp_path / "out")
    checkpoint = str(undisturbed / "out" / "checkpoint-16")
    assert finetune.main([str(job), "--resume", checkpoint, "--max_steps", "16"]) == 0
    assert contents(tmp_path / "out.1") == before
    saved, resumed = (load_file(path / "model.safetensors") for path in (tmp_path / "out", Path(checkpoint)))
    assert all(torch.equal(saved[name], resumed[name]) for name in resumed)


def test_a_job_refused_under_max_restarts_is_refused_again(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished run that still lies there isn't the restarted job's."""
    job, output, before = beside_a_finished_run(undisturbed, tmp_path)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    for restart in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        assert "Invalid beta parameter" in refused(capsys, str(job), "--adam_beta1", "2")
        assert (output / ".prepared").exists() == (restart < 2)
    assert contents(output) == before
    # Killed before its first step, it starts when it is started again; killed behind it, it goes on.
    (output / ".prepared").mkdir()
    assert finetune.main([str(job), "--save_strategy", "steps", "--save_steps", "1"]) == 0
    assert contents(tmp_path / "out.1") == before
    assert finetune.main([str(job)]) == 0
    assert f"the run in {output} is finished at step 1 of 1" in capsys.readouterr().out


def test_resume_of_a_finished_run_touches_nothing(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=24, data=str(undisturbed / "corpus"))
    shutil.copytree(undisturbed / "out", output)
    before = contents(output)
    finished = f"the run in {output} is finished at step 24 of 24: nothing is left to do\n"
    assert finetune.main([str(job), "--resume"]) == 0
    assert capsys.readouterr().out.endswith(finished)
    line = refused(capsys, str(job), "--resume", "--max_steps", "8")
    assert "the checkpoint is at step 24 but this job ends at step 8; pass a larger max_steps" in line
    assert contents(output) == before
    # One that keeps earlier checkpoints only.
    shutil.rmtree(output / "checkpoint-24")
    assert finetune.main([str(job), "--resume"]) == 0
    assert capsys.readouterr().out.endswith(finished)
    assert contents(output) == {
        name: text for name, text in before.items() if not name.startswith("checkpoint-24")
    }


def test_a_run_killed_behind_its_last_checkpoint_is_saved(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=24, data=str(undisturbed / "corpus"))
    shutil.copytree(undisturbed / "out", output)
    (output / "trainer_state.json").unlink()
    (output / "model.safetensors").unlink()
    assert finetune.main([str(job), "--resume"]) == 0
    out = capsys.readouterr().out
    assert "held-out perplexity" in out
    assert "training loss" not in out
    assert losses(output) == losses(undisturbed / "out")
    ends = [path / "model.safetensors" for path in (undisturbed / "out", output)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_resumed_job_must_be_the_same(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, data=str(undisturbed / "corpus"))
    shutil.copytree(undisturbed / "out", tmp_path / "out")
    line = refused(capsys, str(job), "--resume", "--seq_len", "16")
    assert "seq_len: this run began with 32" in line
    line = refused(capsys, str(job), "--resume", "--shape", "olmo2-nano")
    assert "checkpoint-24 has 384 and can't go on with 4096" in line
    shape = tmp_path / "shape.yaml"
    text = shape.read_text(encoding="utf-8")
    for key, began, goes_on in (("n_layer", 2, 3), ("n_head", 2, 4), ("vocab_size", 384, 512)):
        shape.write_text(text.replace(f"{key}: {began}", f"{key}: {goes_on}"), encoding="utf-8")
        line = refused(capsys, str(job), "--resume")
        assert f"{key}: " in line
        assert f"checkpoint-24 has {began} and can't go on with {goes_on}" in line
    shape.write_text(text, encoding="utf-8")
    finetune.train_tokenizer([str(i) for i in range(2000)], 384).save_pretrained(tmp_path / "other")
    other = ["--tokenizer", str(tmp_path / "other")]
    assert "tokenizer: this run began with None" in refused(capsys, str(job), "--resume", *other)
    checkpoint = str(tmp_path / "out" / "checkpoint-16")
    other += ["--output_dir", str(tmp_path / "elsewhere")]
    line = refused(capsys, str(job), "--resume", checkpoint, *other)
    assert f"tokenizer: not the vocabulary of {checkpoint}" in line


def test_another_number_of_processes_is_said(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, max_steps=24, data=str(undisturbed / "corpus"))
    checkpoint = tmp_path / "out" / "checkpoint-16"
    shutil.copytree(
        undisturbed / "out", tmp_path / "out", ignore=shutil.ignore_patterns("*-24", "trainer_s*")
    )
    shutil.copy(undisturbed / "out" / "checkpoint-16" / "trainer_state.json", checkpoint)
    state = checkpoint / "trainer_state.json"
    state.write_text(state.read_text().replace('"world_size": 1', '"world_size": 2'), encoding="utf-8")
    for rank in range(2):
        shutil.copy(checkpoint / "rng_state.pth", checkpoint / f"rng_state_{rank}.pth")
    assert finetune.main([str(job), "--resume"]) == 0
    out = capsys.readouterr().out
    assert f"resuming from {checkpoint} of 2 process(es) with 1: dropout draws other" in out


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_job_killed_while_it_writes_a_checkpoint_goes_on_with_the_same_losses(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    """Its second, with half of the file on the disk."""
    job = write_job(tmp_path, max_steps=24, save_strategy="steps", save_steps=8)
    whole = (undisturbed / "out" / "checkpoint-16" / file).read_bytes()
    half = tmp_path / "half"
    half.write_bytes(whole[: len(whole) // 2])
    writes = {
        "model.safetensors": "transformers.modeling_utils.safe_save_file",
        "optimizer.pt": "transformers.trainer.Trainer._save_optimizer_and_scheduler",
    }[file]
    code = f"""if True:
        import os, shutil, signal, sys
        from unittest import mock
        from pkgutil import resolve_name
        from streamattn import finetune
        target = "{tmp_path / "out" / "checkpoint-16"}"
        owner, _, name = "{writes}".rpartition(".")
        original = getattr(resolve_name(owner), name)
        def killed(*words, **options):
            if os.path.isdir(target):
                shutil.copy("{half}", target + "/{file}")
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*words, **options)
        with mock.patch("{writes}", killed):
            finetune.main(["{job}"])
    """
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # as here: two add up in another order
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=one_thread, timeout=150)
    assert done.returncode == -signal.SIGKILL
    cut = tmp_path / "out" / "checkpoint-16"
    assert (cut / file).stat().st_size == len(whole) // 2
    capsys.readouterr()
    assert finetune.main([str(job), "--resume"]) == 0
    out = capsys.readouterr().out
    assert f"skipping {cut}: no readable trainer_state.json" in out
    assert f"resuming from {tmp_path / 'out' / 'checkpoint-8'}" in out
    assert losses(tmp_path / "out") == losses(undisturbed / "out")
    ends = [path / "out" / "model.safetensors" for path in (undisturbed, tmp_path)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_named_checkpoint_brings_its_tokenizer(undisturbed: Path, tmp_path: Path) -> None:
    """Into another output_dir, where nothing was prepared."""
    job = write_job(tmp_path, max_steps=24, data=str(undisturbed / "corpus"))
    assert finetune.main([str(job), "--resume", str(undisturbed / "out" / "checkpoint-16")]) == 0
    assert losses(tmp_path / "out") == losses(undisturbed / "out")
