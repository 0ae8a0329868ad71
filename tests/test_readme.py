"""What README.md shows is run, and what it names exists."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from streamattn.dispatch import Backend

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[tuple[int, str]]:
    """The fenced blocks of one language: (line of the fence, text)."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, match.start()) + 1, match[1]) for match in found]


PYTHON = blocks("python")
SHELL = [text.strip() for _, text in blocks("sh")]


@pytest.mark.parametrize(("line", "source"), PYTHON, ids=[f"line-{line}" for line, _ in PYTHON])
def test_python_blocks_run(line: int, source: str) -> None:
    code = compile("\n" * line + source, "README.md", "exec")  # a failure names README's own line
    exec(code, {"__name__": "__main__"})


def test_readme_shows_each_entry_point() -> None:
    shown = "\n".join(text for _, text in PYTHON)
    for name in ("attention(", "flash_attention(", "StreamMultiHeadAttention(", "patch_model("):
        assert name in shown


def test_two_commands_come_first() -> None:
    assert README.index("```sh") < README.index("```python")
    run_job, run_tests = SHELL[:2]
    for command in (run_job, run_tests):
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install -e ")
    assert run_job.endswith(" && streamattn finetune configs/gpt2-nano_stdlib_cpu.yaml")
    assert " && pytest" in run_tests


def test_ci_runs_the_test_command_last() -> None:
    """CI installs and tests exactly as a reader does, and pytest's summary ends its output."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[-1] == SHELL[1]
    assert "set -euo pipefail" in script


def test_torchrun_line_is_the_one_that_ci_runs() -> None:
    (line,) = [text for text in SHELL if text.startswith("torchrun")]
    launch, *_ = line.split(" configs/")
    assert launch in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_paths_exist() -> None:
    paths = set(re.findall(r"\b(?:configs|docs|tests)/[\w./-]*\w", README))
    paths |= set(re.findall(r"\]\(([^)#:]+)\)", README))
    assert paths, "the pattern finds nothing any more"
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


def test_backends_of_the_table_are_all_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` +\|", README, re.MULTILINE)
    assert sorted(rows) == sorted(backend.value for backend in Backend if backend is not Backend.AUTO)


def test_figures_are_those_of_the_csv() -> None:
    with (ROOT / "docs/measurements/attention_h100.csv").open() as file:
        measured = list(csv.DictReader(file))
    rows = re.findall(r"^\| (\d+) (full|causal) \| (\d+) \| (.+) \| (.+) \| (.+) \|$", README, re.MULTILINE)
    assert len(rows) == 12
    for head_dim, mask, seq_len, *figures in rows:
        for provider, figure in zip(("streamattn", "sdpa_flash", "sdpa_cudnn"), figures, strict=True):
            case = {
                "head_dim": head_dim,
                "causal": str(mask == "causal"),
                "seq_len": seq_len,
                "provider": provider,
            }
            (row,) = [row for row in measured if case.items() <= row.items()]
            assert figure == " / ".join(
                f"{float(row[f'{way}_tflops']):.0f}" for way in ("forward", "backward")
            )


def test_no_host_names_but_licences() -> None:
    """Where to download from is the reader's pip configuration's business."""
    assert not re.findall(r"https?://", README)
