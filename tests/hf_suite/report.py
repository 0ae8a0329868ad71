"""A pytest plugin for the process that runs the suite: each test's outcome, one JSON object a line.

``HF_SUITE_REPORT`` names the file. Subtests report under the name of their test.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what became of one phase of a test: name, outcome, why, and the patched layers that ran."""
    reason: Any = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    entry = {
        "test": report.nodeid.split("::")[-1],
        "outcome": report.outcome,
        "reason": reason[-3000:],
        "layers": dict(report.user_properties).get("layers", 0),
    }
    with open(os.environ["HF_SUITE_REPORT"], "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
