"""Where a model's time goes: ``streamattn profile --csv FILE``.

One contestant of `streamattn.bench.contestants`, or ``unfused``: plain scores, softmax and values, each in a
range of its own. The forward, the backward and the optimizer are profiled apart by torch.profiler, so that
every kernel belongs to one of them; kernels are classed by their names into matmul, attention, softmax,
elementwise and the rest. FLOPs are counted by torch.utils.flop_counter, those of softmax as five a score, and
stand beside the shares of time. On a CPU operators take the place of kernels.

Ranges (step, forward, backward, optimizer, and of each unfused layer scores, softmax, values) are NVTX's and
torch.profiler's at once. ``--trace`` writes a chrome trace of a step. ``--once`` runs one step between
cudaProfilerStart and cudaProfilerStop and measures nothing: the commands for Nsight are printed, and
``--ncu`` runs Nsight Compute on it for occupancy and hit rates of the caches. Left out on purpose: compiled
models.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from streamattn.bench.arguments import HelpFormatter, positive, writable
from streamattn.bench.contestants import CONTESTANTS, base_model, configuration, contestant, register
from streamattn.bench.machine import sm_clock
from streamattn.bench.models import DTYPES, WIDTH, ModelCase, autocast
from streamattn.bench.providers import Unsupported
from streamattn.bench.resume import Mismatch, Stamp, appended, stamp

PHASES = ("forward", "backward", "optimizer")
PARTS = ("scores", "softmax", "values")
"""Of unfused attention."""
RANGES = (*PHASES, "step", *PARTS)
CLASSES = {
    "attention": r"query_spans|segment_blocks|longest_first|decode_|flash|fmha|attention|sdpa|attn"
    r"|_fwd_kernel|_bwd_kernel|hopper|qk_prologue",
    "loss": r"nll_loss|log_?softmax|cross_entropy",
    "softmax": r"softmax",
    "matmul": r"gemm|matmul|nvjet|cutlass|::(add|b|add_b)?mm\b|::linear|::matmul|xmma",
    "elementwise": r"elementwise|::(add|mul|sub|div|tanh|pow|gelu|silu|copy|_to_copy|neg|where|exp|cat)_?\b"
    r"|::(fill|zero)_?\b|multi_tensor|memcpy|memset|triton_poi|fused_adam|dropout",
    "reduction": r"reduce|norm|::(sum|mean|rsqrt|var|argmax)\b|triton_(red|per)|embedding|index",
}
"""Classes of kernels (operators on a CPU) and the names of each; the first that matches counts. The loss
keeps its own softmax, which is no attention's and the longer one where the vocabulary is large."""
METRICS = {
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy %",
    "l1tex__t_sector_hit_rate.pct": "L1 hits %",
    "lts__t_sector_hit_rate.pct": "L2 hits %",
    "gpu__time_duration.sum": "ns",
}
SOFTMAX_FLOPS = 5
"""A score: maximum, difference, exponential, sum, quotient."""


@dataclass(frozen=True)
class ProfileRow(Stamp):
    """The kernels of one class in one phase, one line of the CSV.

    Attributes:
        shape: of the model.
        layers: how many; None = the shape's.
        batch: rows.
        seq_len: tokens of a row.
        dtype: bfloat16 is autocast.
        contestant: whose attention.
        phase: forward, backward, optimizer, or step, their sum; a part of unfused attention, in all layers.
        kind: a name in `CLASSES`, or other; for a part range: its time from end to end in the forward.
        calls: kernels, or operators.
        ms: of them all, in one step.
        share: of the phase's time, for a part of the forward's from end to end, 0 to 1.
        flops: of them all, where they are counted; matmul counts those of unfused attention too.
        flops_share: of the phase's, 0 to 1.
    """

    shape: str
    layers: int | None
    batch: int
    seq_len: int
    dtype: str
    contestant: str
    phase: str
    kind: str
    calls: int
    ms: float
    share: float
    flops: int | None
    flops_share: float | None


@dataclass(frozen=True)
class Kernel:
    """All launches of one name in a phase, or all ranges: how many, and their time in microseconds."""

    name: str
    calls: int
    us: float


@contextmanager
def span(name: str) -> Iterator[None]:
    """A range that both torch.profiler and, on a GPU, NVTX's tools show."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else nullcontext()
    with record_function(name), nvtx:
        yield


def unfused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of transformers' interface in three steps, each in a range.

    Returns:
        out [B, T, H, D], and no weights.
    """
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    with span("scores"):
        scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    with span("softmax"):
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    with span("values"):
        out = weights @ value
    return out.transpose(1, 2).contiguous(), None


def kind_of(name: str) -> str:
    """The class of a kernel or an operator, by its name."""
    return next((kind for kind, names in CLASSES.items() if re.search(names, name, re.IGNORECASE)), "other")


def kernels_of(profiler: Any, on_gpu: bool) -> list[Kernel]:
    """Kernels (operators on a CPU, without those that they call) by name, the longest first."""
    found = []
    for event in profiler.key_averages():
        if getattr(event, "is_user_annotation", False) or event.key in RANGES:
            continue
        if on_gpu:
            wanted = event.device_type.name == "CUDA"
            time = event.self_device_time_total
        else:
            wanted = event.device_type.name == "CPU"
            time = event.self_cpu_time_total
        if wanted and time > 0:
            found.append(Kernel(event.key, event.count, time))
    return sorted(found, key=lambda kernel: -kernel.us)


def ranges_of(profiler: Any, on_gpu: bool) -> dict[str, Kernel]:
    """Ranges by name: on a GPU from the first of their kernels to the last, on a CPU as they were called."""
    found = {}
    for event in profiler.key_averages():
        if event.key in RANGES and event.device_type.name == ("CUDA" if on_gpu else "CPU"):
            time = event.device_time_total if on_gpu else event.cpu_time_total
            found[event.key] = Kernel(event.key, event.count, time)
    return found


class Step:
    """A training step of one contestant in phases that can be run one by one."""

    def __init__(self, case: ModelCase, name: str, device: str) -> None:
        """Builds the model, with random weights and tokens.

        Args:
            case: shape, length and dtype.
            name: whose attention.
            device: ``cuda`` or ``cpu``.

        Raises:
            Unsupported: this release of transformers can't.
        """
        torch.manual_seed(0)
        self.case, self.name, self.device = case, name, device
        base = base_model(configuration(case.shape, case.layers, case.seq_len, 0.0), device)
        if name == "unfused":
            register(name, unfused)
        self.model = contestant(base, name).train()
        vocabulary = base.config.vocab_size
        self.ids = torch.randint(2, vocabulary, (case.batch, case.seq_len), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        self.loss: Tensor | None = None

    def forward(self) -> None:
        """The loss of a batch."""
        with span("forward"), autocast(self.case, self.device):
            self.loss = self.model(input_ids=self.ids, labels=self.ids).loss

    def backward(self) -> None:
        """Its gradients."""
        assert self.loss is not None, "forward comes first"
        with span("backward"):
            self.loss.backward()
        self.loss = None

    def update(self) -> None:
        """The optimizer's step, and no gradients any more."""
        with span("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def phases(self) -> dict[str, Callable[[], None]]:
        """The phases in their order."""
        return dict(zip(PHASES, (self.forward, self.backward, self.update), strict=True))

    def whole(self) -> None:
        """All of them."""
        with span("step"):
            for phase in self.phases().values():
                phase()

    def scores(self) -> int:
        """Pairs of query and key of a forward, hidden ones too: of all rows, heads and layers."""
        config, case = self.model.config, self.case
        return case.batch * config.num_attention_heads * config.num_hidden_layers * case.seq_len**2

    def head_dim(self) -> int:
        """Columns of a head."""
        config = self.model.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def profiled(
    step: Step, trace: str | None, warmup: int
) -> tuple[dict[str, list[Kernel]], dict[str, Kernel], int | None]:
    """Kernels of each phase, all ranges, and the GPU's clock in MHz right after the last phase.

    Args:
        step: of a model.
        trace: file of a chrome trace of one more step; None = none.
        warmup: steps before.
    """
    on_gpu = step.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def finish() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    for _ in range(warmup):
        step.whole()
    found, ranges, clock, mhz = {}, {}, sm_clock(step.device), None
    for name, phase in step.phases().items():
        finish()
        with profile(activities=activities, acc_events=True) as profiler:
            phase()
            finish()
            mhz = clock()  # before the profiler has gathered its events, or the GPU would idle meanwhile
        found[name] = kernels_of(profiler, on_gpu)
        ranges |= ranges_of(profiler, on_gpu)
    if trace is not None:
        with profile(activities=activities, acc_events=True) as profiler:
            step.whole()
            finish()
        profiler.export_chrome_trace(trace)
    return found, ranges, mhz


def counted(step: Step) -> dict[str, dict[str, int]]:
    """Floating-point operations of each phase by class: products, fused attention, softmax.

    Attention counts hidden pairs too, as PyTorch's counter does: 4 * D operations a pair forward, 10 * D
    backward. The optimizer's and elementwise ones aren't counted.
    """
    found = {}
    for name in PHASES[:2]:
        with FlopCounterMode(display=False) as counter:
            step.phases()[name]()
        flops: dict[str, int] = {}
        for operator, count in counter.get_flop_counts()["Global"].items():
            kind = "attention" if "attention" in str(operator) else "matmul"
            flops[kind] = flops.get(kind, 0) + count
        if step.name in ("sdpa", "sdpa_cudnn", "streamattn") and "attention" not in flops:
            # The counter doesn't know our operator, nor PyTorch's on a CPU.
            flops["attention"] = (4 if name == "forward" else 10) * step.head_dim() * step.scores()
        if step.name != "removed":
            flops["softmax"] = SOFTMAX_FLOPS * step.scores()
        found[name] = flops
    step.update()
    return found


def rows_of(
    on: Stamp,
    case: ModelCase,
    name: str,
    kernels: dict[str, list[Kernel]],
    ranges: dict[str, Kernel],
    flops: dict[str, dict[str, int]],
) -> list[ProfileRow]:
    """A row of each class in each phase and in the step, and of each part of unfused attention."""

    def row(phase: str, kind: str, calls: int, us: float, share: float, counts: dict[str, int]) -> ProfileRow:
        return ProfileRow(
            **asdict(on),
            shape=case.shape,
            layers=case.layers,
            batch=case.batch,
            seq_len=case.seq_len,
            dtype=case.dtype,
            contestant=name,
            phase=phase,
            kind=kind,
            calls=calls,
            ms=round(us / 1000.0, 4),
            share=round(share, 4),
            flops=counts.get(kind),
            flops_share=round(counts[kind] / sum(counts.values()), 5) if kind in counts else None,
        )

    rows = []
    step = {"step": [kernel for phase in kernels.values() for kernel in phase]}
    total: dict[str, int] = {}
    for phase in flops.values():
        for kind, count in phase.items():
            total[kind] = total.get(kind, 0) + count
    for phase, found in {**kernels, **step}.items():
        all_us = sum(kernel.us for kernel in found)
        counts = {**flops, "step": total}.get(phase, {})
        for kind in (*CLASSES, "other"):
            mine = [kernel for kernel in found if kind_of(kernel.name) == kind]
            us = sum(kernel.us for kernel in mine)
            if mine or kind in counts:
                calls = sum(kernel.calls for kernel in mine)
                rows.append(row(phase, kind, calls, us, us / all_us, counts))
    for part in (ranges[name] for name in PARTS if name in ranges):
        rows.append(row(part.name, "range", part.calls, part.us, part.us / ranges["forward"].us, {}))
    return rows


def tables(
    rows: Sequence[ProfileRow], kernels: dict[str, list[Kernel]], top: int, what: str
) -> Iterator[Table]:
    """Shares of the classes, and the longest kernels of each phase."""
    shares = Table(
        *("phase", "class", "calls", "ms", "% of time", "% of FLOPs"),
        title="where the time goes",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    last = ""
    for row in rows:
        flops = "" if row.flops_share is None else f"{100 * row.flops_share:.2f}"
        phase = "" if row.phase == last else row.phase
        shares.add_row(phase, row.kind, str(row.calls), f"{row.ms:.3f}", f"{100 * row.share:.1f}", flops)
        last = row.phase
    yield shares
    for phase, found in kernels.items():
        total = sum(kernel.us for kernel in found)
        longest = Table(
            *("class", "calls", "us", "%", what[:-1]),
            title=f"{phase}: the longest of {len(found)} {what}",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for kernel in found[:top]:
            share = f"{100 * kernel.us / total:.1f}"
            cells = (kind_of(kernel.name), str(kernel.calls), f"{kernel.us:.1f}", share)
            longest.add_row(*cells, kernel.name[:70])
        yield longest


def once(step: Step, warmup: int) -> None:
    """One step between the marks that Nsight's tools begin and end at."""
    for _ in range(warmup):
        step.whole()
    torch.cuda.synchronize()
    with torch.cuda.profiler.profile():
        step.whole()
        torch.cuda.synchronize()


def read_ncu(text: str) -> list[dict[str, Any]]:
    """Nsight Compute's CSV as one line for each kernel's name: launches, means of the metrics.

    Args:
        text: what ``ncu --csv --page raw`` printed, other lines before it.
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    found: dict[str, list[dict[str, str]]] = {}
    for line in table:
        if line.get("ID"):  # the second line holds units
            found.setdefault(line["Kernel Name"], []).append(line)

    def mean(launches: list[dict[str, str]], metric: str) -> float | None:
        values = [float(launch[metric].replace(",", "")) for launch in launches if launch.get(metric)]
        return sum(values) / len(values) if values else None

    return [
        {"kernel": name, "calls": len(launches)}
        | {title: mean(launches, metric) for metric, title in METRICS.items()}
        for name, launches in found.items()
    ]


def ncu_command(tool: str, launches: int) -> list[str]:
    """Nsight Compute's command line before the command that it looks at; ``tool`` is its path."""
    arguments = [tool, "--csv", "--page", "raw", "--profile-from-start", "off", "--target-processes", "all"]
    return [*arguments, "--metrics", ",".join(METRICS), "--launch-count", str(launches)]


def run_ncu(command: Sequence[str], launches: int) -> tuple[list[dict[str, Any]], str | None]:
    """Occupancy and hit rates of the first kernels of a step.

    Args:
        command: the command with ``--once``.
        launches: kernels at most; each is replayed several times.

    Returns:
        As `read_ncu`; and why there is nothing.
    """
    tool = shutil.which("ncu")
    if tool is None:
        return [], "ncu is not installed"
    try:
        done = subprocess.run(
            [*ncu_command(tool, launches), *command], capture_output=True, text=True, timeout=540
        )
    except subprocess.TimeoutExpired:
        return [], "ncu took longer than nine minutes"
    found = read_ncu(done.stdout)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
    return found, None if found else (errors or [f"ncu ended with {done.returncode} and no kernel"])[0]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="streamattn profile",
        description="Where the time of a model's training step goes.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, help="where the shares go; a file with some is continued")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu", help="where")
    add("--attention", choices=[*CONTESTANTS, "unfused"], default="streamattn", help="whose")
    add("--shape", default="gpt2-small" if gpu else "gpt2-nano", help="a file in configs/shapes")
    add("--layers", type=positive, help="in place of the shape's own number")
    add("--seq-len", type=positive, default=1024 if gpu else 64, help="tokens of a row")
    add("--batch", type=positive, default=4 if gpu else 2, help="rows")
    add("--dtype", choices=DTYPES, default="bfloat16" if gpu else "float32", help="bfloat16 is autocast")
    add("--warmup", type=positive, default=3, help="steps before")
    add("--top", type=positive, default=12, help="kernels that are listed of each phase")
    add("--trace", type=writable, help="file of a chrome trace of one step")
    add("--once", action="store_true", help="one step between cudaProfilerStart and -Stop, nothing measured")
    add("--ncu", action="store_true", help="occupancy and hit rates of caches, by Nsight Compute")
    add("--launches", type=positive, default=200, help="kernels that Nsight Compute looks at")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not gpu:
        raise SystemExit("streamattn profile: no CUDA device is visible; --device cpu measures the CPU")
    if options.device == "cpu" and (options.once or options.ncu):
        raise SystemExit(
            "streamattn profile: --once and --ncu are for Nsight's tools, which need a CUDA device"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Profiles one contestant.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status, 0.

    Raises:
        SystemExit: the command line is wrong, or something is not there.
    """
    options = parse(argv)
    case = ModelCase(
        options.shape,
        "train",
        options.shape,
        options.layers,
        options.batch,
        options.seq_len,
        0,
        options.dtype,
    )
    try:
        step = Step(case, options.attention, options.device)
    except (Unsupported, ValueError) as error:
        raise SystemExit(f"streamattn profile: {error}") from None
    if options.once:
        once(step, options.warmup)
        return 0
    console = Console(width=WIDTH)
    kernels, ranges, mhz = profiled(step, options.trace, options.warmup)
    on = replace(stamp(options.device), sm_mhz=mhz)
    rows = rows_of(on, case, options.attention, kernels, ranges, counted(step))
    if options.csv:
        try:
            with appended(options.csv, ProfileRow) as write:
                for row in rows:
                    write(row)
        except Mismatch as error:
            raise SystemExit(f"streamattn profile: {error}") from None
    what = "kernels" if options.device == "cuda" else "operators"
    for table in tables(rows, kernels, options.top, what):
        console.print(table, highlight=False)
    command = [sys.executable, "-m", "streamattn", "profile", "--once"]
    for name in ("attention", "shape", "layers", "seq_len", "batch", "dtype", "warmup"):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    nsys = "nsys profile -o step --trace=cuda,nvtx,cublas,cudnn --capture-range=cudaProfilerApi"
    for tool in (nsys.split(), ncu_command("ncu", options.launches)):
        console.print(shlex.join([*tool, *command]), markup=False, highlight=False, soft_wrap=True)
    if options.ncu:
        del step
        torch.cuda.empty_cache()
        found, reason = run_ncu(command, options.launches)
        if reason is not None:
            console.print(f"no occupancy: {reason}", markup=False, highlight=False)
        else:
            table = Table("kernel", "calls", *METRICS.values(), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for line in sorted(found, key=lambda line: -(line["ns"] or 0.0) * line["calls"])[
                : 2 * options.top
            ]:
                cells = ["" if line[title] is None else f"{line[title]:.1f}" for title in METRICS.values()]
                table.add_row(line["kernel"][:60], str(line["calls"]), *cells)
            console.print(table, highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
