"""Ways to average gradients: all right, told when not, and the optimizer's state where it is spread."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamattn import cli
from streamattn.bench import ddp
from streamattn.bench.ddp import average, buckets
from tests.test_bench_comm import no_gpu  # noqa: F401


def test_buckets_hold_no_more_than_they_may_but_one_at_least() -> None:
    sizes = [3, 1, 5, 9, 1, 1]
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def split(most: float) -> list[list[int]]:
        return [[x.nbytes for x in bucket] for bucket in buckets(tensors, most)]

    assert split(5) == [[3, 1], [5], [9], [1, 1]]
    assert split(float("inf")) == [sizes]
    assert list(buckets([], 5)) == []


@pytest.mark.parametrize("most", [None, 12, float("inf")])
def test_gradients_are_divided_by_the_number_of_processes(
    most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ddp.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(ddp.dist, "all_reduce", lambda x: x.mul_(8))
    gradients = [torch.ones(2, 2), torch.full((3,), 3.0)]
    average(gradients, most)
    assert torch.equal(gradients[0], torch.full((2, 2), 2.0))
    assert torch.equal(gradients[1], torch.full((3,), 6.0))


@pytest.mark.distributed
def test_every_way_on_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    command = ["bench", "ddp", "--csv", str(path), "--layers", "1", "--seq-len", "8", "--repeats", "1"]
    assert cli.main([*command, "--buckets", "1"]) == 0
    rows = {row["way"]: row for row in csv.DictReader(path.open())}
    assert list(rows) == list(ddp.WAYS)
    for row in rows.values():
        assert row["status"] == "ok"
        assert float(row["error"]) < 1e-5
        assert 0 < float(row["p20_ms"]) <= float(row["step_ms"]) <= float(row["p80_ms"])
    whole = float(rows["overlapped"]["optimizer_mib"])
    assert 0.45 * whole <= float(rows["zero1"]["optimizer_mib"]) <= 0.75 * whole, "spread by whole tensors"


def test_wrong_gradients_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that is told to be one of two and averages with itself only."""
    reduce: Callable[..., object] = torch.distributed.all_reduce
    case = dict(shape="gpt2-nano", layers=1, batch=1, seq_len=8)

    monkeypatch.setattr(ddp, "sm_clock", lambda device: lambda: 1980)

    def run(factor: float) -> dict[str, object]:
        monkeypatch.setattr(ddp.dist, "all_reduce", lambda x, *op: reduce(x, *op) if op else x.mul_(factor))
        return ddp.one(case, "naive", None, torch.device("cpu"), 1)

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        right = run(1.0)
        assert (right["status"], right["sm_mhz"]) == ("ok", 1980)
        wrong = run(2.0)
    finally:
        torch.distributed.destroy_process_group()
    assert str(wrong["status"]).startswith("wrong: the gradients are off by 1.0e+00")
    assert "times" not in wrong


def test_a_file_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []

    def group(
        function: object, world: int, backend: str, case: object, ways: list[tuple[str, int]], *rest: int
    ):
        ran.append((world, ways))
        return [
            dict(way=way, bucket=bucket, error=0.0, status="ok", times=[1.0], sm_mhz=1980, state=1.0)
            for way, bucket in ways
        ]

    monkeypatch.setattr(ddp, "group", group)
    command = ["bench", "ddp", "--csv", str(tmp_path / "x.csv"), "--buckets", "1", "--ways", "flat"]
    assert cli.main(command) == 0
    assert cli.main([*command, "bucketed", "--world-sizes", "2", "3"]) == 0
    assert cli.main(command) == 0
    first, second = ("flat", None), ("bucketed", 1)
    assert {row["sm_mhz"] for row in csv.DictReader((tmp_path / "x.csv").open())} == {"1980"}
    assert ran == [(2, [first]), (2, [second]), (3, [first, second])]
