"""Pictures of measurements, PNG files drawn by matplotlib, which the extra ``bench`` brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamattn.bench.resume import extra

Points = Sequence[tuple[float, float]]
"""(x, y) in the order of x."""


def need_matplotlib(command: str) -> None:
    """Fails before anything is measured where there is no matplotlib.

    Raises:
        SystemExit: with one line that says what to install.
    """
    extra("matplotlib", command)


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    figure = extra("matplotlib.figure", "streamattn bench").Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def lines(
    path: str, series: Mapping[str, Points], title: str, x: str, y: str, logarithmic: str = "x"
) -> None:
    """One line for each series, over lengths or sizes.

    Args:
        path: of the PNG.
        series: points by name.
        title: above it.
        x: what is to the right, with its unit.
        y: what is upward.
        logarithmic: axes that are, of ``xy``.
    """
    figure, axes = _axes(title, x, y)
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    places = sorted({place for points in series.values() for place, _ in points})
    if "x" in logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
    if "y" in logarithmic:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)


def roofline(path: str, series: Mapping[str, Points], title: str, peak: float, bandwidth: float) -> None:
    """Speed over FLOP per byte below the two ceilings of a machine.

    Args:
        path: of the PNG.
        series: (FLOP per byte, TFLOP/s) by name.
        title: above it.
        peak: TFLOP/s of a matrix product.
        bandwidth: GB/s of a copy.
    """
    figure, axes = _axes(title, "FLOP per byte", "TFLOP/s")
    found = [place for points in series.values() for place, _ in points]
    ridge = peak * 1000.0 / bandwidth
    ends = sorted([min([ridge / 4, *found]), ridge, max([ridge * 4, *found])])
    axes.plot(ends, [min(peak, end * bandwidth / 1000.0) for end in ends], color="black", label="ceiling")
    for name, points in series.items():
        axes.scatter(*zip(*points, strict=True), s=18, label=name)
    axes.set(xscale="log", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)


def timeline(path: str, sizes: Mapping[str, Sequence[float]], title: str) -> None:
    """Memory in use from one allocation to the next.

    Args:
        path: of the PNG.
        sizes: MiB after each allocation or release, by name.
        title: above it.
    """
    figure, axes = _axes(title, "share of the step's allocations and releases", "MiB in use")
    for name, values in sizes.items():
        steps = [index / max(1, len(values) - 1) for index in range(len(values))]
        axes.step(steps, values, where="post", label=name)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
