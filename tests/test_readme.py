"""What README.md and docs/technical.md show is run, and what README names exists."""

from __future__ import annotations

import csv
import inspect
import re
import socket
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from streamattn import attention, cli, finetune
from streamattn.bench.readme import COMMANDS, figures
from streamattn.bench.tables import Row
from streamattn.dispatch import Backend
from tests.finetune_jobs import write_job

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TECHNICAL = (ROOT / "docs" / "technical.md").read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of one language: (line of the fence, text)."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [(page.count("\n", 0, match.start()) + 1, match[1]) for match in found]


PYTHON = blocks(README, "python")
SHELL = [text.strip() for _, text in blocks(README, "sh")]
SIGNATURE, *EXAMPLES = [text for _, text in blocks(TECHNICAL, "python")]


@pytest.fixture
def finished_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go where README's first command has run: its job, cut to one step on little text."""
    job = Path(SHELL[0].split()[-1])
    text = str(write_job(tmp_path).parent / "corpus")
    monkeypatch.chdir(tmp_path)
    assert (
        finetune.main([str(ROOT / job), "--data", text, "--max_steps", "1", "--eval_on_start", "false"]) == 0
    )


@pytest.mark.parametrize(("line", "source"), PYTHON, ids=[f"line-{line}" for line, _ in PYTHON])
def test_python_blocks_run(line: int, source: str, request: pytest.FixtureRequest) -> None:
    if "runs/" in source:
        request.getfixturevalue("finished_job")
    code = compile("\n" * line + source, "README.md", "exec")  # a failure names README's own line
    exec(code, {"__name__": "__main__"})


@pytest.mark.parametrize("source", EXAMPLES)
def test_technical_examples_run(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the only process where they are for torchrun."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port),
    ):
        monkeypatch.setenv(name, value)
    exec(compile(source, "technical.md", "exec"), {"__name__": "__main__"})


def test_technical_shows_the_signature() -> None:
    shown: dict[str, Callable[..., object]] = {}
    exec(f"def {SIGNATURE.rstrip()}: ...", shown)
    assert [
        (p.name, p.kind, p.default) for p in inspect.signature(shown["attention"]).parameters.values()
    ] == [(p.name, p.kind, p.default) for p in inspect.signature(attention).parameters.values()]


def test_readme_shows_each_entry_point() -> None:
    shown = "\n".join(text for _, text in PYTHON)
    entry_points = (
        "attention(",
        "flash_attention(",
        "StreamMultiHeadAttention(",
        "patch_model(",
        "flash_attn_func(",
        "qk_norm_rope(",
    )
    for name in entry_points:
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


def test_benchmark_commands_can_be_asked_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    """And know every option that README gives them."""
    commands = [line.split()[1:] for line in re.findall(r"`(streamattn bench [^`]+)`", README)]
    assert commands, "the pattern finds nothing any more"
    for command in commands:
        with pytest.raises(SystemExit):
            cli.main([*command[:2], "--help"])
        shown = capsys.readouterr().out
        assert all(option in shown for option in command if option.startswith("--"))


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
    with (ROOT / "docs/measurements/attention_h200.csv").open() as file:
        measured = list(csv.DictReader(file))
    # the file may be older than that column, which says something of cases alone that are not in it
    assert set(measured[0]) | {"queries"} == {field.name for field in fields(Row)}
    for row in measured:
        assert row["status"] == "ok" or (row["provider"], row["part"]) == ("fa3", "backward"), row
    text = " ".join(README.split())
    found = figures(ROOT / "docs" / "measurements")
    assert len(found) == 12 + 5
    for figure in found:
        assert figure in text, figure
    assert len(re.findall(r"^\| (\d+) (full|causal) \| .+ \|$", README, re.MULTILINE)) == 12


def test_the_commands_of_the_figures_are_those_that_make_all_of_them() -> None:
    shown = " ".join(README.replace("\\\n", " ").split())
    for name, command in COMMANDS.items():
        assert f"streamattn bench {' '.join(command)} --csv FILE" in shown
        assert f"[{name}.csv](docs/measurements/{name}.csv)" in shown


@pytest.mark.parametrize("causal", ["False", "True"])
@pytest.mark.parametrize("head_dim", ["64", "128"])
def test_the_csv_holds_what_was_promised_of_speed_and_memory(head_dim: str, causal: str) -> None:
    """One run, bfloat16, 16,384 tokens, hidden size 2048; as many tokens take as much memory at every length.

    Forward 1.15 and backward 0.9 times as fast as SDPA's flash backend from 2048 on.
    """
    with (ROOT / "docs/measurements/attention_h200.csv").open() as file:
        rows = {
            (row["provider"], row["part"], int(row["seq_len"])): row
            for row in csv.DictReader(file)
            if (row["case"], row["head_dim"], row["causal"]) == ("sweep", head_dim, causal)
        }
    for part, factor in (("forward", 1.15), ("backward", 0.9)):
        least = float(rows["streamattn", part, 512]["peak_mib"])
        for seq_len in (2048, 4096, 8192, 16384):
            ours, flash = rows["streamattn", part, seq_len], rows["sdpa_flash", part, seq_len]
            assert ours["dtype"] == flash["dtype"] == "bfloat16"
            assert int(ours["batch"]) * seq_len == 16384
            assert int(ours["num_heads"]) * int(head_dim) == 2048
            assert float(flash["median_ms"]) >= factor * float(ours["median_ms"]), (part, seq_len)
            assert float(ours["peak_mib"]) <= 1.01 * least, (part, seq_len)


def test_no_host_names_but_licences() -> None:
    """Where to download from is the reader's pip configuration's business."""
    assert not re.findall(r"https?://", README)
