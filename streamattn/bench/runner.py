"""Times attention beside other implementations: ``streamattn bench kernel --csv FILE``.

Each case runs in a process of its own, all its contestants in turns, and a file is continued: what it holds
of the same case, code and machine is not measured again. What fails the gate is not timed, and the exit
status is 1. Without a GPU the CPU is measured, by default on one small case. ``bench decode`` and ``bench
wide`` are this command with ``--cases decode`` and ``--cases wide``. Left out on purpose: whole models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product

import torch
from rich.console import Console
from rich.progress import track

from streamattn.bench import report, tile_sweep
from streamattn.bench.arguments import HelpFormatter, positive, writable, writable_folder
from streamattn.bench.cases import DTYPES, PASSES, SETS, Case, Sweep, shrunk
from streamattn.bench.contest import Plan, measure
from streamattn.bench.plots import need_matplotlib
from streamattn.bench.providers import PROVIDERS, find
from streamattn.bench.resume import Died, Mismatch, apart, appended, holds, rows_in, stamp
from streamattn.bench.tables import Row
from streamattn.bench.tables import report as tables_of
from streamattn.bench.timers import TIMERS

COMMAND = "streamattn bench kernel"
ON_CPU = ["cpu"]
ON_GPU = [name for name in SETS if name not in ("cpu", "single", "headless", "drafts")]
"""What is measured where nothing is asked for; what has one head, and drafts, are asked for by name."""
WRITTEN_OUT = ("eager", "eager_compiled", "cupy")
PEERS = [name for name in PROVIDERS if name not in WRITTEN_OUT]
"""Who takes part where nobody is asked for: who doesn't hold all scores in memory."""
WIDTH = 120  # columns of the tables, on a terminal or not


def worth_compiling(case: Case, longest: int) -> bool:
    """Whether FlexAttention, which compiles for seconds in every case, takes part where not all was asked."""
    pattern = case.window is not None or case.document is not None
    return (
        pattern or case.case == "gpt2" or (case.case, case.seq_len, case.head_dim) == ("sweep", longest, 128)
    )


def cases_of(options: argparse.Namespace) -> list[Case]:
    """All cases of the sets and dtypes that were asked for, each once."""
    found = []
    for dtype in options.dtypes:
        sweep = Sweep(dtype, options.head_dims, options.seq_lens, options.tokens, options.hidden)
        found += [case for name in options.cases for case in SETS[name](sweep)]
    if options.device == "cpu":
        whole = ("cpu", *(("sweep", "single", "headless") if options.seq_lens else ()))
        found = [case if case.case in whole else shrunk(case) for case in found]
    return list(dict.fromkeys(found))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options; defaults that depend on device and cases are filled in."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Times attention beside other implementations; what is wrong is not timed.",
        epilog="On a CPU cases are cut to 2 rows, 4 heads and 256 tokens, but where --seq-lens is theirs.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the rows go; a file with some is continued")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu", help="where")
    add("--cases", nargs="+", choices=SETS, help=f"sets of cases (default: {' '.join(ON_GPU)}; cpu on a CPU)")
    add("--head-dims", type=positive, nargs="+", help="of the sweep, single and headless; default: their own")
    add("--seq-lens", type=positive, nargs="+", help="of the same, 512 to 16384 of the sweep by default")
    add("--tokens", type=positive, default=16384, help="batch times sequence length of the sweep")
    add("--hidden", type=positive, default=2048, help="heads times head_dim of the sweep")
    add("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"], help="of most cases")
    add("--passes", nargs="+", choices=PASSES, default=["forward"], help="what is timed")
    add("--timer", nargs="+", choices=TIMERS, help="single calls, or replays of many; graph of decode alone")
    add("--repeats", type=positive, default=10, help="calls, or replays, of a turn")
    add("--rounds", type=positive, default=2, help="turns of each provider; the one of least median counts")
    add("--providers", nargs="+", choices=PROVIDERS, default=PEERS, help="who takes part")
    add("--all-flex", action="store_true", help="FlexAttention in every case, not in a few: it compiles each")
    add("--tiles", action="store_true", help="tiles of the portable kernels in place of providers")
    add("--plot", type=writable_folder, metavar="FOLDER", help="draw PNGs of the file there")
    options = parser.parse_args(argv)
    on_cpu = options.device == "cpu"
    if not on_cpu and not gpu:
        raise SystemExit(f"{COMMAND}: needs a CUDA device, and none is visible; leave --device cuda out")
    if on_cpu and options.tiles:
        raise SystemExit(f"{COMMAND}: --tiles needs a CUDA device; the CPU runs no kernel that has tiles")
    options.cases = options.cases or (ON_CPU if on_cpu else ON_GPU)
    graph = options.tiles or set(options.cases) <= {"decode", "drafts"}
    options.timer = options.timer or (["graph"] if graph and not on_cpu else ["events"])
    if on_cpu and options.timer != ["events"]:
        raise SystemExit(f"{COMMAND}: --timer graph needs a CUDA device; leave it out on the CPU")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases that the file doesn't hold yet, prints tables, and adds the rows.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status: 1 where a provider was wrong or a process died.

    Raises:
        SystemExit: the device is not there, the command line is wrong, or the file has other columns.
    """
    options = parse(argv)
    if options.plot:
        need_matplotlib(COMMAND)
    console, errors = Console(width=WIDTH), Console(width=WIDTH, stderr=True)
    cases = cases_of(options)
    plan = Plan(options.passes, options.timer, options.repeats, options.rounds, options.device)
    if options.tiles:
        work, function, ours = list(tile_sweep.work(cases, plan)), tile_sweep.measure, []
    else:
        providers, absent = find(options.providers)
        for name in options.providers:
            fact = providers[name].version if name in providers else f"absent: {absent[name]}"
            console.print(f"{name:<20} {fact}", markup=False, highlight=False, soft_wrap=True)
        ours = [name for name, provider in providers.items() if provider.ours]
        longest = max((case.seq_len for case in cases if case.case == "sweep"), default=0)
        work, function = [], measure
        for case in cases:
            flex = options.all_flex or worth_compiling(case, longest)
            work.append((case, [name for name in providers if name != "flex" or flex], plan))
    rows: list[Row] = []
    bad = False
    try:
        held = rows_in(options.csv, Row)
        on = apart(stamp, options.device) if held else None
        with appended(options.csv, Row) as write:
            for case, names, each in track(work, console=errors):
                keys = product(names, each.passes, each.timers)
                wanted = [dict(zip(("provider", "part", "timer"), key, strict=True)) for key in keys]
                if on is not None and all(holds(held, on, {**asdict(case), **key}) for key in wanted):
                    continue
                try:
                    found = apart(function, case, names, each)
                except (Died, torch.OutOfMemoryError) as error:
                    errors.print(f"{case}: {error}", markup=False, highlight=False, soft_wrap=True)
                    bad = True
                    continue
                for row in found:
                    write(row)
                    if row.status.startswith("wrong"):
                        text = (
                            f"{row.provider}, {case.case}, {case.label}, S {case.seq_len}, D {case.head_dim}"
                        )
                        errors.print(f"{text}: {row.status}", markup=False, highlight=False, soft_wrap=True)
                        bad = True
                rows += found
    except Mismatch as error:
        raise SystemExit(f"{COMMAND}: {error}") from None
    if not rows:
        console.print("every case is in the file already", highlight=False)
    for table in tile_sweep.tables(rows) if options.tiles else tables_of(rows, ours):
        console.print(table)
    if options.tiles:
        arch = tile_sweep.tiles.architecture(torch.cuda.get_device_capability())
        for line in tile_sweep.table_rows(rows, arch):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.plot:
        for path in report.draw(options.csv, options.plot):
            console.print(path, markup=False, highlight=False, soft_wrap=True)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
