"""What a fine-tuning run was asked for: the YAML and the command line.

Beside that the checks which need no trainer; `streamattn.run_folder` has what is found in ``output_dir``,
`streamattn.doctor` what is wrong with the launch.

The YAML is flat: the fields of `Job`, and any field of ``transformers.TrainingArguments``. ``--key value`` on
the command line overrides one of them, ``--resume`` goes on from the last complete checkpoint. Every mistake
raises a ValueError of one line: what was expected, what came, and what to do.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import constants
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from streamattn.data import is_path

LONGEST_MESSAGE = 600

_CONFIGS = Path(__file__).parents[1] / "configs"
_PATHS = {
    "output_dir",
    "model",
    "shape",
    "tokenizer",
    "data",
    "resume",
    "resume_from_checkpoint",
    "logging_dir",
}
_FROM_ONE_ON = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "eval_accumulation_steps",
    "dataloader_prefetch_factor",
)
# The only numbers that mean something below 0.
_BELOW_ZERO = ("max_steps", "save_total_limit", "local_rank", "past_index")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: ``no`` is a string, 5e-4 a number, 010 ten, and 1:30 and 2026_11 are strings.

    A key that comes twice, and a value that its ``!!tag`` doesn't fit, are errors with their line.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # PyYAML's constructors let through whatever int() or a dict raises
            what = repr(node.value) if isinstance(node, yaml.ScalarNode) else "this"
            problem = f"can't read {what} as {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for i, key in enumerate(keys):
            if key.value in [earlier.value for earlier in keys[:i]]:
                problem = f"the key {key.value!r} comes twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0].rpartition(":")[2] not in ("bool", "int", "float", "timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+$"), list("-+0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|Inf)$|\.(nan|NaN)$"),
    list("-+.0123456789"),
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A fine-tuning job.

    Args:
        config: the YAML it was read from.
        training: the fields of ``transformers.TrainingArguments``.
        resume: go on from the last complete checkpoint of ``output_dir`` (True), or from this one (a path).
        model: path or hub name of a pretrained model; either this or ``shape``.
        shape: name of a file in ``configs/shapes`` or a path to one: a model with random weights.
        tokenizer: path or hub name; default: the model's own, or with ``shape`` a byte-level BPE trained on
            the data.
        data: a text file, a folder, or ``name[:configuration]`` of a data set; default: the sources of
            Python's standard library.
        seq_len: tokens in a block; default: the longest the model takes.
        patch: run `streamattn.patch_model` on the model.
        context_parallel_size: processes that share one sequence.
    """

    config: Path
    training: dict[str, Any]
    resume: bool | str = False
    model: str | None = None
    shape: str | None = None
    tokenizer: str | None = None
    data: str | None = None
    seq_len: int | None = None
    patch: bool = True
    context_parallel_size: int = 1

    @property
    def output_dir(self) -> Path:
        """Where checkpoints, the model, and the packed text go."""
        return Path(self.training["output_dir"])

    def __post_init__(self) -> None:
        for key in ("model", "shape", "tokenizer", "data"):
            if getattr(self, key) == "":
                raise ValueError(f"{key}: expected a path or a name, got an empty string; leave the key out")
        if (self.model is None) == (self.shape is None):
            remedy = "name one of them" if self.model is None else "leave one of them out"
            raise ValueError(
                f"expected either model or shape, got model={self.model!r} and shape={self.shape!r}; {remedy}"
            )
        if self.seq_len is not None and self.seq_len < 2:
            raise ValueError(f"seq_len: expected at least 2 tokens, got {self.seq_len}")
        self._check_context_parallel()

    def _check_context_parallel(self) -> None:
        size = self.context_parallel_size
        if size < 1:
            raise ValueError(f"context_parallel_size: expected at least 1, got {size}")
        if size > 1 and not self.patch:
            raise ValueError(
                f"context_parallel_size: {size} processes share a sequence in patched layers alone; leave "
                "patch: false out"
            )
        for key in ("label_smoothing_factor", "neftune_noise_alpha", "torch_compile"):
            if size > 1 and self.training.get(key):
                raise ValueError(
                    f"{key}: not served with context_parallel_size {size}; leave one of them out"
                )


def read_job(argv: Sequence[str]) -> Job:
    """The job that ``CONFIG [--key value ...]`` asks for.

    Raises:
        ValueError: an unknown key (the message names the nearest), a value of a wrong type, no such file.
    """
    config, *rest = argv
    if config.startswith("-"):
        raise ValueError(f"expected the path of a YAML first, got {config!r}")
    path = Path(config)
    values, texts = _read_yaml(path)
    _check_keys(values, origin=str(path))
    overrides, override_texts = _parse_overrides(rest)
    resume = overrides.pop("resume", False)
    if resume in (None, ""):
        raise ValueError("resume: expected the folder of a checkpoint, or nothing, got an empty string")
    _check_keys(overrides, origin="command line")
    for chosen, other in (("model", "shape"), ("shape", "model")):
        if overrides.get(chosen) is not None and other not in overrides:
            values.pop(other, None)
    values |= overrides
    texts |= override_texts
    hints = {**typing.get_type_hints(TrainingArguments), **typing.get_type_hints(Job)}
    values = {key: _typed(key, value, hints[key], texts[key]) for key, value in values.items()}
    # Once, for all who read them: TrainingArguments does it, but for its own output_dir only.
    values = {key: _expand_home(key, value) for key, value in values.items()}
    own = {key: values.pop(key) for key in job_keys() & values.keys()}
    _check_training(values)
    values["output_dir"] = values.get("output_dir") or f"runs/{path.stem}"
    values.setdefault("report_to", "none")
    values.setdefault("dataloader_pin_memory", torch.cuda.is_available())
    # Every parameter of a language model is used; looking for others costs a walk of the graph a step.
    values.setdefault("ddp_find_unused_parameters", False)
    # Bars redraw themselves: in a file each step would leave a line.
    values.setdefault("disable_tqdm", not sys.stderr.isatty())
    if values.get("gradient_checkpointing") and "activation_checkpointing" not in hints:
        # The reentrant kind, default before the newer name, marks parameters ready twice under DDP that looks
        # for unused ones (huggingface/peft#313).
        values.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": False})
    return Job(
        config=path,
        training=values,
        resume=resume if isinstance(resume, bool) else _expand_home("resume", str(resume)),
        **own,
    )


def job_keys() -> set[str]:
    """The keys of the YAML that aren't ``transformers.TrainingArguments``'s."""
    return {field.name for field in dataclasses.fields(Job)} - {"config", "training", "resume"}


def _parse(text: str) -> tuple[Any, dict[str, Any]]:
    """The value of a YAML, and of a mapping's values the texts as they were written."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        return value, {key.value: item.value for key, item in pairs}
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    finally:
        loader.dispose()


def _is_shape(file: Path) -> bool:
    return file.is_file() and "model_type:" in file.read_text(encoding="utf-8", errors="replace")


def _read_yaml(path: Path, shape: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a file and their texts; where there is no such file, others of its kind are named."""
    try:
        values, texts = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shipped = _CONFIGS / "shapes" if shape else _CONFIGS
        folders = dict.fromkeys(folder.resolve() for folder in (path.parent, shipped))
        files = {file.name: file for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")}
        files = {name: file for name, file in files.items() if _is_shape(file) == shape}
        stems = {Path(name).stem: file for name, file in files.items()}  # the ending is alike in all of them
        near = [str(stems[name]) for name in difflib.get_close_matches(path.stem, stems, n=3, cutoff=0.4)]
        hint = f"near it: {', '.join(near)}" if near else "pass the path of a YAML that is there"
        raise ValueError(f"no file {str(path)!r}; {hint}") from None
    except OSError as error:
        raise ValueError(f"can't read {str(path)!r}: {error.strerror}; pass the path of a YAML") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not a YAML file: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: {', '.join(filter(None, (error.context, error.problem)))}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        got = "an empty file" if values is None else type(values).__name__
        raise ValueError(f"{path}: expected lines of 'key: value', got {got}")
    return values, texts


def _parse_overrides(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``--key value``, ``--key=value`` or ``--key`` (true): the values, read as YAML, and their texts.

    An empty value is an empty string: to the YAML it would be none, the default.
    """
    values: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"expected --key value, got {word!r}; write --KEY in front of a value")
        key, equals, text = word[2:].partition("=")
        if not key:
            raise ValueError(f"expected --key value, got {word!r}; write a key of the YAML behind the --")
        if not equals:
            text = words.pop(0) if words and not words[0].startswith("--") else "true"
        key = key.replace("-", "_")
        if key in texts:
            raise ValueError(f"command line: --{key} comes twice; pass it once")
        texts[key] = text
        try:
            values[key] = _parse(text)[0] if text.strip() else ""
        except yaml.YAMLError:
            values[key] = text
    return values, texts


def _check_keys(values: Mapping[str, Any], origin: str) -> None:
    known = sorted(job_keys() | {field.name for field in dataclasses.fields(TrainingArguments) if field.init})
    for key in values:
        if key not in known:
            (nearest,) = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ValueError(f"{origin}: unknown key {key!r}; the nearest is {nearest!r}")


def _expand_home(key: str, value: Any) -> Any:
    """A path that starts with ``~``, from the home folder; other values as they are."""
    if not isinstance(value, str):
        return value
    if "\0" in value:
        raise ValueError(f"{key}: expected text without a NUL character, got {value!r}")
    expanded = os.path.expanduser(value)
    if key in _PATHS and expanded.startswith("~"):
        raise ValueError(
            f"{key}: no home folder for {value.partition('/')[0]!r}, got {value!r}; write ./~... for a name "
            "that starts with ~"
        )
    return expanded


def _check_training(values: Mapping[str, Any]) -> None:
    """Refuse what TrainingArguments takes but has no meaning, would train no step, or measure no loss."""
    for key, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{key}: expected a number, got nan")
    if not 0 <= values.get("learning_rate", 0.0) < math.inf:
        raise ValueError(f"learning_rate: expected a finite number from 0 on, got {values['learning_rate']}")
    for key in ("seed", "data_seed"):
        if not 0 <= (values.get(key) or 0) < 2**32:
            raise ValueError(f"{key}: expected a whole number from 0 to 2^32 - 1, got {values[key]}")
    for key in _FROM_ONE_ON:
        if (value := values.get(key)) is not None and value < 1:
            raise ValueError(f"{key}: expected at least 1, got {value}")
    max_steps, epochs = values.get("max_steps", -1), values.get("num_train_epochs", 1.0)
    if max_steps < 1 and max_steps != -1:
        raise ValueError(f"max_steps: expected at least 1, or -1 to go by num_train_epochs, got {max_steps}")
    if max_steps == -1 and not epochs > 0:
        raise ValueError(f"num_train_epochs: expected more than 0, got {epochs}")
    for key, value in values.items():
        if isinstance(value, int | float) and value < 0 and key not in _BELOW_ZERO:
            raise ValueError(f"{key}: expected a number from 0 on, got {value}; leave the key out")
    if values.get("do_train") is False:
        raise ValueError("do_train: expected true, got false; a job always trains, leave the key out")
    if values.get("metric_for_best_model") not in (None, "loss", "eval_loss"):
        raise ValueError(
            f"metric_for_best_model: expected loss, the only one that is measured, got "
            f"{values['metric_for_best_model']!r}; leave the key out"
        )
    if values.get("label_names") not in (None, ["labels"]):
        raise ValueError(
            f"label_names: expected ['labels'], the only ones of a block of text, got "
            f"{values['label_names']}; leave the key out"
        )


def _typed(key: str, value: Any, hint: Any, text: str) -> Any:
    """``value`` as one of the types that ``hint`` allows: whole floats are ints, a string keeps its ``text``.

    Hints of other than YAML's types (an enum) are left to ``transformers.TrainingArguments``.
    """
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    allowed = {typing.get_origin(option) or option for option in options}
    if type(value) in allowed or not allowed & {bool, int, float, str, dict, list}:
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and float in allowed:
        return float(value)
    if number and int in allowed and float(value).is_integer():
        return int(value)
    if number and str in allowed:
        return text
    names = " or ".join(sorted("none" if option is type(None) else option.__name__ for option in allowed))
    remedy = "; write true or false" if bool in allowed else ""
    if float in allowed and str(value).lstrip("+-").lower() in ("inf", "infinity"):
        remedy = "; YAML's infinity is .inf"
    raise ValueError(f"{key}: expected {names}, got {value!r}{remedy}")


def one_line(error: BaseException) -> str:
    """An error's message, without PyTorch's C++ stack, on one line of bounded length."""
    text, _, _ = str(error).partition("Exception raised from")
    if not text or isinstance(error, LookupError | AttributeError):  # a KeyError's message is only the key
        text = f"{type(error).__name__}: {text}"
    return textwrap.shorten(text, LONGEST_MESSAGE, placeholder=" ...")


def load_pretrained(cls: Any, key: str, name: str, **options: Any) -> Any:
    """``cls.from_pretrained(name)``, whose errors name the job's key.

    Raises:
        ValueError: whatever was wrong, in one line; of a path that isn't there nothing is asked of the hub.
    """
    path = Path(name)
    if is_path(name) and not path.exists():
        raise ValueError(
            f"{key}: no folder {name!r} (seen from {Path.cwd()}); pass one that a model was saved in, or a "
            "name on the hub"
        )
    if path.is_file():
        raise ValueError(
            f"{key}: expected the folder of a saved model, got the file {name!r}; pass its folder"
        )
    needed = {AutoConfig: ("config.json",), AutoTokenizer: ("*.json", "*.model", "vocab*")}.get(cls, ("*",))
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in needed):
        what = "model" if cls is AutoConfig else "tokenizer"
        raise ValueError(
            f"{key}: expected the folder of a saved {what}, {name!r} holds no "
            f"{' or '.join(needed)}; pass another"
        )
    try:
        return cls.from_pretrained(name, **options)
    except Exception as error:  # which one differs between releases
        reason = one_line(error)
        if isinstance(error, OSError) and constants.HF_HUB_OFFLINE and not path.exists():
            reason = (
                "there is no such folder, the hub doesn't answer (or HF_HUB_OFFLINE is set), and its cache "
                "here doesn't hold it; pass the folder of a saved model"
            )
        raise ValueError(f"{key}: can't load {name!r}: {reason}") from error


def load_shape(name: str, beside: Path = _CONFIGS) -> PretrainedConfig:
    """A model's configuration from a file with ``model_type`` and fields of that type's configuration class.

    Args:
        name: a path, or the name of a file in ``configs/shapes`` (with or without ``.yaml``).
        beside: the folder whose ``shapes`` folder is looked into first.

    Returns:
        The configuration, without the special tokens' ids: those are the tokenizer's.

    Raises:
        ValueError: no such file, or not a shape.
    """
    file = name if name.endswith(".yaml") else f"{name}.yaml"
    candidates = [Path(name), beside / "shapes" / file, _CONFIGS / "shapes" / file]
    missing = candidates[0 if is_path(name) else -1]
    path = next((candidate for candidate in candidates if candidate.is_file()), missing)
    try:
        values, _ = _read_yaml(path, shape=True)
    except ValueError as error:
        raise ValueError(f"shape: {error}") from None
    if "model_type" not in values:
        raise ValueError(
            f"{path}: expected model_type: gpt2 or another of transformers' model types, got {values}"
        )
    model_type = str(values.pop("model_type"))
    if model_type not in CONFIG_MAPPING:
        (nearest,) = difflib.get_close_matches(model_type, CONFIG_MAPPING.keys(), n=1, cutoff=0.0)
        raise ValueError(
            f"{path}: model_type: transformers has no {model_type!r}; the nearest is {nearest!r}"
        )
    config = AutoConfig.for_model(model_type)
    for key in values:
        # rope_theta moved into rope_parameters in transformers 5; the constructor takes it in either version.
        if not hasattr(config, str(key)) and key != "rope_theta":
            (nearest,) = difflib.get_close_matches(str(key), config.to_dict(), n=1, cutoff=0.0)
            raise ValueError(
                f"{path}: {type(config).__name__} has no field {key!r}; the nearest is {nearest!r}"
            )
    special_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    fields: dict[str, Any] = {**special_tokens, **values}
    try:
        config = type(config)(**fields)
    except Exception as error:  # releases differ in what a configuration class raises on a wrong value
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    names = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    heads, kv_heads, layers = (getattr(config, name, None) for name in names)
    for name, count in zip(names, (heads, kv_heads, layers), strict=True):
        if isinstance(count, int) and count < 1:
            name = (config.attribute_map or {}).get(name, name)
            raise ValueError(f"{path}: {name}: expected at least 1, got {count}")
    if heads and kv_heads and heads % kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads: expected a multiple of num_key_value_heads={kv_heads}, got {heads}"
        )
    return config


def check_causal(config: PretrainedConfig) -> None:
    """Raise ValueError for a model whose tokens see later ones: its loss would measure how well it copies.

    Args:
        config: the built model's, for decoders of encoder-decoder families set ``is_decoder`` there.
    """
    # Families that learn by filling gaps.
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"expected a causal language model, got {config.model_type} with is_decoder: false, whose tokens "
            "see what they are to predict; take a decoder, such as gpt2, llama or olmo2"
        )


def check_batches(
    arguments: TrainingArguments, train_blocks: int, held_out_blocks: int, context_parallel_size: int = 1
) -> None:
    """Raise ValueError for batches of which ``dataloader_drop_last`` would leave none."""
    blocks = {"train": train_blocks, "eval": held_out_blocks}
    sizes = {"train": arguments.train_batch_size, "eval": arguments.eval_batch_size}
    for name, size in sizes.items():
        most = blocks[name] // (arguments.world_size // context_parallel_size)
        if arguments.dataloader_drop_last and size > most:
            raise ValueError(
                f"per_device_{name}_batch_size: expected at most {most}, got {size}: dataloader_drop_last "
                f"would drop all of the {blocks[name]} blocks; leave it out, or take smaller batches"
            )
