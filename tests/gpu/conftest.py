"""Where the tests of this folder run: the portable kernels on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import streamattn.kinds
import streamattn.ops
from streamattn.dispatch import Backend


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def backend() -> str:
    return "auto"


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every tensor that a kernel allocates and does not write holds NaN.

    By torch's deterministic mode: who wants the Hopper backward's sums in any order says
    ``deterministic=False``.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(4, device="cuda").isnan().all()
    streamattn.kinds.KINDS.clear()  # a repeated call allocates past that mode
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Backend]:
    """What served eager calls, forward and backward; the first of each kind where they repeat."""
    streamattn.kinds.KINDS.clear()
    chosen: list[Backend] = []
    original = streamattn.ops.choose

    def recording(*args: Any, **options: Any) -> Backend:
        chosen.append(original(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(streamattn.ops, "choose", recording)
    return chosen
