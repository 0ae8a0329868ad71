"""Times what the host does for an attention layer that decodes, beside HuggingFace's on PyTorch's attention.

``streamattn bench decode-layer --csv results.csv``. Three cases: the attention function alone, one query
[1, H, 1, D] on a fixed number of keys; the attention layers of a GPT-2; those of a Llama. The layers are
called as their models call them, with the arguments of a decoding step and a dynamic cache that grows by one
token each time; a round goes through all layers of a model, and its time is divided by their number.

Three sides, each with a cache of its own, of one length: PyTorch's attention as it chooses its backend
itself; the same without cuDNN, which prepares a plan for every length that it meets first, milliseconds each,
and so for every token of a growing cache; and ours. A time is the host's alone: a round queues its calls and
waits for the device only after the clock has stopped. Rounds of the sides take turns, and their medians are
reported, no gradient wanted. Without a GPU the same runs on one thread of the CPU, with narrow layers, so
that the host's time still outweighs the arithmetic. Left out on purpose: the work of the device, prefill, and
static caches, whose models are compiled.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from patches import patch_model
from patches.hf import CACHE_NAMES
from streamattn.bench.arguments import positive, writable
from streamattn.bench.machine import sm_clock
from streamattn.bench.resume import Mismatch, Stamp, appended, stamp
from streamattn.functional import attention

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Round = Callable[[], float]
"""Calls every layer once and returns the microseconds that each call took.

No more than one token: a device queues 1,024 launches, and then the host waits for it. Twelve layers of some
25 kernels make 300 of them; four tokens would be timed as the device's time.
"""


@dataclass(frozen=True)
class Shape:
    """Sizes of a case.

    Attributes:
        num_heads: query heads.
        head_dim: columns of a head.
        keys: in the cache before the first token is decoded.
        layers: of a model.
    """

    num_heads: int
    head_dim: int
    keys: int
    layers: int


@dataclass(frozen=True)
class Row(Stamp):
    """One case, one line of the CSV; times in microseconds of the host for each call.

    ``sdpa_flash`` is PyTorch's attention without cuDNN, the difference that of ours to the faster of the two.
    """

    dtype: str
    case: str
    num_heads: int
    head_dim: int
    keys: int
    sdpa_us: float
    sdpa_flash_us: float
    streamattn_us: float
    difference_us: float


def synchronize() -> None:
    """Waits for the GPU where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def without_cudnn(one_round: Round) -> Round:
    """The round with PyTorch's attention kept from cuDNN; the choice is made outside of the clock."""

    def restricted() -> float:
        with sdpa_kernel(WITHOUT_CUDNN):
            return one_round()

    return restricted


def function_rounds(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Round, Round, Round]:
    """Rounds of PyTorch's function twice and of `attention`, one query on as many keys as ``shape`` says."""
    q = torch.randn(1, shape.num_heads, 1, shape.head_dim, device=device, dtype=dtype)
    k, v = (
        torch.randn(1, shape.num_heads, shape.keys, shape.head_dim, device=device, dtype=dtype)
        for _ in range(2)
    )

    def timed(call: Callable[[], Any]) -> Round:
        def one_round() -> float:
            start = perf_counter()
            for _ in range(shape.layers):
                call()
            return (perf_counter() - start) / shape.layers * 1e6

        return one_round

    theirs = timed(lambda: F.scaled_dot_product_attention(q, k, v))
    return theirs, without_cudnn(theirs), timed(lambda: attention(q, k, v, causal=True))


def gpt2(shape: Shape) -> nn.Module:
    """A GPT-2 with random weights."""
    options: dict[str, Any] = dict(
        vocab_size=64,
        n_positions=2 * shape.keys,
        n_embd=shape.num_heads * shape.head_dim,
        n_layer=shape.layers,
        n_head=shape.num_heads,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    return transformers.GPT2Model(transformers.GPT2Config(**options))


def llama(shape: Shape) -> nn.Module:
    """A Llama with random weights, four query heads for each head of keys."""
    options: dict[str, Any] = dict(
        vocab_size=64,
        hidden_size=shape.num_heads * shape.head_dim,
        intermediate_size=16,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads // 4,
        attn_implementation="sdpa",
    )
    return transformers.LlamaModel(transformers.LlamaConfig(**options))


class Layers:
    """The attention layers of a model in the middle of decoding, with the arguments that they are given."""

    def __init__(self, model: nn.Module, shape: Shape, device: str) -> None:
        """Fills a cache with ``shape.keys`` tokens and decodes one more, listening.

        Args:
            model: a decoder of transformers on ``device``.
            shape: of the model.
            device: where it runs.
        """
        self.calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        tokens = torch.zeros(1, shape.keys, dtype=torch.long, device=device)
        name = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
        cache = transformers.DynamicCache()
        model(tokens, **{name: cache}, use_cache=True)

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls.append((layer, args, kwargs))

        layers = [layer for layer in model.modules() if type(layer).__name__.endswith("Attention")]
        assert len(layers) == shape.layers, "every layer of the model has one attention layer"
        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        model(tokens[:, :1], **{name: cache}, use_cache=True)
        for handle in handles:
            handle.remove()

    def one_round(self) -> float:
        """Decodes one token more, on a cache that grows by it."""
        start = perf_counter()
        for layer, args, kwargs in self.calls:
            layer(*args, **kwargs)
        return (perf_counter() - start) / len(self.calls) * 1e6


def layer_rounds(
    make: Callable[[Shape], nn.Module], shape: Shape, device: str, dtype: torch.dtype
) -> tuple[Round, Round, Round]:
    """Rounds of a model's layers as HuggingFace made them, of the same without cuDNN, and of the patched."""
    model = make(shape).to(device, dtype).eval()
    models = (model, copy.deepcopy(model), patch_model(copy.deepcopy(model)))
    theirs, flash, ours = (Layers(each, shape, device).one_round for each in models)
    return theirs, without_cudnn(flash), ours


def medians(rounds: Sequence[Round], repeats: int) -> list[float]:
    """Median of each side over ``repeats`` turns, after one tenth as many to warm up."""
    turns = []
    for _ in range(repeats // 10 + 2 + repeats):
        turn = []
        for one_round in rounds:
            synchronize()
            turn.append(one_round())
        turns.append(turn)
    synchronize()
    return [statistics.median(times) for times in zip(*turns[-repeats:], strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all cases, prints a table, and writes the CSV.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status, 0.

    Raises:
        SystemExit: the command line is wrong, or the file has other columns.
    """
    parser = argparse.ArgumentParser(
        prog="streamattn bench decode-layer",
        description="Times what the host does for attention layers that decode, beside HuggingFace's.",
    )
    parser.add_argument("--keys", type=positive, default=256, help="in the cache at first")
    parser.add_argument("--layers", type=positive, default=12, help="of each model")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16, float32 on a CPU")
    parser.add_argument("--repeats", type=positive, default=100, help="rounds of each side")
    parser.add_argument(
        "--csv", type=writable, required=True, help="where the rows go; they are added to those there"
    )
    options = parser.parse_args(argv)
    if torch.cuda.is_available():
        device = "cuda"
        dtype, shape = options.dtype or "bfloat16", Shape(12, 64, options.keys, options.layers)
    else:
        device = "cpu"
        dtype, shape = options.dtype or "float32", Shape(4, 8, options.keys, options.layers)
        torch.set_num_threads(1)

    cases: dict[str, Callable[[], tuple[Round, Round, Round]]] = {
        "attention": lambda: function_rounds(shape, device, DTYPES[dtype]),
        "GPT-2 layer": lambda: layer_rounds(gpt2, shape, device, DTYPES[dtype]),
        "Llama layer": lambda: layer_rounds(llama, shape, device, DTYPES[dtype]),
    }
    table = Table("case", "sdpa us", "sdpa without cuDNN us", "streamattn us", "to the faster us")
    on, clock = stamp(device), sm_clock(device)
    try:
        with torch.no_grad(), appended(options.csv, Row) as write:
            for case, make in cases.items():
                theirs, flash, ours = (round(time, 1) for time in medians(make(), options.repeats))
                there = asdict(replace(on, sm_mhz=clock()))
                difference = round(ours - min(theirs, flash), 1)
                table.add_row(case, f"{theirs:.1f}", f"{flash:.1f}", f"{ours:.1f}", f"{difference:+.1f}")
                write(
                    Row(
                        **there,
                        dtype=dtype,
                        case=case,
                        num_heads=shape.num_heads,
                        head_dim=shape.head_dim,
                        keys=shape.keys,
                        sdpa_us=theirs,
                        sdpa_flash_us=flash,
                        streamattn_us=ours,
                        difference_us=difference,
                    )
                )
    except Mismatch as error:
        raise SystemExit(f"streamattn bench decode-layer: {error}") from None
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
