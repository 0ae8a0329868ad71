"""The benchmark of layers that decode: what it calls and what it writes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import patches.hf
from streamattn.bench import decode_layer
from streamattn.bench.decode_layer import Shape, gpt2, layer_rounds, llama, main

SMALL = Shape(num_heads=4, head_dim=8, keys=5, layers=2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_every_case_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.csv"
    main(["--csv", str(file), "--repeats", "2", "--keys", "8", "--layers", "1"])
    rows = list(csv.DictReader(file.open()))
    assert [row["case"] for row in rows] == ["attention", "GPT-2 layer", "Llama layer"]
    for row in rows:
        theirs, ours = float(row["sdpa_us"]), float(row["streamattn_us"])
        assert theirs > 0
        assert float(row["difference_us"]) == pytest.approx(ours - theirs, abs=0.11)
    assert "GPT-2 layer" in capsys.readouterr().out


@pytest.mark.parametrize("make", [gpt2, llama])
def test_layers_decode_on_a_growing_cache(make) -> None:
    lengths: dict[str, list[int]] = {}

    def spy(name: str, function):
        def noting(q, k, v, **options):
            lengths.setdefault(name, []).append(k.shape[2])
            return function(q, k, v, **options)

        return noting

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(patches.hf, "attention", spy("ours", patches.hf.attention))
        sdpa = torch.nn.functional.scaled_dot_product_attention
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy("theirs", sdpa))
        theirs, ours = layer_rounds(make, SMALL, "cpu", torch.float32)
        lengths.clear()
        for one_round in (theirs, ours):
            assert one_round() > 0
    grown = [SMALL.keys + 2 + token for token in range(decode_layer.TOKENS) for _ in range(SMALL.layers)]
    assert lengths == {"theirs": grown, "ours": grown}
