"""The benchmark's clocks, memory and gate on a GPU: known times and sizes, and what is wrong is refused."""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from streamattn import attention
from streamattn.bench import timers
from streamattn.bench.cases import Case
from streamattn.bench.contest import Plan, contest
from streamattn.bench.machine import sm_clock, this_machine
from streamattn.bench.providers import PROVIDERS, Call, Provider
from streamattn.bench.tile_sweep import measure

pytestmark = pytest.mark.gpu

CASE = Case("sweep", "bfloat16", 2, 4, 4, 1024, 64, True)
PLAN = Plan(("forward", "backward", "both"), ("events", "graph"), 10, 2, "cuda")


@pytest.mark.parametrize("name", ["events", "graph"])
def test_a_sleep_of_known_length(name: str) -> None:
    """The GPU waits for so many of its cycles: twice as many take twice as long, by each timer's clock.

    Other processes make some times longer and none shorter: the least counts of several turns, in each of
    which the GPU's clock is the same for both.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        cycles = (2_000_000, 4_000_000)
        measures = [timers.TIMERS[name](partial(torch.cuda._sleep, each), 5) for each in cycles]
        turns = [[min(measure()) for measure in measures] for _ in range(10)]
    one, two = map(min, zip(*turns, strict=True))
    assert two == pytest.approx(2 * one, rel=0.1)
    assert 0.5 < one < 4.0, "2 million cycles of 0.5 to 4 GHz"


def test_memory_of_known_size() -> None:
    """Sizes between 1 and 10 MiB are cut from segments of 20 MiB, if more than 1 MiB of the block stays free.

    Where less would stay it is given too, and counts. Here 3 of 20 MiB are cut off, 6 of 17, and 8 of 11,
    while the 3, free again, are too few.
    """

    def forward() -> Tensor:
        scratch = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
        return torch.empty(2 * scratch.numel(), dtype=torch.uint8, device="cuda")

    gc.collect()
    torch.cuda.empty_cache()  # so that there is no block of another size for any of them
    assert timers.footprint(forward, lambda out: torch.empty(8 << 20, dtype=torch.uint8, device="cuda")) == (
        6.0,
        14.0,
    )


def test_the_most_that_the_machine_does() -> None:
    product, copy = timers.ceilings(torch.device("cuda"), torch.bfloat16)
    assert product > 50.0
    assert copy > 200.0


def changed(change: Callable[[Tensor], Tensor]) -> Provider:
    def bind(case: Case, device: torch.device) -> Call:
        return lambda q, k, v: change(attention(q, k, v, causal=case.causal))

    return Provider(bind, "1")


def test_what_is_wrong_is_refused_and_the_rest_has_figures() -> None:
    providers = {name: PROVIDERS[name]() for name in ("streamattn", "streamattn-portable", "sdpa_flash")}
    rows = contest(CASE, providers | {"wrong": changed(lambda out: out * 1.05)}, PLAN)
    for row in rows:
        if row.provider == "wrong":
            assert row.status.startswith("wrong: out is off by"), row
            assert row.median_ms is None
            continue
        assert row.status == "ok", row
        for figure in (row.median_ms, row.p20_ms, row.tflops, row.gb_s, row.error, row.speedup, row.held_mib):
            assert figure is not None
            assert figure > 0.0
        assert row.p20_ms is not None
        assert row.median_ms is not None
        assert row.p80_ms is not None
        assert row.p20_ms <= row.median_ms <= row.p80_ms
        assert row.peak_share is not None
        assert row.copy_share is not None
        assert max(row.peak_share, row.copy_share) < 1.2
        assert row.held_mib is not None
        assert row.peak_mib is not None
        assert row.held_mib <= row.peak_mib
        assert row.sm_mhz is not None
        assert 200 < row.sm_mhz < 4000


def test_the_kernels_name_the_backend() -> None:
    names = ("streamattn", "streamattn-portable", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "eager")
    hopper = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton"
    rows = contest(CASE, {name: PROVIDERS[name]() for name in names}, replace(PLAN, rounds=1))
    assert {(row.provider, row.part, row.backend) for row in rows} == {
        (name, part, backend)
        for name, backend in zip(
            names, (hopper, "triton", "flash", "cudnn", "efficient", "math"), strict=True
        )
        for part in PLAN.passes
    }


def test_the_clock_is_the_one_that_the_driver_tells() -> None:
    read, tool = sm_clock("cuda"), shutil.which("nvidia-smi")
    assert tool is not None
    query = [tool, f"--id=GPU-{torch.cuda.get_device_properties().uuid}", "--format=csv,noheader,nounits"]
    busy = torch.ones(1 << 28, device="cuda")

    def told(what: str) -> str:
        answer = subprocess.Popen([*query, f"--query-gpu={what}"], stdout=subprocess.PIPE, text=True)
        while answer.poll() is None:
            busy.mul_(1.0)
            torch.cuda.synchronize()
        return answer.communicate()[0].strip()

    mhz = float(told("clocks.sm"))
    assert read() == pytest.approx(mhz, rel=0.3)
    assert this_machine().driver == told("driver_version")


def test_tiles_are_swept() -> None:
    forward = replace(PLAN, passes=("forward",), timers=("graph",), rounds=1)
    names = ["forward 64x64x4x2", "forward 128x64x8x3"]
    rows = measure(CASE, names, forward)
    assert [(row.provider, row.status) for row in rows] == [(name, "ok") for name in names]
    assert {row.backend for row in rows} == {"triton"}
    assert max(row.speedup or 0.0 for row in rows) == 1.0
    assert rows[0].median_ms != rows[1].median_ms
    dq = replace(forward, passes=("backward",))
    assert [row.status for row in measure(CASE, ["dq 64x64x4x2", "dkdv 64x64x4x2"], dq)] == ["ok", "ok"]
