"""Every figure of README.md with one command: ``streamattn bench readme --out FOLDER``.

Runs the commands that README names, each into its CSV file in a folder, makes the page of them all there,
with the pictures that README shows, and prints the table and the sentences as README has them. Files with
rows are continued. The tests hold README to what this makes of the files that are checked in. Without a GPU
the same runs at small sizes, and what it prints is short of some figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from streamattn.bench import plots, report
from streamattn.bench.arguments import writable_folder

COMMAND = "streamattn bench readme"
TIMED_ONCE = ("--repeats", "8", "--rounds", "1")
COMMANDS = {
    "attention_h200": (
        *("kernel", "--cases", "sweep", "--head-dims", "64", "128", "--passes", "forward", "backward"),
        *TIMED_ONCE,
        *("--providers", "streamattn", "fa3", "sdpa_flash", "sdpa_cudnn"),
    ),
    "decode_h200": ("decode", *TIMED_ONCE, "--providers", "streamattn", "sdpa_flash", "sdpa_cudnn"),
    "decode_layer_h200": ("decode-layer",),
}
"""File -> the command that writes it, without --csv."""
COLUMNS = ("streamattn", "sdpa_flash", "sdpa_cudnn", "fa3")
LENGTHS = (2048, 8192, 16384)


def speeds(frame: Any) -> Iterator[str]:
    """Lines of the table of speeds, TFLOP/s forward / backward."""
    frame = frame[(frame["case"] == "sweep") & frame["seq_len"].isin(LENGTHS)].dropna(subset=["tflops"])
    for (head_dim, causal, seq_len), rows in frame.groupby(["head_dim", "causal", "seq_len"]):
        cells = [
            " / ".join(
                f"{speed:.0f}"
                for part in ("forward", "backward")
                for speed in rows[(rows["provider"] == name) & (rows["part"] == part)]["tflops"]
            )
            for name in COLUMNS
        ]
        yield f"| {head_dim} {'causal' if causal else 'full'} | {seq_len} | {' | '.join(cells)} |"


def sentences(attention: Any, decode: Any, layers: Any) -> Iterator[str]:
    """Parts of sentences with figures of the three files in them, as README has them."""
    times = attention.pivot_table(
        "median_ms", ["part", "head_dim", "causal", "seq_len"], "provider", sort=False
    )
    if {"streamattn", "sdpa_cudnn"} <= set(times.columns) and 512 in times.index.unique("seq_len"):
        ratios = (times["streamattn"] / times["sdpa_cudnn"]).xs(512, level="seq_len")
        low, high = (100 * (end - 1) for end in (ratios["forward"].min(), ratios["forward"].max()))
        slow = 100 * (ratios["backward", 128, True] - 1)
        yield f"cuDNN's forward is {low:.0f} to {high:.0f} % faster"
        yield f"its causal backward at head dimension 128 by {slow:.0f} %"
    times = decode.pivot_table("median_ms", ["batch", "num_kv_heads", "seq_len", "head_dim"], "provider")
    if {"streamattn", "sdpa_cudnn", "sdpa_flash"} <= set(times.columns):
        cudnn, flash = (times["streamattn"] / times[name] for name in ("sdpa_cudnn", "sdpa_flash"))
        ends = f"{flash.min():.2f} to {flash.max():.2f}"
        yield f"takes {cudnn.min():.2f} to {cudnn.max():.2f} of cuDNN's time, and {ends} of SDPA flash's"
    longer = layers.groupby("case")["difference_us"].last()
    gpt2, llama = longer["GPT-2 layer"], longer["Llama layer"]
    yield f"takes {gpt2:.0f} microseconds longer for a patched GPT-2 layer that decodes"
    yield f"and {llama:.0f} for Llama's"


def figures(folder: Path) -> list[str]:
    """All that README says in figures, as the files of a folder have it."""
    attention, decode, layers = (report.read(folder / f"{name}.csv") for name in COMMANDS)
    return [*speeds(attention), *sentences(attention, decode, layers)]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the commands one after another.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: the largest of the commands'.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description="Measures every figure of README.md.")
    what = "folder of the files, the page, the pictures"
    parser.add_argument("--out", type=writable_folder, required=True, help=what)
    options = parser.parse_args(argv)
    plots.need_matplotlib(COMMAND)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    bench = import_module("streamattn.bench")
    files = [str(out / f"{name}.csv") for name in COMMANDS]
    status = max(
        bench.main([*command, "--csv", file]) for file, command in zip(files, COMMANDS.values(), strict=True)
    )
    report.main(["--out", options.out, *files])
    print("\n".join(figures(out)))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
