"""Starts processes that work together, without each of them importing torch and transformers anew."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes


def several_processes(function: Callable[..., None], count: int, *args: Any) -> None:
    """Calls ``function(rank, *args)`` in so many processes and waits for them; an error of theirs is raised.

    They are forked off a process that has run nothing and imported the function's module.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([function.__module__])
    start_processes(function, args=args, nprocs=count, start_method="forkserver")
