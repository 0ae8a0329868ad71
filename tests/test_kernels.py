"""Runs the tests of the portable kernels in Triton's interpreter, in processes of their own.

The interpreter is chosen when Triton is imported, for the whole process. Here it would change what every
other test of the process means: which backends are available, and how kernels are compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest

from tests.kernels.conftest import INTERPRETED

triton = pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).parents[1]

# Those that take longest, and the one that wants to import the kernels itself; the others share a process.
ALONE = ("test_forward.py", "test_backward.py", "test_hopper_emulated.py", "test_decode.py", "test_wide.py")
PARTS = {name.removesuffix(".py"): [name] for name in ALONE}
PARTS["others"] = [name for name in INTERPRETED if name not in ALONE]


def version_of(module: ModuleType) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]
    return int(major), int(minor)


@pytest.mark.slow
@pytest.mark.skipif(
    version_of(triton) < (3, 7) and version_of(numpy) >= (2, 4),
    reason="this Triton's interpreter fails on loops with run-time bounds under numpy 2.4 and newer",
)
@pytest.mark.parametrize("part", PARTS)
def test_kernels_in_the_interpreter(part):
    files = [f"tests/kernels/{name}" for name in PARTS[part]]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        environment.pop(name, None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert all(re.search(rf"^{file} \S*\.", done.stdout, re.MULTILINE) for file in files), done.stdout
