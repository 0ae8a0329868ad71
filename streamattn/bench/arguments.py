"""Types of the benchmarks' arguments: what can't be counted or written is refused before anything runs."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to what an option's help says, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def positive(text: str) -> int:
    """A whole number of 1 or more.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return number


def writable(path: str) -> str:
    """The path of a file that can be written; what it holds stays, and a file that isn't there isn't made.

    Raises:
        argparse.ArgumentTypeError: it can't be written, and why.
    """
    there = os.path.lexists(path)
    try:
        with open(path, "a", encoding="utf-8"):  # the one question that every file system answers truly
            pass
        if not there:
            os.remove(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write {path!r}: {error.strerror}") from error
    return path


def writable_folder(path: str) -> str:
    """The path of a folder that is there, or can be made, and takes files; it isn't made.

    Raises:
        argparse.ArgumentTypeError: it can't be, and why.
    """
    absolute = Path(path).absolute()
    there = next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't use {path!r} as a folder: {error.strerror}") from error
    return path
