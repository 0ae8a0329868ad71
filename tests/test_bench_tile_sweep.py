"""The sweep of tiles: what is swept, what a table holds meanwhile, and what is made of the rows."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import attention, cli
from streamattn.bench import runner, tile_sweep
from streamattn.bench.cases import SETS, Case, Sweep
from streamattn.bench.contest import Plan
from streamattn.bench.providers import Provider
from streamattn.bench.resume import stamp
from streamattn.bench.tables import Row
from streamattn.bench.tile_sweep import in_table, measure, name_of, table_rows, tables, tile_of, work
from streamattn.kernels import tiles
from streamattn.kernels.tiles import Tile, choose_tile
from tests.test_bench_tables import ROW

CASE = Case("sweep", "bfloat16", 1, 1, 1, 32, 128, True)
PLAN = Plan(("forward", "backward"), ("events",), 2, 1, "cpu")


def test_names_tell_the_tile() -> None:
    assert name_of("dkdv", Tile(32, 128, 4, 3)) == "dkdv 32x128x4x3"
    assert tile_of("dkdv 32x128x4x3") == ("dkdv", Tile(32, 128, 4, 3))


def test_each_kernel_is_swept_in_its_own_pass_its_own_tiles_included() -> None:
    found = list(work([CASE], PLAN))
    assert [(names[0].split()[0], plan.passes) for _, names, plan in found] == [
        ("forward", ("forward",)),
        ("dq", ("backward",)),
        ("dkdv", ("backward",)),
    ]
    for (_, names, _), kernel in zip(found, ("forward", "dq", "dkdv"), strict=True):
        assert len(set(names)) == len(names) >= 20
        assert {name.split()[0] for name in names} == {kernel}
        for arch in ("sm_80", "sm_86", "sm_90"):
            assert name_of(kernel, choose_tile(kernel, arch, 128, 2, False)) in names
    assert [plan.passes for *_, plan in work([CASE], replace(PLAN, passes=("forward",)))] == [("forward",)]


def test_decoding_has_tiles_of_its_own_and_wide_heads_have_none() -> None:
    cases = [SETS["decode"](Sweep("bfloat16"))[0], *SETS["wide"](Sweep("bfloat16"))]
    ((case, names, plan),) = work(cases, PLAN)
    assert (case.case, plan.passes) == ("decode", ("forward",))
    assert all(name.startswith("decode ") for name in names)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))


def test_a_tile_is_in_the_table_and_then_what_was(hopper: None) -> None:
    pytest.importorskip("triton")
    from streamattn.kernels import launch

    tile, before = Tile(16, 16, 1, 1), dict(tiles._TABLES)
    launch._plans["older"] = None  # pyright: ignore[reportArgumentType]
    with in_table("dq", tile, CASE):
        assert choose_tile("dq", "sm_90", 128, 2, False) == tile
        assert choose_tile("dq", "sm_90", 64, 2, False) == before["dq", "sm_90", 2][64]
        assert choose_tile("dq", "sm_90", 128, 4, False) == before["dq", "sm_90", 4][128]
        assert "older" not in launch._plans, "it was planned with another tile"
        launch._plans["newer"] = None  # pyright: ignore[reportArgumentType]
    assert before == tiles._TABLES
    assert "newer" not in launch._plans


def test_tiles_are_contestants(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in the table while it is called, and one that can't be launched is no error."""
    pytest.importorskip("triton")
    seen: list[Tile] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tile = choose_tile("forward", "sm_90", 128, 2, False)
        seen.append(tile)
        if tile.num_stages == 3:
            raise RuntimeError("out of resource: shared memory")
        return attention(q, k, v, causal=True)

    provider = Provider(lambda case, device: call, "1", ours=True)
    monkeypatch.setitem(tile_sweep.PROVIDERS, "streamattn-portable", lambda: provider)
    names = ["forward 64x64x4x2", "forward 64x64x4x3"]
    good, bad = measure(CASE, names, replace(PLAN, passes=("forward",)))
    assert (good.provider, good.status, good.speedup) == (names[0], "ok", 1.0)
    assert bad.status == "RuntimeError: out of resource: shared memory"
    assert set(seen) == {tile_of(name)[1] for name in names}


def row(name: str, ms: float | None, speedup: float | None, **changes: Any) -> Row:
    status = "ok" if ms is not None else "OutOfResources"
    made = replace(ROW, provider=name, median_ms=ms, speedup=speedup, status=status, tflops=1.0)
    return replace(made, **changes)


def test_the_best_is_marked_and_written_as_rows_of_the_table() -> None:
    rows = [
        row("forward 64x64x4x2", 2.0, 0.5),
        row("forward 128x64x8x3", 1.0, 1.0),
        row("forward 128x128x8x3", None, None),
        row("forward 64x64x4x2", 1.0, 1.0, seq_len=512),
        row("forward 128x64x8x3", 1.25, 0.8, seq_len=512),
        row("forward 128x128x8x3", 0.5, 2.0, seq_len=512),
        row("forward 32x64x4x2", 1.0, 1.0, head_dim=48),
        row("dq 64x64x4x2", 1.0, 1.0, dtype="float32", part="backward"),
    ]
    first = next(tables(rows))
    assert str(first.title) == "forward, sweep, full, 4x4096x16, D 128, bfloat16, events"
    assert [list(column.cells) for column in first.columns][:2] == [["best", ""], ["128x64x8x3", "64x64x4x2"]]
    lines = table_rows(rows, "sm_90")
    assert lines == [
        '("forward", "sm_90", 2): {64: Tile(32, 64, 4, 2), 128: Tile(128, 64, 8, 3)},',
        '("dq", "sm_90", 4): {128: Tile(64, 64, 4, 2)},',
    ], "what can't be launched in one of its cases is no choice"
    table = eval(f"{{{''.join(lines)}}}", {"Tile": Tile})
    assert table["forward", "sm_90", 2][128] == Tile(128, 64, 8, 3)


def test_the_command_sweeps(
    hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on = stamp("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def apart(function: Any, *arguments: Any) -> Any:
        if function is not measure:
            return on
        case, names, plan = arguments
        assert plan.timers == ["graph"]
        return [
            row(name, 1.0 + index, 1.0 / (1.0 + index), part=plan.passes[0], **vars(case) | vars(on))
            for index, name in enumerate(names)
        ]

    monkeypatch.setattr(runner, "apart", apart)
    path = tmp_path / "x.csv"
    argv = ["bench", "kernel", "--csv", str(path), "--tiles", "--cases", "gpt2"]
    assert cli.main([*argv, "--passes", "forward", "backward"]) == 0
    rows = list(csv.DictReader(path.open()))
    assert {row["provider"].split()[0] for row in rows} == {"forward", "dq", "dkdv"}
    shown = capsys.readouterr().out
    assert '("forward", "sm_90", 2): {64: Tile(' in shown
    assert "best" in shown
