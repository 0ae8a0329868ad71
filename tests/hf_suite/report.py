"""A pytest plugin for the process that runs the suite: each test's outcome, one JSON object a line.

``HF_SUITE_REPORT`` names the file. Subtests report under the name of their test.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what became of one phase of a test: its family and name, outcome, why, and patched layers."""
    reason: Any = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    _, family, test = report.nodeid.split("::")
    entry = {
        "family": family.removeprefix("Test"),
        "test": test,
        "outcome": report.outcome,
        "reason": reason[-3000:],
        "layers": dict(report.user_properties).get("layers", 0),
    }
    with open(os.environ["HF_SUITE_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
