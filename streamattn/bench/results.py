"""Where measurements go: a CSV file with a line for each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any


def write(path: str, rows: Sequence[Any]) -> None:
    """Writes measurements, with their fields' names in the first line; an older file is replaced.

    Args:
        path: of the CSV file.
        rows: instances of one dataclass, at least one.
    """
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
