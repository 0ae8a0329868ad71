"""The kernels between the projections and the attention, compiled for Hopper: they spill nothing.

Needs Triton's compiler and no GPU; see `tests.offline`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import qk_prologue
from tests.offline import Launch, compiled

BF16, FP32 = torch.bfloat16, torch.float32
MODELS: dict[str, dict[str, Any]] = {
    "olmo2 7B": {"heads": (32, 32), "head_dim": 128, "norm": "all"},
    "olmo2 32B": {"heads": (40, 8), "head_dim": 128, "norm": "all"},
    "64 heads": {"heads": (64, 64), "head_dim": 128, "norm": "all"},
    "qwen3 8B": {"heads": (32, 8), "head_dim": 128, "norm": "each", "angles": BF16},
    "gemma3 4B": {"heads": (8, 4), "head_dim": 256, "norm": "each", "angles": BF16},
    "partial": {"heads": (32, 32), "head_dim": 64, "norm": "each", "rotary": 16},
    "float32": {"heads": (32, 32), "head_dim": 128, "norm": "all", "dtype": FP32},
}


def launches(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int],
    head_dim: int,
    norm: str,
    angles: torch.dtype = FP32,
    rotary: int | None = None,
    dtype: torch.dtype = BF16,
    interleaved: bool = False,
) -> dict[str, Launch]:
    """What the launchers would launch for two sequences of 4096 tokens on a Hopper GPU."""
    seen: dict[str, Launch] = {}

    def keep(
        kernel: Any, key: Hashable, pointers: tuple[Any, ...], arguments: Callable[[], tuple[int, dict]]
    ) -> None:
        named = dict(zip(kernel.arg_names, pointers, strict=False))
        seen[kernel.__name__.split("_")[2]] = Launch(kernel, {**named, **arguments()[1]})

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    monkeypatch.setattr(qk_prologue, "launch", keep)
    monkeypatch.setattr(qk_prologue, "_programs", lambda q, most: 132 * most)
    q, k = (empty(2, 4096, count * head_dim) for count in heads)
    weights = [empty(x.shape[2] if norm == "all" else head_dim) for x in (q, k)]
    cos, sin = (empty(1, 4096, rotary or head_dim, dtype=angles) for _ in range(2))
    arguments: tuple[Any, ...] = (q, k, *weights, cos, sin, head_dim, 1e-6, 0.0, interleaved)
    forward, backward = (getattr(qk_prologue, f"prologue_{part}") for part in ("forward", "backward"))
    backward(*forward(*arguments, False), *arguments)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_nothing_spills(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, launch in launches(monkeypatch, **MODELS[name]).items():
        assert compiled(launch, "sm_90", tmp_path).spills == 0, part


@pytest.mark.parametrize("name", ["olmo2 7B", "64 heads", "float32", "partial"])
def test_rows_are_written_16_bytes_at_a_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread's numbers of q, and those of k, in as many instructions as they take at least."""
    model = MODELS[name]
    forward = launches(monkeypatch, **model)["fwd"]
    written = compiled(forward, "sm_90", tmp_path).instructions["STG"]
    assert written == 2 * qk_prologue.FORWARD_BYTES // 16
