"""What really ran: the backend of attention, by the names of the kernels that torch.profiler saw.

On a CPU operators take the place of kernels. The profiler costs what is timed after it up to a fifth, for it
leaves its hooks in the driver (https://github.com/pytorch/pytorch/issues/144455): it is opened when a
process has nothing left to time. Left out on purpose: which call ran what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from streamattn.bench.providers import Unsupported

FUSED = {
    "hopper": r"^hopper_(fwd|bwd)_",
    "triton": r"^attention_(fwd|bwd)_",
    "decode": r"^decode_(fwd|combine)_",
    "wide": r"^attention_wide_",
    "fa4": r"flash_attn\.?cute",
    "fa3": r"\bflash::(enable_sm90|FlashAttn)",
    "cudnn": r"cudnn.*sdpa",
    "flex": r"^triton_.*flex",
    "efficient": r"fmha_cutlass",
    "flash": r"flash_(fwd|bwd)|flash_attention_for_cpu",
}
"""Backends and the names of their kernels; the first that matches counts, for FA4's look like FA2's too."""
UNFUSED = {
    "reference": r"^streamattn::attention_",
    "math": r"(?<!log)(?<!log_)softmax(?!.*logsoftmax)(?!_warp_\w+<[^>]*\d, true,)",
}
"""The same where no kernel is of a fused one: ours on the CPU, and scores that are written out.

A loss has a softmax of its own, which is a logarithm."""


def backend_of(names: Sequence[str]) -> str | None:
    """The backend that kernels belong to; with " + " between them, in their order, where it is more than one.

    Args:
        names: of kernels, or of operators on a CPU, as they ran.

    Returns:
        None where there is no attention that is known.
    """
    for table in (FUSED, UNFUSED):
        found = [
            next((backend for backend, names in table.items() if re.search(names, name, re.IGNORECASE)), None)
            for name in names
        ]
        if backends := dict.fromkeys(backend for backend in found if backend is not None):
            return " + ".join(backends)
    return None


def names_in(profiler: Any, device: str) -> list[str]:
    """Names of kernels, or of operators on a CPU, in the order in which they began."""
    return [event.name for event in profiler.events() if event.device_type.name == device.upper()]


@contextmanager
def recording(device: str) -> Iterator[list[str]]:
    """Notes what runs inside.

    Args:
        device: ``cuda`` or ``cpu``.

    Yields:
        A list that holds `names_in` afterwards; nothing where the profiler fails, as it does without CUPTI
        or beside another tool on the GPU.
    """
    names: list[str] = []
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    profiler = profile(activities=activities, acc_events=True)
    started = False
    with suppress(Exception):  # whatever ails the profiler, no figure is lost for it
        profiler.start()
        started = True
    try:
        yield names
        if device == "cuda":
            torch.cuda.synchronize()
    finally:
        if started:
            with suppress(Exception):
                profiler.stop()
                names += names_in(profiler, device)


def served(names: Sequence[str], predicted: str | None, named: bool = False) -> str | None:
    """What goes into a row's column.

    Args:
        names: that `recording` noted.
        predicted: who should have served it; None = nobody knows.
        named: whether the contestant's name promises that.

    Returns:
        The backend that ran, or that was predicted, which is then said; None where neither is known.

    Raises:
        Unsupported: another ran than the name promises.
    """
    ran = backend_of(names)
    if ran is None:
        return None if predicted is None else f"{predicted} (predicted)"
    if named and ran != predicted:
        raise Unsupported(f"{ran} served it, not {predicted}")
    return ran
