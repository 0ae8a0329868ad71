"""What is wrong with a machine or a launch, and the remedy: what ``streamattn info`` and fine-tuning check.

`examine` is a function of environment variables and of a `Machine`, so that each finding can be had without
the machine that has it; `look` reads this machine. PyTorch and NCCL would fail on most of it too, but late,
deep inside C++, or by hanging.

Left out on purpose: whether a job fits into memory, and whether GPUs of several hosts reach each other, which
only a collective can tell.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.cuda import nccl

MASTER_SECONDS = 60.0
# What a collective may take: TrainingArguments' default of `ddp_timeout`.
COLLECTIVE_SECONDS = 1800.0
LAUNCH = "torchrun --nproc-per-node {processes} -m streamattn.finetune {config}"

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
NEEDED = (*_NUMBERS, "MASTER_ADDR")
_LEAST_CAPABILITY = (8, 0)
_SMALL_SHM = 256 * 2**20  # Docker's default is 64 MiB
_LONG_TIMEOUT = 4 * 3600.0


@dataclass(frozen=True)
class Finding:
    """Something wrong.

    Args:
        problem: what was expected and what is there, with the variable's or the device's name.
        remedy: what to do.
        fatal: whether a job can't run, or would hang; otherwise it may be slow, or fail later.
    """

    problem: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


@dataclass(frozen=True)
class Machine:
    """What a process sees of its machine.

    Args:
        gpus: compute capability of each visible GPU.
        torch_cuda: the CUDA version that torch is built for; None: built without.
        driver_cuda: the newest CUDA version that the driver serves; None: no driver.
        nccl: NCCL's version; None: torch has none.
        shm: bytes of /dev/shm; None: not there.
        interfaces: names of the network's interfaces; empty: the system doesn't tell.
    """

    gpus: tuple[tuple[int, int], ...] = ()
    torch_cuda: str | None = None
    driver_cuda: tuple[int, int] | None = None
    nccl: str | None = None
    shm: int | None = None
    interfaces: tuple[str, ...] = ()


Reach = Callable[[str, int, float, bool], "str | None"]


def look(gpus: bool = True) -> Machine:
    """This machine.

    Args:
        gpus: ask the GPUs, which initialises CUDA where there are any.
    """
    indices = range(torch.cuda.device_count()) if gpus and torch.cuda.is_available() else ()
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    try:
        shm = shutil.disk_usage("/dev/shm").total
    except OSError:
        shm = None
    try:
        interfaces = tuple(name for _, name in socket.if_nameindex())
    except OSError:
        interfaces = ()
    return Machine(
        gpus=tuple(torch.cuda.get_device_capability(index) for index in indices),
        torch_cuda=torch.version.cuda,
        driver_cuda=_driver_cuda(),
        nccl=".".join(map(str, nccl.version())) if has_nccl else None,
        shm=shm,
        interfaces=interfaces,
    )


def _driver_cuda() -> tuple[int, int] | None:
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether the variables say that this is a process of several, or say it by halves."""
    return bool({"RANK", "LOCAL_RANK"} & environment.keys()) or environment.get("WORLD_SIZE", "1") != "1"


def examine(
    environment: Mapping[str, str],
    machine: Machine,
    *,
    config: str = "CONFIG.yaml",
    use_cpu: bool = False,
    backend: str | None = None,
    timeout: float = COLLECTIVE_SECONDS,
    master_seconds: float = MASTER_SECONDS,
    reach: Reach | None = None,
) -> list[Finding]:
    """Everything that is wrong, what would stop a job first.

    Args:
        environment: the process's variables.
        machine: of `look`.
        config: the job's YAML, for the line that would launch it rightly.
        use_cpu: the job was told to leave GPUs alone.
        backend: ``ddp_backend``; None: NCCL with GPUs, else Gloo.
        timeout: ``ddp_timeout`` in seconds.
        master_seconds: how long to wait for the master at most.
        reach: stands in for `reach_master`.

    Returns:
        The findings, the fatal ones first. Where the variables are wrong, nothing else of the launch is
        looked at, and where anything fatal was found, the master isn't waited for.
    """
    findings: list[Finding] = []
    on_gpus = bool(machine.gpus) and not use_cpu
    if not use_cpu:
        findings += _driver(environment, machine)
        findings += _capabilities(machine)
    if not is_launched(environment):
        if on_gpus and len(machine.gpus) > 1:  # what a launch on all of them would meet
            common = [
                *_nccl(environment, machine, timeout),
                *_shared_memory(environment, machine),
                *_interfaces(environment, machine, True),
            ]
            findings += [replace(finding, fatal=False) for finding in common]
        return _fatal_first(findings)
    variables = list(_variables(environment, config))
    findings += variables
    if variables:
        return _fatal_first(findings)
    if on_gpus:
        findings += _enough_gpus(environment, machine, config)
    if int(environment["WORLD_SIZE"]) > 1:
        on_nccl = on_gpus and backend in (None, "nccl")
        if on_nccl:
            findings += _nccl(environment, machine, timeout)
            if local_processes(environment) > 1:
                findings += _shared_memory(environment, machine)
        findings += _interfaces(environment, machine, on_nccl)
        if several_hosts(environment):
            findings += _hosts(environment, machine)
    if not any(finding.fatal for finding in findings):
        findings += _master(environment, min(master_seconds, timeout), reach or reach_master)
    return _fatal_first(findings)


def check(findings: Iterable[Finding]) -> list[Finding]:
    """Raise ValueError for the first fatal finding; returns the others."""
    findings = list(findings)
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        more = f" (and {len(fatal) - 1} more: see `streamattn info`)" if len(fatal) > 1 else ""
        raise ValueError(f"{fatal[0]}{more}")
    return findings


def local_processes(environment: Mapping[str, str]) -> int:
    """Processes on this host, as far as its variables tell."""
    return max(int(environment.get("LOCAL_WORLD_SIZE", "1")), int(environment["LOCAL_RANK"]) + 1)


def several_hosts(environment: Mapping[str, str]) -> bool:
    """Whether processes of the launch run elsewhere; no, if the launcher doesn't count the local ones."""
    local = environment.get("LOCAL_WORLD_SIZE")
    return local is not None and int(local) < int(environment["WORLD_SIZE"])


def reach_master(address: str, port: int, seconds: float, hosts_store: bool) -> str | None:
    """Connect to the master once, trying again until ``seconds`` are over.

    Args:
        address: MASTER_ADDR, and
        port: MASTER_PORT.
        seconds: when to give up.
        hosts_store: this process will listen there itself, so it does meanwhile.

    Returns:
        None, or why it can't be reached.
    """
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        if hosts_store:
            try:
                stack.enter_context(socket.create_server(("", port)))
            except OSError as error:
                return f"MASTER_PORT: can't listen on {port} ({error.strerror})"
        while True:
            try:
                left = max(0.1, deadline - time.monotonic())
                stack.enter_context(socket.create_connection((address, port), timeout=min(left, 5.0)))
                return None
            except OSError as error:
                if time.monotonic() >= deadline:
                    return (
                        f"no master at MASTER_ADDR={address} MASTER_PORT={port} within {seconds:.0f} s "
                        f"({error.strerror or error})"
                    )
                time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def _fatal_first(findings: list[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: not finding.fatal)


def _driver(environment: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    if machine.torch_cuda is None or machine.driver_cuda is None:
        return
    if machine.gpus or environment.get("CUDA_VISIBLE_DEVICES") == "":
        return
    major, minor = machine.driver_cuda
    if major < int(machine.torch_cuda.partition(".")[0]):
        yield Finding(
            f"driver: it serves CUDA {major}.{minor} and torch is built for CUDA {machine.torch_cuda}, so no "
            "GPU can be used",
            "install a newer driver, or a torch built for that CUDA; CUDA_VISIBLE_DEVICES= trains on the CPU",
        )
    else:
        yield Finding(
            "driver: it is there, but torch can use no GPU",
            "compare `nvidia-smi -L` with CUDA_VISIBLE_DEVICES, and in a container pass --gpus all; "
            "CUDA_VISIBLE_DEVICES= trains on the CPU",
        )


def _capabilities(machine: Machine) -> Iterator[Finding]:
    old = [i for i, capability in enumerate(machine.gpus) if capability < _LEAST_CAPABILITY]
    if old:
        major, minor = machine.gpus[old[0]]
        yield Finding(
            f"cuda:{', cuda:'.join(map(str, old))}: expected compute capability 8.0 or newer, got "
            f"{major}.{minor}: attention runs there in plain PyTorch, which is slow",
            "leave these GPUs out with CUDA_VISIBLE_DEVICES, or take an Ampere GPU or a newer one",
            fatal=False,
        )


def _variables(environment: Mapping[str, str], config: str) -> Iterator[Finding]:
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        present = [name for name in NEEDED if name not in missing]
        launch = LAUNCH.format(processes=environment.get("WORLD_SIZE") or "N", config=config)
        yield Finding(
            f"{', '.join(present)} set but {', '.join(missing)} missing",
            f"launch with: {launch}, or unset {', '.join(present)} for one process",
        )
        return
    again = "let torchrun set these variables, or make the launcher's own fit"
    for name in (*_NUMBERS, "LOCAL_WORLD_SIZE"):
        if not environment.get(name, "1").isdigit():
            yield Finding(f"{name}: expected 0 or a greater whole number, got {environment[name]!r}", again)
            return
    rank, local_rank, world_size, port = (int(environment[name]) for name in _NUMBERS)
    local = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    if not 0 < port < 2**16:
        yield Finding(f"MASTER_PORT: expected 1 to 65535, got {port}", "set one that is free on the master")
    if rank >= world_size:
        yield Finding(f"RANK: expected less than WORLD_SIZE={world_size}, got {rank}", again)
    if local > world_size:
        yield Finding(f"LOCAL_WORLD_SIZE: expected at most WORLD_SIZE={world_size}, got {local}", again)
    elif local_rank >= local:
        yield Finding(
            f"LOCAL_RANK: expected less than the {local} processes of this host, got {local_rank}", again
        )
    elif local_rank > rank:
        yield Finding(f"LOCAL_RANK: expected at most RANK={rank}, got {local_rank}", again)


def _enough_gpus(environment: Mapping[str, str], machine: Machine, config: str) -> Iterator[Finding]:
    processes, gpus = local_processes(environment), len(machine.gpus)
    if processes > gpus:
        launch = LAUNCH.format(processes=gpus, config=config)
        yield Finding(
            f"{processes} processes on this host but {gpus} visible GPU{'s' * (gpus != 1)}",
            f"launch with: {launch} (or pass --use_cpu)",
        )


def _nccl(environment: Mapping[str, str], machine: Machine, timeout: float) -> Iterator[Finding]:
    if machine.nccl is None:
        yield Finding(
            "NCCL: this torch has none, and processes with GPUs need it",
            "install a CUDA build of torch, or pass --ddp_backend gloo",
        )
        return
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if environment.get(name) == "0":
            yield Finding(
                f"{name}=0: a process that is lost is never noticed, and the others wait for ever",
                f"unset {name}",
            )
    if timeout > _LONG_TIMEOUT:
        yield Finding(
            f"ddp_timeout: the others wait {timeout / 3600:.0f} hours for a process that is lost",
            f"pass --ddp_timeout {COLLECTIVE_SECONDS:.0f}, the default",
            fatal=False,
        )


def _shared_memory(environment: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    if environment.get("NCCL_SHM_DISABLE") == "1":
        return
    if machine.shm is None:
        yield Finding(
            "/dev/shm: not there, and NCCL's processes meet in it",
            "mount a tmpfs there, in a container with --shm-size=1g or --ipc=host",
        )
    elif machine.shm < _SMALL_SHM:
        yield Finding(
            f"/dev/shm: {machine.shm / 2**20:.0f} MiB are little for NCCL's and DataLoader's processes",
            "start the container with --shm-size=1g or --ipc=host",
            fatal=False,
        )


def _interfaces(environment: Mapping[str, str], machine: Machine, on_nccl: bool) -> Iterator[Finding]:
    if not machine.interfaces:
        return
    shown = ", ".join(machine.interfaces)
    # Gloo serves beside NCCL, too.
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")[0 if on_nccl else 1 :]:
        wanted = environment.get(name, "")
        if wanted and not _names_an_interface(wanted, machine.interfaces, prefixes=name.startswith("NCCL")):
            yield Finding(f"{name}={wanted}: expected one of {shown}", f"correct it, or unset {name}")


def _hosts(environment: Mapping[str, str], machine: Machine) -> Iterator[Finding]:
    if machine.interfaces and all(interface == "lo" for interface in machine.interfaces):
        yield Finding(
            "network: only the loopback interface is there, and the launch has processes on other hosts",
            "start the container with --network=host",
        )
    address = environment["MASTER_ADDR"]
    if address == "localhost" or address.startswith("127.") or address == "::1":
        yield Finding(
            f"MASTER_ADDR={address}: means each host itself, and the launch has processes on several",
            "set it to a name or an address of the first host that the others can reach",
        )


def _names_an_interface(wanted: str, interfaces: tuple[str, ...], prefixes: bool) -> bool:
    """NCCL takes prefixes, exact names behind ``=``, and leaves out those behind ``^``; Gloo exact names."""
    exclude, exact = prefixes and wanted.startswith("^"), not prefixes
    wanted = wanted[1:] if exclude else wanted
    if prefixes and wanted.startswith("="):
        wanted, exact = wanted[1:], True

    def matches(interface: str) -> bool:
        names = (name.partition(":")[0] for name in wanted.split(","))
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(matches(interface) != exclude for interface in interfaces)


def _master(environment: Mapping[str, str], seconds: float, reach: Reach) -> Iterator[Finding]:
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    hosts_store = environment["RANK"] == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    problem = reach(address, port, seconds, hosts_store)
    if problem is None:
        return
    if problem.startswith("MASTER_PORT"):
        yield Finding(problem, "set another, or end what listens there")
    else:
        yield Finding(problem, "is rank 0 running there, and is the port open?")
