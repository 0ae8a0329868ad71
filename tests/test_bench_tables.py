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
    speeds,
    totals,
)

ROW = Row(
    device="Imagined GPU",
    driver=None,
    torch="2.11",
    triton=None,
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
    provider="streamattn",
    version="1",
    status="ok",
    forward_ms=2.0,
    forward_tflops=650.4,
    forward_to_best=0.8,
)
PEER = replace(ROW, provider="sdpa_flash", forward_ms=1.6, forward_tflops=813.0, forward_to_best=1.0)


def lines(table: Table) -> list[list[str]]:
    cells = [list(column.cells) for column in table.columns]
    return [[str(cell) for cell in line] for line in zip(*cells, strict=True)]


def test_speeds_stand_side_by_side() -> None:
    lone = replace(
        ROW, case="grouped", num_kv_heads=4, causal=True, forward_tflops=None, forward_to_best=None
    )
    table = speeds([ROW, PEER, lone], "forward", ["streamattn"])
    assert [str(column.header) for column in table.columns][4:] == [
        "streamattn",
        "flash",
        "to best",
    ]
    assert lines(table) == [
        ["sweep", "128", "full", "4x4096x16", "650", "813", "0.80"],
        ["grouped", "128", "causal", "4x4096x16:4", "-", "-", "-"],
    ]


def test_decoding_is_told_in_bytes_of_the_cache() -> None:
    decoding = replace(ROW, case="decode", batch=1, num_heads=32, num_kv_heads=8, forward_ms=0.02)
    peer = replace(decoding, provider="sdpa_flash", forward_ms=None)
    assert lines(bandwidths([ROW, decoding, peer], "forward")) == [
        ["128", "1x4096x32:8", "16", "839", "-"],
    ]
    assert not bandwidths([ROW, PEER], "forward").row_count


def test_means_are_geometric_and_over_the_sweep_alone() -> None:
    rows = [
        ROW,
        replace(ROW, seq_len=512, forward_to_best=1.25),
        replace(ROW, causal=True, forward_to_best=0.5),
        replace(ROW, head_dim=64, causal=True, forward_to_best=1.1),
        replace(ROW, case="gpt2", forward_to_best=9.0),
        PEER,
    ]
    both = geometric_mean([0.8, 1.25, 0.5])
    assert both == pytest.approx(0.5 ** (1 / 3))
    assert lines(means(rows, "forward", ["streamattn"])) == [
        ["streamattn", "128", "1.000", "0.500", f"{both:.3f}", "0.500"],
        ["streamattn", "64", "-", "1.100", "1.100", "1.100"],
    ]


def test_costs_are_against_the_same_provider_without_the_pattern() -> None:
    plain = replace(ROW, case="dropout")
    rows = [
        replace(plain, dropout_p=0.1, forward_ms=2.5),
        plain,
        replace(plain, provider="flex", dropout_p=0.1, forward_ms=None),
        replace(plain, provider="flex"),
        ROW,
        replace(ROW, causal=True),
        replace(PEER, case="window", causal=True, window=1024, forward_ms=0.1),
        replace(PEER, case="window", causal=True, forward_ms=1.0),
    ]
    assert lines(costs(rows, "forward")) == [
        ["dropout", "128", "full p 0.1", "streamattn", "1.250"],
        ["window", "128", "causal w 1024", "sdpa_flash", "0.100"],
    ]


def test_totals_are_those_of_the_first_of_ours_beside_the_fastest_peer_of_both() -> None:
    ours = replace(ROW, backward_ms=4.0)
    rows = [
        ours,
        replace(ours, provider="streamattn-portable", forward_ms=0.5),
        replace(PEER, backward_ms=3.4),
        replace(PEER, provider="fa3", forward_ms=1.0),
        replace(PEER, provider="sdpa_cudnn", forward_ms=1.0, backward_ms=9.0),
        replace(ours, seq_len=512),
    ]
    assert lines(totals(rows, ["streamattn", "streamattn-portable"])) == [
        ["sweep", "128", "full", "4096", "6.000", "sdpa_flash", "5.000", "1.200"]
    ]
    assert not lines(totals(rows, []))


def test_what_was_not_measured_is_counted() -> None:
    rows = [ROW, *(replace(PEER, seq_len=n, status="unsupported: it is old") for n in (1, 2))]
    assert lines(notes(rows)) == [["sdpa_flash", "unsupported: it is old", "2"]]


def printed(tables: Sequence[Table]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


def test_empty_tables_are_left_out() -> None:
    shown = [str(table.title) for table in report([ROW, PEER], ["forward"], ["streamattn"])]
    assert [title.split(",")[1].strip() for title in shown] == ["TFLOP/s", "best peer's time / ours"]


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
    assert all(heading in text for heading in ("streamattn", "portable", "efficient", "to best"))
    assert sum(bool(line.strip()) for line in text.splitlines()) == 4, "no line is broken in two"
