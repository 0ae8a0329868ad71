"""Speeds are those of the files, and what is in none is said."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamattn.bench.comm import COLLECTIVES, CommRow, row_of
from streamattn.bench.resume import appended, stamp
from streamattn.pattern import UNBOUNDED
from streamattn.speeds import ASSUMED, Speeds, interpolated, rows_of
from streamattn.step import Attention

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measurements" / "attention_h200.csv"
COLUMNS = (
    *("device", "dtype", "seq_len", "head_dim", "causal", "window", "document", "dropout_p", "queries"),
    *("provider", "part", "status", "tflops", "peak_share", "gb_s", "copy_share"),
)


def kernel_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for row in rows:
            usual = dict(device="NVIDIA H200", dtype="bfloat16", seq_len=1024, head_dim=64, causal=True)
            usual |= dict(dropout_p=0.0, provider="streamattn", part="forward", status="ok", tflops=100.0)
            writer.writerow({**usual, **row})
    return str(path)


def comm_csv(path: Path, speeds: dict[tuple[str, int, int], float], backend: str = "nccl") -> str:
    """By operation, processes and MB: milliseconds."""
    with appended(str(path), CommRow) as write:
        for (operation, world, megabytes), ms in speeds.items():
            write(row_of(stamp("cpu"), operation, backend, world, megabytes, [ms], "ok"))
    return str(path)


def call(
    is_backward: bool = False, head_dim: int = 64, window: tuple[int, int] = (UNBOUNDED, 0)
) -> Attention:
    return Attention(is_backward, 1, 8, head_dim, *window)


def test_the_file_that_is_checked_in_serves() -> None:
    speeds, notes = Speeds(MEASURED), []
    with MEASURED.open() as file:
        rows = [row for row in csv.DictReader(file) if row["provider"] == "streamattn"]
    assert rows
    for row in rows:
        window = (UNBOUNDED, 0 if row["causal"] == "True" else UNBOUNDED)
        wanted = call(row["part"] == "backward", int(row["head_dim"]), window)
        assert speeds.attend(wanted, row["dtype"], int(row["seq_len"]), notes) == float(row["tflops"]) * 1e12
    assert notes == []
    assert speeds.device == "NVIDIA H200"


def test_lengths_between_are_interpolated_and_beyond_are_said(tmp_path: Path) -> None:
    lengths = {1024: 100.0, 4096: 300.0}
    assert [interpolated(lengths, x) for x in (512, 1024, 2048, 4096, 9999)] == [100, 100, 200, 300, 300]
    rows = [dict(seq_len=length, tflops=speed) for length, speed in lengths.items()]
    speeds = Speeds(kernel_csv(tmp_path / "k.csv", rows))
    notes: list[str] = []
    assert speeds.attend(call(), "bfloat16", 2048, notes) == 200e12
    assert notes == []
    assert speeds.attend(call(), "bfloat16", 8192, notes) == 300e12
    assert speeds.attend(call(head_dim=80), "bfloat16", 1024, notes) == 100e12
    assert speeds.attend(call(window=(7, 0)), "bfloat16", 1024, notes) == 100e12
    assert [note.split(",")[0] for note in notes] == [
        "attention of 8192 tokens as of 4096",
        "attention of head_dim 80 as of 64",
        "attention in a window at the speed without one",
    ]


def test_other_patterns_and_providers_and_failures_do_not_count(tmp_path: Path) -> None:
    other = ({"window": 128}, {"document": 64}, {"dropout_p": 0.1}, {"queries": 1}, {"provider": "fa3"})
    rows = [
        *(dict(tflops=1.0, **each) for each in other),
        dict(status="wrong", tflops=1.0),
        dict(tflops=50.0),
    ]
    speeds = Speeds(kernel_csv(tmp_path / "k.csv", rows))
    assert speeds.attention["forward", "bfloat16", True] == {64: {1024: 50.0}}


def test_products_and_copies_follow_from_the_shares(tmp_path: Path) -> None:
    row = dict(tflops=400.0, peak_share=0.5, gb_s=1000.0, copy_share=0.25)
    less = dict(tflops=1.0, peak_share=0.002, gb_s=1.0, copy_share=0.0002)  # rounded
    speeds, notes = Speeds(kernel_csv(tmp_path / "k.csv", [less, row, less])), []
    assert (speeds.product("bfloat16", notes), speeds.copy(notes)) == (800e12, 4000e9)
    assert notes == []
    assert speeds.product("float32", notes) == ASSUMED["float32 product"] * 1e12
    assert notes == ["products in float32 at 50 TFLOP/s (no peak_share in the kernel CSV)"]


def test_without_files_everything_is_assumed_and_said() -> None:
    speeds, notes = Speeds(), []
    assert speeds.attend(call(True), "bfloat16", 1024, notes) == ASSUMED["attention"] * 700e12
    speeds.copy(notes)
    speeds.link_ms("all_gather", 2, 1e6, notes)
    text = "\n".join(notes)
    for word in ("attention's backward in bfloat16 at 50%", "700 TFLOP/s", "4200 GB/s", "all_gather at 200"):
        assert word in text


@pytest.mark.parametrize("operation", COLLECTIVES)
@pytest.mark.parametrize("world", [2, 4])
def test_a_collective_takes_what_was_measured(tmp_path: Path, operation: str, world: int) -> None:
    speeds = Speeds(None, comm_csv(tmp_path / "c.csv", {(operation, world, 64): 3.0}))
    notes: list[str] = []
    assert speeds.link_ms(operation, world, 64e6, notes) == pytest.approx(3.0, rel=1e-3)
    assert notes == []


def test_other_numbers_of_gpus_and_sizes_beyond_are_said(tmp_path: Path) -> None:
    times = {("all_gather", 2, 8): 0.5, ("all_gather", 2, 64): 1.0}
    speeds, notes = Speeds(None, comm_csv(tmp_path / "c.csv", times)), []
    for megabytes in (8, 30, 64):
        speeds.link_ms("all_gather", 2, megabytes * 1e6, notes)
    assert notes == []
    # 7/8 of the bytes over the link that carried 1/2 of them in 1 ms
    assert speeds.link_ms("all_gather", 8, 64e6, notes) == pytest.approx(1.75, rel=1e-3)
    assert speeds.link_ms("all_gather", 2, 2e9, notes) == pytest.approx(2000 / 64, rel=1e-3)
    assert speeds.link_ms("all_gather", 2, 4e6, notes) == pytest.approx(0.25, rel=1e-3)
    assert notes == [
        "all_gather of 8 GPUs at the bus bandwidth of 2",
        "all_gather of more than 64 MB at the bus bandwidth of 64 MB",
        "all_gather of less than 8 MB at the bus bandwidth of 8 MB",
    ]


def test_nccl_goes_before_gloo(tmp_path: Path) -> None:
    path = comm_csv(tmp_path / "c.csv", {("all_reduce", 2, 8): 9.0}, "gloo")
    assert Speeds(None, path).link_ms("all_reduce", 2, 8e6, []) == pytest.approx(9.0, rel=1e-3)
    comm_csv(tmp_path / "c.csv", {("all_reduce", 2, 8): 1.0})
    assert Speeds(None, path).link_ms("all_reduce", 2, 8e6, []) == pytest.approx(1.0, rel=1e-3)


def test_a_file_is_of_one_device_and_its_last_row_counts(tmp_path: Path) -> None:
    rows = [dict(tflops=speed) for speed in (9.0, 7.0)]
    speeds = Speeds(kernel_csv(tmp_path / "k.csv", rows))
    assert speeds.attend(call(), "bfloat16", 1024, []) == 7e12
    mixed = kernel_csv(tmp_path / "k.csv", [*rows, dict(device="NVIDIA L4")])
    with pytest.raises(
        ValueError, match=r"k.csv: expected rows of one device, got 'NVIDIA H200', 'NVIDIA L4';"
    ):
        Speeds(mixed)
    lines = ["device,operation,backend,world_size,megabytes,bus_gb_s", "CPU,all_reduce,gloo,2,8,1"]
    lines += [f"{device},all_reduce,nccl,2,8,100" for device in ("A", "B")]
    (tmp_path / "c.csv").write_text("\n".join(lines[:3]), encoding="utf-8")
    assert Speeds(None, tmp_path / "c.csv").links == {"all_reduce": {2: {8: 100.0}}}  # of NCCL alone
    (tmp_path / "c.csv").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ValueError, match=r"c.csv: expected rows of one device, got 'A', 'B';"):
        Speeds(None, tmp_path / "c.csv")


@pytest.mark.parametrize(
    ("column", "cell", "wanted"),
    [
        ("tflops", "", "a number above 0"),
        ("tflops", "nan", "a number above 0"),
        ("seq_len", "1024.0", "a whole number above 0"),
        ("dropout_p", "none", "a number of 0 or more"),
        ("peak_share", "half", "a number of 0 or more"),
    ],
)
def test_bad_cells_are_named(column: str, cell: str, wanted: str, tmp_path: Path) -> None:
    path = kernel_csv(tmp_path / "k.csv", [{}, {column: cell}])
    with pytest.raises(ValueError, match=f"k.csv, line 3, column {column}: expected {wanted}, got '{cell}'"):
        Speeds(path)


@pytest.mark.parametrize("cell", ["0", "-3", "inf", ""])
def test_links_without_a_speed_are_named(cell: str, tmp_path: Path) -> None:
    text = f"operation,backend,world_size,megabytes,bus_gb_s\nall_reduce,nccl,2,8,{cell}\n"
    (tmp_path / "c.csv").write_text(text, encoding="utf-8")
    wanted = f"c.csv, line 2, column bus_gb_s: expected a number above 0, got '{cell}'"
    with pytest.raises(ValueError, match=wanted):
        Speeds(None, tmp_path / "c.csv")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", b"a\n" + b"x" * 200_000], ids=["png", "long"])
def test_what_is_no_csv_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"k.csv, line \d: expected the CSV file that a benchmark wrote: ."):
        Speeds(tmp_path / "k.csv")


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"can't read '.*gone.csv': No such file"):
        Speeds(tmp_path / "gone.csv")
    path = comm_csv(tmp_path / "c.csv", {("all_reduce", 2, 8): 9.0})
    with pytest.raises(ValueError, match="got none named provider, dtype"):
        Speeds(path)
    (tmp_path / "other.csv").write_text(
        "operation,world_size,megabytes,bus_gb_s\nx,2,8,1\n", encoding="utf-8"
    )
    with pytest.raises(ValueError, match="got none named backend;"):
        Speeds(None, tmp_path / "other.csv")
    (tmp_path / "empty.csv").write_text("operation,backend\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected rows with figures .* got none;"):
        rows_of(tmp_path / "empty.csv", "operation")
