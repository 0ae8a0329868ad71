"""Sums, layers under autocast and attention by dtype: what is known of them beforehand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from streamattn import attention, cli
from streamattn.bench import precision
from streamattn.bench.precision import attention_errors, autocast_dtypes, errors_of, sums
from tests.test_bench_models import on_the_cpu  # noqa: F401


def test_sums_that_are_known() -> None:
    found = {row["name"]: row for row in sums("cpu")}
    value = {name: row["value"] for name, row in found.items()}
    assert value["float32"] == pytest.approx(10.0001, abs=1e-4)
    assert value["float16"] == pytest.approx(9.953125)
    assert value["bfloat16"] == 4.0, "the next number is 1/32 away, and a term less than half of that"
    for low, term in (("float16", 0.01000213623046875), ("bfloat16", 0.010009765625)):
        ways = [value[f"float32 of {low} terms, {way}"] for way in ("implicit", "explicit")]
        assert ways[0] == ways[1] == pytest.approx(1000 * term, rel=1e-4)
    assert found["bfloat16"]["rms_error"] == 0.6


def test_autocast_keeps_weights_and_sums_in_float32() -> None:
    found = {(row["name"], row["tensor"]): row["dtype"] for row in autocast_dtypes("cpu", "bfloat16")}
    assert found["bfloat16: h.0.attn.c_attn", "out"] == "bfloat16"
    assert found["bfloat16: h.0.attn", "out"] == "bfloat16"
    assert found["bfloat16: wte", "out"] == "float32"
    assert found["bfloat16: logits", "out"] == "bfloat16"
    assert found["bfloat16: loss", "out"] == "float32"
    weights = [(tensor, dtype) for (_, tensor), dtype in found.items() if tensor != "out"]
    assert len(weights) > 10
    assert set(weights) == {("weight", "float32"), ("gradient", "float32")}


def test_errors_of_attention_grow_with_the_dtype_and_show_what_is_wrong() -> None:
    rows = attention_errors("cpu", ["bfloat16", "float32"], [32], heads=2, head_dim=16)
    for row in rows:
        low, high = (1e-3, 2e-2) if row["dtype"] == "bfloat16" else (1e-9, 1e-5)
        assert low < row["rms_error"] < high, row
        assert row["max_error"] > 0
    inputs = [torch.randn(1, 1, 16, 8, dtype=torch.float64) for _ in range(4)]
    right = errors_of(lambda q, k, v: attention(q, k, v, causal=True, backend="reference"), inputs)
    assert max(max(errors) for errors in right.values()) < 1e-12
    wrong = errors_of(lambda q, k, v: attention(q, k, v, backend="reference"), inputs)
    assert min(min(errors) for errors in wrong.values()) > 0.1


def test_every_figure_has_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def sm_clock(device: str):
        return lambda: read.append(1) or len(read)

    monkeypatch.setattr(precision, "sm_clock", sm_clock)
    assert [row["sm_mhz"] for row in sums("cpu")] == [1, 2, 3, 4, 5, 6, 7]
    assert {row["sm_mhz"] for row in autocast_dtypes("cpu", "bfloat16")} == {8}, "one pass"
    rows = attention_errors("cpu", ["float32"], [8], heads=1, head_dim=8)
    assert [row["sm_mhz"] for row in rows] == [9] * 4 + [10] * 4, "one call"


def test_tf32_is_allowed_where_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noting(function, inputs):
        seen.append(torch.get_float32_matmul_precision())
        return errors_of(function, inputs)

    monkeypatch.setattr(precision, "errors_of", noting)
    attention_errors("cpu", ["float32", "tf32"], [8], heads=1, head_dim=8)
    assert seen == ["highest"] * 2 + ["high"] * 2


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "sm_clock", lambda device: lambda: 1980)
    path = tmp_path / "x.csv"
    command = ["bench", "precision", "--csv", str(path), "--seq-lens", "8"]
    assert cli.main([*command, "--dtypes", "float32"]) == 0
    shown = capsys.readouterr().out
    assert "9.953125" in shown
    rows = list(csv.DictReader(path.open()))
    assert {row["sm_mhz"] for row in rows} == {"1980"}
    assert {row["study"] for row in rows} == {"sums", "autocast", "attention"}
    assert cli.main([*command, "--studies", "sums"]) == 0
    assert len(list(csv.DictReader(path.open()))) == len(rows) + 7
    with pytest.raises(SystemExit, match="no CUDA device"):
        cli.main([*command, "--device", "cuda"])
    path.write_text("a,b\n")
    with pytest.raises(SystemExit, match="other columns"):
        cli.main(command)
