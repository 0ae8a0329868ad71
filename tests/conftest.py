"""Shared by all tests: seeds, threads, hypothesis profiles, and the skip of GPU tests without a GPU.

`HYPOTHESIS_PROFILE=sweep` searches long; the default, `ci`, is quick. Both draw other examples every time; a
failure prints what reproduces it, and what it found is kept as a case. `SWEEP_CASES=6` runs so many cases of
each test marked `sweep`.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
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


def left_out_of_sweeps(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Of each test marked `sweep` all cases but ``count`` that are spread evenly over them."""
    sweeps: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is not None:
            sweeps[item.nodeid.partition("[")[0]].append(item)
    left_out: list[pytest.Item] = []
    for cases in sweeps.values():
        kept = {i * (len(cases) - 1) // max(count - 1, 1) for i in range(count)}
        left_out += [case for i, case in enumerate(cases) if i not in kept]
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; shorten the sweeps."""
    if count := int(os.environ.get("SWEEP_CASES", "0")):
        left_out = left_out_of_sweeps(items, count)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """Spares the garbage collector what stays: modules and tests.

    They are 670 thousand objects, which every full collection would look through: half a second, and a job of
    fine-tuning asks for two.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Lets the interpreter clean up at its end, or libraries report that they leak."""
    gc.unfreeze()


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
