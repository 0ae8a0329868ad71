"""A job from its YAML to a saved model; what it prints; a killed job goes on as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import patches.hf
from streamattn import finetune
from streamattn.job import read_job
from streamattn.run_folder import RunFolder
from tests.finetune_jobs import losses, run, start, write_job

_SMALL = """
hidden_size: 32
intermediate_size: 32
num_hidden_layers: 1
max_position_embeddings: 32
vocab_size: 384
"""


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr of a job that must not start."""
    assert finetune.main(list(words)) == 2
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith("streamattn finetune: ")
    return line


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by its path."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_a_job_trains_reports_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, max_steps=30, eval_strategy="steps", eval_steps=30, eval_on_start=True)
    assert finetune.main([str(job)]) == 0
    out = capsys.readouterr().out
    assert "2 attention layers patched, 0 not" in out
    (difference,) = re.findall(r"unpatched model on 32 tokens of held-out text: (\S+)", out)
    assert 0 <= float(difference) < 1e-4
    same_kernel = float(difference) == 0.0 and not torch.cuda.is_available()
    assert ("on the CPU PyTorch's own kernel computes both" in out) == same_kernel
    assert re.search(r"^step  0/30: held-out loss \d", out, re.MULTILINE)
    assert re.search(r"^step  1/30: loss \S+, gradient norm \S+, learning rate 0.01$", out, re.MULTILINE)
    assert re.search(r"^step 30/30: held-out loss \d", out, re.MULTILINE)
    assert "{" not in out.split("results")[0], "Trainer's dictionaries"
    assert "of the first" in out
    for word in ("training loss", "held-out loss", "perplexity", "tokens/s", "peak memory", "GiB", "sample"):
        assert word in out

    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    held_out = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
    assert len(held_out) == 2
    assert held_out[1] < 0.85 * held_out[0]
    assert f"{math.exp(held_out[1]):.2f}" in out

    # What was saved is what was trained: an unpatched model with a safetensors file and its tokenizer.
    assert (tmp_path / "out" / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    blocks = finetune.read_blocks(tmp_path / "out" / "blocks", {})
    assert blocks is not None
    total = 0.0
    with torch.no_grad():
        for item in blocks[1]:
            total += model(**{name: tensor.unsqueeze(0) for name, tensor in item.items()}).loss.item()
    assert total / len(blocks[1]) == pytest.approx(held_out[1], abs=1e-4)
    assert "def" in tokenizer.decode(blocks[0].blocks[:40].reshape(-1).tolist())


def test_the_logit_difference_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a patch that computes something else it is large; of a long sequence only the start is compared."""
    original = patches.hf.attention
    monkeypatch.setattr(patches.hf, "attention", lambda *args, **options: 3 * original(*args, **options))
    assert finetune.COMPARED_TOKENS == 512
    monkeypatch.setattr(finetune, "COMPARED_TOKENS", 20)
    job = read_job([str(write_job(tmp_path))])
    finetune.build_trainer(job, RunFolder(job, {}))
    out = capsys.readouterr().out
    (difference,) = re.findall(r"unpatched model on 20 tokens of held-out text: (\S+)", out)
    assert float(difference) > 1e-3


def test_precision_accumulation_and_clipping_reach_the_layers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bar, as on a terminal; each line of losses above it."""
    dtypes: list[torch.dtype] = []
    original = patches.hf.attention

    def recording(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        dtypes.append(result.dtype)
        return result

    monkeypatch.setattr(patches.hf, "attention", recording)
    values = {"bf16": True, "gradient_accumulation_steps": 3, "max_grad_norm": 1e-9, "disable_tqdm": False}
    job = read_job([str(write_job(tmp_path, max_steps=2, learning_rate=1e-2, optim="sgd", **values))])
    trainer, _ = finetune.build_trainer(job, RunFolder(job, {}))
    dtypes.clear()
    model = trainer.model
    assert model is not None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    finetune.train(trainer, None)
    steps = dtypes[: 2 * 2 * 3]  # layers, steps, parts of a step
    assert set(steps) == {torch.bfloat16}
    after = {name: p.detach() for name, p in model.named_parameters()}
    change = max(float((p - before[name]).abs().max()) for name, p in after.items())
    assert change < 1e-8, "gradients of length 1e-9 can't move a weight further"
    shown = capfd.readouterr()
    assert "2/2" in shown.err
    assert re.search(r"step 2/2: loss \S+, gradient norm \S+, learning rate", shown.out + shown.err)


def test_a_pretrained_model_with_its_own_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, max_steps=2)
    assert finetune.main([str(job)]) == 0
    first = str(tmp_path / "out")
    again = str(tmp_path / "again")
    # A checkpoint in half precision is trained in float32.
    AutoModelForCausalLM.from_pretrained(first).bfloat16().save_pretrained(first)
    assert finetune.main([str(job), "--model", first, "--output_dir", again, "--patch", "false"]) == 0
    assert "attention layers patched" not in capsys.readouterr().out.split("results")[1]
    assert next(AutoModelForCausalLM.from_pretrained(again).parameters()).dtype == torch.float32
    stored = (tmp_path / "again" / "blocks" / "held_out.npy").read_bytes()
    assert stored == (tmp_path / "out" / "blocks" / "held_out.npy").read_bytes()


def test_olmo2_trains_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, shape="olmo2-nano", max_steps=2)
    assert finetune.main([str(job)]) == 0
    out = capsys.readouterr().out
    assert "4 attention layers patched, 0 not" in out
    assert "of the first" not in out, "there was no other evaluation"


@pytest.mark.parametrize("key", ["bf16_full_eval", "fp16_full_eval"])
def test_evaluation_in_half_precision_saves_float32(tmp_path: Path, key: str) -> None:
    assert finetune.main([str(write_job(tmp_path, max_steps=1, **{key: True}))]) == 0
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_a_diverged_run_has_no_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main([str(write_job(tmp_path, max_steps=2, learning_rate=1e30))]) == 0
    out = capsys.readouterr().out
    assert "the run diverged: its held-out loss is nan, so there is no sample" in out
    assert "what the model wrote" not in out
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_data_around_the_output_dir(tmp_path: Path) -> None:
    """What a run leaves is no text to train on."""
    for name in ("out", "out.3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("NEEDLE\n" * 500, encoding="utf-8")
    assert finetune.main([str(write_job(tmp_path, data=str(tmp_path), max_steps=1))]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    blocks = finetune.read_blocks(tmp_path / "out" / "blocks", {})
    assert blocks is not None
    for part in blocks:
        assert "NEEDLE" not in tokenizer.decode(part.blocks.reshape(-1).tolist())


def test_patching_changes_the_losses_by_rounding_only(tmp_path: Path) -> None:
    words = [str(write_job(tmp_path, max_steps=12)), "--shape", "olmo2-nano"]
    assert finetune.main([*words, "--output_dir", str(tmp_path / "patched")]) == 0
    assert finetune.main([*words, "--output_dir", str(tmp_path / "plain"), "--patch", "false"]) == 0
    patched, plain = losses(tmp_path / "patched"), losses(tmp_path / "plain")
    assert patched.keys() == plain.keys() == set(range(1, 13))
    assert [patched[i] for i in patched] == pytest.approx([plain[i] for i in patched], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--data", "./no-such-folder"], "data: no file or folder './no-such-folder'"),
        (["--seq_len", "33"], "seq_len: expected at most the model's 32 positions, got 33"),
        (["--optim", "adamm"], "transformers.TrainingArguments: adamm"),
        (["--lr_scheduler_type", "sine"], "transformers.TrainingArguments: sine"),
        (["--eval_strategy", "sometimes"], "transformers.TrainingArguments: sometimes"),
        (
            ["--load_best_model_at_end", "--eval_strategy", "epoch", "--save_strategy", "steps"],
            "load_best_model_at_end requires the save and eval strategy to match.*EPOCH.*STEPS",
        ),
        (["--log_level", "shout"], "transformers.*: KeyError: 'shout'"),
        (["--report_to", "nothing-known"], "transformers.*: nothing-known"),
        # What Trainer would find only when it begins.
        (["--lr_scheduler_kwargs", "{powr: 2}"], "transformers.Trainer: .*unexpected keyword .*'powr'"),
        (["--learning_rate", "-1"], "transformers.Trainer: Invalid learning rate: -1.0"),
        (["--dataloader_num_workers", "-1"], "transformers.Trainer: num_workers"),
        (["--shape", "gpt2-nan"], "no file .*gpt2-nan.yaml.*near it: .*gpt2-nano.yaml"),
        (["--model", "./no-such-model"], "no-such-model"),
        (["--tokenizer", "./no-such-tokenizer"], "no-such-tokenizer"),
        (["--shape", "bert.yaml"], "expected a causal language model, got bert with is_decoder: false"),
        (["--shape", "odd.yaml"], "shape: .*size"),
        (
            ["--dataloader_drop_last", "--per_device_train_batch_size", "5000"],
            r"per_device_train_batch_size: expected at most \d+, got 5000: dataloader_drop_last would",
        ),
        (
            ["--dataloader_drop_last", "--per_device_eval_batch_size", "5000"],
            r"per_device_eval_batch_size: expected at most \d+, got 5000: dataloader_drop_last would",
        ),
        (["--resume", "no/checkpoint-1"], "resume: 'no/checkpoint-1' is not a complete checkpoint"),
        (["--lerning_rate", "1"], "command line: unknown key 'lerning_rate'; the nearest is 'learning_rate'"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    (tmp_path / "shapes").mkdir()
    for name, sizes in (("bert", "num_attention_heads: 2"), ("olmo2", "num_attention_heads: 6")):
        path = tmp_path / "shapes" / f"{'odd' if name == 'olmo2' else name}.yaml"
        path.write_text(f"model_type: {name}\n{sizes}\n{_SMALL}", encoding="utf-8")
    assert re.search(expected, refused(capsys, str(write_job(tmp_path)), *words))


def test_a_model_without_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers then makes one that knows nothing but the end of a text."""
    model = tmp_path / "model"
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=32)).save_pretrained(model)
    line = refused(capsys, str(write_job(tmp_path)), "--model", str(model))
    assert re.search(r"the tokenizer at '.*model' has no vocabulary for this text: .*--tokenizer", line)


@pytest.mark.parametrize("steps", [0, 2])
def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    original = finetune.Trainer.training_step
    done = []

    def interrupt(self: Any, *args: Any, **options: Any) -> Any:
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(1)
        return original(self, *args, **options)

    monkeypatch.setattr(finetune.Trainer, "training_step", interrupt)
    job = write_job(tmp_path, save_strategy="steps", save_steps=1)
    assert finetune.main([str(job)]) == 130
    (line,) = capsys.readouterr().err.splitlines()
    way_on = {0: "there is no checkpoint yet", 2: f"go on from {tmp_path / 'out'}/checkpoint-2 with --resume"}
    assert line.startswith(f"streamattn finetune: interrupted; {way_on[steps]}")


@pytest.mark.parametrize(
    ("key", "value", "package"),
    [("report_to", "wandb", "wandb"), ("deepspeed", "{zero_optimization: {stage: 2}}", "deepspeed")],
)
def test_an_absent_package_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, package: str
) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    assert package in refused(capsys, str(write_job(tmp_path)), f"--{key}", value)


def test_an_error_after_training_has_begun_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("from a kernel")

    monkeypatch.setattr(finetune.Trainer, "training_step", fail)
    with pytest.raises(ValueError, match="from a kernel"):
        finetune.main([str(write_job(tmp_path))])


def test_a_shape_that_cannot_be_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    shape = tmp_path / "shape.yaml"
    shape.write_text(shape.read_text().replace("n_head: 2", "n_head: 3"), encoding="utf-8")
    assert "streamattn finetune: shape: " in refused(capsys, str(job))
    shape.write_text("model_type: clip", encoding="utf-8")
    line = refused(capsys, str(job))
    assert "expected a causal language model, CLIPConfig has no vocab_size" in line
    line = refused(capsys, str(job), "--seq_len", "null")
    assert "seq_len: expected a number, for CLIPConfig names no longest sequence" in line


def test_a_corpus_shorter_than_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    text = tmp_path / "short.txt"
    text.write_text("a few words\n" * 20, encoding="utf-8")
    line = refused(capsys, str(job), "--data", str(text))
    assert "the held-out part of" in line
    assert "shorter than one block of 32 tokens" in line


def test_a_tokenizer_larger_than_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finetune.train_tokenizer([str(i) for i in range(2000)], 500).save_pretrained(tmp_path / "tokenizer")
    line = refused(capsys, str(write_job(tmp_path)), "--tokenizer", str(tmp_path / "tokenizer"))
    assert "tokenizer: 500 tokens but the model's vocabulary holds 384" in line


def test_rank_without_world_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    line = refused(capsys, str(write_job(tmp_path)))
    assert "torchrun --nproc-per-node N -m streamattn.finetune" in line


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_only_one_of_several_processes_has_to_say_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Later, for where all have the same to say, torchrun ends this one when the first has spoken."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    words = [str(write_job(tmp_path)), "--sed", "1"]
    environments = {
        0: [{}, {"LOCAL_RANK": "1"}, {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}],
        1: [{"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}],
    }
    for count, several in environments.items():
        for environment in several:
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                assert "the nearest is 'seed'" in refused(capsys, *words)
            assert waits == [finetune.SECONDS_TO_SPEAK] * count


def test_no_arguments_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main([]) == 2
    assert finetune.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: streamattn finetune" in out
    assert "seq_len" in out
    assert "context_parallel_size" not in out, "only its default is legal"


# Killed and resumed.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 24 steps with a checkpoint every 8, run to its end; its folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert finetune.main([str(write_job(folder, max_steps=24, save_strategy="steps", save_steps=8))]) == 0
    return folder


def test_a_killed_job_goes_on_with_the_same_losses(undisturbed: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, max_steps=24, save_strategy="steps", save_steps=8)
    output = tmp_path / "out"
    process = start(str(job))
    try:
        deadline = time.monotonic() + 100
        # The state file is a checkpoint's last: right behind it the run is in its middle.
        while not (output / "checkpoint-8" / "trainer_state.json").exists():
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

    def damage(name: str, keep: float | None) -> str:
        shutil.rmtree(output / "checkpoint-24")
        shutil.copytree(undisturbed / "out" / "checkpoint-24", output / "checkpoint-24")
        file = output / "checkpoint-24" / name
        content = file.read_bytes()
        file.unlink()
        if keep is not None:
            file.write_bytes(content[: int(len(content) * keep)])
        best, broken = finetune.last_checkpoint(output)
        assert best == output / "checkpoint-16"
        return broken[output / "checkpoint-24"]

    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert damage(name, None) == f"no {name}"
        assert damage(name, 0.9) == f"{name} is cut off"
        assert damage(name, 0.0) == f"{name} is cut off"
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


def test_a_finished_run_is_moved_aside(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=1)
    shutil.copytree(undisturbed / "out", output)
    before = contents(output)
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
        (["--model", "./no-such-model"], "no-such-model"),
        (["--tokenizer", "./no-such-tokenizer"], "no-such-tokenizer"),
        (["--data", "short.txt"], "the held-out part of .* is shorter than one block"),
        (["--dataloader_drop_last", "--per_device_train_batch_size", "5000"], "expected at most"),
        (["--report_to", "nothing-known"], "nothing-known"),
        # Found when Trainer has begun to set up.
        (["--learning_rate", "-1"], "Invalid learning rate: -1.0"),
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
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=1)
    shutil.copytree(undisturbed / "out", output)
    before = contents(output)

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
    output = tmp_path / "out"
    job = write_job(tmp_path, max_steps=1)
    shutil.copytree(undisturbed / "out", output)
    before = contents(output)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    for restart in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        assert "Invalid learning rate" in refused(capsys, str(job), "--learning_rate", "-1")
        assert (output / ".prepared").exists() == (restart < 2)
    assert contents(output) == before
    # Killed before its first step, it starts when it is started again; killed behind it, it goes on.
    (output / ".prepared").mkdir()
    assert finetune.main([str(job), "--save_strategy", "steps", "--save_steps", "1"]) == 0
    assert contents(tmp_path / "out.1") == before
    assert finetune.main([str(job)]) == 0
    assert f"the run in {output} is finished at step 1 of 1" in capsys.readouterr().out


def test_a_name_is_refused_at_once_where_no_hub_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself the hub's client asks six times for each file."""
    requests: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with suppress(OSError):  # the end of the test closes the server
                while True:
                    connection, _ = server.accept()
                    requests.append(1)  # before the client can know of the end
                    connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # whatever the environment says
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        job = str(write_job(tmp_path))
        for key, expected in (
            ("data", "data: 'no/such' is neither .* could be loaded .the hub can't be reached"),
            ("model", "model: can't load 'no/such'"),
            ("tokenizer", "tokenizer: can't load 'no/such'"),
        ):
            requests.clear()
            assert re.search(expected, refused(capsys, job, f"--{key}", "no/such"))
            assert len(requests) == 1, key
        server.shutdown(socket.SHUT_RDWR)  # closing alone doesn't wake the thread


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


def test_resume_with_nothing_to_resume_starts_afresh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job(tmp_path, max_steps=1)
    assert finetune.main([str(job), "--resume"]) == 0
    assert "no complete checkpoint in" in capsys.readouterr().out
    # torchrun --max-restarts runs the same command line again: that resumes too.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert finetune.main([str(job)]) == 0
    assert f"the run in {tmp_path / 'out'} is finished at step 1 of 1" in capsys.readouterr().out
    assert finetune.main([str(job), "--max_steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "no complete checkpoint in" in out
    assert "moved the finished run" in out


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


def test_a_named_checkpoint_brings_its_tokenizer(undisturbed: Path, tmp_path: Path) -> None:
    """Into another output_dir, where nothing was prepared."""
    job = write_job(tmp_path, max_steps=24, data=str(undisturbed / "corpus"))
    assert finetune.main([str(job), "--resume", str(undisturbed / "out" / "checkpoint-16")]) == 0
    assert losses(tmp_path / "out") == losses(undisturbed / "out")
