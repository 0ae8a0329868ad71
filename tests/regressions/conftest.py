"""Where the regression tests run: here the CPU backends; `tests/gpu` runs the same tests on a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture(params=["auto", "reference"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
