"""The command ``streamattn bench``: it only finds the benchmark's own module, each of which can be run alone.

Each writes CSV; `kernel` checks a provider before it times it. Two names are others' with options given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

_BENCHMARKS = {
    "kernel": ("runner", "attention beside other implementations"),
    "decode": ("runner", "one query on a cache: bench kernel --cases decode", "--cases", "decode"),
    "wide": ("runner", "heads wider than 256: bench kernel --cases wide", "--cases", "wide"),
    "parallel": ("parallel", "one sequence shared by several processes, each mode beside one process"),
    "model": ("models", "training steps and generation of whole models, by shape, length, dtype and warm-up"),
    "e2e": ("e2e", "named whole-model cases: attention as shipped, on cuDNN, patched, taken out"),
    "memory": ("memory", "peak memory of whole models by length, and the largest allocations"),
    "precision": ("precision", "what a dtype costs: sums, layers under autocast, attention"),
    "comm": ("comm", "collectives and copies by size and number of processes"),
    "ddp": ("ddp", "ways to average gradients, and an optimizer's state when it is spread"),
    "report": ("report", "one Markdown page of CSV files, with pictures"),
    "decode-layer": ("decode_layer", "host time of attention layers that decode, beside HuggingFace's"),
    "readme": ("readme", "every figure of README.md, by the commands that it names"),
}
"""Name -> module, purpose, options that come first."""


def main(argv: Sequence[str] = ()) -> int:
    """Run one benchmark.

    Args:
        argv: its name and its arguments.

    Returns:
        The benchmark's exit status; 2 where the name is none of ours.
    """
    name, *arguments = argv or [""]
    if name in _BENCHMARKS:
        module, _, *first = _BENCHMARKS[name]
        return import_module(f"streamattn.bench.{module}").main([*first, *arguments])
    asked_for_help = name in ("-h", "--help")
    stream = sys.stdout if asked_for_help else sys.stderr
    if name and not asked_for_help:
        print(f"streamattn bench: no benchmark {name!r}", file=stream)
    print("usage: streamattn bench BENCHMARK [ARGUMENTS], with --help for its arguments", file=stream)
    for each, (_, purpose, *_) in _BENCHMARKS.items():
        print(f"  {each:<13} {purpose}", file=stream)
    return 0 if asked_for_help else 2
