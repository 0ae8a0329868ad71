"""Where the tests of this folder run: the portable kernels on the GPU."""

from __future__ import annotations

from typing import Any

import pytest

import streamattn.ops
from streamattn.dispatch import Backend


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def backend() -> str:
    return "auto"


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Backend]:
    """What served each eager call, forward and backward."""
    chosen: list[Backend] = []
    original = streamattn.ops.choose

    def recording(*args: Any, **options: Any) -> Backend:
        chosen.append(original(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(streamattn.ops, "choose", recording)
    return chosen
