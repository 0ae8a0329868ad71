"""A job from its YAML to a saved model, what it prints, and what refuses it in one line."""

from __future__ import annotations

import json
import math
import re
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
from streamattn import finetune, processes
from streamattn.job import read_job
from streamattn.run_folder import RunFolder
from tests.finetune_jobs import losses, refused, write_job

_SMALL = """
hidden_size: 32
intermediate_size: 32
num_hidden_layers: 1
max_position_embeddings: 32
vocab_size: 384
"""


def test_a_job_trains_reports_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, max_steps=30, eval_strategy="steps", eval_steps=30, eval_on_start=True)
    began = time.perf_counter()
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
    minutes = re.search(r"wall time\W+(\d+) min (\d+) s with preparation, evaluation and saving", out)
    assert minutes is not None
    assert abs(60 * int(minutes[1]) + int(minutes[2]) - (time.perf_counter() - began)) < 2

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
    original = patches.hf.packed_attention  # which trained layers call

    def recording(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        dtypes.append(result[0].dtype)
        return result

    monkeypatch.setattr(patches.hf, "packed_attention", recording)
    values = {"bf16": True, "gradient_accumulation_steps": 3, "max_grad_norm": 1e-9, "disable_tqdm": False}
    job = read_job([str(write_job(tmp_path, max_steps=2, learning_rate=1e-2, optim="sgd", **values))])
    trainer, _ = finetune.build_trainer(job, RunFolder(job, {}))
    dtypes.clear()
    model = trainer.model
    assert model is not None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    finetune.train(trainer, None)
    steps = dtypes[: 2 * 2 * 3]  # layers, steps, parts of a step
    assert len(steps) == 2 * 2 * 3
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


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_one_process_needs_no_backend(tmp_path: Path, backend: str) -> None:
    job = write_job(tmp_path, ddp_backend=backend, max_steps=1)
    assert finetune.main([str(job)]) == 0


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
        (["--adam_beta1", "2"], "transformers.Trainer: Invalid beta parameter at index 0: 2.0"),
        (["--dataloader_num_workers", "-1"], "dataloader_num_workers: expected a number from 0 on, got -1"),
        (["--shape", "gpt2-nan"], "no file .*gpt2-nan.yaml.*near it: .*gpt2-nano.yaml"),
        (["--model", "./no-such-model"], r"model: no folder './no-such-model' \(seen from"),
        (["--model", "job.yaml/of/it"], "model: no folder 'job.yaml/of/it'"),
        (["--tokenizer", "./no-such-tokenizer"], r"tokenizer: no folder './no-such-tokenizer' \(seen from"),
        (["--shape", "bert.yaml"], "expected a causal language model, got bert with is_decoder: false"),
        (["--shape", "odd.yaml"], "shape: odd.yaml: .*size"),
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


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("model_type: bloom\nn_layer: 2\nn_head: 2", "attention layers of BloomForCausalLM .* more"),
        ("model_type: mamba\nnum_hidden_layers: 1", "no attention layer to patch in MambaForCausalLM"),
        ("model_type: gpt2\nn_layer: 2\nn_head: 2\nattn_pdrop: 1.0", "of GPT2LMHeadModel .* more"),
    ],
)
def test_a_model_that_cannot_be_patched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str, expected: str
) -> None:
    """The remedy is one of the command line, and it helps."""
    job = write_job(tmp_path, max_steps=1)
    (tmp_path / "shape.yaml").write_text(f"{shape}\nhidden_size: 32\nvocab_size: 384", encoding="utf-8")
    line = refused(capsys, str(job), "--seq_len", "32")
    assert re.search(f"finetune: patch: .*{expected}.*; pass --patch false, or take another model$", line)
    assert "strict" not in line
    assert finetune.main([str(job), "--seq_len", "32", "--patch", "false"]) == 0


def test_an_unknown_activation_names_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    with (tmp_path / "shape.yaml").open("a", encoding="utf-8") as shape:
        shape.write("activation_function: foo\n")
    assert "shape.yaml: activation_function: unknown name 'foo'" in refused(capsys, str(job))


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
            assert waits == [processes.SECONDS_TO_SPEAK] * count


def test_no_arguments_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main([]) == 2
    assert finetune.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: streamattn finetune" in out
    assert "seq_len" in out
    assert "context_parallel_size" in out


# Killed and resumed.


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
