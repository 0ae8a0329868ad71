"""Trainer's checkpoints: which of them are complete, what they record for the next launch, how it goes on.

A checkpoint is complete or is not there, whichever process is killed while it is written: its
``trainer_state.json`` is written last, and `why_incomplete` looks at the other files too, for checkpoints
come from elsewhere. What a host loses that fails before its disk has caught up shows as a file cut short.

Left out on purpose: saving in the background.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from streamattn.job import load_pretrained


def world_size_of(checkpoint: Path) -> int:
    """How many processes wrote a checkpoint; 1 if it doesn't say.

    Raises:
        OSError, ValueError, TypeError, KeyError, AttributeError: its state can't be read.
    """
    recorded = trainer_state(checkpoint)["stateful_callbacks"].get(RecordWorldSize.__name__, {})
    return int(recorded.get("args", {}).get("world_size", 1))


def blocks_of_step(arguments: TrainingArguments, context_parallel_size: int) -> int | None:
    """How many blocks of text all processes together take in one step; None if Trainer finds it out."""
    if arguments.auto_find_batch_size:
        return None
    groups = arguments.world_size // context_parallel_size
    return arguments.train_batch_size * arguments.gradient_accumulation_steps * groups


def keep_batch(checkpoint: Path, arguments: TrainingArguments, context_parallel_size: int) -> str | None:
    """Have a step take as many blocks of text as before, so that the order of the data goes on.

    Args:
        checkpoint: the one to go on from.
        arguments: whose ``gradient_accumulation_steps`` is changed, if need be.
        context_parallel_size: processes that share one sequence.

    Returns:
        What to say of a change.

    Raises:
        ValueError: no number of accumulation steps does it.
    """
    recorded = trainer_state(checkpoint)["stateful_callbacks"].get(RecordWorldSize.__name__, {})
    batch, asked = recorded.get("args", {}).get("batch"), arguments.gradient_accumulation_steps
    now = blocks_of_step(arguments, context_parallel_size)
    if None in (batch, now) or now == batch:
        return None
    groups = arguments.world_size // context_parallel_size
    share, left = divmod(batch, groups)
    takes = f"a step of the run in {checkpoint} takes {batch} blocks"
    if left:
        raise ValueError(
            f"{takes}, which can't be shared out to {groups} processes; go on with a number of them that "
            f"divides {batch}, or start anew with --model {checkpoint} and another --output_dir"
        )
    if share % arguments.train_batch_size:
        raise ValueError(
            f"per_device_train_batch_size: {takes}, {share} a process, which batches of "
            f"{arguments.train_batch_size} can't make up; pass a size that divides {share}"
        )
    arguments.gradient_accumulation_steps = share // arguments.train_batch_size
    taken = arguments.gradient_accumulation_steps
    return f"gradient_accumulation_steps: {taken} instead of {asked}, for {takes}"


def trainer_state(folder: Path) -> dict[str, Any]:
    """What Trainer saved of its state at a checkpoint or, in a run's folder, at the end.

    Raises:
        OSError: it can't be read.
        ValueError: it isn't such a state.
    """
    file = folder / "trainer_state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    for key, kind in (("global_step", int), ("max_steps", int), ("log_history", list)):
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            raise ValueError(f"{file} is damaged: expected {key} ({kind.__name__}) in it")
    return state


class RecordWorldSize(TrainerCallback, ExportableState):
    """Puts into each checkpoint's state what the next launch must know to go on.

    Args:
        world_size: the number of processes; so many generator states belong to the checkpoint.
        batch: the blocks of a step (`blocks_of_step`).
    """

    def __init__(self, world_size: int, batch: int | None) -> None:
        self.world_size, self.batch = world_size, batch

    def state(self) -> dict[str, Any]:
        """What Trainer saves under this class's name."""
        return {"args": {"world_size": self.world_size, "batch": self.batch}, "attributes": {}}


class RunTrainer(Trainer):
    """A Trainer of whose checkpoints ``trainer_state.json`` is the last file, whichever process is killed.

    By itself it writes that file, and deletes checkpoints beyond ``save_total_limit``, while other processes
    may still be writing theirs; and where a checkpoint of this step lies already, as after going on from an
    earlier one, its old state would vouch for a mixture.
    """

    def _save_checkpoint(self, *words: Any, **options: Any) -> None:
        if self.args.should_save:
            folder = Path(self.args.output_dir or "") / f"checkpoint-{self.state.global_step}"
            (folder / "trainer_state.json").unlink(missing_ok=True)
        super()._save_checkpoint(*words, **options)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # the last file of every process but the first
        self.accelerator.wait_for_everyone()


def last_checkpoint(output_dir: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest complete checkpoint in ``output_dir``, and the incomplete ones with what is wrong with each.

    A process killed while it saves leaves a folder that looks like a checkpoint, and Trainer would take it.
    """
    folders = all_checkpoints(output_dir)
    broken = {folder: reason for folder in folders if (reason := why_incomplete(folder)) is not None}
    # By time, not by step: an earlier and longer run may have left higher numbers here.
    complete = [folder for folder in folders if folder not in broken]
    return max(complete, key=lambda f: (f / "trainer_state.json").stat().st_mtime_ns, default=None), broken


def all_checkpoints(output_dir: Path) -> list[Path]:
    """Trainer's folders, by step."""
    found = (f for f in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", f.name))
    return sorted((f for f in found if f.is_dir()), key=lambda f: int(f.name.partition("-")[2]))


def why_incomplete(checkpoint: Path) -> str | None:
    """What is missing or cut off in a checkpoint; None if it is complete."""
    try:
        # Rank 0 writes this file last.
        world_size = world_size_of(checkpoint)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return "no readable trainer_state.json"
    ranks = [f"rng_state_{rank}.pth" for rank in range(world_size)] if world_size > 1 else ["rng_state.pth"]
    weights = list(checkpoint.glob("*.safetensors"))
    if (index := checkpoint / "model.safetensors.index.json").exists():
        try:
            parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return f"{index.name} is damaged"
        weights = [checkpoint / name for name in sorted(set(parts))]
        if missing := [file.name for file in weights if not file.exists()]:
            return f"no {missing[0]}"
    if not weights and not _is_sharded(checkpoint / "pytorch_model_fsdp_0"):
        return "no *.safetensors"
    for file in weights:
        try:
            with safe_open(file, framework="pt"):  # compares the header with the file's length
                pass
        except (SafetensorError, OSError):
            return f"{file.name} is cut off"
    # FSDP's, whole or in shards, have names of their own.
    optimizer = "optimizer.bin" if (checkpoint / "optimizer.bin").exists() else "optimizer.pt"
    states = [optimizer, "scheduler.pt", *ranks]
    if not any((checkpoint / name).exists() for name in states):
        return "save_only_model left out its optimizer"
    if _is_sharded(checkpoint / "optimizer_0"):
        states.remove(optimizer)
    # torch.save writes a zip, whose directory stands at its end.
    for name in states:
        if not (checkpoint / name).exists():
            return f"no {name}"
        if not zipfile.is_zipfile(checkpoint / name):
            return f"{name} is cut off"
        # Trainer would find it when training has begun. The optimizer's, as large as the model, is read once.
        if name != optimizer and not _sums_agree(checkpoint / name):
            return f"{name} is damaged"
    return None


def _is_sharded(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint has saved there; this file gets its name at the end."""
    return (folder / ".metadata").is_file()


def _sums_agree(archive: Path) -> bool:
    try:
        with zipfile.ZipFile(archive) as parts:
            return parts.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError):
        return False


def check_same_shape(checkpoint: str, config: PretrainedConfig) -> None:
    """Raise ValueError for a checkpoint of other sizes: Trainer would load what fits, or fail half way."""
    saved = load_pretrained(AutoConfig, "resume", checkpoint).to_dict()
    for key, value in config.to_dict().items():
        if type(value) is int and not key.endswith("_token_id") and saved.get(key) != value:
            raise ValueError(
                f"{key}: {checkpoint} has {saved.get(key)} and can't go on with {value}; pass the same "
                "model or shape, or another output_dir"
            )
