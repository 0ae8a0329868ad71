"""Named whole-model cases, every attention in one run: ``streamattn bench e2e --csv FILE``.

HuggingFace's model with its eager attention, with PyTorch's as shipped, with cuDNN preferred and the mask
dropped, patched, and with attention taken out; each run eagerly and compiled. What is timed, judged and
written is `streamattn.bench.models`'; here are only the cases.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from streamattn.bench.arguments import HelpFormatter
from streamattn.bench.models import ModelCase, add_common, run

CASES = {
    each.case: each
    for each in (
        ModelCase("gpt2-16x1024", "train", "gpt2-small", None, 16, 1024),
        ModelCase("gpt2-4x8192", "train", "gpt2-small", None, 4, 8192),
        ModelCase("gpt2-xl-4x1024", "train", "gpt2-xl", None, 4, 1024),
        ModelCase("olmo2-2x4096", "train", "olmo2-7b", 4, 2, 4096),
        ModelCase("olmo2-1x16384", "train", "olmo2-7b", 4, 1, 16384),
        ModelCase("gpt2-dropout", "train", "gpt2-small", None, 16, 1024, dropout=0.1),
        ModelCase("gpt2-generate", "generate", "gpt2-small", None, 8, 4096, 256, warmup=1),
        ModelCase("olmo2-generate", "generate", "olmo2-32b", 4, 8, 4096, 256, warmup=1),
        ModelCase("cpu-gpt2", "train", "gpt2-nano", None, 2, 64, dtype="float32", warmup=1),
        ModelCase("cpu-olmo2", "train", "olmo2-nano", None, 2, 64, dtype="float32", warmup=1),
        ModelCase("cpu-generate", "generate", "gpt2-nano", None, 2, 32, 8, dtype="float32", warmup=1),
    )
}
"""The published GPT-2 sizes, OLMo-2 7B's layers four deep, and OLMo-2 32B's, whose heads share keys. Those
that begin with ``cpu`` are small enough for one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where a contestant was wrong.
    """
    command, gpu = "streamattn bench e2e", torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=command,
        description="Times whole models with attention as shipped, on cuDNN, patched, and taken out.",
        formatter_class=HelpFormatter,
    )
    add_common(parser)
    small = [name for name in CASES if name.startswith("cpu")]
    large = [name for name in CASES if name not in small]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=large if gpu else small, help="which")
    options = parser.parse_args(argv)
    cases = [replace(CASES[name], mode=mode) for name in options.cases for mode in options.modes]
    return run(cases, options, command)


if __name__ == "__main__":
    raise SystemExit(main())
