"""What is printed of a run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from streamattn.bench.tables import (
    Row,
    bandwidths,
    costs,
    geometric_mean,
    means,
    notes,
    report,
    slower,
    speeds,
)

ROW = Row(
    commit="abc",
    device="Imagined GPU",
    driver=None,
    torch="2.11",
    triton=None,
    transformers="5",
    sm_mhz=None,
    case="sweep",
    dtype="bfloat16",
    batch=4,
    num_heads=16,
    num_kv_heads=16,
    seq_len=4096,
    head_dim=128,
    causal=False,
    window=None,
    document=None,
    dropout_p=0.0,
    queries=None,
    provider="streamattn",
    version="1",
    part="forward",
    timer="events",
    median_ms=2.0,
    tflops=650.4,
    speedup=0.8,
)
PEER = replace(ROW, provider="sdpa_flash", median_ms=1.6, tflops=813.0, speedup=1.0)


def lines(table: Table) -> list[list[str]]:
    cells = [list(column.cells) for column in table.columns]
    return [[str(cell) for cell in line] for line in zip(*cells, strict=True)]


def test_speeds_stand_side_by_side() -> None:
    lone = replace(ROW, case="grouped", num_kv_heads=4, causal=True, tflops=None, speedup=None)
    table = speeds([ROW, PEER, lone], "forward", ["streamattn"])
    assert [str(column.header) for column in table.columns][4:] == [
        "streamattn",
        "flash",
        "speedup",
    ]
    assert lines(table) == [
        ["sweep", "128", "full", "4x4096x16", "650", "813", "0.80"],
        ["grouped", "128", "causal", "4x4096x16:4", "-", "-", "-"],
    ]


def test_decoding_is_told_in_bytes_of_the_cache() -> None:
    decoding = replace(ROW, queries=4, batch=1, num_heads=32, num_kv_heads=8, median_ms=0.02)
    peer = replace(decoding, provider="sdpa_flash", median_ms=None)
    assert lines(bandwidths([ROW, decoding, peer], "forward")) == [
        ["128", "4", "1x4096x32:8", "16", "839", "-"],
    ]
    assert not bandwidths([ROW, PEER], "forward").row_count


def test_means_are_geometric_and_each_set_has_its_own() -> None:
    rows = [
        ROW,
        replace(ROW, seq_len=512, speedup=1.25),
        replace(ROW, causal=True, speedup=0.5),
        replace(ROW, head_dim=64, causal=True, speedup=1.1),
        replace(ROW, case="gpt2", speedup=9.0),
        replace(ROW, case="single", causal=True, speedup=3.0),
        PEER,
    ]
    both = geometric_mean([0.8, 1.25, 0.5])
    assert both == pytest.approx(0.5 ** (1 / 3))
    assert lines(means(rows, "forward", ["streamattn"])) == [
        ["sweep", "streamattn", "128", "1.000", "0.500", f"{both:.3f}", "0.500"],
        ["sweep", "streamattn", "64", "-", "1.100", "1.100", "1.100"],
        ["single", "streamattn", "128", "-", "3.000", "3.000", "3.000"],
    ]


def test_costs_are_against_the_same_provider_without_the_pattern() -> None:
    plain = replace(ROW, case="dropout")
    rows = [
        replace(plain, dropout_p=0.1, median_ms=2.5),
        plain,
        replace(plain, provider="flex", dropout_p=0.1, median_ms=None),
        replace(plain, provider="flex"),
        ROW,
        replace(ROW, causal=True),
        replace(PEER, case="window", causal=True, window=1024, median_ms=0.1),
        replace(PEER, case="window", causal=True, median_ms=1.0),
    ]
    assert lines(costs(rows, "forward")) == [
        ["dropout", "128", "full p 0.1", "streamattn", "1.250"],
        ["window", "128", "causal w 1024", "sdpa_flash", "0.100"],
    ]


def test_what_is_slower_than_the_best_peer_is_listed() -> None:
    rows = [
        ROW,
        replace(ROW, seq_len=512, speedup=1.0),
        replace(ROW, seq_len=1024, speedup=None, median_ms=None),
        replace(ROW, provider="streamattn-portable", speedup=0.5),
        replace(PEER, seq_len=512, speedup=0.9),
    ]
    ours = ["streamattn-decode", "streamattn", "streamattn-portable"]
    assert lines(slower(rows, "forward", ours)) == [
        ["sweep", "128", "full", "4x4096x16", "2.0000", "0.800"],
    ]
    assert not slower([PEER], "forward", ours).row_count


def test_what_was_not_measured_is_counted() -> None:
    rows = [ROW, *(replace(PEER, seq_len=n, status="unsupported: it is old") for n in (1, 2))]
    assert lines(notes(rows)) == [["sdpa_flash", "forward", "unsupported: it is old", "2"]]


def printed(tables: Sequence[Table]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_empty_tables_are_left_out() -> None:
    shown = [str(table.title) for table in report([ROW, PEER], ["streamattn"])]
    assert [title.split(",")[2].strip() for title in shown] == [
        "TFLOP/s",
        "best peer's time / ours",
        "slower than the best peer",
    ]


def test_each_pass_dtype_and_timer_has_its_tables() -> None:
    rows = [ROW, replace(ROW, part="backward"), replace(ROW, timer="graph", dtype="tf32")]
    shown = [str(table.title) for table in report(rows, ["streamattn"])]
    assert [title for title in shown if title.endswith("TFLOP/s")] == [
        "forward, bfloat16, TFLOP/s",
        "backward, bfloat16, TFLOP/s",
        "forward, tf32, graph, TFLOP/s",
    ]


def test_eight_providers_fit_the_width() -> None:
    names = [
        "streamattn",
        "streamattn-portable",
        "fa3",
        "fa4",
        "sdpa_flash",
        "sdpa_cudnn",
        "sdpa_efficient",
        "flex",
    ]
    rows = [
        replace(ROW, case="documents", causal=True, document=1024, seq_len=16384, provider=name)
        for name in names
    ]
    text = printed([speeds(rows, "forward", names[:2])])
    assert "causal doc 1024" in text
    assert all(heading in text for heading in ("streamattn", "portable", "efficient", "speedup"))
    assert sum(bool(line.strip()) for line in text.splitlines()) == 4, "no line is broken in two"
