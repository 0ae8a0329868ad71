"""What a run found: its rows, and the tables that are printed of them.

Speeds of all providers side by side, means against the best peer, the cases in which ours is slower, what
patterns cost, what wasn't measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from rich.box import SIMPLE_HEAD
from rich.table import Table

from streamattn.bench.cases import Case
from streamattn.bench.resume import Stamp


@dataclass(frozen=True)
class Row(Case, Stamp):
    """One pass of one provider on one case, one line of the CSV.

    Attributes:
        provider: whose.
        version: of what implements it.
        part: which pass, a name in `PASSES`.
        timer: ``events``, single calls, or ``graph``, many calls in a CUDA graph.
        status: ok, or why there are no figures.
        backend: what served the pass, by the kernels that ran: hopper, triton, decode or wide of ours, cudnn,
            flash, efficient or math of PyTorch's, or another's; " + " stands between several. What should
            have, and "(predicted)", where no profiler could look; the provider where neither is known.
        median_ms: of a call, as its quickest turn had it.
        p20_ms: of the same turn.
        p80_ms: of the same turn.
        tflops: by the median; hidden pairs of query and key don't count.
        peak_share: of what a matrix product of this dtype reached here, 0 to 1.
        flop_per_byte: operations over the bytes that have to be moved.
        gb_s: these bytes over the median.
        copy_share: of what a copy reached here, 0 to 1.
        held_mib: what the forward leaves, its output included; for the backward where there is one.
        peak_mib: the most in use beyond the inputs, for the backward with its forward.
        error: the largest relative error against float64, of out or of a gradient.
        speedup: the fastest peer's median over this one.
        spread: relative difference of the slowest and the quickest turn's medians.
    """

    provider: str = ""
    version: str = ""
    part: str = ""
    timer: str = ""
    status: str = "ok"
    backend: str | None = None
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    tflops: float | None = None
    peak_share: float | None = None
    flop_per_byte: float | None = None
    gb_s: float | None = None
    copy_share: float | None = None
    held_mib: float | None = None
    peak_mib: float | None = None
    error: float | None = None
    speedup: float | None = None
    spread: float | None = None


def case_of(row: Row) -> Case:
    """What a row was measured on."""
    return Case(**{field.name: getattr(row, field.name) for field in fields(Case)})


def _cases(rows: Sequence[Row]) -> dict[Case, dict[str, Row]]:
    """Rows by case and provider, in their order."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(case_of(row), {})[row.provider] = row
    return found


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def geometric_mean(values: Sequence[float]) -> float:
    """Of one value or more, all positive."""
    return math.exp(sum(map(math.log, values)) / len(values))


def speeds(rows: Sequence[Row], title: str, ours: Sequence[str]) -> Table:
    """TFLOP/s of every provider in every case, and the best peer's time over that of the first of ours."""
    names = list(dict.fromkeys(row.provider for row in rows))
    headings = [name.replace("streamattn-", "").replace("sdpa_", "") for name in names]
    table = _table(f"{title}, TFLOP/s", "case", "D", "mask", "shape", *headings)
    if ours:
        table.add_column("speedup")
    for row, case in _cases(rows).items():
        heads = (
            f"{row.num_heads}" if row.num_heads == row.num_kv_heads else f"{row.num_heads}:{row.num_kv_heads}"
        )
        cells = []
        for name in names:
            speed = case[name].tflops if name in case else None
            cells.append("-" if speed is None else f"{speed:.{0 if speed >= 10.0 else 3}f}")
        if ours:
            ratio = case[ours[0]].speedup if ours[0] in case else None
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        shape = f"{row.batch}x{row.seq_len}x{heads}"
        table.add_row(row.case, str(row.head_dim), row.label, shape, *cells)
    return table


def bandwidths(rows: Sequence[Row], title: str) -> Table:
    """GB/s of keys and values read, of every provider that decodes."""
    decoded = [row for row in rows if row.queries is not None]
    names = list(dict.fromkeys(row.provider for row in decoded))
    table = _table(f"{title}, GB/s of k and v", "D", "queries", "shape", "MiB", *names)
    for row, case in _cases(decoded).items():
        times = [case[name].median_ms if name in case else None for name in names]
        cells = ["-" if ms is None else f"{row.kv_bytes() / ms / 1e6:.0f}" for ms in times]
        shape = f"{row.batch}x{row.seq_len}x{row.num_heads}:{row.num_kv_heads}"
        table.add_row(str(row.head_dim), str(row.queries), shape, f"{row.kv_bytes() / 2**20:.0f}", *cells)
    return table


def means(rows: Sequence[Row], title: str, ours: Sequence[str]) -> Table:
    """Geometric means of a set against the best peer of each case, and the worst case."""
    headings = ("case", "provider", "D", "full", "causal", "both", "least")
    table = _table(f"{title}, best peer's time / ours", *headings)
    for case in ("sweep", "single", "headless"):
        mine = [row for row in rows if row.case == case and row.provider in ours and row.speedup is not None]
        for group in dict.fromkeys((row.provider, row.head_dim) for row in mine):
            here = [row for row in mine if (row.provider, row.head_dim) == group]
            sides = [[row for row in here if not row.causal], [row for row in here if row.causal], here]
            ratios = [[row.speedup for row in side if row.speedup is not None] for side in sides]
            cells = [f"{geometric_mean(each):.3f}" if each else "-" for each in ratios]
            table.add_row(case, *map(str, group), *cells, f"{min(ratios[-1]):.3f}")
    return table


def costs(rows: Sequence[Row], title: str) -> Table:
    """The time under a pattern over the time of the same provider without it, in the sets that hold both."""
    table = _table(f"{title}, costs of patterns", "case", "D", "pattern", "provider", "time / without")
    plain = {(row.case, row.dtype, row.head_dim, row.provider): row for row in rows if row.plain}
    for row in rows:
        without = plain.get((row.case, row.dtype, row.head_dim, row.provider))
        if row.plain or without is None or row.median_ms is None or without.median_ms is None:
            continue
        ratio = f"{row.median_ms / without.median_ms:.3f}"
        table.add_row(row.case, str(row.head_dim), row.label, row.provider, ratio)
    return table


def slower(rows: Sequence[Row], title: str, ours: Sequence[str]) -> Table:
    """Every case in which the first of ours that takes part is slower than the best peer."""
    table = _table(f"{title}, slower than the best peer", "case", "D", "mask", "shape", "ms", "speedup")
    first = next((name for name in ours if any(row.provider == name for row in rows)), None)
    for row in rows:
        if row.provider == first and row.speedup is not None and row.speedup < 1.0:
            shape, ms = f"{row.batch}x{row.seq_len}x{row.num_heads}", f"{row.median_ms:.4f}"
            table.add_row(row.case, str(row.head_dim), row.label, shape, ms, f"{row.speedup:.3f}")
    return table


def notes(rows: Sequence[Row]) -> Table:
    """What was not measured, and why."""
    table = _table("not measured", "provider", "pass", "why", "cases")
    found: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.status != "ok":
            key = (row.provider, row.part, row.status)
            found[key] = found.get(key, 0) + 1
    for key, count in found.items():
        table.add_row(*key, str(count))
    return table


def report(rows: Sequence[Row], ours: Sequence[str]) -> Iterator[Table]:
    """All tables that have a line.

    Args:
        rows: of one run.
        ours: providers that are measured against the others, the most important one first.
    """
    found = [notes(rows)]
    for part, dtype, timer in dict.fromkeys((row.part, row.dtype, row.timer) for row in rows):
        title = f"{part}, {dtype}" if timer == "events" else f"{part}, {dtype}, {timer}"
        mine = [row for row in rows if (row.part, row.dtype, row.timer) == (part, dtype, timer)]
        found += [speeds(mine, title, ours), costs(mine, title), means(mine, title, ours)]
        found.append(slower(mine, title, ours))
        if part == "forward":
            found.append(bandwidths(mine, title))
    yield from (table for table in found if table.row_count)
