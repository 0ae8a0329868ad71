"""Text to blocks: which files are read, which are held out, and that no token is lost or moved."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import datasets
import numpy as np
import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from streamattn.data import (
    END_OF_TEXT,
    TokenBlocks,
    hub_or_cache,
    pack,
    read_blocks,
    read_documents,
    train_tokenizer,
    write_blocks,
)

TEXTS = [f"def f{i}(x):\n    return x + {i}  # größer\n" for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=300)


def test_the_standard_library_is_split_by_files() -> None:
    train, held_out = map(list, read_documents(None))
    assert len(train) > 300
    assert len(held_out) >= 2
    assert not set(held_out) & set(train)
    share = sum(map(len, held_out)) / sum(map(len, train))
    assert 0.01 < share < 0.2


def test_what_the_standard_library_holds_out_is_not_trained_on_under_another_name() -> None:
    """By runs of three lines; near copies in the training text would flatter the held-out loss."""

    def triples(texts: Iterable[str]) -> set[tuple[str, ...]]:
        found: set[tuple[str, ...]] = set()
        for text in texts:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            found.update(zip(lines, lines[1:], lines[2:], strict=False))
        return found

    train, held_out = map(triples, read_documents(None))
    assert len(held_out) > 500
    assert len(held_out & train) < 0.05 * len(held_out)


def test_the_standard_library_is_the_part_that_all_pythons_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ["a.py", "json/decoder.py", "xml/sax/handler.py"]
    left_out = ["test/test_a.py", "json/tests/x.py", "lib2to3/fixes/fix_map.py", "encodings/cp037.py"]
    left_out += ["site-packages/other/x.py", "_sysconfigdata__linux_x86_64-linux-gnu.py", "LICENSE.txt"]
    for name in kept + left_out:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    train, held_out = read_documents(None)
    assert sorted([*train, *held_out]) == kept


def test_a_folder_is_split_the_same_way_everywhere(tmp_path: Path) -> None:
    for name in ("a", "b"):
        root = tmp_path / name
        (root / "deep" / ".git").mkdir(parents=True)
        for i, text in enumerate(TEXTS):
            (root / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(text, encoding="utf-8")
        (root / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
        (root / "zeros.bin").write_bytes(b"\0" * 50)
        (root / "deep" / ".git" / "hidden.txt").write_text("hidden", encoding="utf-8")
    (train, held_out), again = read_documents(str(tmp_path / "a")), read_documents(str(tmp_path / "b"))
    assert (train, held_out) == again
    assert sorted([*train, *held_out]) == sorted(TEXTS)
    assert 1 <= len(list(held_out)) <= 4


def test_what_a_run_leaves_in_the_folder_is_no_text(tmp_path: Path) -> None:
    names = ["a.txt", *(f"runs/{name}.txt" for name in ("b", "one.1/c", "one.x/d", "one/e", "two/f"))]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")

    def read(folder: str, leave_out: str) -> list[str]:
        train, held_out = read_documents(str(tmp_path / folder), leave_out=tmp_path / leave_out)
        return sorted([*train, *held_out])

    kept = [name for name in names if not name.startswith(("runs/one/", "runs/one.1/"))]
    assert read(".", "runs/one") == read(".", "runs/two/../one") == kept
    # A run's folder beside the text, around it, or the very same.
    assert read("runs", "elsewhere") == read("runs", ".") == read("runs", "runs") == names[1:]


def test_the_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    text = "".join(f"line {i}\n" for i in range(1000))
    path.write_text(text, encoding="utf-8")
    ((train,), (held_out,)) = read_documents(str(path))
    assert train + held_out == text
    assert train.endswith("\n")
    assert 0.04 < len(held_out) / len(text) < 0.06


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"data: no file or folder '\./missing' .*; pass one that is there, or"
    ):
        read_documents("./missing")
    with pytest.raises(ValueError, match=r"data: no file or folder 'missing.txt'"):
        read_documents("missing.txt")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"is not UTF-8 text .*; convert it, or pass another"):
        read_documents(str(binary))
    with pytest.raises(
        ValueError, match=r"expected at least 2 files of UTF-8 text in .* found 0 among 1 files; add some, or"
    ):
        read_documents(str(tmp_path))

    def refuse(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)  # root may read everything
    with pytest.raises(
        ValueError, match=r"can't read .*binary.txt': Permission denied; let this user read it, or"
    ):
        read_documents(str(binary))


def test_what_of_a_folder_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "inside").mkdir()

    for method, name in (("read_text", "7.txt"), ("iterdir", "inside"), ("is_file", "inside")):
        original = getattr(Path, method)

        def refuses(
            path: Path, *args: Any, original: Any = original, name: str = name, **kwargs: Any
        ) -> Any:  # root may read everything
            if path.name == name:
                raise PermissionError(13, "Permission denied")
            return original(path, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(Path, method, refuses)
            with pytest.raises(ValueError, match=f"data: can't read '.*{name}': Permission denied; let this"):
                list(map(list, read_documents(str(tmp_path))))


def test_a_data_set_gives_its_text_column_and_its_own_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the real loader, on a local folder in the hub's layout."""
    rows = {"title": [str(i) for i in range(100)], "text": [f"row {i}" for i in range(100)]}
    whole = datasets.Dataset.from_dict(rows)
    splits = datasets.DatasetDict({"train": whole, "validation": whole.select(range(3))})
    asked: list[tuple[str, str | None]] = []

    def load(path: str, configuration: str | None) -> object:
        asked.append((path, configuration))
        return splits

    monkeypatch.setattr(datasets, "load_dataset", load)
    train, held_out = read_documents("owner/name:small")
    assert asked == [("owner/name", "small")]
    assert list(train) == rows["text"]
    assert list(held_out) == rows["text"][:3]

    splits.pop("validation")
    train, held_out = read_documents("owner/name")
    assert list(train) + list(held_out) == rows["text"]
    assert len(list(held_out)) == 5

    splits["train"] = whole.rename_column("text", "body")
    with pytest.raises(ValueError, match=r"expected a column 'text' .*\['title', 'body'\]; pass another"):
        read_documents("owner/name")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (RuntimeError("no such configuration\nand a second line"), "no such configuration"),
        (ConnectionError("OfflineModeIsOn"), "the hub can't be reached, and its cache here doesn't hold it"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_absent_data_set_is_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, reason: str
) -> None:
    def fail(path: str, configuration: str | None) -> object:
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=rf"neither a file or folder .*\({reason}\); pass the path") as error:
        read_documents("owner/name")
    assert "\n" not in str(error.value)


class _Hub(BaseHTTPRequestHandler):
    """Answers, if only that there is no such thing."""

    asked = 0

    def do_HEAD(self) -> None:
        type(self).asked += 1
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_only_the_cache_is_asked_where_no_hub_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(_Hub, "asked", 0)
    (tmp_path / "text").mkdir()
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, daemon=True).start()
        with hub_or_cache(None, str(tmp_path / "text"), "./missing", "a/b/c", "missing.txt"):
            assert (constants.HF_HUB_OFFLINE, _Hub.asked) == (False, 0)
        with hub_or_cache(None, "owner/name"):
            assert (constants.HF_HUB_OFFLINE, _Hub.asked) == (False, 1)
        server.shutdown()
    with hub_or_cache("text"):
        assert constants.HF_HUB_OFFLINE
    with pytest.raises(KeyError), hub_or_cache("text"):
        raise KeyError
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub_or_cache("text"):
        assert constants.HF_HUB_OFFLINE
    assert constants.HF_HUB_OFFLINE


def test_packing_keeps_every_token_in_order(tokenizer: PreTrainedTokenizerFast) -> None:
    blocks = pack(TEXTS, tokenizer, seq_len=16)
    assert blocks.shape[1] == 16
    whole = "".join(text + END_OF_TEXT for text in TEXTS)
    packed = str(tokenizer.decode(blocks.reshape(-1).tolist()))
    assert whole.startswith(packed)
    assert len(tokenizer(whole, add_special_tokens=False)["input_ids"]) - blocks.size < 16
    assert pack([], tokenizer, seq_len=16).shape == (0, 16)
    assert pack(["x"], tokenizer, seq_len=16).shape == (0, 16)


def test_a_tokenizer_that_knows_none_of_the_text_is_refused() -> None:
    known = {"other": 0, "<unk>": 1, "<end>": 2}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>")
    tokenizer.name_or_path = "some/where"
    with pytest.raises(ValueError, match=r"'some/where' has no vocabulary for this text: .* --tokenizer"):
        pack(["none of this", "and this"], tokenizer, seq_len=4)
    assert pack(["none of this", "the other"], tokenizer, seq_len=4).tolist() == [[1, 1, 1, 2]]
    assert pack(["", ""], tokenizer, seq_len=2).tolist() == [[2, 2]]


def test_a_trained_tokenizer_is_the_same_after_loading(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    text = "\tdef größer(x): return 'ñ😀'\r\n"
    for loaded in (
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    ):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert len(tokenizer) <= 300


def test_a_vocabulary_below_all_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size: expected at least 258 .* got 100"):
        train_tokenizer(TEXTS, vocab_size=100)


def test_stored_blocks_are_for_the_same_job_only(tmp_path: Path) -> None:
    made_from = {"data": None, "seq_len": 4}
    assert read_blocks(tmp_path, made_from) is None
    train, held_out = np.arange(12, dtype=np.uint32).reshape(3, 4), np.zeros((1, 4), dtype=np.uint32)
    write_blocks(tmp_path / "blocks", made_from, train, held_out)
    stored = read_blocks(tmp_path / "blocks", made_from)
    assert stored is not None
    np.testing.assert_array_equal(stored[0].blocks, train)
    np.testing.assert_array_equal(stored[1].blocks, held_out)
    with pytest.raises(ValueError, match=r"seq_len: this run began with 4 .* can't go on with 8"):
        read_blocks(tmp_path / "blocks", made_from | {"seq_len": 8})
    (tmp_path / "blocks" / "train.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"blocks is damaged \(.*; delete it"):
        read_blocks(tmp_path / "blocks", made_from)
    for text, damage in (("[]", "made_from.json holds list"), ("{", "Expecting property name")):
        write_blocks(tmp_path / "blocks", made_from, train, held_out)
        (tmp_path / "blocks" / "made_from.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"blocks is damaged \({damage}.*; delete it"):
            read_blocks(tmp_path / "blocks", made_from)
    write_blocks(tmp_path / "blocks", made_from, train.reshape(-1), held_out)
    with pytest.raises(ValueError, match=r"blocks is damaged \(.*got uint32 \(12,\)\); delete it"):
        read_blocks(tmp_path / "blocks", made_from)
    # Killed between the arrays and the description: nothing to read.
    (tmp_path / "blocks" / "made_from.json").unlink()
    assert read_blocks(tmp_path / "blocks", made_from) is None


def test_items_are_what_a_causal_language_model_takes() -> None:
    blocks = TokenBlocks(np.array([[1, 2, 3], [4, 5, 4_000_000_000]], dtype=np.uint32))
    assert len(blocks) == 2
    item = blocks[1]
    assert item["input_ids"].tolist() == [4, 5, 4_000_000_000]
    assert item["labels"].tolist() == [-100, 5, 4_000_000_000]
