"""The YAML and the command line: what is accepted, and one clear line for what isn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BartConfig,
    BartForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
)

from streamattn.job import (
    check_causal,
    load_pretrained,
    load_shape,
    read_job,
)


def write(folder: Path, text: str, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_own_keys_and_training_arguments_share_one_flat_file(tmp_path: Path) -> None:
    read = read_job([write(tmp_path, "shape: gpt2-nano\nseq_len: 64\nmax_steps: 3\nbf16: true\n")])
    assert (read.shape, read.seq_len, read.patch, read.context_parallel_size) == ("gpt2-nano", 64, True, 1)
    assert read.training["max_steps"] == 3
    assert read.training["bf16"] is True
    assert read.output_dir == Path("runs/job")
    assert read.resume is False


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--max_steps", "7"], "max_steps", 7),
        (["--max-steps=7"], "max_steps", 7),
        (["--max_steps", "1e3"], "max_steps", 1000),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--bf16"], "bf16", True),
        (["--bf16", "false"], "bf16", False),
        (["--learning_rate", "5e-4"], "learning_rate", 5e-4),
        (["--learning_rate", "1"], "learning_rate", 1.0),
        (["--save_strategy", "no"], "save_strategy", "no"),
        (["--run_name", "2024"], "run_name", "2024"),
        (["--run_name", "2024-01-01"], "run_name", "2024-01-01"),
        (["--run_name", "1.10"], "run_name", "1.10"),
        (["--run_name", "12:30"], "run_name", "12:30"),
        (["--output_dir", "2026_11_28"], "output_dir", "2026_11_28"),
        (["--output_dir", "1e3"], "output_dir", "1e3"),
        (["--output_dir", ""], "output_dir", "runs/job"),
        (["--seed", "010"], "seed", 10),
        (["--data_seed", "null"], "data_seed", None),
        (["--lr_scheduler_kwargs", "{power: 2}"], "lr_scheduler_kwargs", {"power": 2}),
    ],
)
def test_command_line_overrides(tmp_path: Path, words: list[str], key: str, value: Any) -> None:
    read = read_job([write(tmp_path, "shape: gpt2-nano\nmax_steps: 3\nbf16: false\n"), *words])
    assert read.training[key] == value
    assert type(read.training[key]) is type(value)


def test_yaml_reads_numbers_and_words_as_people_mean_them(tmp_path: Path) -> None:
    """YAML 1.1 makes a string of 5e-4 and False of no."""
    read = read_job([write(tmp_path, "shape: gpt2-nano\nlearning_rate: 5e-4\neval_strategy: no\n")])
    assert read.training["learning_rate"] == 5e-4
    assert read.training["eval_strategy"] == "no"


def test_model_on_the_command_line_takes_the_place_of_shape(tmp_path: Path) -> None:
    path = write(tmp_path, "shape: gpt2-nano\n")
    read = read_job([path, "--model", "some/model"])
    assert (read.model, read.shape) == ("some/model", None)
    with pytest.raises(ValueError, match=r"either model or shape, .*; leave one of them out"):
        read_job([path, "--model", "some/model", "--shape", "gpt2-nano"])
    with pytest.raises(ValueError, match=r"either model or shape, .*; name one of them"):
        read_job([write(tmp_path, "seq_len: 8\n")])


def test_resume_with_and_without_a_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, "shape: gpt2-nano\n")
    assert read_job([path, "--resume", "--max_steps", "2"]).resume is True
    assert read_job([path, "--resume", "out/checkpoint-5"]).resume == "out/checkpoint-5"


def test_the_home_folder_is_expanded_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TrainingArguments expands its output_dir; whoever reads it elsewhere must see the same folder."""
    monkeypatch.setenv("HOME", "/home/me")
    path = write(tmp_path, "shape: gpt2-nano\noutput_dir: ~/out\ndata: ~/text\ntokenizer: ~/tokenizer\n")
    read = read_job([path, "--resume", "~/out/checkpoint-1"])
    assert (read.output_dir, read.training["output_dir"]) == (Path("/home/me/out"), "/home/me/out")
    assert (read.data, read.tokenizer) == ("/home/me/text", "/home/me/tokenizer")
    assert read.resume == "/home/me/out/checkpoint-1"
    assert read_job([path, "--model=~/model"]).model == "/home/me/model"
    assert read_job([path, "--shape=~/shape.yaml"]).shape == "/home/me/shape.yaml"
    assert read_job([path, "--output_dir=$HOME/out"]).output_dir == Path("$HOME/out")


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("shape: gpt2-nano\nlerning_rate: 1.0", [], "job.yaml: unknown key 'lerning_rate'.*'learning_rate'"),
        ("shape: gpt2-nano", ["--seqlen", "8"], "command line: unknown key 'seqlen'.*'seq_len'"),
        ("shape: gpt2-nano\nconfig: x", [], "unknown key 'config'"),
        ("shape: gpt2-nano\nseq_len: 1", [], "seq_len: expected at least 2 tokens, got 1"),
        ("shape: gpt2-nano\nseq_len: long", [], "seq_len: expected int or none, got 'long'"),
        ("shape: gpt2-nano\npatch: 1", [], "patch: expected bool, got 1; write true or false"),
        ("shape: gpt2-nano", ["--patch", "no"], "patch: expected bool, got 'no'; write true or false"),
        (
            "shape: gpt2-nano",
            ["--max_grad_norm", "inf"],
            r"max_grad_norm: expected float, got 'inf'; YAML's infinity is \.inf",
        ),
        (
            "shape: gpt2-nano\neval_accumulation_steps: 0",
            [],
            "accumulation_steps: expected at least 1, got 0",
        ),
        (
            "shape: gpt2-nano\ndataloader_num_workers: 1\ndataloader_prefetch_factor: 0",
            [],
            "dataloader_prefetch_factor: expected at least 1, got 0",
        ),
        ("shape: gpt2-nano\ndata_seed: 18446744073709551616", [], r"data_seed: expected .* 0 to 2\^32 - 1"),
        ("shape: gpt2-nano\ndata_seed: -1", [], r"data_seed: expected .* 0 to 2\^32 - 1, got -1"),
        (
            "shape: gpt2-nano\nmetric_for_best_model: accuracy",
            [],
            "metric_for_best_model: expected loss, the only one that is measured, got 'accuracy'; leave",
        ),
        ("shape: gpt2-nano\nmax_steps: 1.5", [], "max_steps: expected int, got 1.5"),
        ("shape: gpt2-nano\nbf16: maybe", [], "bf16: expected bool, got 'maybe'"),
        ("shape: gpt2-nano\nlearning_rate: true", [], "learning_rate: expected float, got True"),
        (
            "shape: gpt2-nano\ncontext_parallel_size: 0",
            [],
            "context_parallel_size: expected at least 1, got 0",
        ),
        (
            "shape: gpt2-nano\ncontext_parallel_size: 2\npatch: false",
            [],
            "context_parallel_size: 2 processes share a sequence in patched layers alone; leave patch",
        ),
        (
            "shape: gpt2-nano\ncontext_parallel_size: 2\ntorch_compile: true",
            [],
            "torch_compile: not served with context_parallel_size 2; leave one of them out",
        ),
        ("shape: gpt2-nano\nmax_steps: 1:30", [], "max_steps: expected int, got '1:30'"),
        ("shape: gpt2-nano\ngradient_accumulation_steps: 0", [], "steps: expected at least 1, got 0"),
        ("shape: gpt2-nano", ["max_steps", "3"], "expected --key value, got 'max_steps'"),
        ("shape: gpt2-nano", ["max_steps", "3"], "got 'max_steps'; write --KEY in front"),
        ("shape: gpt2-nano", ["--"], "expected --key value, got '--'; write a key"),
        ("shape: gpt2-nano", ["--=3"], "expected --key value, got '--=3'; write a key"),
        ("shape: gpt2-nano\nweight_decay: -1", [], "weight_decay: expected a number from 0 on, got -1.0; le"),
        ("shape: gpt2-nano\nmax_grad_norm: -1", [], "max_grad_norm: expected a number from 0 on"),
        ("shape: gpt2-nano\nsave_steps: -3", [], "save_steps: expected a number from 0 on"),
        ("shape: gpt2-nano\nwarmup_steps: -5", [], "warmup_steps: expected a number from 0 on"),
        ("shape: gpt2-nano\nmax_steps: 0", [], "max_steps: expected at least 1, or -1 .*, got 0"),
        ("shape: gpt2-nano\nmax_steps: -5", [], "max_steps: expected at least 1, or -1 .*, got -5"),
        ("shape: gpt2-nano\nnum_train_epochs: 0", [], "num_train_epochs: expected more than 0, got 0"),
        ("shape: gpt2-nano\nnum_train_epochs: -1", [], "num_train_epochs: expected more than 0, got -1"),
        ("shape: gpt2-nano\nnum_train_epochs: .nan", [], "num_train_epochs: expected a number, got nan"),
        ("shape: gpt2-nano\nlearning_rate: .nan", [], "learning_rate: expected a number, got nan"),
        (
            "shape: gpt2-nano\nlearning_rate: .inf",
            [],
            "learning_rate: expected a finite number from 0 on, got inf",
        ),
        ("shape: gpt2-nano\nlearning_rate: -1", [], "learning_rate: expected a finite number .*, got -1.0"),
        ("shape: gpt2-nano\nseed: -1", [], r"seed: expected a whole number from 0 to 2\^32 - 1, got -1"),
        ("shape: gpt2-nano\ndo_train: false", [], "do_train: expected true, got false"),
        ("shape: gpt2-nano\nlabel_names: [foo]", [], r"label_names: expected \['labels'\].*, got \['foo'\]"),
        ("shape: gpt2-nano\ndata: ''", [], "data: expected a path or a name, got an empty string"),
        ("shape: gpt2-nano", ["--data", ""], "data: expected a path or a name, got an empty string"),
        ("shape: gpt2-nano", ["--data="], "data: expected a path or a name, got an empty string"),
        ("shape: gpt2-nano", ["--tokenizer="], "tokenizer: expected a path or a name, got an empty string"),
        ("shape: gpt2-nano", ["--model", ""], "model: expected a path or a name, got an empty string"),
        ("shape: ''", [], "shape: expected a path or a name, got an empty string"),
        (
            "shape: gpt2-nano",
            ["--output_dir", "~nobody-here/x"],
            "output_dir: no home folder for '~nobody-here'",
        ),
        ("shape: gpt2-nano", ["--resume", "~nobody-here/x"], "resume: no home folder for '~nobody-here'"),
        ("shape: gpt2-nano", ["--output_dir", '"a\\0b"'], r"output_dir: expected text without a NUL"),
        (
            'shape: gpt2-nano\ndata: "a\\0b"',
            [],
            r"data: expected text without a NUL character, got 'a\\x00b'",
        ),
        ("shape: gpt2-nano", ["--resume="], "resume: expected the folder of a checkpoint, or nothing"),
        ("shape: gpt2-nano", ["--seed", "1", "--seed=2"], "command line: --seed comes twice"),
        (
            "shape: gpt2-nano",
            ["--max_steps", "1", "--max-steps", "1"],
            "command line: --max_steps comes twice",
        ),
        ("shape: gpt2-nano", ["--resume", "--resume"], "command line: --resume comes twice"),
        ("shape: [gpt2", [], "job.yaml, line 1: while parsing a flow sequence, expected"),
        ("- a\n- b", [], "expected lines of 'key: value', got list"),
        ("", [], "expected lines of 'key: value', got an empty file"),
        ("# nothing", [], "expected lines of 'key: value', got an empty file"),
        ("shape: gpt2-nano\nbf16: !!bool maybe", [], "job.yaml, line 2: can't read 'maybe' as bool"),
        ("shape: gpt2-nano\nseed: !!int [1]", [], "job.yaml, line 2: can't read this as int"),
        ("shape: gpt2-nano\nseed: " + "9" * 5000, [], "job.yaml, line 2: can't read '9+' as int"),
        ("data: !!timestamp x", [], "job.yaml, line 1: can't read 'x' as timestamp"),
        ("data: !!map x", [], "job.yaml, line 1: expected a mapping node, but found scalar"),
        ("data: !!python/object:os.system {}", [], "job.yaml, line 1: could not determine a constructor"),
        ("lr_scheduler_kwargs:\n\tpower: 2", [], r"job.yaml, line 2: .*found character '\\t'"),
        ("seed: 1\nshape: gpt2-nano\nseed: 2", [], "job.yaml, line 3: the key 'seed' comes twice; keep one"),
        ("lr_scheduler_kwargs: {a: 1, a: 2}", [], "job.yaml, line 1: the key 'a' comes twice"),
        ("? [a, b]\n: 1", [], "job.yaml, line 1: .*found unhashable key"),
        ("shape: &a {b: *a}", [], "shape: expected none or str"),
        ("<<: {max_steps: 1.5}\nshape: gpt2-nano", [], "max_steps: expected int, got 1.5"),
        ("seed: 1\n---\nseed: 2", [], "job.yaml, line 2: expected a single document in the stream"),
        ("shape: a\0b", [], "not a YAML file: unacceptable character"),
        ("[" * 5000, [], "not a YAML file: nested too deeply"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as error:
        read_job([write(tmp_path, text), *words])
    assert "\n" not in str(error.value)


def test_a_missing_file_names_near_ones(tmp_path: Path) -> None:
    write(tmp_path, "shape: gpt2-nano", name="tiny_model.yaml")
    with pytest.raises(ValueError, match=r"no file .*tinymodel.yaml.*near it: .*tiny_model.yaml"):
        read_job([str(tmp_path / "tinymodel.yaml")])
    with pytest.raises(ValueError, match=r"gpt2-nano_stdlib_cpu.yaml"):
        read_job(["gpt2-nano_stdlib.yaml"])
    with pytest.raises(ValueError, match=r"can't read .*: Is a directory; pass the path of a YAML"):
        read_job([str(tmp_path)])
    with pytest.raises(ValueError, match=r"no file .*qqqq.yaml'; pass the path of a YAML that is there"):
        read_job([str(tmp_path / "qqqq.yaml")])
    (tmp_path / "picture.yaml").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(ValueError, match=r"picture.yaml: .* not UTF-8 text \(invalid start byte at byte 0"):
        read_job([str(tmp_path / "picture.yaml")])


def test_shapes_are_found_beside_the_config_first(tmp_path: Path) -> None:
    (tmp_path / "shapes").mkdir()
    write(tmp_path / "shapes", "model_type: gpt2\nn_embd: 24\nn_head: 2", name="mine.yaml")
    assert load_shape("mine", beside=tmp_path).hidden_size == 24
    assert load_shape("gpt2-nano", beside=tmp_path).hidden_size == 128
    assert load_shape(str(tmp_path / "shapes" / "mine.yaml")).hidden_size == 24


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n_embd: 24", "expected model_type"),
        ("model_type: gpt2\nn_layers: 2", "GPT2Config has no field 'n_layers'; the nearest is 'n_layer'"),
        ("model_type: gpt2\n3: 4", "GPT2Config has no field 3; the nearest is"),
        ("model_type: gpt-2", "job.yaml: model_type: transformers has no 'gpt-2'; the nearest is 'gpt2'$"),
        ("model_type: [gpt2]", "gpt2"),
        ("model_type: gpt2\nn_layer: two", "n_layer"),
        (
            "model_type: olmo2\nnum_attention_heads: 4\nnum_key_value_heads: 3",
            "num_attention_heads: expected a multiple of num_key_value_heads=3, got 4",
        ),
        ("model_type: olmo2\nnum_key_value_heads: 0", "num_key_value_heads: expected at least 1, got 0"),
        ("model_type: gpt2\nn_layer: -1", "job.yaml: n_layer: expected at least 1, got -1"),
        ("model_type: olmo2\nnum_hidden_layers: 0", "num_hidden_layers: expected at least 1, got 0"),
        ("model_type: gpt2\nn_head: 0", "n_head: expected at least 1, got 0"),
    ],
)
def test_wrong_shapes(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        load_shape(write(tmp_path, text))


def test_a_missing_shape_names_near_ones() -> None:
    with pytest.raises(ValueError, match=r"near it: .*gpt2-nano.yaml"):
        load_shape("gpt2-nan")
    with pytest.raises(ValueError, match=r"shape: no file 'mine/of/gpt2-nan'"):
        load_shape("mine/of/gpt2-nan")


def test_a_missing_shape_names_no_jobs(tmp_path: Path) -> None:
    write(tmp_path, "shape: gpt2-nano\nseq_len: 8", name="mine.yaml")
    with pytest.raises(ValueError, match="pass the path of a YAML that is there"):
        load_shape(str(tmp_path / "mines.yaml"))
    write(tmp_path, "model_type: gpt2", name="mines1.yaml")
    with pytest.raises(ValueError, match=r"near it: \S*mines1.yaml$"):
        load_shape(str(tmp_path / "mines.yaml"))


@pytest.mark.parametrize("value", [-1, 2])
def test_a_number_of_checkpoints_may_be_negative(tmp_path: Path, value: int) -> None:
    path = write(tmp_path, f"shape: gpt2-nano\nsave_total_limit: {value}")
    assert read_job([path]).training["save_total_limit"] == value


@pytest.mark.parametrize("key", ["model", "tokenizer"])
@pytest.mark.parametrize("path", ["./nothere", "/nowhere/nothere", "../a/b", "a b", "a\\b"])
def test_a_path_that_is_not_there_is_named(key: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client would speak of the spelling of its names."""
    cls = {"model": AutoConfig, "tokenizer": AutoTokenizer}[key]
    monkeypatch.setattr(cls, "from_pretrained", lambda name: pytest.fail(f"the hub was asked for {name}"))
    with pytest.raises(ValueError, match=rf"{key}: no folder .* \(seen from .*\); pass one that") as error:
        load_pretrained(cls, key, path)
    assert repr(path) in str(error.value)


def test_what_is_no_saved_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cls, needed in (
        (AutoConfig, "model, .* holds no config.json"),
        (AutoTokenizer, r"tokenizer, .* \*.json"),
    ):
        with pytest.raises(ValueError, match=f"key: expected the folder of a saved {needed}.*; pass another"):
            load_pretrained(cls, "key", str(tmp_path))
    file = write(tmp_path, "shape: gpt2-nano\n")
    with pytest.raises(ValueError, match=r"key: expected the folder .* got the file .*; pass its folder"):
        load_pretrained(AutoConfig, "key", file)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"key: can't load 'no/such': there is no such folder.*; pass"
    ) as error:
        load_pretrained(AutoConfig, "key", "no/such")
    assert "http" not in str(error.value)


def test_encoders_are_told_from_decoders() -> None:
    decoder_of_both = BartForCausalLM(
        BartConfig(d_model=16, vocab_size=9, decoder_layers=1, decoder_ffn_dim=8)
    )
    for config in (GPT2Config(), LlamaConfig(), BertConfig(is_decoder=True), decoder_of_both.config):
        check_causal(config)
    for config in (BertConfig(), RobertaConfig()):
        with pytest.raises(ValueError, match="is_decoder: false, whose tokens see what they are to predict"):
            check_causal(config)
