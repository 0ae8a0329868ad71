"""What checkpoints record for the next launch, so that a step keeps its blocks on other processes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import Trainer

from streamattn.checkpoints import RecordWorldSize, RunTrainer, blocks_of_step, keep_batch, why_incomplete


def arguments(batch_size: int, accumulation: int, world_size: int, **values: Any) -> Any:
    fields = {"train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    return SimpleNamespace(**fields, world_size=world_size, **{"auto_find_batch_size": False} | values)


def record(now: Any, context_parallel_size: int = 1) -> dict[str, Any]:
    return RecordWorldSize(now.world_size, blocks_of_step(now, context_parallel_size)).state()


def checkpoint(folder: Path, recorded: dict[str, Any] | None) -> Path:
    callbacks = {} if recorded is None else {"RecordWorldSize": recorded}
    state = {"global_step": 4, "max_steps": 8, "log_history": [], "stateful_callbacks": callbacks}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("before", "now", "accumulation"),
    [  # batch size, accumulation, processes, context_parallel_size
        ((4, 1, 2, 1), (4, 1, 2, 1), 1),
        ((4, 1, 2, 1), (4, 1, 1, 1), 2),
        ((4, 2, 2, 1), (4, 2, 4, 1), 1),
        ((4, 1, 4, 1), (2, 3, 2, 1), 4),
        ((4, 1, 2, 1), (8, 1, 1, 1), 1),
        ((4, 1, 2, 1), (4, 1, 2, 2), 2),
        ((4, 2, 4, 2), (4, 2, 2, 1), 2),
    ],
)
def test_a_step_takes_as_many_blocks_as_before(
    tmp_path: Path, before: tuple[int, ...], now: tuple[int, ...], accumulation: int
) -> None:
    earlier, later = arguments(*before[:3]), arguments(*now[:3])
    folder = checkpoint(tmp_path, record(earlier, before[3]))
    asked = later.gradient_accumulation_steps
    note = keep_batch(folder, later, now[3])
    assert later.gradient_accumulation_steps == accumulation
    assert blocks_of_step(later, now[3]) == blocks_of_step(earlier, before[3])
    assert (note is None) == (asked == accumulation)
    if note is not None:
        assert note.startswith(f"gradient_accumulation_steps: {accumulation} instead of {asked}, for a step")


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            (4, 1, 3),
            "takes 8 blocks, which can't be shared out to 3 processes; go on with .* divides 8",
        ),
        ((3, 1, 2), "per_device_train_batch_size: .* 8 blocks, 4 a process, which batches of 3 .* divides 4"),
    ],
)
def test_a_step_that_cannot_be_made_up_is_refused(
    tmp_path: Path, now: tuple[int, int, int], expected: str
) -> None:
    folder = checkpoint(tmp_path, record(arguments(4, 1, 2)))
    with pytest.raises(ValueError, match=expected):
        keep_batch(folder, arguments(*now), 1)


def test_batches_whose_size_is_not_known_are_left_alone(tmp_path: Path) -> None:
    """Of older checkpoints, and where auto_find_batch_size looks for one that fits into memory."""
    finds = arguments(4, 1, 2, auto_find_batch_size=True)
    recorded = record(arguments(4, 1, 2))
    older = {"args": {"world_size": 2}, "attributes": {}}
    for state, now in (
        (None, arguments(4, 1, 1)),
        (older, arguments(4, 1, 1)),
        (record(finds), arguments(4, 1, 1)),
        (recorded, arguments(4, 1, 1, auto_find_batch_size=True)),
    ):
        assert keep_batch(checkpoint(tmp_path, state), now, 1) is None
        assert now.gradient_accumulation_steps == 1


def test_the_state_is_written_when_all_processes_have_written_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the state of an earlier checkpoint of that step vouch for the files of two."""
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text("{}", encoding="utf-8")
    events: list[str] = []

    def save(self: Any, model: object, trial: object) -> None:
        assert not state.exists()
        self._save_rng_state(str(state.parent))
        events.append("state")

    monkeypatch.setattr(Trainer, "_save_checkpoint", save)
    monkeypatch.setattr(Trainer, "_save_rng_state", lambda self, folder: events.append("rng"))
    trainer: Any = object.__new__(RunTrainer)
    trainer.args = SimpleNamespace(should_save=True, output_dir=str(tmp_path))
    trainer.state = SimpleNamespace(global_step=4)
    trainer.accelerator = SimpleNamespace(wait_for_everyone=lambda: events.append("all are there"))
    trainer._save_checkpoint(None, trial=None)
    assert events == ["rng", "all are there", "state"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_of_fsdp_are_complete_without_the_files_of_ddp(tmp_path: Path) -> None:
    """In shards, as torch.distributed.checkpoint writes them, or whole under names of accelerate's."""
    folder = checkpoint(tmp_path, None)
    for name in ("scheduler.pt", "rng_state.pth"):
        torch.save({}, folder / name)
    assert why_incomplete(folder) == "no *.safetensors"
    weights = {"model": {"w": torch.ones(2)}}
    save(weights, storage_writer=FileSystemWriter(folder / "pytorch_model_fsdp_0"), no_dist=True)
    assert why_incomplete(folder) == "no optimizer.pt"
    save(weights, storage_writer=FileSystemWriter(folder / "optimizer_0"), no_dist=True)
    assert why_incomplete(folder) is None
    for name in ("optimizer_0", "pytorch_model_fsdp_0"):
        (folder / name / ".metadata").unlink()
        assert why_incomplete(folder) is not None
        (folder / name / ".metadata").touch()
    (folder / "optimizer_0" / ".metadata").unlink()
    torch.save({}, folder / "optimizer.bin")
    assert why_incomplete(folder) is None
    (folder / "optimizer.bin").write_bytes(b"PK")
    assert why_incomplete(folder) == "optimizer.bin is cut off"


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    """A process killed while it deletes a checkpoint leaves some of its files."""
    folder = checkpoint(tmp_path, None)
    index = folder / "model.safetensors.index.json"
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": parts}), encoding="utf-8")
    (folder / parts["a"]).write_bytes(b"")
    assert why_incomplete(folder) == f"no {parts['b']}"
    index.write_text("{", encoding="utf-8")
    assert why_incomplete(folder) == "model.safetensors.index.json is damaged"
