"""Bad input to `attention`: the error says what was expected, what came and what to do, and nothing runs."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamattn import attention, dispatch, flash_attention, ops
from streamattn.dispatch import BACKEND_NAMES, Backend


def tensors(**changes) -> dict:
    """Legal q, k, v [2, 4, 8, 16] with two key heads, changed by name."""
    made = {"q": torch.randn(2, 4, 8, 16), "k": torch.randn(2, 2, 8, 16), "v": torch.randn(2, 2, 8, 16)}
    return made | changes


class Listener(TorchDispatchMode):
    """Listens on every operator, so that attention goes through its own; fails there if it must `refuse`."""

    def __init__(self, *, refuse: bool) -> None:
        super().__init__()
        self.refuse = refuse

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not (self.refuse and func.namespace == "streamattn"), f"{func} ran on bad input"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where an implementation is asked for, by the operator or by the short way past it."""

    def refuse(chosen: Backend) -> None:
        raise AssertionError(f"{chosen.value} would have run on bad input")

    monkeypatch.setattr(ops, "_implementation", refuse)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def randn(*shape: int, **kwargs) -> torch.Tensor:
    return torch.randn(*shape, **kwargs)


INT_Q = torch.zeros(2, 4, 8, 16, dtype=torch.int64)
INT_KV = torch.zeros(2, 2, 8, 16, dtype=torch.int32)

PAGES = torch.zeros(2, 3, dtype=torch.int32)
PAGED = {
    "q": randn(2, 4, 1, 16),
    "k": randn(5, 2, 4, 16),
    "v": randn(5, 2, 4, 16),
    "kv_lengths": torch.tensor([3, 12]),
    "block_table": PAGES,
}

# name -> (error, changes to the legal arguments, words that the message must hold: what it wants and got)
BAD = {
    "q is an array": (TypeError, {"q": np.zeros((2, 4, 8, 16))}, ["q", "Tensor", "ndarray"]),
    "k is None": (TypeError, {"k": None}, ["k", "Tensor", "None"]),
    "q is integer": (TypeError, {"q": INT_Q}, ["q", "float", "int64"]),
    "k is integer": (TypeError, {"k": INT_KV}, ["k", "float", "int32"]),
    "v is integer": (TypeError, {"v": INT_KV}, ["v", "float", "int32"]),
    "q is bool": (TypeError, {"q": INT_Q.bool()}, ["q", "float", "bool"]),
    "q is complex": (
        TypeError,
        {"q": randn(2, 4, 8, 16, dtype=torch.complex64)},
        ["q", "float", "complex64"],
    ),
    "q is float8": (TypeError, {"q": randn(2, 4, 8, 16).to(torch.float8_e4m3fn)}, ["q", "float16", "float8"]),
    "q is float16": (TypeError, {"q": randn(2, 4, 8, 16).half()}, ["dtype", "float16", "float32"]),
    "v is bfloat16": (TypeError, {"v": randn(2, 2, 8, 16).bfloat16()}, ["dtype", "bfloat16", "float32"]),
    "k is elsewhere": (ValueError, {"k": randn(2, 2, 8, 16, device="meta")}, ["device", "meta", "cpu"]),
    "q is elsewhere": (ValueError, {"q": randn(2, 4, 8, 16, device="meta")}, ["device", "meta", "cpu"]),
    "one dimension": (ValueError, {x: randn(16) for x in "qkv"}, ["4-D", "3-D", "2-D", "[16]"]),
    "five dimensions": (ValueError, {x: randn(1, 1, 2, 8, 16) for x in "qkv"}, ["4-D", "[1, 1, 2, 8, 16]"]),
    "ranks differ": (ValueError, {"k": randn(2, 8, 16), "v": randn(2, 8, 16)}, ["4-D", "[2, 8, 16]"]),
    "heads do not divide": (ValueError, {"q": randn(2, 3, 8, 16)}, ["heads", "multiple", "3", "2"]),
    "more key heads": (ValueError, {"q": randn(2, 1, 8, 16)}, ["heads", "multiple", "1", "2"]),
    "no key heads": (ValueError, {x: randn(2, 0, 8, 16) for x in "kv"}, ["heads", "0"]),
    "k and v heads differ": (
        ValueError,
        {"v": randn(2, 4, 8, 16)},
        ["k and v", "[2, 2, 8, 16]", "[2, 4, 8, 16]"],
    ),
    "k and v lengths differ": (ValueError, {"v": randn(2, 2, 9, 16)}, ["k and v", "[2, 2, 9, 16]"]),
    "batches differ": (ValueError, {"q": randn(3, 4, 8, 16)}, ["batch", "[3, 4, 8, 16]", "[2, 2, 8, 16]"]),
    "batch of v differs": (ValueError, {"v": randn(1, 2, 8, 16)}, ["[1, 2, 8, 16]"]),
    "head_dim differs": (
        ValueError,
        {"q": randn(2, 4, 8, 24)},
        ["head_dim", "[2, 4, 8, 24]", "[2, 2, 8, 16]"],
    ),
    "head_dim 0": (
        ValueError,
        {"q": randn(2, 4, 8, 0), "k": randn(2, 2, 8, 0)},
        ["head_dim", "[2, 4, 8, 0]"],
    ),
    "no heads": (ValueError, {"q": randn(2, 0, 8, 16)}, ["heads", "positive multiple", "0 and 2"]),
    "no heads, no batch": (
        ValueError,
        {"q": randn(0, 8, 16), "k": randn(2, 8, 16), "v": randn(2, 8, 16)},
        ["0 and 2"],
    ),
    "q is a list": (TypeError, {"q": [[1.0]]}, ["q", "Tensor", "list"]),
    "k is sparse": (
        TypeError,
        {"k": randn(2, 2, 8, 16).to_sparse()},
        ["k", "dense", "sparse_coo", "k.to_dense()"],
    ),
    "causal of numpy": (TypeError, {"causal": np.bool_(True)}, ["causal", "True or False", "bool"]),
    "window of numpy": (ValueError, {"window_size": np.int64(0)}, ["window_size", "positive", "0"]),
    "window of numpy's bool": (TypeError, {"window_size": np.bool_(True)}, ["window_size", "int"]),
    "return_lse a string": (TypeError, {"return_lse": "x"}, ["return_lse", "True or False", "'x'"]),
    "return_lse 1": (TypeError, {"return_lse": 1}, ["return_lse", "True or False", "1"]),
    "window 0": (ValueError, {"window_size": 0}, ["window_size", "positive", "0"]),
    "window negative": (ValueError, {"window_size": -1}, ["window_size", "positive", "-1"]),
    "window side negative": (ValueError, {"window_size": (-2, 0)}, ["window_size", "-1", "(-2, 0)"]),
    "window right negative": (ValueError, {"window_size": (3, -3)}, ["window_size", "-1", "(3, -3)"]),
    "window of three": (ValueError, {"window_size": (1, 2, 3)}, ["window_size", "(1, 2, 3)"]),
    "window is a float": (TypeError, {"window_size": 4.0}, ["window_size", "int", "4.0"]),
    "window of floats": (TypeError, {"window_size": (4.0, 0)}, ["window_size", "int", "4.0"]),
    "window is a string": (TypeError, {"window_size": "4"}, ["window_size", "int", "4"]),
    "window is a bool": (TypeError, {"window_size": True}, ["window_size", "int", "True"]),
    "dropout 1": (ValueError, {"dropout_p": 1.0}, ["dropout_p", "[0, 1)", "1.0"]),
    "dropout negative": (ValueError, {"dropout_p": -0.1}, ["dropout_p", "[0, 1)", "-0.1"]),
    "dropout nan": (ValueError, {"dropout_p": float("nan")}, ["dropout_p", "[0, 1)", "nan"]),
    "dropout is a string": (TypeError, {"dropout_p": "0.1"}, ["dropout_p", "number", "str"]),
    "sinks of integers": (
        TypeError,
        {"sinks": torch.zeros(2, dtype=torch.int64)},
        ["sinks", "floating", "int64"],
    ),
    "sinks a list": (TypeError, {"sinks": [0.0, 0.0]}, ["sinks", "floating", "list"]),
    "sinks of the wrong length": (ValueError, {"sinks": torch.zeros(3)}, ["sinks", "[4]", "[3]"]),
    "sinks elsewhere": (ValueError, {"sinks": torch.zeros(4, device="meta")}, ["sinks", "cpu", "meta"]),
    "softcap negative": (ValueError, {"softcap": -2.0}, ["softcap", "0 or more", "-2.0"]),
    "softcap infinite": (ValueError, {"softcap": float("inf")}, ["softcap", "finite", "inf"]),
    "scale nan": (ValueError, {"scale": float("nan")}, ["scale", "finite", "nan"]),
    "scale infinite": (ValueError, {"scale": float("inf")}, ["scale", "finite", "inf"]),
    "scale minus infinity": (ValueError, {"scale": float("-inf")}, ["scale", "finite", "inf"]),
    "scale above float32": (ValueError, {"scale": -1e39}, ["scale", "float32", "-1e+39"]),
    "scale a huge integer": (ValueError, {"scale": 10**400}, ["scale", "float32", "1000"]),
    "scale a list": (TypeError, {"scale": [1]}, ["scale", "number", "list"]),
    "scale complex": (TypeError, {"scale": 1j}, ["scale", "number", "complex"]),
    "softcap above float32": (ValueError, {"softcap": 1e39}, ["softcap", "float32", "1e+39"]),
    "softcap below float32": (ValueError, {"softcap": 1e-50}, ["softcap", "float32", "1e-50"]),
    "softcap a list": (TypeError, {"softcap": [1.0]}, ["softcap", "number", "list"]),
    "softcap a bool": (TypeError, {"softcap": False}, ["softcap", "number", "bool"]),
    "dropout a list": (TypeError, {"dropout_p": [0.1]}, ["dropout_p", "number", "list"]),
    "scale is a tensor": (TypeError, {"scale": torch.tensor(0.1)}, ["scale", "number", "Tensor"]),
    "mask integer": (
        TypeError,
        {"attn_mask": torch.ones(8, 8, dtype=torch.int64)},
        ["attn_mask", "bool", "int64"],
    ),
    "mask uint8": (
        TypeError,
        {"attn_mask": torch.ones(8, 8, dtype=torch.uint8)},
        ["attn_mask", "bool", "uint8"],
    ),
    "mask a list": (TypeError, {"attn_mask": [[True]]}, ["attn_mask", "Tensor", "list"]),
    "mask sparse": (
        TypeError,
        {"attn_mask": torch.zeros(8, 8).to_sparse()},
        ["attn_mask", "dense", "sparse_coo", "to_dense()"],
    ),
    "mask too short": (
        ValueError,
        {"attn_mask": torch.ones(8, 7).bool()},
        ["attn_mask", "[2, 4, 8, 8]", "[8, 7]"],
    ),
    "mask rows": (
        ValueError,
        {"attn_mask": torch.ones(3, 8).bool()},
        ["attn_mask", "[2, 4, 8, 8]", "[3, 8]"],
    ),
    "mask key heads": (ValueError, {"attn_mask": torch.zeros(2, 2, 8, 8)}, ["attn_mask", "[2, 2, 8, 8]"]),
    "mask batch": (ValueError, {"attn_mask": torch.zeros(3, 1, 8, 8)}, ["attn_mask", "[3, 1, 8, 8]"]),
    "mask per batch and key": (ValueError, {"attn_mask": torch.ones(2, 8).bool()}, ["attn_mask", "[2, 8]"]),
    "mask five dimensions": (
        ValueError,
        {"attn_mask": torch.zeros(1, 1, 1, 8, 8)},
        ["attn_mask", "[1, 1, 1, 8, 8]"],
    ),
    "mask elsewhere": (
        ValueError,
        {"attn_mask": torch.zeros(8, 8, device="meta")},
        ["attn_mask", "cpu", "meta"],
    ),
    "lengths beyond": (ValueError, {"kv_lengths": torch.tensor([8, 9])}, ["kv_lengths", "8", "[8, 9]"]),
    "lengths negative": (ValueError, {"kv_lengths": torch.tensor([-1, 8])}, ["kv_lengths", "[0", "[-1, 8]"]),
    "lengths float": (TypeError, {"kv_lengths": torch.ones(2)}, ["kv_lengths", "int32", "float32"]),
    "lengths a list": (TypeError, {"kv_lengths": [8, 8]}, ["kv_lengths", "int32", "list"]),
    "lengths an int": (TypeError, {"kv_lengths": 8}, ["kv_lengths", "int32", "int"]),
    "lengths elsewhere": (
        ValueError,
        {"kv_lengths": torch.zeros(2, dtype=torch.int32, device="meta")},
        ["kv_lengths", "meta", "cpu"],
    ),
    "lengths of three": (ValueError, {"kv_lengths": torch.tensor([8, 8, 8])}, ["kv_lengths", "[2]", "[3]"]),
    "lengths a scalar": (ValueError, {"kv_lengths": torch.tensor(8)}, ["kv_lengths", "[2]", "[]"]),
    "lengths a mask": (ValueError, {"kv_lengths": torch.ones(2, 8).int()}, ["kv_lengths", "[2]", "[2, 8]"]),
    "segments int64": (
        TypeError,
        {"segment_ids": torch.zeros(2, 8).long()},
        ["segment_ids", "int32", "int64"],
    ),
    "segments float": (TypeError, {"segment_ids": torch.zeros(2, 8)}, ["segment_ids", "int32", "float32"]),
    "segments a list": (TypeError, {"segment_ids": [[0] * 8] * 3}, ["segment_ids", "int32"]),
    "segments [T]": (ValueError, {"segment_ids": torch.zeros(8).int()}, ["segment_ids", "[2, 8]", "[8]"]),
    "segments short": (
        ValueError,
        {"segment_ids": torch.zeros(2, 7).int()},
        ["segment_ids", "[2, 8]", "[2, 7]"],
    ),
    "segments batch": (
        ValueError,
        {"segment_ids": torch.zeros(1, 8).int()},
        ["segment_ids", "[2, 8]", "[1, 8]"],
    ),
    "segments pair": (
        ValueError,
        {"segment_ids": (torch.zeros(2, 8).int(), torch.zeros(2, 9).int())},
        ["segment_ids", "[2, 8]", "[2, 9]"],
    ),
    "segments of three": (
        TypeError,
        {"segment_ids": (torch.zeros(2, 8).int(),) * 3},
        ["segment_ids", "pair"],
    ),
    "segments not square": (
        ValueError,
        {"q": randn(2, 4, 5, 16), "segment_ids": torch.zeros(2, 8).int()},
        ["segment_ids", "5", "8", "pair"],
    ),
    "pages a list": (TypeError, PAGED | {"block_table": [[0]]}, ["block_table", "int32", "list"]),
    "pages of int64": (TypeError, PAGED | {"block_table": PAGES.long()}, ["block_table", "int32", "int64"]),
    "pages of one sequence": (
        ValueError,
        PAGED | {"block_table": PAGES[:1]},
        ["block_table", "[2, pages of a sequence]", "[1, 3]"],
    ),
    "pages in a row": (ValueError, PAGED | {"block_table": PAGES[0]}, ["block_table", "[3]"]),
    "pages elsewhere": (
        ValueError,
        PAGED | {"block_table": PAGES.to("meta")},
        ["block_table", "cpu", "meta"],
    ),
    "pages without lengths": (
        ValueError,
        PAGED | {"kv_lengths": None},
        ["block_table", "kv_lengths", "int32"],
    ),
    "pages for a prompt": (ValueError, PAGED | {"q": randn(2, 4, 17, 16)}, ["paged", "16 queries", "17"]),
    "no pages": (ValueError, PAGED | {x: randn(0, 2, 4, 16) for x in "kv"}, ["page", "[0, 2, 4, 16]"]),
    "pages without batch": (
        ValueError,
        PAGED | {"q": randn(4, 1, 16), "k": randn(2, 4, 16), "v": randn(2, 4, 16)},
        ["block_table", "[B, Hq, Tq, D]", "[4, 1, 16]"],
    ),
    "more than the pages hold": (
        ValueError,
        PAGED | {"kv_lengths": torch.tensor([13, 1])},
        ["kv_lengths", "12", "[13, 1]"],
    ),
    "mask of a page": (ValueError, PAGED | {"attn_mask": torch.zeros(1, 4)}, ["attn_mask", "[2, 4, 1, 12]"]),
    "segments of a page": (
        ValueError,
        PAGED | {"segment_ids": (torch.zeros(2, 1).int(), torch.zeros(2, 4).int())},
        ["kv segment_ids", "[2, 12]", "[2, 4]"],
    ),
    "backend unknown": (ValueError, {"backend": "flash"}, ["backend", "auto", "reference", "flash"]),
    "backend None": (ValueError, {"backend": None}, ["backend", "auto", "None"]),
    "deterministic a string": (TypeError, {"deterministic": "yes"}, ["deterministic", "True", "yes"]),
}


HALF = {"q": randn(2, 4, 64, 64).half(), "k": randn(2, 2, 64, 64).half(), "v": randn(2, 2, 64, 64).half()}
# what an explicit backend can't serve. Only the operator knows, and some of it only where there is a GPU
UNABLE = {
    "sdpa with softcap": ("sdpa", {"softcap": 3.0}, ["softcap"]),
    "sdpa with dropout": ("sdpa", {"dropout_p": 0.1}, ["dropout"]),
    "sdpa with another Dv": ("sdpa", {"v": randn(2, 2, 8, 24)}, ["16", "24"]),
    "sdpa with no queries": ("sdpa", {"q": randn(2, 4, 0, 16)}, ["empty"]),
    "triton without GPU": ("triton", {}, ["GPU", "CPU"]),
    "triton in float64": ("triton", {x: tensors()[x].double() for x in "qkv"}, ["float16", "float64"]),
    "triton with a large head": (
        "triton",
        {"q": randn(2, 4, 8, 264), "k": randn(2, 2, 8, 264)},
        ["256", "264"],
    ),
    "triton with no keys": ("triton", {x: randn(2, 2, 0, 16) for x in "kv"}, ["empty"]),
    "triton with pages": ("triton", PAGED, ["block_table"]),
    "sdpa with pages": ("sdpa", PAGED, ["block_table"]),
    "hopper with pages": ("hopper", PAGED, ["block_table"]),
    "decode without GPU": ("decode", {}, ["GPU", "CPU"]),
    "decode with many queries": ("decode", {"q": randn(2, 4, 17, 16)}, ["16", "17"]),
    "decode with dropout": ("decode", {"dropout_p": 0.1}, ["dropout"]),
    "decode with a mask by head": (
        "decode",
        {"attn_mask": torch.zeros(4, 8, 8)},
        ["attn_mask", "head to head"],
    ),
    "wide without GPU": ("wide", {x: randn(2, 2, 8, 264) for x in "qkv"}, ["GPU", "CPU"]),
    "wide with a small head": ("wide", {}, ["257", "8192", "16"]),
    "hopper without GPU": ("hopper", {}, ["GPU", "CPU"]),
    "hopper in float32": ("hopper", {}, ["float16", "float32"]),
    "hopper with a mask": ("hopper", HALF | {"attn_mask": torch.zeros(64, 64)}, ["attn_mask"]),
    "hopper with sinks": ("hopper", HALF | {"sinks": torch.zeros(4)}, ["sinks"]),
    "hopper with another Dv": ("hopper", HALF | {"v": randn(2, 2, 64, 32).half()}, ["64", "32"]),
    "hopper with few queries": ("hopper", HALF | {"q": randn(2, 4, 63, 64).half()}, ["64", "63"]),
}


def explained(error: type[Exception], arguments: dict, words: list[str]) -> str:
    """The message of the error that a call raises; it must hold the words, an expectation and a remedy."""
    arguments = dict(arguments)
    q, k, v = (arguments.pop(x) for x in "qkv")
    with pytest.raises(error) as caught:
        attention(q, k, v, **arguments)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"
    assert re.search(r"\b(must|need|needs|can't|has)\b", message), f"no expectation in: {message}"
    assert re.search(r"; \w+.* \w+", message), f"no remedy in: {message}"
    assert "\n" not in message
    assert len(message) < 400
    return message


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained_and_nothing_runs(name, nothing_runs):
    """The same is said whatever the backend, and before the operator is called."""
    error, changes, words = BAD[name]
    backends = (changes["backend"],) if "backend" in changes else BACKEND_NAMES
    messages = set()
    for backend in backends:
        arguments = tensors(**changes) | {"backend": backend}
        with Listener(refuse=True):
            messages.add(explained(error, arguments, words))
        messages.add(explained(error, arguments, words))
    assert len(messages) == 1, messages


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize("listening", [False, True], ids=["direct", "operator"])
@pytest.mark.parametrize("name", UNABLE)
def test_an_unable_backend_says_why_and_nothing_runs(name, listening, gradient, nothing_runs, monkeypatch):
    backend, changes, words = UNABLE[name]
    if not name.endswith("GPU"):
        monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    arguments = tensors(**changes) | {"backend": backend}
    for x in "qkv":
        arguments[x] = arguments[x].clone().requires_grad_(gradient and "block_table" not in arguments)
    with Listener(refuse=False) if listening else contextlib.nullcontext():
        explained(ValueError, arguments, [backend, "auto", *words])


@pytest.mark.parametrize("listening", [False, True], ids=["direct", "operator"])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_what_watches_sees_every_backend(backend, listening, nothing_runs, monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    tensors_of = {"decode": tensors(), "wide": {name: x.repeat(1, 1, 1, 5) for name, x in HALF.items()}}
    with (
        Listener(refuse=False) if listening else contextlib.nullcontext(),
        pytest.raises(AssertionError, match="would have run"),
    ):
        attention(*tensors_of.get(backend, HALF).values(), backend=backend)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"segment_ids": torch.zeros(1, 8).int()}, ["[8]", "[1, 8]"]),
        ({"kv_lengths": torch.tensor([8])}, ["[]", "[1]"]),
        ({"attn_mask": torch.zeros(1, 1, 8, 8)}, ["[4, 8, 8]", "[1, 1, 8, 8]"]),
    ],
    ids=["segments", "lengths", "mask"],
)
def test_options_of_unbatched_inputs_are_unbatched(options, words, nothing_runs):
    q, k, v = randn(4, 8, 16), randn(2, 8, 16), randn(2, 8, 16)
    with pytest.raises(ValueError) as caught:
        attention(q, k, v, **options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("carrier", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("listening", [False, True], ids=["direct", "operator"])
@pytest.mark.parametrize("backend", ["auto", "reference", "decode"])
def test_a_gradient_of_a_paged_cache_is_refused(backend, listening, carrier, nothing_runs):
    arguments = PAGED | {"sinks": torch.zeros(4), "backend": backend}
    arguments[carrier] = arguments[carrier].clone().requires_grad_()
    with Listener(refuse=False) if listening else contextlib.nullcontext():
        explained(NotImplementedError, arguments, ["block_table", "no_grad"])


def test_flash_attention_wants_matrices(nothing_runs):
    with pytest.raises(ValueError, match=r"\[Tq, D\]"):
        flash_attention(randn(1, 8, 16), randn(1, 8, 16), randn(1, 8, 16))


def test_flash_attention_wants_tensors(nothing_runs):
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, got list"):
        flash_attention([[1.0]], randn(8, 16), randn(8, 16))  # pyright: ignore[reportArgumentType]


def test_mixed_dtypes_are_cast_only_under_autocast():
    q, k, v = randn(2, 4, 8, 16), randn(2, 2, 8, 16).bfloat16(), randn(2, 2, 8, 16)
    with pytest.raises(TypeError, match="dtype"):
        attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_mask_is_refused(layout, nothing_runs):
    mask = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=layout)
    with pytest.raises(
        TypeError, match=r"attn_mask must be .*dense.* got a nested tensor; .*to_padded_tensor"
    ):
        attention(**tensors(), attn_mask=mask)


def test_an_unknown_option_is_no_option(nothing_runs):
    with pytest.raises(TypeError, match="is_causal"):
        attention(**tensors(), is_causal=True)  # pyright: ignore[reportCallIssue]
