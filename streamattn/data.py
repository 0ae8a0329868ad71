"""Text for fine-tuning: where it comes from, how it is tokenized, and how it is packed into blocks.

A source is a text file, a folder of them, the name of a data set that the ``datasets`` package can load, or
(the default) the sources of Python's own standard library, which every machine has. Documents are joined by
the tokenizer's end-of-text token and cut into blocks of ``seq_len`` tokens, [N, seq_len]; what is left over
at the end is dropped. Part of the files is held out and never trained on.

Left out on purpose: padding (blocks are full), masks between the documents of a block (the usual packing of
language modelling), streaming of data sets larger than memory.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants, get_session, utils
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

HELD_OUT_SHARE = 0.05  # of a text's characters or of a data set's rows
STDLIB_HELD_OUT_SHARE = 0.01  # it is large: 25,000 tokens, and evaluating them takes seconds
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"

# What is no part of the default text, so that Python's releases and distributions agree on most of it.
_NOT_STDLIB = {
    *("site-packages", "dist-packages"),
    *("test", "tests"),  # half of the bytes, and not shipped everywhere
    *("idlelib", "tkinter", "turtledemo"),  # packages of their own in distributions
    *("distutils", "lib2to3"),  # gone since 3.12 and 3.13; families of files that are nearly the same
    *("encodings", "pydoc_data"),  # tables, many nearly the same: held out, they would flatter the loss
}
_DOCUMENTS_AT_ONCE = 512


class TokenBlocks(Dataset[dict[str, torch.Tensor]]):
    """Packed blocks as the items a causal language model trains on.

    Args:
        blocks: [N, seq_len], any unsigned integer dtype; may be memory-mapped.
    """

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``labels``, both [seq_len] int64; the model itself shifts the labels."""
        tokens = torch.from_numpy(self.blocks[index].astype(np.int64))
        labels = tokens.clone()
        # Nothing predicts the first token. Trainer divides by the labels it counts, and not every version
        # leaves this one out: losses would come out too small by 1 / seq_len.
        labels[0] = -100
        return {"input_ids": tokens, "labels": labels}


def read_documents(source: str | None, leave_out: Path | None = None) -> tuple[Iterable[str], Iterable[str]]:
    """The documents to train on and the held-out ones.

    Args:
        source: a file, a folder, or ``name[:configuration]`` of a data set; None = Python's standard library.
        leave_out: a run's folder, which may lie inside the folder ``source``: no file of it is read, nor of
            the earlier runs that were moved aside to ``<leave_out>.1``, ``<leave_out>.2`` and so on.

    Returns:
        Two iterables of texts that can be walked repeatedly. Files are held out whole, chosen by a hash of
        their path so that machines agree; of a single file the last part is held out; of a data set its
        validation or test split, else its last rows.

    Raises:
        ValueError: nothing readable as text there.
    """
    if source is None:
        return _standard_library()
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, leave_out)
    if path.exists():
        return _single_file(path)
    if is_path(source):
        raise ValueError(
            f"data: no file or folder {source!r} (seen from {Path.cwd()}); pass one that is there, or leave "
            "data out to train on Python's standard library"
        )
    return _data_set(source)


def is_path(name: str) -> bool:
    """Whether ``name`` is a file's or folder's, even of one that isn't there, and can't be one on the hub."""
    path = Path(name).expanduser()
    return (
        path.exists()
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or path.suffix in (".txt", ".md")
        or re.search(r"[\\\s]", name) is not None
    )


@contextmanager
def hub_or_cache(*names: str | None) -> Iterator[None]:
    """Where the hub doesn't answer, let its client look into its cache only, as with ``HF_HUB_OFFLINE=1``.

    By itself the client asks six times for each file, with a warning each time, for more than 20 s.

    Args:
        names: models, tokenizers and data sets; without one that may lie on the hub, it isn't asked.
    """
    remote = [name for name in names if name is not None and not is_path(name)]
    offline = constants.HF_HUB_OFFLINE
    try:
        if remote and not offline:
            try:
                get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            except Exception:  # the errors of an HTTP library that changes with the client's major version
                _set_offline(True)
        yield
    finally:
        if offline != constants.HF_HUB_OFFLINE:
            _set_offline(offline)


def _set_offline(offline: bool) -> None:
    constants.HF_HUB_OFFLINE = offline
    # Before release 1 a session keeps to what was set when it was made.
    getattr(utils, "reset_sessions", lambda: None)()


def _standard_library() -> tuple[list[str], list[str]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        f
        for f in root.rglob("*.py")
        if not _NOT_STDLIB.intersection(f.relative_to(root).parts)
        # tables of how this Python was built, some of them twice
        and not f.name.startswith("_sysconfigdata")
        and os.access(f, os.R_OK)
    ]
    return _split_files(root, files, STDLIB_HELD_OUT_SHARE)


def _folder(root: Path, leave_out: Path | None) -> tuple[list[str], list[str]]:
    files = list(_files(root))
    base = root.resolve()
    if leave_out is not None and base in leave_out.resolve().parents:
        run = re.compile(re.escape(leave_out.resolve().relative_to(base).as_posix()) + r"(\.\d+)?/")
        files = [f for f in files if not run.match(f.relative_to(root).as_posix())]
    return _split_files(root, files, HELD_OUT_SHARE)


def _files(folder: Path) -> Iterator[Path]:
    """The files under a folder, but for those whose names, or whose folders' names, begin with a dot."""
    try:
        inside = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from None
    for path in inside:
        try:
            is_file, is_folder = path.is_file(), path.is_dir() and not path.is_symlink()
        except OSError as error:
            raise _unreadable(path, error) from None
        if is_file:
            yield path
        elif is_folder:
            yield from _files(path)


def _split_files(root: Path, files: list[Path], share: float) -> tuple[list[str], list[str]]:
    names = {f.relative_to(root).as_posix(): f for f in files}
    texts = {name: text for name in sorted(names) if (text := _text_or_none(names[name]))}
    if len(texts) < 2:
        raise ValueError(
            f"data: expected at least 2 files of UTF-8 text in {str(root)!r} (one is held out), found "
            f"{len(texts)} among {len(files)} files; add some, or pass one file, whose end is held out"
        )
    by_hash = sorted(texts, key=lambda name: (zlib.crc32(name.encode()), name))
    enough = share * sum(map(len, texts.values()))
    held_out: set[str] = set()
    size = 0
    for name in by_hash[:-1]:
        held_out.add(name)
        size += len(texts[name])
        if size >= enough:
            break
    return [t for n, t in texts.items() if n not in held_out], [texts[n] for n in by_hash if n in held_out]


def _read(path: Path) -> str:
    """The file's text; UnicodeDecodeError if it isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"data: can't read {str(path)!r}: {error.strerror}; let this user read it, or pass another"
    )


def _text_or_none(path: Path) -> str | None:
    """The file's text; None if it isn't UTF-8 text."""
    try:
        text = _read(path)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _single_file(path: Path) -> tuple[list[str], list[str]]:
    try:
        text = _read(path)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}); convert "
            "it, or pass another"
        ) from None
    start = len(text) - int(len(text) * HELD_OUT_SHARE)
    cut = text.rfind("\n", 0, start) + 1 or start
    return [text[:cut]], [text[cut:]]


def _data_set(name: str) -> tuple[Iterable[str], Iterable[str]]:
    import datasets

    path, _, configuration = name.partition(":")
    try:
        splits = datasets.load_dataset(path, configuration or None)
    # anything from a missing name to no network; the reader needs the reason, not the stack
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, ConnectionError):
            reason = "the hub can't be reached, and its cache here doesn't hold it"
        raise ValueError(
            f"data: {name!r} is neither a file or folder here nor a data set that could be loaded "
            f"({reason}); pass the path of a text, or leave data out to train on Python's standard library"
        ) from error
    if not isinstance(splits, datasets.DatasetDict) or "train" not in splits:
        raise ValueError(
            f"data: expected a data set with a split 'train', {name!r} has {list(splits)}; pass another, or "
            "the path of a text"
        )
    train = splits["train"]
    held_out = next((splits[s] for s in ("validation", "test") if s in splits), None)
    if held_out is None:
        rows = max(1, int(len(train) * HELD_OUT_SHARE))
        train, held_out = (
            train.select(range(len(train) - rows)),
            train.select(range(len(train) - rows, len(train))),
        )
    strings = [
        column for column, feature in train.features.items() if getattr(feature, "dtype", "") == "string"
    ]
    column = "text" if "text" in strings else strings[0] if len(strings) == 1 else None
    if column is None:
        raise ValueError(
            f"data: expected a column 'text' or a single one of strings in {name!r}, found {strings}; "
            "pass another, or the path of a text"
        )
    return train[column], held_out[column]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocab_size`` tokens, learned from ``texts``.

    Its end-of-text and padding tokens differ: OLMo-2 never trains its padding token's embedding.

    Raises:
        ValueError: ``vocab_size`` doesn't even hold all bytes and the two special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 2:
        raise ValueError(
            f"vocab_size: expected at least {len(alphabet) + 2} for a byte-level BPE, got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        clean_up_tokenization_spaces=False,
    )


def pack(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, seq_len: int) -> np.ndarray:
    """Tokens of all texts, each followed by the end-of-text token, as blocks [N, seq_len] uint32.

    Raises:
        ValueError: there is text, but to the tokenizer all of it is special tokens, or nothing.
    """
    characters = 0
    end = np.array([tokenizer.eos_token_id], dtype=np.uint32)
    pieces: list[np.ndarray] = []
    for batch in _batches(texts, _DOCUMENTS_AT_ONCE):
        characters += sum(map(len, batch))
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            pieces += [np.array(ids, dtype=np.uint32), end]
    tokens = np.concatenate(pieces) if pieces else end[:0]
    # What AutoTokenizer makes of a model's folder without a tokenizer's files.
    if characters and set(tokenizer.all_special_ids).issuperset(np.unique(tokens).tolist()):
        raise ValueError(
            f"the tokenizer at {tokenizer.name_or_path!r} has no vocabulary for this text: of {characters} "
            "characters it makes special tokens only; give another with --tokenizer"
        )
    blocks = len(tokens) // seq_len
    return tokens[: blocks * seq_len].reshape(blocks, seq_len)


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(islice(iterator, size)):
        yield batch


def write_blocks(folder: Path, made_from: dict[str, Any], train: np.ndarray, held_out: np.ndarray) -> None:
    """Store packed blocks, so that other ranks and a resumed run read the very same ones.

    Args:
        folder: is created; what lay there is replaced.
        made_from: what the blocks depend on; `read_blocks` wants the same.
        train: [N, seq_len] uint32.
        held_out: [M, seq_len] uint32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    description = folder / "made_from.json"
    description.unlink(missing_ok=True)
    np.save(folder / "train.npy", train)
    np.save(folder / "held_out.npy", held_out)
    # Written last and moved in whole: where it stands, the blocks are complete.
    unfinished = folder / "made_from.json.part"
    unfinished.write_text(json.dumps(made_from, indent=2), encoding="utf-8")
    os.replace(unfinished, description)


def read_blocks(folder: Path, made_from: dict[str, Any]) -> tuple[TokenBlocks, TokenBlocks] | None:
    """Blocks stored by `write_blocks`, memory-mapped; None if there are none.

    Raises:
        ValueError: they were made from something else, or are damaged.
    """
    description = folder / "made_from.json"
    if not description.exists():
        return None
    try:
        stored = json.loads(description.read_text(encoding="utf-8"))
        train, held_out = (
            TokenBlocks(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("train", "held_out")
        )
        if not isinstance(stored, dict):
            raise ValueError(f"{description.name} holds {type(stored).__name__}, not names and values")
        for part in (train, held_out):
            if part.blocks.ndim != 2 or part.blocks.dtype != np.uint32:
                raise ValueError(
                    f"expected blocks [N, seq_len] uint32, got {part.blocks.dtype} {part.blocks.shape}"
                )
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{folder} is damaged ({error}); delete it, and the text is packed again") from None
    for key, value in made_from.items():
        if stored.get(key) != value:
            raise ValueError(
                f"{key}: this run began with {stored.get(key)!r} (see {folder}) and can't go on with "
                f"{value!r}; pass the same, or another output_dir"
            )
    return train, held_out
