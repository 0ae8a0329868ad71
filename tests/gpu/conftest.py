"""Where the tests of this folder run: the portable kernels on the GPU."""

from __future__ import annotations

import pytest


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture
def backend() -> str:
    return "auto"
