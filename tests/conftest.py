"""Shared by all tests: seeds, threads, hypothesis profiles, and the skip of GPU tests without a GPU.

`HYPOTHESIS_PROFILE=sweep` searches long; the default, `ci`, is quick. Both draw other examples every time; a
failure prints what reproduces it, and what it found is kept as a case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci",
    max_examples=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "sweep",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Test workers share few cores; one thread each is faster than many that fight.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_gpu)


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """Every test starts from the same generator state."""
    torch.manual_seed(0)
    yield


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """The default group, of one process; it ends after a test's wrapper is gone, which would wait for it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
