"""A run takes its output folder: nobody's files are lost, and of two runs at once one is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from streamattn import checkpoints, run_folder
from streamattn.job import Job
from streamattn.run_folder import LOCK, RunFolder, checkpoint_to_resume
from tests.finetune_jobs import ROOT

MADE_FROM = {"data": None, "seq_len": 8, "tokenizer": None, "vocab_size": 300}
TRIES = {"TORCHELASTIC_MAX_RESTARTS": "1"}


def folder_of(output: Path, environment: dict[str, str] | None = None, **values: Any) -> RunFolder:
    job = Job(
        config=Path("configs/x.yaml"), training={"output_dir": str(output)}, shape="gpt2-nano", **values
    )
    return RunFolder(job, environment or {})


def start(folder: RunFolder) -> None:
    """A run's first calls, in its main process."""
    folder.hold()
    folder.check_checkpoints()
    folder.prepare()
    folder.check_start()


def prepared(folder: RunFolder, text: str) -> RunFolder:
    """As a run's main process leaves it before the first step."""
    start(folder)
    files = {"blocks/made_from.json": json.dumps(MADE_FROM), "blocks/train": text}
    for name, content in (files | {"tokenizer/tokenizer.json": text}).items():
        (folder.prepared / name).parent.mkdir(exist_ok=True)
        (folder.prepared / name).write_text(content, encoding="utf-8")
    return folder


def take(output: Path, text: str) -> list[str]:
    folder = prepared(folder_of(output), text)
    notes = folder.take()
    folder.close()
    return notes


def files(root: Path) -> dict[str, str]:
    """Texts by path, less what the blocks were made from."""
    found = (file for file in root.rglob("*") if file.is_file() and file.name != "made_from.json")
    return {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in found}


def checkpoint(folder: Path, step: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an unfinished run; its weights are of no interest here."""
    folder.mkdir(parents=True)
    state = {"global_step": step, "max_steps": steps, "log_history": []}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    monkeypatch.setattr(checkpoints, "why_incomplete", lambda _: None)


def in_another_process(output: Path, text: str) -> subprocess.Popen[str]:
    """Run ``text`` with `folder`, which that process holds; it prints a line when it does, and then waits."""
    code = (
        "import sys; from pathlib import Path; from tests.test_run_folder import folder_of, prepared\n"
        f"folder = folder_of(Path({str(output)!r}))\n{text}\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_nothing_is_lost_when_a_run_takes_its_folder(tmp_path: Path) -> None:
    """The text of a run that was cut short is renamed; a finished run moves to the next free name."""
    output = tmp_path / "out"
    assert take(output, "first") == []
    first = {"out/blocks/train": "first", "out/tokenizer/tokenizer.json": "first"}
    assert files(tmp_path) == first
    (output / "blocks" / "notes").write_text("a user's", encoding="utf-8")
    notes = take(output, "second")
    assert notes == [
        f"moved {output / n} of a run that was cut short to {output / n}.1" for n in run_folder.PARTS
    ]
    second = dict.fromkeys(first, "second")
    earlier = {"out/blocks.1/train": "first", "out/blocks.1/notes": "a user's"}
    earlier["out/tokenizer.1/tokenizer.json"] = "first"
    assert files(tmp_path) == second | earlier
    (output / "model.safetensors").write_text("model", encoding="utf-8")
    before = files(output)
    (tmp_path / "out.1").symlink_to("nowhere")
    assert take(output, "third") == [f"moved the finished run in {output} to {output}.2"]
    moved = {f"out.2/{name}": text for name, text in before.items()}
    assert files(tmp_path) == moved | dict.fromkeys(first, "third")
    assert sorted(path.name for path in output.iterdir()) == ["blocks", "tokenizer"]
    assert not list(tmp_path.rglob(LOCK)) and not list(tmp_path.rglob(".prepared"))


@pytest.mark.parametrize("name", ["blocks", "tokenizer", "checkpoint-4", ".prepared"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_users_folder_with_one_of_our_names_refuses_the_job(tmp_path: Path, name: str, kind: str) -> None:
    """A fresh run once deleted it; a link was not followed, but what it led to could be a run's."""
    output = tmp_path / "out"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "corpus.txt").write_text("mine", encoding="utf-8")
    output.mkdir()
    if kind == "link":
        (output / name).symlink_to(tmp_path / "mine")
    elif kind == "folder":
        (tmp_path / "mine").rename(output / name)
    else:
        (output / name).write_text("mine", encoding="utf-8")
    before = files(tmp_path)
    folder = folder_of(output)
    with pytest.raises(ValueError, match=r"was not written by .*pass another --output_dir") as error:
        start(folder)
    assert str(output / name) in str(error.value)
    folder.close()
    assert files(tmp_path) == before
    assert [path.name for path in output.iterdir()] == [name]


def test_a_tokenizer_that_no_run_trained_is_a_users(tmp_path: Path) -> None:
    """The run beside it was given another."""
    take(tmp_path, "first")
    (tmp_path / "blocks" / "made_from.json").write_text(json.dumps(MADE_FROM | {"tokenizer": "gpt2"}))
    with pytest.raises(ValueError, match="tokenizer was not written by an earlier run"):
        take(tmp_path, "second")


@pytest.mark.parametrize("part", ["blocks", "tokenizer", "checkpoint-4"])
@pytest.mark.parametrize("key", ["data", "tokenizer"])
def test_what_the_job_reads_does_not_move(tmp_path: Path, part: str, key: str) -> None:
    take(tmp_path, "first")
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / part / "mine").mkdir()
    folder = folder_of(tmp_path, {}, **{key: str(tmp_path / part / "mine")})
    holds = f"{part} .* but holds {tmp_path / part / 'mine'}, which this job needs there"
    with pytest.raises(ValueError, match=holds):
        start(folder)


def test_a_folder_in_use_is_refused_and_a_killed_process_stops_nobody(tmp_path: Path) -> None:
    for what in ("folder.hold()", "prepared(folder, 'theirs')", "prepared(folder, 'theirs').take()"):
        output = tmp_path / str(len(what))
        other = in_another_process(output, what)
        before = files(output)
        folder = folder_of(output)
        with pytest.raises(ValueError, match=f"a run of process {other.pid} on .* is using {output}; wait"):
            folder.hold()
        folder.close()
        assert files(output) == before
        other.kill()
        other.communicate()
        assert (output / LOCK).exists()
        take(output, "mine")
        assert files(output)["blocks/train"] == "mine"
        assert not (output / LOCK).exists()


def test_the_lock_follows_the_run_that_moves_in(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "model.safetensors").write_text("model", encoding="utf-8")
    other = in_another_process(output, "prepared(folder, 'theirs').take()")
    with pytest.raises(ValueError, match="is using"):
        folder_of(output).hold()
    assert (tmp_path / "out.1" / "model.safetensors").exists()
    other.communicate("")


def test_a_run_that_began_meanwhile_is_not_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without locks."""
    output = tmp_path / "out"
    folder = prepared(folder_of(output), "mine")
    checkpoint(output / "checkpoint-8", 8, 40, monkeypatch)
    with pytest.raises(ValueError, match="holds an unfinished run at step 8 of 40; go on with --resume"):
        folder.take()
    (output / "checkpoint-8").rename(tmp_path / "elsewhere")
    prepared(folder_of(output), "theirs")
    with pytest.raises(ValueError, match=f"another run took {output} meanwhile"):
        folder.take()
    folder.close()
    assert files(output / ".prepared")["blocks/train"] == "theirs"


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(16, "Device or resource busy")])
@pytest.mark.parametrize("behind", [False, True])
def test_a_move_that_fails_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, error: BaseException, behind: bool
) -> None:
    """At whichever of its renames, before or behind it."""
    rename = Path.rename
    for failing in range(2 if finished else 4):
        output = tmp_path / f"out{failing}"
        take(output, "first")
        if finished:
            (output / "model.safetensors").write_text("model", encoding="utf-8")
        before = files(output)
        folder = prepared(folder_of(output), "second")
        done: list[Path] = []

        def fail(self: Path, target: Path, done: list[Path] = done, failing: int = failing) -> None:
            done.append(self)
            if len(done) - 1 == failing and not behind:
                raise error
            rename(self, target)
            if len(done) - 1 == failing:
                raise error

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail)
            with pytest.raises(type(error)):
                folder.take()
        folder.close()
        assert files(output) == before
    assert len(list(tmp_path.iterdir())) == (2 if finished else 4)


def test_what_cannot_be_put_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    take(output, "first")
    (output / "model.safetensors").write_text("model", encoding="utf-8")
    folder = prepared(folder_of(output), "second")
    rename, done = Path.rename, []

    def fail(self: Path, target: Path) -> None:
        done.append(self)
        if len(done) > 1:
            raise OSError(5, "Input/output error")
        rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match=f"Input/output error; what was {output} is now {output}.1"):
        folder.take()


def test_what_was_prepared_is_dropped_by_the_process_that_made_it(tmp_path: Path) -> None:
    """And only where torchrun won't try again; of a run that didn't begin no new folder stays."""
    output = tmp_path / "new" / "out"
    for environment, dropped in (
        ({}, True),
        (TRIES | {"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        (TRIES | {"TORCHELASTIC_RESTART_COUNT": "1"}, True),
    ):
        folder = prepared(folder_of(output, environment), "text")
        folder_of(output, environment).close()  # another rank's
        assert (folder.prepared / "blocks").exists()
        folder.close()
        assert folder.prepared.exists() != dropped, environment
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "new", output]  # that was there for the last try
    folder = prepared(folder_of(tmp_path / "a" / "b"), "text")
    folder.close()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("main", "begun"), [(True, True), (True, False), (False, False)])
def test_a_restart_moves_aside_only_what_its_own_tries_left(
    tmp_path: Path, main: bool, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first try was refused, the run that can't go on is another's; only the main process knows."""
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}", encoding="utf-8")
    folder = folder_of(tmp_path, TRIES | {"TORCHELASTIC_RESTART_COUNT": "1"})
    if not begun:
        folder.prepared.mkdir()
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    monkeypatch.setattr(TrainingArguments, "should_save", main)
    if main and not begun:
        with pytest.raises(ValueError, match=r"can't go on \(checkpoint-2: no readable trainer_state.json"):
            checkpoint_to_resume(folder.job, arguments, folder)
    else:
        assert checkpoint_to_resume(folder.job, arguments, folder) == (None, True)
    folder.close()
    assert (checkpoint / "config.json").exists()


def test_what_is_no_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for name in ("loop", "loop/x", "file", "file/x", "x" * 300):
        folder = folder_of(tmp_path / name)
        with pytest.raises(ValueError, match=r"can't use .* as a folder .*; pass another --output_dir"):
            folder.hold()
        folder.close()
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]
