"""What ``streamattn info`` prints: versions, devices, why a backend can't be used, and what is wrong here.

What is wrong, with this machine or with the launch that it runs in, `streamattn.doctor` finds. Of several
processes, as under ``torchrun --nproc-per-node 2 -m streamattn info``, the first prints the report, the
others only what is wrong with them.

With ``--plan`` it is the command of `streamattn.plan`. Otherwise it works without Triton and without
transformers. The driver's version comes from the ``nvidia-smi`` tool, for torch knows only the CUDA version
that it was built with.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module, metadata

import torch

from streamattn import doctor
from streamattn.dispatch import Backend, unavailable

MASTER_SECONDS = 5.0

_PACKAGES = ("streamattn", "torch", "triton", "transformers", "accelerate", "einops")


def main(argv: Sequence[str] = ()) -> int:
    """Print the report, which takes no arguments, or a plan (`streamattn.plan`).

    Returns:
        The exit status: 1 where a job could not run, or nothing fits.
    """
    if list(argv) in (["-h"], ["--help"]):
        print("usage: streamattn info [--plan MODEL --seq S --gpus N ...]")
        print("`streamattn info --plan MODEL --help` lists the rest of a plan's options")
        return 0
    if any(word.split("=")[0] == "--plan" for word in argv):
        return import_module("streamattn.plan").main(argv)
    if argv:
        raise SystemExit(f"streamattn info: takes no arguments but --plan and its own, got {' '.join(argv)}")
    machine = doctor.look()
    findings = doctor.examine(os.environ, machine, master_seconds=MASTER_SECONDS)
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(report(machine, findings))
    else:
        for finding in findings:
            print(f"rank {rank}: {'fatal' if finding.fatal else 'warning'}: {finding}")
    return int(any(finding.fatal for finding in findings))


def report(machine: doctor.Machine, findings: Sequence[doctor.Finding]) -> str:
    """The report as text, one fact a line: versions, devices, backends, launch and findings."""
    found = [("fatal" if finding.fatal else "warning", str(finding)) for finding in findings]
    sections = {
        "versions": versions(),
        "devices": devices(),
        "backends": backends(),
        "launch": launch(os.environ, machine),
        "findings": found or [("none", "nothing is wrong with this machine or this launch")],
    }
    lines: list[str] = []
    for heading, rows in sections.items():
        rows = list(rows)
        width = max(len(name) for name, _ in rows)
        lines += [heading, *(f"  {name:<{width}}  {fact}" for name, fact in rows)]
    return "\n".join(lines)


def versions() -> Iterator[tuple[str, str]]:
    """Python's and the packages' versions."""
    yield "python", platform.python_version()
    for name in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "not installed"
            if name == "streamattn":
                version = "run from a source tree, not installed"
        yield name, version


def devices() -> Iterator[tuple[str, str]]:
    """The CPU, and every visible GPU with its compute capability and memory."""
    yield "cpu", f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is built without CUDA"
        )
        yield "cuda", f"none visible ({built})"
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    restriction = "" if visible is None else f", CUDA_VISIBLE_DEVICES={visible}"
    yield "driver", f"{_driver_version()}, torch is built for CUDA {torch.version.cuda}{restriction}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = gpu.total_memory / 2**30
        yield f"cuda:{index}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory:.0f} GiB"


def backends() -> Iterator[tuple[str, str]]:
    """Each backend on each kind of device: ok, or the reason why not."""
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for backend in Backend:
        if backend is Backend.AUTO:  # stands for the others
            continue
        for kind in kinds:
            reason = unavailable(backend, torch.device(kind))
            yield f"{backend.value} on {kind}", "ok" if reason is None else f"no: {reason}"


def launch(environment: Mapping[str, str], machine: doctor.Machine) -> Iterator[tuple[str, str]]:
    """The variables of torchrun, and what processes share."""
    names = (*doctor.NEEDED, "LOCAL_WORLD_SIZE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    given = " ".join(f"{name}={environment[name]}" for name in names if name in environment)
    yield "processes", given if doctor.is_launched(environment) else "one: torchrun set no variables"
    yield "nccl", machine.nccl or "torch has none"
    yield "timeout", f"{doctor.COLLECTIVE_SECONDS:.0f} s for a collective; ddp_timeout of a job changes it"
    yield "/dev/shm", "not there" if machine.shm is None else f"{machine.shm / 2**20:,.0f} MiB"
    yield "network", ", ".join(machine.interfaces) or "unknown"


def _driver_version() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown (nvidia-smi: {error})"
    return answer.stdout.strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
