"""What a run found: its rows, and the tables that are printed of them.

Speeds of all providers side by side, means against the best peer, what patterns cost, what wasn't measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from rich.box import SIMPLE_HEAD
from rich.table import Table

from streamattn.bench.cases import Case


@dataclass(frozen=True)
class Row:
    """One provider on one case, one line of the CSV.

    Times are milliseconds: ``_ms`` by events, ``_graph_ms`` in a CUDA graph; ``_to_best`` is the time of the
    fastest peer over this one; ``sm_mhz`` the clock during the last turns; ``peak_mib`` what all passes asked
    for take beyond the inputs; ``spread`` the largest relative difference of two turns.
    """

    device: str
    driver: str | None
    torch: str
    triton: str | None
    sm_mhz: str | None
    case: str
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    head_dim: int
    causal: bool
    window: int | None
    document: int | None
    dropout_p: float
    provider: str
    version: str
    status: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    forward_to_best: float | None = None
    backward_to_best: float | None = None
    forward_graph_ms: float | None = None
    backward_graph_ms: float | None = None
    forward_graph_tflops: float | None = None
    backward_graph_tflops: float | None = None
    forward_graph_to_best: float | None = None
    backward_graph_to_best: float | None = None
    peak_mib: float | None = None
    spread: float | None = None


def _case(row: Row) -> Case:
    """What a row was measured on."""
    return Case(**{field.name: getattr(row, field.name) for field in fields(Case)})


def _cases(rows: Sequence[Row]) -> dict[Case, dict[str, Row]]:
    """Rows by case and provider, in their order."""
    found: dict[Case, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_case(row), {})[row.provider] = row
    return found


def _table(title: str, *headings: str) -> Table:
    return Table(*headings, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def geometric_mean(values: Sequence[float]) -> float:
    """Of one value or more, all positive."""
    return math.exp(sum(map(math.log, values)) / len(values))


def speeds(rows: Sequence[Row], column: str, ours: Sequence[str]) -> Table:
    """TFLOP/s of every provider in every case, and the first of ours against the best peer."""
    names = list(dict.fromkeys(row.provider for row in rows))
    headings = [name.replace("streamattn-", "").replace("sdpa_", "") for name in names]
    table = _table(f"{column}, TFLOP/s", "case", "D", "mask", "shape", *headings)
    if ours:
        table.add_column("to best")
    for row, case in _cases(rows).items():
        heads = (
            f"{row.num_heads}" if row.num_heads == row.num_kv_heads else f"{row.num_heads}:{row.num_kv_heads}"
        )
        cells = []
        for name in names:
            each = case.get(name)
            speed = getattr(each, f"{column}_tflops", None)
            cells.append("-" if speed is None else f"{speed:.{0 if speed >= 10.0 else 3}f}")
        if ours:
            ratio = getattr(case.get(ours[0]), f"{column}_to_best", None)
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        shape = f"{row.batch}x{row.seq_len}x{heads}"
        table.add_row(row.case, str(row.head_dim), row.label, shape, *cells)
    return table


def bandwidths(rows: Sequence[Row], column: str) -> Table:
    """GB/s of keys and values read, of every provider that decodes."""
    decoded = [row for row in rows if row.case == "decode"]
    names = list(dict.fromkeys(row.provider for row in decoded))
    table = _table(f"{column}, GB/s of k and v", "D", "shape", "MiB", *names)
    for row, case in _cases(decoded).items():
        times = [getattr(case.get(name), f"{column}_ms", None) for name in names]
        cells = ["-" if ms is None else f"{row.kv_bytes() / ms / 1e6:.0f}" for ms in times]
        shape = f"{row.batch}x{row.seq_len}x{row.num_heads}:{row.num_kv_heads}"
        table.add_row(str(row.head_dim), shape, f"{row.kv_bytes() / 2**20:.0f}", *cells)
    return table


def means(rows: Sequence[Row], column: str, ours: Sequence[str]) -> Table:
    """Geometric means of the sweep against the best peer of each case, and the worst case."""
    table = _table(f"{column}, best peer's time / ours", "provider", "D", "full", "causal", "both", "least")
    for name in ours:
        for head_dim in dict.fromkeys(row.head_dim for row in rows):
            ratios = {
                causal: [
                    ratio
                    for row in rows
                    if (row.case, row.provider, row.head_dim, row.causal) == ("sweep", name, head_dim, causal)
                    and (ratio := getattr(row, f"{column}_to_best")) is not None
                ]
                for causal in (False, True)
            }
            both = [*ratios[False], *ratios[True]]
            if both:
                sides = (ratios[False], ratios[True], both)
                cells = [f"{geometric_mean(each):.3f}" if each else "-" for each in sides]
                table.add_row(name, str(head_dim), *cells, f"{min(both):.3f}")
    return table


def costs(rows: Sequence[Row], column: str) -> Table:
    """The time under a pattern over the time of the same provider without it, in the sets that hold both."""
    table = _table(f"{column}, costs of patterns", "case", "D", "pattern", "provider", "time / without")
    plain = {(row.case, row.head_dim, row.provider): row for row in rows if _case(row).plain}
    for row in rows:
        without = plain.get((row.case, row.head_dim, row.provider))
        if _case(row).plain or without is None:
            continue
        times = [getattr(each, f"{column}_ms") for each in (row, without)]
        if None not in times:
            ratio = f"{times[0] / times[1]:.3f}"
            table.add_row(row.case, str(row.head_dim), _case(row).label, row.provider, ratio)
    return table


def totals(rows: Sequence[Row], ours: Sequence[str]) -> Table:
    """Forward and backward together: the first of ours beside the fastest peer that did both."""
    table = _table(
        "forward + backward, ms", "case", "D", "mask", "S", "ours", "best peer", "its", "ours / its"
    )
    for row, case in _cases(rows).items():
        sums = {
            name: each.forward_ms + each.backward_ms
            for name, each in case.items()
            if each.forward_ms is not None and each.backward_ms is not None
        }
        best = min(sums.keys() - set(ours), key=sums.__getitem__, default=None)
        if best is not None and ours and ours[0] in sums:
            cells = (f"{sums[ours[0]]:.3f}", best, f"{sums[best]:.3f}", f"{sums[ours[0]] / sums[best]:.3f}")
            table.add_row(row.case, str(row.head_dim), row.label, str(row.seq_len), *cells)
    return table


def notes(rows: Sequence[Row]) -> Table:
    """What was not measured, and why."""
    table = _table("not measured", "provider", "why", "cases")
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.status != "ok":
            found[row.provider, row.status] = found.get((row.provider, row.status), 0) + 1
    for (name, why), count in found.items():
        table.add_row(name, why, str(count))
    return table


def report(rows: Sequence[Row], columns: Sequence[str], ours: Sequence[str]) -> Iterator[Table]:
    """All tables that have a line.

    Args:
        rows: of one run.
        columns: beginnings of the names of their fields, such as ``forward_graph``.
        ours: providers that are measured against the others, the most important one first.
    """
    found = [notes(rows)]
    for column in columns:
        found += [speeds(rows, column, ours), costs(rows, column), means(rows, column, ours)]
        found.append(bandwidths(rows, column))
    found.append(totals(rows, ours))
    yield from (table for table in found if table.row_count)
