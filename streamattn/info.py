"""What ``streamattn info`` prints: versions, devices, and each backend with the reason why it can't be used.

Works without Triton and without transformers. The driver's version comes from the ``nvidia-smi`` tool, for
torch knows only the CUDA version that it was built with.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib import metadata

import torch

from streamattn.dispatch import Backend, unavailable

_PACKAGES = ("streamattn", "torch", "triton", "transformers", "accelerate", "einops")


def main(argv: Sequence[str] = ()) -> int:
    """Print the report; takes no arguments. Returns the exit status."""
    if argv:
        raise SystemExit(f"streamattn info: takes no arguments, got {' '.join(argv)}")
    print(report())
    return 0


def report() -> str:
    """The report as text, one fact a line under the headings versions, devices and backends."""
    sections = {"versions": versions(), "devices": devices(), "backends": backends()}
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
