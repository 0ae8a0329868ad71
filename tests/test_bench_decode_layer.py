"""The benchmark of layers that decode: what it calls and what it writes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import patches.hf
from streamattn.bench import decode_layer
from streamattn.bench.decode_layer import Shape, function_rounds, gpt2, layer_rounds, llama, main, medians

SMALL = Shape(num_heads=4, head_dim=8, keys=5, layers=2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_case_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, measured = [], decode_layer.medians

    def medians(*arguments) -> list[float]:
        read.append("timed")
        return measured(*arguments)

    monkeypatch.setattr(decode_layer, "medians", medians)
    monkeypatch.setattr(decode_layer, "sm_clock", lambda device: lambda: read.append("clock") or 1980)
    file = tmp_path / "times.csv"
    assert main(["--csv", str(file), "--repeats", "2", "--keys", "8", "--layers", "1"]) == 0
    rows = list(csv.DictReader(file.open()))
    assert [row["case"] for row in rows] == ["attention", "GPT-2 layer", "Llama layer"]
    assert read == ["timed", "clock"] * 3
    for row in rows:
        assert row["sm_mhz"] == "1980"
        theirs, flash, ours = (float(row[f"{side}_us"]) for side in ("sdpa", "sdpa_flash", "streamattn"))
        assert min(theirs, flash, ours) > 0
        assert float(row["difference_us"]) == pytest.approx(ours - min(theirs, flash), abs=0.11)
    assert "GPT-2 layer" in capsys.readouterr().out


@pytest.mark.parametrize("make", [gpt2, llama])
def test_all_sides_decode_one_token_a_round_on_caches_of_one_length(make) -> None:
    seen: list[tuple[str, int, bool]] = []

    def spy(name: str, function):
        def noting(q, k, v, **options):
            seen.append((name, k.shape[2], torch.backends.cuda.cudnn_sdp_enabled()))
            return function(q, k, v, **options)

        return noting

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(patches.hf, "attention", spy("ours", patches.hf.attention))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy("theirs", sdpa))
        rounds = layer_rounds(make, SMALL, "cpu", torch.float32)
        seen.clear()
        medians(rounds, repeats=3)
    length = SMALL.keys + 1
    assert seen == [
        (name, length + token, cudnn)
        for token in range(1, 3 + 2 + 1)  # two rounds warm up
        for name, cudnn in (("theirs", True), ("theirs", False), ("ours", True))
        for _ in range(SMALL.layers)
    ]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_function_is_called_as_often_by_all_sides() -> None:
    calls: list[str] = []

    def spy(name: str, function):
        def noting(*args, **options):
            calls.append(name)
            return function(*args, **options)

        return noting

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_layer, "attention", spy("ours", decode_layer.attention))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy("theirs", sdpa))
        times = [one_round() for one_round in function_rounds(SMALL, "cpu", torch.float32)]
    assert calls == ["theirs"] * 2 * SMALL.layers + ["ours"] * SMALL.layers
    assert all(time > 0 for time in times)


def test_a_round_is_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves on by 7 microseconds in each call."""
    now = [0.0]

    def call(*args, **options) -> None:
        now[0] += 7e-6

    monkeypatch.setattr(decode_layer, "perf_counter", lambda: now[0])
    monkeypatch.setattr(decode_layer, "attention", call)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", call)
    rounds = function_rounds(SMALL, "cpu", torch.float32)
    assert medians(rounds, repeats=2) == pytest.approx([7.0, 7.0, 7.0])
