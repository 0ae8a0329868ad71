"""One page of all results: ``streamattn bench report --out FOLDER FILE.csv ...``.

Writes ``FOLDER/report.md`` and PNGs beside it. Each file has a section: what it was measured on, pictures,
and its rows as a table without the columns that say the same in all of them. Pictures are drawn by what the
columns are: speed and memory by length and rooflines of kernels, tokens a second and peak memory by length
of models, bandwidth by size of collectives. The files are only read; those that are checked in where none is
named. Left out on purpose: judgements; the page says what was measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamattn.bench import plots
from streamattn.bench.arguments import writable_folder
from streamattn.bench.resume import extra

COMMAND = "streamattn bench report"
MACHINE = ("commit", "device", "driver", "torch", "triton", "transformers")
CHECKED_IN = Path(__file__).parents[2] / "docs" / "measurements"


def markdown(frame: Any) -> str:
    """A pandas frame as a Markdown table; empty cells where there is no value."""
    rows = [list(frame.columns), ["---"] * len(frame.columns)]
    rows += [
        ["" if value != value or value is None else cell(value) for value in values]
        for values in frame.itertuples(index=False, name=None)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(value: Any) -> str:
    """A value as a cell: whole numbers as such, and nothing that would end the cell."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def series_of(frame: Any, name: str, x: str, y: str) -> dict[str, plots.Points]:
    """Points of each value of a column, in the order of x; rows without a figure are left out."""
    found: dict[str, plots.Points] = {}
    for value, rows in frame.dropna(subset=[y]).groupby(name, sort=False):
        points = rows.groupby(x)[y].max()
        found[str(value)] = list(zip(points.index.tolist(), points.tolist(), strict=True))
    return found


def kernel_pictures(frame: Any, stem: str) -> Iterator[str]:
    """Of `streamattn bench kernel`: speed and memory by length, and rooflines, for each dtype, D and mask."""
    for (case, part, timer), found in frame.groupby(["case", "part", "timer"], sort=False):
        name = f"{stem}-{part}" if (case, timer) == ("sweep", "events") else f"{stem}-{case}-{part}-{timer}"
        for (dtype, head_dim, causal), rows in found.groupby(["dtype", "head_dim", "causal"]):
            mask = "causal" if causal else "full"
            title = f"{case}: {part}, {dtype}, head_dim {head_dim}, {mask}"
            for what, unit, scale in (("tflops", "TFLOP/s", "x"), ("peak_mib", "MiB", "xy")):
                series = series_of(rows, "provider", "seq_len", what)
                if any(len(points) > 1 for points in series.values()):
                    memory = "-memory" if what == "peak_mib" else ""
                    path = f"{name}-{dtype}-{head_dim}-{mask}{memory}.png"
                    plots.lines(path, series, title, "queries and keys", unit, scale)
                    yield path
        for dtype, rows in found.dropna(subset=["peak_share", "copy_share"]).groupby("dtype"):
            path = f"{name}-{dtype}-roofline.png"
            series = series_of(rows, "provider", "flop_per_byte", "tflops")
            ceiling = (rows["tflops"] / rows["peak_share"]).median()
            copy = (rows["gb_s"] / rows["copy_share"]).median()
            plots.roofline(path, series, f"{case}: {part}, {dtype}, all bytes moved once", ceiling, copy)
            yield path


NUMBERS = ("layers", "batch", "warmup")
"""Columns whose values are told with their names: a number alone says nothing."""


def length_pictures(
    frame: Any, stem: str, by: Sequence[str], what: str, title: str, unit: str
) -> Iterator[str]:
    """One figure of models by length, a picture for each group with several lengths.

    Args:
        frame: of the file.
        stem: of the paths.
        by: columns that make a group.
        what: the column that is drawn.
        title: what that is.
        unit: of it.
    """
    for values, rows in frame.groupby(list(by), sort=False, dropna=False):
        series = series_of(rows, "contestant", "seq_len", what)
        if any(len(points) > 1 for points in series.values()):
            words = [
                f"{name} {value:g}" if name in NUMBERS else str(value)
                for name, value in zip(by, values, strict=True)
                if value == value
            ]
            path = f"{stem}-{what}-{'-'.join(words).replace(' ', '_')}.png"
            plots.lines(path, series, f"{title}: {', '.join(words)}", "tokens of a row", unit)
            yield path


def pictures(frame: Any, stem: str) -> Iterator[str]:
    """Draws what a file's columns allow, and yields the paths."""
    columns = set(frame.columns)
    if {"provider", "flop_per_byte"} <= columns:
        yield from kernel_pictures(frame, stem)
    if "tokens_per_s" in columns:
        by = ("shape", "layers", "work", "batch", "dtype", "mode", "warmup")
        yield from length_pictures(frame, stem, by, "tokens_per_s", "speed", "tokens/s")
    if "step_peak_mib" in columns:
        for part in ("forward", "step"):
            by = ("shape", "layers", "batch", "dtype")
            yield from length_pictures(frame, stem, by, f"{part}_peak_mib", f"peak of a {part}", "MiB")
    if "bus_gb_s" in columns:
        for (backend, world), rows in frame.groupby(["backend", "world_size"]):
            series = series_of(rows, "operation", "megabytes", "bus_gb_s")
            if series:
                path = f"{stem}-{backend}-{world}.png"
                plots.lines(path, series, f"{backend}, {world} processes", "MB", "bus GB/s")
                yield path


def read(file: Path) -> Any:
    """A file as a pandas frame.

    Raises:
        SystemExit: it is no CSV with a row.
    """
    pandas = extra("pandas", COMMAND)
    try:
        frame = pandas.read_csv(file)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{COMMAND}: can't read {str(file)!r}: {error}") from None
    if frame.empty:
        raise SystemExit(f"{COMMAND}: {str(file)!r} has no row")
    return frame


def draw(file: str, folder: str) -> list[str]:
    """Draws a file's pictures into a folder, which is made where it isn't there; returns their paths."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    return list(pictures(read(Path(file)), str(Path(folder) / Path(file).stem)))


def section(file: Path, out: Path) -> str:
    """A file's part of the page; its pictures are drawn into ``out``.

    Raises:
        SystemExit: it is no CSV with a row.
    """
    frame = read(file)
    paths = [Path(path).name for path in draw(str(file), str(out))]
    constant = [
        name for name in frame.columns if frame[name].nunique(dropna=False) == 1 and frame[name].notna().all()
    ]
    facts = [f"{name} {cell(frame[name].iloc[0])}" for name in constant if len(frame) > 1 or name in MACHINE]
    shown = frame[[name for name in frame.columns if frame[name].notna().any()]]
    if len(frame) > 1:
        shown = shown.drop(columns=constant)
    parts = [f"## {file.stem}", ", ".join(facts), *(f"![{name}]({name})" for name in paths), markdown(shown)]
    return "\n\n".join(part for part in parts if part)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status, 0.

    Raises:
        SystemExit: a file can't be read, or pandas or matplotlib is missing.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description="Renders results as one page with PNGs.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", help="that benchmarks wrote")
    what = "folder of the page and its pictures"
    parser.add_argument("--out", type=writable_folder, required=True, help=what)
    options = parser.parse_args(argv)
    plots.need_matplotlib(COMMAND)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    sections = [section(file, out) for file in options.files or sorted(CHECKED_IN.glob("*.csv"))]
    page = out / "report.md"
    page.write_text("# Measurements\n\n" + "\n\n".join(sections) + "\n", encoding="utf-8")
    print(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
