"""Every finding about a machine or a launch, without the machine that has it; and what ends a job."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from streamattn import doctor, info
from streamattn.doctor import Finding, Machine, examine

TWO = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SIXTEEN = TWO | {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node0"}
H100 = Machine(
    gpus=((9, 0),) * 8,
    torch_cuda="13.0",
    driver_cuda=(13, 0),
    nccl="2.27.5",
    shm=2**33,
    interfaces=("lo", "eth0", "ib0"),
)
CPU = Machine(torch_cuda="13.0", shm=2**26, interfaces=("lo", "eth0"))


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def found(environment: dict[str, str], machine: Machine = H100, **options: Any) -> list[Finding]:
    options = {"reach": lambda *_: None} | options
    return examine(environment, machine, **options)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    assert finding.remedy
    assert "\n" not in str(finding)
    return finding


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"MASTER_ADDR": "elsewhere"}, TWO, SIXTEEN])
@pytest.mark.parametrize("machine", [H100, CPU, Machine()])
def test_nothing_is_wrong(environment: dict[str, str], machine: Machine) -> None:
    assert found(environment, machine) == []


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"RANK": "0"}, "RANK set but LOCAL_RANK, WORLD_SIZE, MASTER_PORT, MASTER_ADDR missing"),
        ({"LOCAL_RANK": "0"}, "missing"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE set but RANK, LOCAL_RANK, MASTER_PORT, MASTER_ADDR missing"),
        ({k: v for k, v in TWO.items() if k != "WORLD_SIZE"}, "WORLD_SIZE missing"),
    ],
)
def test_half_a_launch_prints_the_right_line(environment: dict[str, str], missing: str) -> None:
    """EleutherAI/cookbook#59."""
    finding = only(found(environment, config="configs/x.yaml"))
    assert finding.fatal
    assert missing in finding.problem
    processes = environment.get("WORLD_SIZE", "N")
    line = f"launch with: torchrun --nproc-per-node {processes} -m streamattn.finetune configs/x.yaml"
    assert line in finding.remedy


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"RANK": "one"}, "RANK: expected 0 or a greater whole number, got 'one'"),
        ({"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE: expected 0 or a greater whole number, got 'two'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: expected 1 to 65535, got 70000"),
        ({"RANK": "2"}, "RANK: expected less than WORLD_SIZE=2, got 2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK: expected less than the 2 processes of this host, got 2"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE: expected at most WORLD_SIZE=2, got 3"),
        ({"RANK": "0"}, "LOCAL_RANK: expected at most RANK=0, got 1"),
    ],
)
def test_variables_that_contradict_each_other(changed: dict[str, str], expected: str) -> None:
    finding = only(found(TWO | changed))
    assert finding.problem == expected
    assert finding.fatal


def test_more_processes_than_gpus() -> None:
    """pytorch/pytorch#68666: an early, clear error instead of an invalid device ordinal."""
    machine = replace(H100, gpus=H100.gpus[:1])
    finding = only(found(TWO, machine))
    assert finding.fatal
    assert finding.problem == "2 processes on this host but 1 visible GPU"
    assert "--nproc-per-node 1 " in finding.remedy
    assert found(TWO, machine, use_cpu=True) == []
    # A launcher that doesn't count them: this one is the third.
    counted = {k: v for k, v in SIXTEEN.items() if k != "LOCAL_WORLD_SIZE"} | {"LOCAL_RANK": "2"}
    assert "3 processes on this host but 2" in only(found(counted, replace(H100, gpus=H100.gpus[:2]))).problem


def test_old_gpus_are_named() -> None:
    finding = only(found({}, replace(H100, gpus=((9, 0), (7, 5), (8, 0), (7, 0)))))
    assert finding.problem.startswith("cuda:1, cuda:3: expected compute capability 8.0 or newer, got 7.5")
    assert not finding.fatal


def test_a_driver_that_no_gpu_can_be_used_with() -> None:
    """Training would silently take the CPU."""
    old = replace(H100, gpus=(), driver_cuda=(12, 4))
    finding = only(found({}, old))
    assert finding.fatal
    assert finding.problem.startswith("driver: it serves CUDA 12.4 and torch is built for CUDA 13.0")
    assert "newer driver" in finding.remedy
    assert "--gpus all" in only(found({}, replace(old, driver_cuda=(13, 1)))).remedy
    assert found({}, old, use_cpu=True) == found({"CUDA_VISIBLE_DEVICES": ""}, old) == []
    assert found({}, replace(old, torch_cuda=None)) == [], "a CPU build was chosen"


def test_nccl() -> None:
    without = replace(H100, nccl=None)
    finding = only(found(TWO, without))
    assert finding.fatal
    assert finding.problem.startswith("NCCL: this torch has none")
    assert found(TWO, without, backend="gloo") == found(TWO, without, use_cpu=True) == []
    assert (
        found(TWO | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, without)
        == []
    )
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        finding = only(found(TWO | {name: "0"}))
        assert finding.fatal
        assert finding.problem.startswith(f"{name}=0: a process that is lost is never noticed")
        assert finding.remedy == f"unset {name}"
        assert found(TWO | {name: "1"}) == []
    finding = only(found(TWO, timeout=86400.0))
    assert finding.problem == "ddp_timeout: the others wait 24 hours for a process that is lost"
    assert not finding.fatal


def test_shared_memory() -> None:
    finding = only(found(TWO, replace(H100, shm=2**26)))
    assert not finding.fatal
    assert finding.problem.startswith("/dev/shm: 64 MiB are little")
    assert "--shm-size=1g" in finding.remedy
    finding = only(found(TWO, replace(H100, shm=None)))
    assert finding.fatal
    assert finding.problem.startswith("/dev/shm: not there")
    for quiet in ({"NCCL_SHM_DISABLE": "1"}, {"RANK": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}):
        assert found(SIXTEEN | quiet, replace(H100, shm=None)) == []


def test_a_machine_is_looked_at_before_anything_is_launched_there() -> None:
    """One process can still work."""
    finding = only(found({}, replace(H100, shm=2**26)))
    assert finding.problem.startswith("/dev/shm: 64 MiB")
    for machine in (replace(H100, shm=None), replace(H100, nccl=None)):
        assert not only(found({}, machine)).fatal
        assert found({}, replace(machine, gpus=H100.gpus[:1])) == []
    assert not only(found({"NCCL_SOCKET_IFNAME": "eth9"})).fatal


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "NCCL_SOCKET_IFNAME",
            ["eth", "=ib0", "eth9,ib", "^docker,lo", "^=lo", "eth0:8000"],
            ["eno", "=eth", "^lo,eth,ib"],
        ),
        ("GLOO_SOCKET_IFNAME", ["eth0", "eth0,ib0"], ["eth"]),
    ],
)
def test_interfaces_that_are_not_there(name: str, right: list[str], wrong: list[str]) -> None:
    for value in right:
        assert found(TWO | {name: value}) == [], value
    for value in wrong:
        finding = only(found(TWO | {name: value}))
        assert finding.fatal
        assert finding.problem == f"{name}={value}: expected one of lo, eth0, ib0"
    assert found(TWO | {name: wrong[0]}, replace(H100, interfaces=())) == [], "the system doesn't tell"
    assert bool(found(TWO | {name: wrong[0]}, use_cpu=True)) == (name == "GLOO_SOCKET_IFNAME"), "not asked"


def test_hosts_that_cannot_meet() -> None:
    finding = only(found(SIXTEEN, replace(H100, interfaces=("lo",))))
    assert finding.fatal
    assert finding.remedy == "start the container with --network=host"
    assert found(TWO, replace(H100, interfaces=("lo",))) == []
    for address in ("localhost", "127.0.1.1", "::1"):
        finding = only(found(SIXTEEN | {"MASTER_ADDR": address}))
        assert finding.fatal
        assert finding.problem.startswith(f"MASTER_ADDR={address}: means each host itself")
        assert found(TWO | {"MASTER_ADDR": address}) == []


def test_the_master_is_asked_last_and_in_time() -> None:
    asked: list[tuple[object, ...]] = []

    def reach(*words: object) -> str:
        asked.append(words)
        return "no master there"

    assert only(found(TWO, reach=reach)).problem == "no master there"
    found(TWO, reach=reach, timeout=20.0)
    found(TWO, reach=reach, master_seconds=5.0)
    first = TWO | {"RANK": "0", "LOCAL_RANK": "0"}
    found(first, reach=reach)
    found(first | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, reach=reach)
    assert [words[2:] for words in asked] == [(60, False), (20, False), (5, False), (60, True), (60, False)]
    asked.clear()
    found({}, reach=reach)
    found(TWO, replace(H100, nccl=None), reach=reach)
    assert asked == []


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_an_unreachable_master_is_given_up_in_time(address: str) -> None:
    environment = TWO | {"MASTER_PORT": free_port(), "MASTER_ADDR": address}
    began = time.monotonic()
    finding = only(examine(environment, CPU, timeout=1))
    assert finding.problem.startswith(f"no master at MASTER_ADDR={address} MASTER_PORT=")
    assert time.monotonic() - began < 15


def test_a_master_is_reached_and_a_port_listened_on() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.reach_master("127.0.0.1", port, 5.0, False) is None
        first = TWO | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(port)}
        finding = only(examine(first, CPU))
        assert finding.problem.startswith(f"MASTER_PORT: can't listen on {port}")
    assert doctor.reach_master("127.0.0.1", int(free_port()), 5.0, True) is None


def test_a_job_stops_at_what_is_fatal() -> None:
    warning, first, second = (Finding(name, "do it", name != "w") for name in ("w", "a", "b"))
    assert doctor.check([warning]) == [warning]
    with pytest.raises(ValueError, match=r"^a; do it$"):
        doctor.check([first, warning])
    with pytest.raises(ValueError, match=r"^a; do it \(and 1 more: see `streamattn info`\)$"):
        doctor.check([first, second])
    machine = replace(H100, gpus=((7, 5),), nccl=None)
    assert [finding.fatal for finding in found(TWO, machine)] == [True, True, False]


def test_this_machine_is_looked_at_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("asked for a GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    machine = doctor.look(gpus=False)
    assert machine.gpus == ()
    assert machine.torch_cuda == torch.version.cuda
    assert machine.interfaces == tuple(name for _, name in socket.if_nameindex())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    assert doctor.look().gpus == ((9, 0), (9, 1))


def test_info_ends_with_the_findings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TWO:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "look", lambda: CPU)
    assert info.main([]) == 0
    out = capsys.readouterr().out
    assert "one: torchrun set no variables" in out
    assert "64 MiB" in out
    assert out.splitlines()[-2:] == ["findings", "  none  nothing is wrong with this machine or this launch"]
    for name, value in (TWO | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    assert info.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("  fatal  LOCAL_RANK: expected at most RANK=0")
    # Of several processes one prints the report.
    monkeypatch.setenv("RANK", "7")
    assert info.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rank 7: fatal: RANK: expected less than WORLD_SIZE=2, got 7")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(doctor, "reach_master", lambda *_: None)
    assert info.main([]) == 0
    assert capsys.readouterr().out == ""
