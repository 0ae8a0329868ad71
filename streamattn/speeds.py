"""Speeds of a machine, as the benchmarks measured them: what `streamattn.plan` reckons with.

Attention, products and copies come from a CSV of ``streamattn bench kernel``, links from one of ``streamattn
bench comm``. What is asked for and isn't there is assumed, and said. The rows of a file that serve must be of
one device; of several of the same case (of other commits, timers, batches) the last counts.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamattn.pattern import UNBOUNDED
from streamattn.step import Attention

ASSUMED = {"product": 700.0, "float32 product": 50.0, "copy": 4200.0, "link": 200.0, "attention": 0.5}
"""TFLOP/s in 16 bits and in float32, GB/s of H200's memory and of NVLink, attention's share of products."""


class Row(dict[str, str]):
    """A row of a CSV file, and where it is: the file and the line it ends in."""

    where: str = ""

    def number(self, column: str, kind: Callable[[str], float] = float, *, least: float | None = None) -> Any:
        """A cell's number, of ``kind`` (float or int).

        Args:
            column: of the cell.
            kind: what reads it.
            least: it may be this; None: it must be above 0.

        Raises:
            ValueError: the cell holds no such number.
        """
        with suppress(ValueError):
            number = kind(self.get(column) or "")
            if math.isfinite(number) and (number > 0 if least is None else number >= least):
                return number
        wanted = f"a{' whole' if kind is int else ''} number"
        wanted += " above 0" if least is None else f" of {least:g} or more"
        raise ValueError(f"{self.where}, column {column}: expected {wanted}, got {self.get(column)!r}")


def rows_of(path: str | Path, *columns: str) -> list[Row]:
    """The rows of a benchmark's CSV that have figures.

    Raises:
        ValueError: no such file, not a CSV, no such row, or not these columns.
    """
    rows: list[Row] = []
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            try:
                for cells in reader:
                    if cells.get("status", "ok") == "ok":
                        rows.append(Row(cells))
                        rows[-1].where = f"{path}, line {reader.line_num}"
            except (csv.Error, UnicodeDecodeError) as error:
                where = f"{path}, line {max(1, reader.line_num)}"
                raise ValueError(f"{where}: expected the CSV file that a benchmark wrote: {error}") from None
    except OSError as error:
        raise ValueError(f"can't read {str(path)!r}: {error.strerror}; name a benchmark's CSV file") from None
    missing = [name for name in columns if rows and name not in rows[0]]
    if not rows or missing:
        got = f"none named {', '.join(missing)}" if missing else "none"
        raise ValueError(
            f"{path}: expected rows with figures and the columns {', '.join(columns)}, got {got}; name the "
            "file that the benchmark wrote"
        )
    return rows


def _check_device(path: str | Path, rows: Sequence[Row]) -> str | None:
    """The one that all rows were measured on."""
    devices = sorted({row.get("device") or "" for row in rows})
    if len(devices) > 1:
        raise ValueError(
            f"{path}: expected rows of one device, got {', '.join(map(repr, devices))}; keep those of one"
        )
    return devices[0] or None


def interpolated(points: dict[int, float], at: float) -> float:
    """The value there, linear in the logarithm between its neighbours; beyond the ends that of the end."""
    below = max((x for x in points if x <= at), default=min(points))
    above = min((x for x in points if x >= at), default=max(points))
    share = 0.0 if above <= below else math.log(at / below) / math.log(above / below)
    return points[below] + share * (points[above] - points[below])


class Speeds:
    """Speeds of one machine. What is asked for and was not measured is written into ``notes``.

    Args:
        kernel_csv: of ``streamattn bench kernel --passes forward backward``; None: everything is assumed.
        comm_csv: of ``streamattn bench comm``; None: likewise. NCCL's rows serve where there are any.

    Raises:
        ValueError: a file can't be read, is of several devices, or a cell holds no number.
    """

    def __init__(self, kernel_csv: str | Path | None = None, comm_csv: str | Path | None = None) -> None:
        self.device: str | None = None
        self.attention: dict[tuple[str, str, bool], dict[int, dict[int, float]]] = {}
        self.links: dict[str, dict[int, dict[int, float]]] = {}
        self.ceilings: dict[str, float] = {}
        shares: dict[str, float] = {}
        columns = ("provider", "dtype", "part", "causal", "head_dim", "seq_len", "tflops")
        rows = rows_of(kernel_csv, *columns) if kernel_csv else []
        if kernel_csv:
            self.device = _check_device(kernel_csv, rows)
        for row in rows:
            for name, rate, share in (
                (row["dtype"], "tflops", "peak_share"),
                ("copy", "gb_s", "copy_share"),
            ):
                found = row.number(share, least=0) if row.get(share) else 0.0
                if found > shares.get(name, 0.0):  # rounded to four places, the largest says most
                    shares[name], self.ceilings[name] = found, row.number(rate) / found
            plain = not (row.get("window") or row.get("document") or row.get("queries"))
            if (
                plain
                and row["provider"] == "streamattn"
                and not (row.get("dropout_p") and row.number("dropout_p", least=0))
            ):
                key = row["part"], row["dtype"], row["causal"] == "True"
                lengths = self.attention.setdefault(key, {}).setdefault(row.number("head_dim", int), {})
                lengths[row.number("seq_len", int)] = row.number("tflops")
        columns = ("operation", "backend", "world_size", "megabytes", "bus_gb_s")
        rows = rows_of(comm_csv, *columns) if comm_csv else []
        best = "nccl" if any(row["backend"] == "nccl" for row in rows) else "gloo"
        rows = [row for row in rows if row["backend"] == best]
        if comm_csv and rows:
            _check_device(comm_csv, rows)
        for row in rows:
            sizes = self.links.setdefault(row["operation"], {}).setdefault(row.number("world_size", int), {})
            sizes[row.number("megabytes", int)] = row.number("bus_gb_s")

    def product(self, dtype: str, notes: list[str]) -> float:
        """FLOP/s of a matrix product."""
        if dtype not in self.ceilings:
            rate = ASSUMED["float32 product" if dtype == "float32" else "product"]
            notes.append(f"products in {dtype} at {rate:.0f} TFLOP/s (no peak_share in the kernel CSV)")
            return rate * 1e12
        return self.ceilings[dtype] * 1e12

    def copy(self, notes: list[str]) -> float:
        """Bytes/s of a copy, read and written."""
        if "copy" not in self.ceilings:
            notes.append(f"memory at {ASSUMED['copy']:.0f} GB/s (no copy_share in the kernel CSV)")
        return self.ceilings.get("copy", ASSUMED["copy"]) * 1e9

    def attend(self, call: Attention, dtype: str, length: int, notes: list[str]) -> float:
        """FLOP/s of attention on sequences of a length."""
        part, causal = "backward" if call.is_backward else "forward", call.window_right == 0
        dims = self.attention.get((part, dtype, causal))
        if not dims:
            share = ASSUMED["attention"]
            notes.append(f"attention's {part} in {dtype} at {share:.0%} of products (not in a kernel CSV)")
            return share * self.product(dtype, notes)
        nearest = min(dims, key=lambda head_dim: abs(head_dim - call.head_dim))
        if nearest != call.head_dim:
            notes.append(f"attention of head_dim {call.head_dim} as of {nearest}, the nearest measured")
        if not min(dims[nearest]) <= length <= max(dims[nearest]):
            end = min(dims[nearest], key=lambda measured: abs(measured - length))
            notes.append(f"attention of {length} tokens as of {end}, the nearest measured")
        if call.window_left != UNBOUNDED:
            notes.append("attention in a window at the speed without one")
        return interpolated(dims[nearest], length) * 1e12

    def link_ms(self, operation: str, world: int, size: float, notes: list[str]) -> float:
        """Milliseconds of a collective whose larger buffer has so many bytes; factors as `bench.comm`'s."""
        factor = {"all_reduce": 2 * (world - 1) / world, "send_recv": 1.0}.get(operation, (world - 1) / world)
        worlds = self.links.get(operation)
        if not worlds:
            speed = ASSUMED["link"]
            notes.append(f"{operation} at {speed:.0f} GB/s bus bandwidth (no such row in a comm CSV)")
        else:
            nearest = min(worlds, key=lambda measured: abs(measured - world))
            if nearest != world:
                notes.append(f"{operation} of {world} GPUs at the bus bandwidth of {nearest}")
            sizes, megabytes = worlds[nearest], size / 1e6
            end = min(max(megabytes, min(sizes)), max(sizes))
            if end != megabytes:
                than = "less" if megabytes < end else "more"
                notes.append(f"{operation} of {than} than {end} MB at the bus bandwidth of {end} MB")
            speed = interpolated(sizes, megabytes)
        return factor * size / speed / 1e6
