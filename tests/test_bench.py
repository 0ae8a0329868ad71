"""The command `streamattn bench` finds the benchmark and hands over its arguments and its exit status."""

from __future__ import annotations

import pytest

from streamattn import bench, cli
from streamattn.bench import (
    comm,
    ddp,
    decode_layer,
    e2e,
    memory,
    models,
    parallel,
    precision,
    readme,
    report,
    runner,
)

MODULES = {
    "kernel": runner,
    "decode": runner,
    "wide": runner,
    "parallel": parallel,
    "model": models,
    "e2e": e2e,
    "memory": memory,
    "precision": precision,
    "comm": comm,
    "ddp": ddp,
    "report": report,
    "decode-layer": decode_layer,
    "readme": readme,
}


def test_every_benchmark_is_listed_here() -> None:
    assert MODULES.keys() == bench._BENCHMARKS.keys()


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_arguments_and_status_pass_through(name: str, module, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ["--cases", name] if name in ("decode", "wide") else []
    monkeypatch.setattr(module, "main", lambda argv: 7 if argv == [*first, "--csv", "x.csv"] else 0)
    assert cli.main(["bench", name, "--csv", "x.csv"]) == 7


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--help"]) == 0
    shown = capsys.readouterr()
    assert "kernel" in shown.out
    assert "decode-layer" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("argv", [[], ["kernels"], ["--helps"]])
def test_without_a_known_benchmark_the_usage_goes_to_stderr(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "usage: streamattn bench" in shown.err
    assert all(word in shown.err for word in argv)
