"""What earlier runs left in ``output_dir``, and how a run takes the folder without losing any of it.

A run that is told to resume goes on from the newest complete checkpoint; without one it starts from the
beginning and says so, for whoever starts jobs again when they end gives the same command every time.

Nothing there is deleted but what this code itself put into ``.prepared``. A finished run is moved aside as a
whole, and so is one of whose checkpoints none can be resumed, if the job was told to resume; the text of one
that was cut short before its first checkpoint is renamed; a folder that bears one of our names and isn't ours
refuses the job.

Layout: ``checkpoint-<step>/`` and the model are ``transformers.Trainer``'s, ``blocks/`` and ``tokenizer/``
hold the run's text, ``.prepared/`` that of a run which hasn't begun, ``.streamattn.lock`` names the process
that runs.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainingArguments

from streamattn.checkpoints import (
    all_checkpoints,
    keep_batch,
    last_checkpoint,
    trainer_state,
    why_incomplete,
    world_size_of,
)
from streamattn.job import Job

LOCK = ".streamattn.lock"
PARTS = ("blocks", "tokenizer")


def cannot_write(error: BaseException, folder: Path) -> str | None:
    """If ``error`` came of writing into ``folder``, what to say of it: why, how much is free, what to do.

    The libraries that write checkpoints say it in their own ways, torch without the system's reason.
    """
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, OSError):
        known = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
        if error.errno is None:  # numpy's, after a short write; those of networks have none either
            known = re.search(r"\d+ requested and \d+ written", reason)
    else:
        known = re.search(r"os error (5|27|28|30|122)\b|inline_container|PytorchStreamWriter", reason)
    if not known:
        return None
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    if "inline_container" in reason or "PytorchStreamWriter" in reason:
        reason = "a file was cut short"
    return (
        f"output_dir: can't write to {folder}, where {free / 2**20:,.1f} MiB are free ({reason}); make room "
        "there, or pass another --output_dir"
    )


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of writing into ``folder`` into a ValueError of one line."""
    try:
        yield
    except Exception as error:  # tokenizers raises no narrower one
        if (line := cannot_write(error, folder)) is None:
            raise
        raise ValueError(line) from error


def last_step(output_dir: Path) -> int | None:
    """The step at which the run in ``output_dir`` ended; None if none did."""
    try:
        return trainer_state(output_dir)["global_step"]  # this state is saved after the model
    except (OSError, ValueError):
        return None


def holds_run(output_dir: Path) -> bool:
    """Whether a run left a model there, or a checkpoint: of a broken one the weights may still be wanted."""
    return _has_ended(output_dir) or any(any(folder.iterdir()) for folder in all_checkpoints(output_dir))


def _has_ended(output_dir: Path) -> bool:
    return (output_dir / "trainer_state.json").exists() or any(output_dir.glob("*.safetensors"))


def cannot_go_on(output_dir: Path) -> str | None:
    """Why none of an unfinished run's checkpoints can be resumed; None if one can, or if there are none."""
    found, broken = last_checkpoint(output_dir)
    reasons = [f"{folder.name}: {reason}" for folder, reason in broken.items() if any(folder.iterdir())]
    return reasons[-1] if reasons and found is None and not _has_ended(output_dir) else None


def steps_left(output_dir: Path) -> tuple[int, int] | None:
    """The step that an unfinished run in ``output_dir`` has reached, and its last; None if there is none."""
    found, _ = last_checkpoint(output_dir)
    if found is None:
        return None
    state, ended = trainer_state(found), last_step(output_dir)
    step, steps = state["global_step"], state["max_steps"]
    # A run that keeps no checkpoints, or only its best, ends behind the newest.
    return None if step >= steps or (ended is not None and ended > step) else (step, steps)


class Finished(Exception):
    """The run that was to go on is at its last step."""

    def __init__(self, output_dir: Path | str, step: int) -> None:
        super().__init__(
            f"the run in {output_dir} is finished at step {step} of {step}: nothing is left to do"
        )


class Lock:
    """A file in ``folder`` that this process alone has locked.

    The system lets go of it when the process ends, however it ends: what a killed one leaves stops nobody.
    A record lock, for DataLoader's forked workers don't inherit it, and other hosts of a network file system
    see it. Where a file system has no locks, nothing is locked.

    Raises:
        ValueError: another process has it.
        OSError: the file can't be made.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    owner = os.read(self._file, 200).decode(errors="replace") or "another process"
                    os.close(self._file)
                    raise ValueError(
                        f"output_dir: a run of {owner} is using {folder}; wait for its end, or pass another "
                        "--output_dir"
                    ) from None
            if self.held():
                break
            os.close(self._file)  # its owner removed it between the two calls
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def held(self) -> bool:
        """Whether the file still lies where it was locked."""
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self.path))
        except OSError:
            return False

    def release(self, remove: bool = True) -> None:
        """Let go of the file."""
        if remove and self.held():
            self.path.unlink()
        os.close(self._file)


class RunFolder:
    """A job's ``output_dir`` from the checks before its start to its end.

    Every process of a launch has one; the one that saves calls `hold`, `prepare` and `take`.

    Args:
        job: the job.
        environment: torchrun's variables.

    Attributes:
        path: ``output_dir`` behind all links, so that its files stay on their disk.
        prepared: where a new run's tokenizer and text wait until it begins: until then an earlier one may lie
            in ``path``. While the folder is there, the run that was to start has not begun.
        restarts: how often torchrun --max-restarts has started this job again.
        resumes: whether the job was told to go on, so that a run which can't is moved aside;
            `checkpoint_to_resume` sets it.
    """

    resumes = False

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        self.job = job
        self.path = Path(os.path.realpath(job.output_dir))
        self.prepared = self.path / ".prepared"
        self.restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.last_try = self.restarts >= int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        self._made: list[Path] = []
        self._lock: Lock | None = None
        self._waiting: Lock | None = None  # in `prepared`

    def hold(self) -> None:
        """Make the folder, and keep other runs out of it until `close`.

        Raises:
            ValueError: another run has it, or it can't be a folder.
        """
        try:
            self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path)
        except OSError as error:
            raise ValueError(
                f"output_dir: can't use {self.path} as a folder ({error.strerror}); pass another --output_dir"
            ) from None

    def prepare(self) -> None:
        """Make `prepared`, or empty it; the folder itself stays, for others may be looking for it.

        Raises:
            ValueError: something else has its name.
        """
        if os.path.lexists(self.prepared) and not self._prepared_is_ours():
            raise self._foreign(self.prepared)
        self.prepared.mkdir(exist_ok=True)
        self._empty_prepared()
        self._waiting = Lock(self.prepared)

    def check_start(self) -> None:
        """Raise ValueError if a run that starts here would bury an unfinished one, or move a user's files."""
        if (left := steps_left(self.path)) is not None:
            raise ValueError(
                f"{self.job.output_dir} holds an unfinished run at step {left[0]} of {left[1]}; "
                "go on with --resume, or start afresh with another --output_dir"
            )
        reason = cannot_go_on(self.path)
        if reason is not None and not self.resumes:
            raise ValueError(
                f"{self.job.output_dir} holds an unfinished run that can't go on ({reason}); --resume moves "
                "it aside and starts from the beginning, or pass another --output_dir"
            )
        if holds_run(self.path):
            kind = "a finished" if reason is None else "an unfinished"
            if os.path.ismount(self.path):
                raise ValueError(
                    f"output_dir: {self.path} holds {kind} run, but can't be moved aside, for it is a "
                    "mount point; pass another --output_dir"
                )
            self._check_needed(self.path, f"holds {kind} run, which would be moved aside, but also")
            return
        for name in PARTS:
            self._check_needed(self.path / name, "would be replaced by this run's, but holds")
        blocks, tokenizer = (self.path / name for name in PARTS)
        made_from = _made_from(blocks)
        if os.path.lexists(blocks) and made_from is None:
            raise self._foreign(blocks)
        trained = made_from is not None and made_from.get("tokenizer") is None and not tokenizer.is_symlink()
        if os.path.lexists(tokenizer) and not (trained and (tokenizer / "tokenizer.json").is_file()):
            raise self._foreign(tokenizer)

    def check_checkpoints(self) -> None:
        """Raise ValueError for a user's folder with a checkpoint's name: Trainer may delete it."""
        for folder in sorted(self.path.glob("checkpoint-*")):
            # Trainer counts a checkpoint-8-best among its own.
            longer = re.match(r"checkpoint-\d+\D", folder.name)
            if longer and folder.is_dir() and self.job.training.get("save_total_limit") is not None:
                raise ValueError(
                    f"output_dir: save_total_limit may delete {folder}; give it a name that doesn't start "
                    "like a checkpoint's, or pass another --output_dir"
                )
            if re.fullmatch(r"checkpoint-\d+", folder.name):
                self._check_needed(folder, "is named like a checkpoint of this run, but holds")
                names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
                ours = {"config.json", "trainer_state.json"} & names
                if names and not ours and not any(name.startswith("rng_state") for name in names):
                    raise self._foreign(folder)

    def take(self) -> list[str]:
        """Give the folder to the run that now begins: an earlier one moves out, `prepared` moves in.

        A finished run's folder, or that of one which can't go on, is renamed to the next free
        ``<output_dir>.1``, ``<output_dir>.2``, ..., the text of one that was cut short to ``blocks.1`` and so
        on. A move that fails is taken back.

        Returns:
            What to say of that: a line for each thing moved.

        Raises:
            ValueError: the folder is no longer as it was when the job was checked.
            OSError: it can't be renamed.
        """
        lock, waiting = self._lock, self._waiting
        if lock is None or waiting is None or not lock.held() or not waiting.held():
            raise ValueError(
                f"output_dir: another run took {self.path} meanwhile; wait for its end, or pass another "
                "--output_dir"
            )
        self.check_start()
        if holds_run(self.path):
            kind = "finished" if cannot_go_on(self.path) is None else "unfinished"
            aside = _next_free(self.path)
            _move((self.path, aside), (aside / self.prepared.name, self.path))
            lock.path, waiting.path = aside / LOCK, self.path / LOCK
            self._lock, self._waiting = waiting, None
            lock.release()
            return [f"moved the {kind} run in {self.job.output_dir} to {aside}"]
        old = [self.path / name for name in PARTS if os.path.lexists(self.path / name)]
        moved = [(path, _next_free(path)) for path in old]
        new = [path for name in PARTS if (path := self.prepared / name).exists()]
        _move(*moved, *((path, self.path / path.name) for path in new))
        self._waiting = None
        waiting.release()
        self.prepared.rmdir()
        return [f"moved {path} of a run that was cut short to {aside}" for path, aside in moved]

    def close(self) -> None:
        """Let others in; of a run that didn't begin nothing stays, unless torchrun tries once more."""
        if self._waiting is not None:
            if self.last_try and self._waiting.held():
                with suppress(OSError):  # what stays is replaced by the next run
                    self._empty_prepared()
                    self.prepared.rmdir()
            self._waiting.release(remove=False)
        if self._lock is not None:
            self._lock.release()
        for path in self._made:
            with suppress(OSError):  # it holds something
                path.rmdir()
        self._lock = self._waiting = None

    def _prepared_is_ours(self) -> bool:
        if self.prepared.is_symlink() or not self.prepared.is_dir():
            return False
        parts = {path.name: path for path in self.prepared.iterdir()}
        known = all(name in PARTS and not path.is_symlink() for name, path in parts.items() if name != LOCK)
        return not parts or (LOCK in parts and known)

    def _empty_prepared(self) -> None:
        for name in PARTS:
            if (self.prepared / name).exists():
                shutil.rmtree(self.prepared / name)
        (self.prepared / LOCK).unlink(missing_ok=True)  # last: without it the rest would not be known as ours

    def _check_needed(self, folder: Path, why: str) -> None:
        job = self.job
        for needed in filter(None, (Path.cwd(), job.config, job.model, job.shape, job.tokenizer, job.data)):
            path = Path(needed).resolve()
            if path.exists() and folder.resolve() in (path, *path.parents):
                raise ValueError(
                    f"output_dir: {folder} {why} {path}, which this job needs there; "
                    "pass another --output_dir"
                )

    def _foreign(self, path: Path) -> ValueError:
        return ValueError(
            f"output_dir: {path} was not written by an earlier run, and this one would put its own there; "
            "pass another --output_dir, or move it away"
        )


def checkpoint_to_resume(
    job: Job, arguments: TrainingArguments, folder: RunFolder
) -> tuple[str | None, bool]:
    """The checkpoint to go on from, None at a fresh start; and whether the run starts in ``output_dir``.

    Into another ``output_dir`` it may start from a checkpoint.

    Raises:
        ValueError: the named checkpoint isn't complete, or a start would bury an unfinished run.
        Finished: the run to go on with ended, and left no checkpoint from which it could be prolonged.
    """
    output = job.output_dir
    if arguments.should_save:
        folder.hold()
    folder.check_checkpoints()
    # Where the text still waits, the try before this one didn't begin: an earlier run lies there.
    restarted = folder.restarts > 0 and not folder.prepared.exists()
    named = job.resume if isinstance(job.resume, str) else arguments.resume_from_checkpoint
    # The main process knows; the others may find what it prepares for this try.
    may_be = restarted or (folder.restarts > 0 and not arguments.should_save)
    folder.resumes = named is None and (bool(job.resume) or may_be)
    found, broken = last_checkpoint(output)
    state = None if found is None else trainer_state(found)
    last = last_step(output)
    # A run that keeps no checkpoints, or only its best, ends behind the newest.
    ended = last is not None and (state is None or last > state["global_step"])
    console = Console(quiet=arguments.process_index != 0)
    if named is not None:
        reason = why_incomplete(Path(named)) if Path(named).is_dir() else "no such folder"
        if reason is not None:
            raise ValueError(
                f"resume: {named!r} is not a complete checkpoint ({reason}); pass an earlier one, or "
                "--resume alone for the newest that is complete"
            )
        named = os.path.realpath(named)  # a way through output_dir ends when that is moved
        if (note := keep_batch(Path(named), arguments, job.context_parallel_size)) is not None:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        if restarted or output.resolve() in Path(named).resolve().parents:
            return named, False
    elif job.resume or restarted:
        for incomplete, reason in broken.items():
            console.print(f"skipping {incomplete}: {reason}", markup=False, soft_wrap=True)
        if last is not None and ended and arguments.max_steps <= last:
            raise Finished(output, last)
        note = f"nothing to resume: no complete checkpoint in {output}, starting from the beginning"
        if found is not None:
            note = f"resuming from {found}"
            if (before := world_size_of(found)) != arguments.world_size:
                note += (
                    f" of {before} process(es) with {arguments.world_size}: dropout draws other numbers than "
                    "in an undisturbed run"
                )
        console.print(note, markup=False, highlight=False, soft_wrap=True)
        if found is not None:
            if (note := keep_batch(found, arguments, job.context_parallel_size)) is not None:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
            return str(found), False
    if arguments.should_save:
        folder.prepare()
    folder.check_start()
    return named, True


def _made_from(blocks: Path) -> dict[str, Any] | None:
    """What a run says of its blocks of text; None if the folder isn't a run's."""
    try:
        made_from = json.loads((blocks / "made_from.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(made_from, dict) and {"data", "seq_len", "vocab_size"} <= made_from.keys()
    return made_from if ours and not blocks.is_symlink() else None


def _next_free(path: Path) -> Path:
    names = (f"{path.name}.{number}" for number in itertools.count(1))
    return next(free for name in names if not os.path.lexists(free := path.with_name(name)))


def _move(*moves: tuple[Path, Path]) -> None:
    """Rename each first path to its second; all of them, or none."""
    begun: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            begun.append((source, target))
            source.rename(target)
    except BaseException as error:
        if os.path.lexists(begun[-1][0]):
            begun.pop()  # it didn't happen
        for source, target in reversed(begun):
            try:
                target.rename(source)
            except OSError:
                raise OSError(f"{error or 'interrupted'}; what was {source} is now {target}") from error
        raise
