"""docs/cases.md names tests that exist, each under the address of its report."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (ROOT / "docs" / "cases.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| [\w/-]+#\d", line)
]


@cache
def said_of_tests(path: Path) -> dict[str, str]:
    """By test of a file: its docstring, and the comment lines above it."""
    source = path.read_text(encoding="utf-8")
    lines, said = source.splitlines(), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            above = first
            while lines[above - 1].startswith("#"):
                above -= 1
            said[node.name] = "\n".join([*lines[above:first], ast.get_docstring(node) or ""])
    return said


def test_there_are_rows() -> None:
    assert len(ROWS) > 40
    assert {len(row) for row in ROWS} == {4}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_report_has_its_test(row: tuple[str, ...]) -> None:
    reports, _, tests, _ = row
    named = re.findall(r"`([\w./]+)::(\w+)`", tests)
    assert named
    said = []
    for name, test in named:
        path = ROOT / (name if "/" in name else f"tests/regressions/{name}")
        assert test in said_of_tests(path), f"{name} has no {test}"
        said.append(said_of_tests(path)[test])
    for number in re.findall(r"#\d+", reports):
        for name, words in zip(named, said, strict=True):
            assert any(re.search(number + r"\b", each) for each in said), f"no test of {named} names {number}"
            assert "#" in words, f"{name} has no address above it"
