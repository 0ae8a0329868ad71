"""Context parallelism on two and four processes: outputs, lse and all gradients are one process's.

The processes are started once for all cases; tests/parallel_cases.py is what they do.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel_cases import BATCH, CASES, EVERY_MODE, HEAD_DIM, Case, run_all
from tests.several_processes import several_processes

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]
Reports = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Of every process."""
    folder = tmp_path_factory.mktemp(f"parallel{request.param}")
    several_processes(run_all, request.param, request.param, str(folder))
    return [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(request.param)]


def test_equals_one_process(reports: Reports) -> None:
    for case in CASES:
        limit = 1e-14 if case.dtype == torch.float64 else 2e-6
        if case.mode == "ulysses" and case.num_heads % len(reports):
            continue
        errors = [report[case.name]["error"] for report in reports]
        assert max(errors) < limit, f"{case.name}: {errors}"


def _expected_collectives(case: Case, size: int) -> dict[str, int]:
    """Of forward and backward with a gradient of lse."""
    ids = 1 if "segments" in case.options and case.mode != "replicated" else 0
    if case.mode == "ring":  # keys go around twice, their gradients once and home
        return {"pass_on": 2 * (size - 1) + size}
    if case.mode == "replicated":
        return {"all_reduce": 1}
    if case.mode == "ulysses":  # q, k and v; out; lse; and back
        return {"all_to_all": 6, "all_gather": ids}
    groups = max(n for n in (1, 2, 3, 4) if case.num_kv_heads % n == 0)
    return {"all_gather": 2 * groups + ids, "all_to_all": groups}


def test_number_of_collectives(reports: Reports) -> None:
    checked = 0
    for case in CASES:
        if case.mode != "auto" and case.name in reports[0]:
            expected = {name: n for name, n in _expected_collectives(case, len(reports)).items() if n}
            for report in reports:
                assert report[case.name]["collectives"] == expected, case.name
            checked += 1
    assert checked > 60


def test_bytes_on_the_way(reports: Reports) -> None:
    """Those that `choose_mode` reckons with, of a forward of 64 tokens, 8 and 4 heads, in float32."""
    size = len(reports)
    one_head = BATCH * 64 * HEAD_DIM * 4
    expected = {
        "gather": (size - 1) * 2 * 4 * one_head // size,
        "ring": (size - 1) * 2 * 4 * one_head // size,
        "ulysses": (size - 1) * 2 * (8 + 4) * one_head // size**2,
        "replicated": 0,
    }
    for mode, number in expected.items():
        assert {report[f"{mode} bytes"] for report in reports} == {number}, mode


def test_the_program_that_checks_a_machine(reports: Reports) -> None:
    for rank, report in enumerate(reports):
        status, printed, status_beyond = report["program"]
        assert status == 0
        assert status_beyond == 1, "with no tolerance the ring's merges must show"
        lines = printed.splitlines()
        if rank == 0:
            assert [line.split()[0] for line in lines[2:7]] == ["auto", *EVERY_MODE]
        else:
            assert lines == []


def test_dropout(reports: Reports) -> None:
    """Backward drops what forward did, at the right rate; ranks seeded alike drop different things."""
    for mode in EVERY_MODE:
        for report in reports:
            found = report[f"{mode} dropout"]
            assert found["slope"] < 1e-6, mode
            assert found["kept"] == pytest.approx(1.0, abs=0.03), mode
            assert found["rms"] == pytest.approx(math.sqrt(2.0), abs=0.03), mode
            assert found["alike"] == 1, mode
