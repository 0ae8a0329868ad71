"""The command line, ``streamattn info | finetune | bench | profile``: it only finds the command's own module.

A command's module is imported when it is called, so that ``info`` works where transformers doesn't.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

_COMMANDS = {
    "info": "versions, devices, and which backends can be used here",
    "finetune": "train a causal language model: streamattn finetune configs/<name>.yaml [--key value ...]",
    "bench": "measure beside other implementations: streamattn bench kernel --csv FILE",
    "profile": "where the time of a model's training step goes, by kernel",
}

_PLACES = {"profile": "bench.profile"}
"""Modules that have not the command's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the command and its arguments; None = those of the process.

    Returns:
        The exit status: 0, or 2 where the command line is wrong; without a word 1 where the reader of a pipe
        has gone, and 130 after Ctrl-C.
    """
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go, and Python would flush it again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:  # while the command's module was imported
        return 130


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _COMMANDS:
        return import_module(f"streamattn.{_PLACES.get(arguments[0], arguments[0])}").main(arguments[1:])
    if arguments == ["--version"]:
        from streamattn import __version__

        print(f"streamattn {__version__}")
        return 0
    asked_for_help = bool(arguments) and arguments[0] in ("-h", "--help")
    stream = sys.stdout if asked_for_help else sys.stderr
    if arguments and not asked_for_help:
        print(f"streamattn: no command {arguments[0]!r}", file=stream)
    print("usage: streamattn COMMAND [ARGUMENTS] | --version", file=stream)
    for name, purpose in _COMMANDS.items():
        print(f"  {name:<9} {purpose}", file=stream)
    return 0 if asked_for_help else 2
