"""Collectives: judged, timed, and turned into bandwidths."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from streamattn import cli
from streamattn.bench import comm
from streamattn.bench.comm import COLLECTIVES, bus_factor, row_of
from streamattn.bench.gate import WrongResult
from streamattn.bench.resume import stamp


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.mark.distributed
def test_every_collective_is_judged_and_timed_between_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.csv"
    command = ["bench", "comm", "--csv", str(path), "--megabytes", "1", "--repeats", "2"]
    assert cli.main(command) == 0
    rows = list(csv.DictReader(path.open()))
    assert [(row["operation"], row["status"]) for row in rows] == [(name, "ok") for name in COLLECTIVES]
    for row in rows:
        assert (row["backend"], row["world_size"], row["device"]) == ("gloo", "2", "CPU")
        speed = 1.0 / float(row["median_ms"])  # GB/s
        assert float(row["algorithm_gb_s"]) == pytest.approx(speed, rel=0.02, abs=1e-3)
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "in the file already" in capsys.readouterr().out


def test_bandwidths() -> None:
    assert [bus_factor(name, 4) for name in COLLECTIVES] == [1.5, 0.75, 0.75, 0.75, 1.0]
    assert bus_factor("host_to_device", 1) == 1.0
    row = row_of(stamp("cpu"), "all_reduce", "nccl", 4, 100, [2.0, 1.0, 2.0, 6.0, 1.0, 9.0], "ok")
    assert (row.algorithm_gb_s, row.bus_gb_s) == (50.0, 75.0)
    assert (row.p20_ms, row.median_ms, row.p80_ms) == (1.0, 2.0, 6.0)
    without = row_of(stamp("cpu"), "all_reduce", "nccl", 4, 100, [], "no")
    assert without.bus_gb_s is without.median_ms is without.p80_ms is None


def test_copies_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[object, ...]] = []

    def copy(*arguments: object) -> tuple[list[float], int]:
        made.append(arguments[:3])
        if arguments[1:3] == ("pageable", 8):
            raise WrongResult("wrong: lost")
        return [2.0], 1980

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(comm, "copy", copy)
    monkeypatch.setattr(comm, "group", lambda *arguments: [])
    path = tmp_path / "x.csv"
    command = ["bench", "comm", "--csv", str(path), "--megabytes", "1", "8"]
    assert [cli.main(command) for _ in range(2)] == [1, 0]
    directions = ("host_to_device", "device_to_host")
    wanted = [(way, kind, mb) for mb in (1, 8) for kind in ("pinned", "pageable") for way in directions]
    assert made == wanted
    rows = list(csv.DictReader(path.open()))
    assert [(row["operation"], row["backend"], int(row["megabytes"])) for row in rows] == wanted
    assert [row["bus_gb_s"] for row in rows] == ["0.5"] * 4 + ["4.0"] * 2 + [""] * 2
    assert [row["sm_mhz"] for row in rows] == ["1980"] * 6 + [""] * 2
    assert [row["status"] for row in rows] == ["ok"] * 6 + ["wrong: lost"] * 2


def test_copies_alone_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(comm, "copy", lambda *arguments: ([2.0], None))
    monkeypatch.setattr(comm, "group", lambda *arguments: pytest.fail("collectives were not asked for"))
    path = tmp_path / "x.csv"
    assert cli.main(["bench", "comm", "--csv", str(path), "--operations", "host_to_device"]) == 0
    rows = list(csv.DictReader(path.open()))
    assert {row["operation"] for row in rows} == {"host_to_device"}
    assert {int(row["megabytes"]) for row in rows} == {1, 8, 64, 512, 1000}, "up to a gigabyte"


def test_the_clock_of_a_group_is_in_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = dict(operation="all_reduce", size=10**6, status="ok")
    found = [{**entry, "times": [1.0], "sm_mhz": 1980}, {**entry, "status": "wrong: lost"}]
    monkeypatch.setattr(comm, "group", lambda *arguments: found)
    path = tmp_path / "x.csv"
    assert cli.main(["bench", "comm", "--csv", str(path), "--megabytes", "1"]) == 1
    assert [row["sm_mhz"] for row in csv.DictReader(path.open())] == ["1980", ""]


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_a_copy_is_judged_by_what_arrived(memory: str, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two places of the host; one of them believes to be a GPU."""
    for name in ("zeros", "ones"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            comm.torch, name, lambda size, make=make, **options: make(size, dtype=torch.uint8)
        )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(comm, "sm_clock", lambda device: lambda: 1980)
    if lost:
        monkeypatch.setattr(torch.Tensor, "copy_", lambda self, of, non_blocking: self)
        with pytest.raises(WrongResult, match="other numbers arrived"):
            comm.copy("device_to_host", memory, 1, 2)
        return
    for operation in comm.COPIES:
        times, mhz = comm.copy(operation, memory, 1, 2)
        assert (len(times), mhz) == (2, 1980)


class Lone:
    """A group of one process that believes to be the second of two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sent: float) -> None:
        def all_reduce(x: torch.Tensor, op: Any = None) -> None:
            if x.numel() > 100:
                x.fill_(sent)

        monkeypatch.setattr(comm, "join", lambda *args: torch.device("cpu"))
        for name, value in {
            "get_rank": lambda: 1,
            "get_world_size": lambda: 2,
            "all_reduce": all_reduce,
            "barrier": lambda: None,
            "destroy_process_group": lambda: None,
        }.items():
            monkeypatch.setattr(comm.dist, name, value)


@pytest.mark.parametrize(("sent", "status"), [(1.0, "ok"), (2.0, "wrong: a process got other")])
def test_a_wrong_sum_is_not_timed(
    sent: float, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import json

    Lone(monkeypatch, sent)
    monkeypatch.setattr(comm, "sm_clock", lambda device: lambda: 1980)
    comm.member(0, 2, "gloo", str(tmp_path), [("all_reduce", 4000)], 1)
    (entry,) = json.loads((tmp_path / "found.json").read_text())
    assert entry["status"].startswith(status)
    assert ("times" in entry) == (status == "ok")
    assert entry.get("sm_mhz") == (1980 if status == "ok" else None)


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    command = ["bench", "comm", "--csv", str(tmp_path / "x.csv")]
    with pytest.raises(SystemExit, match="NCCL needs a GPU a process; there are 0"):
        cli.main([*command, "--backend", "nccl"])
    with pytest.raises(SystemExit, match="device_to_host need a CUDA device"):
        cli.main([*command, "--operations", "all_reduce", "device_to_host"])
    with pytest.raises(SystemExit):
        cli.main([*command, "--world-sizes", "1"])
