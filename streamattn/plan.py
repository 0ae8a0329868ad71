"""What training will need and take on N GPUs: ``streamattn info --plan MODEL --seq S --gpus N``.

Every split of the GPUs into data parallel x context parallel groups gets a line: memory of a GPU,
milliseconds of a step, tokens a second. `streamattn.step` counts what a process computes, moves and holds;
here that meets the speeds of `streamattn.speeds`. A line that needs one which was not measured, of a length
or a number of GPUs beyond those that were too, is ``simulated``, and what was assumed is printed.

Memory of a GPU, the most that PyTorch's allocator holds: float32 weights and AdamW's two moments, 12 bytes a
parameter; with several processes DDP's buckets, 4 more (accelerate leaves gradient_as_bucket_view off); and
the step's peak, in which the gradients are. With FSDP2 weights, moments and gradients are shared out, 16 / N,
and beside them a GPU holds, in the dtype of the products, three layers (one at work, one on its way, one of
gradients) and what belongs to no layer. With several micro-steps gradients are whole, in that dtype.

Time of a step: an operation takes what its products or its bytes need, whichever is more; attention its FLOPs
(4 * head_dim a visible pair forward, 10 backward) at the measured speed. Exchanges of a context parallel mode
are those of its module, less what hides behind attention. Gradients leave in DDP's buckets while the last
backward goes on: what takes longer than it shows, and the last bucket always. Fused AdamW moves 28 bytes a
parameter, clipping 12.

Left out on purpose: time of the host (a small model on a fast GPU waits for it), contention of links and
kernels, operations whose speed is another than a copy's or a large product's (caches, mixed dtypes, odd
sizes), links between hosts.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from streamattn.job import check_causal, load_pretrained, load_shape, one_line
from streamattn.parallel.functional import choose_mode
from streamattn.parallel.gather import count_head_groups
from streamattn.parallel.layout import Layout
from streamattn.parallel.ulysses import repeats
from streamattn.pattern import count_pairs
from streamattn.speeds import Speeds
from streamattn.step import Attention, Operation, Step, trace

KERNEL_CSV = Path(__file__).parents[1] / "docs" / "measurements" / "attention_h200.csv"
"""Attention alone: it has no shares of products and copies."""
GPU_GIB = {"NVIDIA H100 80GB HBM3": 79.0, "NVIDIA H200": 139.0}
"""Of the GPUs that kernel CSVs name."""
BUCKET, FIRST_BUCKET = 25 << 20, 1 << 20
"""Bytes of DDP's buckets."""
MIN_TOKENS = 2 * 64
"""That a GPU of a context parallel group is planned with: two tiles, one from each end of a sequence."""

_pairs = cache(count_pairs)


@dataclass(frozen=True)
class Work:
    """What is to be trained, and how; as the keys of a fine-tuning job.

    Attributes:
        config: of the model.
        seq_len: tokens of a sequence.
        gpus: processes.
        batch: sequences of a micro-step, of each context parallel group.
        accumulation: micro-steps of a step.
        dtype: of the products, the name of torch's; float32 is no autocast.
        checkpointing: layers are computed again.
        fsdp: FSDP2 in place of DDP.
    """

    config: PretrainedConfig
    seq_len: int
    gpus: int = 1
    batch: int = 1
    accumulation: int = 1
    dtype: str = "bfloat16"
    checkpointing: bool = False
    fsdp: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the products."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class Split:
    """The prediction for one split. Bytes of a GPU, and milliseconds of a step that add up to `step_ms`.

    Attributes:
        dp: groups that train on different sequences.
        cp: GPUs of a group, which share each sequence.
        mode: of `streamattn.parallel`.
        fixed: weights, moments and buckets.
        held: what the forward leaves for the backward.
        peak: the most, all included.
        compute_ms: operations but attention.
        attention_ms: attention.
        exchange_ms: what context parallelism shows.
        reduce_ms: what averaging gradients, or FSDP2's gathering, shows.
        optimizer_ms: clipping and AdamW.
        tokens: of a step, over all GPUs.
        assumed: what was not measured; empty: everything was.
    """

    dp: int
    cp: int
    mode: str
    fixed: int
    held: int
    peak: int
    compute_ms: float
    attention_ms: float
    exchange_ms: float
    reduce_ms: float
    optimizer_ms: float
    tokens: int
    assumed: tuple[str, ...]

    @property
    def step_ms(self) -> float:
        """Of a whole step."""
        parts = (self.compute_ms, self.attention_ms, self.exchange_ms, self.reduce_ms, self.optimizer_ms)
        return sum(parts)

    @property
    def tokens_per_s(self) -> float:
        """Over all GPUs."""
        return self.tokens / self.step_ms * 1e3


class _Sharing:
    """How a context parallel group shares one sequence: its mode, what it sends and what it holds meanwhile.

    Args:
        work: what is trained.
        cp: GPUs of a group.
        mode: as `parallel.attention` takes it.
    """

    def __init__(self, work: Work, cp: int, mode: str = "auto") -> None:
        config, dtype = work.config, work.torch_dtype
        heads = getattr(config, "num_attention_heads", None)
        if not isinstance(heads, int) or heads < 1:
            raise ValueError(
                f"expected a model with num_attention_heads of 1 or more, got {heads}; take another"
            )
        kv_heads = getattr(config, "num_key_value_heads", heads)
        kv_heads = heads if kv_heads is None else kv_heads
        if not isinstance(kv_heads, int) or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"num_key_value_heads: expected a divisor of the {heads} heads, got {kv_heads}")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.layout = layout = Layout(0, cp, work.seq_len)
        self.tokens = layout.length if cp > 1 else work.seq_len
        q, k = (
            torch.empty(work.batch, n, self.tokens, head_dim, dtype=dtype, device="meta")
            for n in (heads, kv_heads)
        )
        self.cp, self.groups, self.itemsize = cp, count_head_groups(k, k), dtype.itemsize
        self.mode = mode
        if cp == 1:
            self.mode = "-"
        elif mode == "auto":
            self.mode = choose_mode(q, k, k, layout, ring_can=True)
        self.kv = 2 * k.nbytes * cp  # keys and values of the whole sequence
        self.times = repeats(kv_heads, cp) if self.mode == "ulysses" else 1

    def workspace(self, call: Attention, tokens: int) -> int:
        """Bytes that a call holds beside its arguments and results: float32 sums of dq, and what travels.

        Of a group of heads gathering holds k and v in order, the next ones as they come and what was sent of
        them; backward also dk and dv as made, laid out, sent and received, as far as there are such groups.
        The ring holds shards, and sums in float32. All-to-all holds what it sends and receives as parts and
        in one piece.
        """
        back, queries = call.is_backward, call.batch * call.num_heads * tokens * call.head_dim
        sums = (4 * queries + 4 * queries // call.head_dim) if back else 0
        shard, own = self.kv // self.cp, queries * self.itemsize
        if self.mode == "gather":
            parts = 3 + min(self.groups, 3) if back else 2
            return (parts * self.kv + shard + own * (1 + back) + sums) // self.groups
        if self.mode == "ring":
            return sums + 2 * shard + (12 * shard // self.itemsize + 4 * queries if back else 12 * queries)
        if self.mode == "ulysses":
            return sums + 3 * (own + shard * self.times)
        return sums

    def attention_ms(self, call: Attention, dtype: str, speeds: Speeds, notes: list[str]) -> float:
        """Of a call's share of the whole sequence."""
        seq_len = self.layout.seq_len
        pairs = _pairs(seq_len, seq_len, call.window_left, call.window_right) / self.cp
        flops = (10 if call.is_backward else 4) * call.batch * call.num_heads * call.head_dim * pairs
        length = seq_len if self.mode == "ulysses" else self.tokens
        if self.mode in ("gather", "ring"):
            notes.append("attention of a part of the queries at the speed of as many keys")
        return flops / speeds.attend(call, dtype, length, notes) * 1e3

    def exchange_ms(self, call: Attention, attention_ms: float, speeds: Speeds, notes: list[str]) -> float:
        """What a call's exchanges show beside ``attention_ms``, the copies around them included."""
        queries = call.batch * call.num_heads * self.tokens * call.head_dim * self.itemsize
        shard, cp, groups = self.kv / self.cp, self.cp, self.groups

        def link(operation: str, size: float) -> float:
            return speeds.link_ms(operation, cp, size, notes)

        if self.mode == "gather":
            # Into one buffer, and in order; backward also dk and dv laid out, and their sum. The first
            # group's way shows, backward the last one's way home too.
            moved = 2 * shard + 2 * self.kv + (3 * self.kv + shard if call.is_backward else 0)
            first = link("all_gather", self.kv / groups)
            first += link("all_to_all", self.kv / groups) if call.is_backward else 0.0
            late = (groups - 1) * max(0.0, first - attention_ms / groups)
            shown = first + late
        elif self.mode == "ring":
            moved = 2 * shard + (cp - 1) * 3 * queries * 4 / self.itemsize
            wide = link("send_recv", shard * 4 / self.itemsize) if call.is_backward else 0.0
            shown = (cp - 1) * max(0.0, link("send_recv", shard) + wide - attention_ms / cp) + wide
        elif self.mode == "ulysses":
            moved = 6 * (2 * queries + shard * self.times)
            shown = link("all_to_all", queries + shard * self.times) + link("all_to_all", queries)
        else:
            return 0.0
        return shown + moved / speeds.copy(notes) * 1e3


def _reduce_ms(work: Work, step: Step, backward_ms: float, speeds: Speeds, notes: list[str]) -> float:
    """What averaging gradients shows behind a backward."""
    buckets, filled = [], 0
    for elements in reversed(step.parameters):  # DDP closes a bucket as it reaches its size
        filled += 4 * elements
        if filled >= (BUCKET if buckets else FIRST_BUCKET):
            buckets.append(filled)
            filled = 0
    buckets += [filled] if filled else []
    times = [speeds.link_ms("all_reduce", work.gpus, size, notes) for size in buckets]
    return max(times[-1], sum(times) - backward_ms)


def _shard_ms(work: Work, step: Step, phases: tuple[float, float], speeds: Speeds, notes: list[str]) -> float:
    """What FSDP2's gathering of weights shows, and scattering of gradients in the last micro-step."""
    size, layer = (n * work.torch_dtype.itemsize for n in (sum(step.parameters), step.layer_parameters))

    def both(operation: str) -> tuple[float, float]:
        one = speeds.link_ms(operation, work.gpus, layer, notes)
        return one, one * size / layer

    gather, scatter = both("all_gather"), both("reduce_scatter")
    forward, backward = (max(gather[0], gather[1] - phase) for phase in phases)
    last = max(gather[0] + scatter[0], gather[1] + scatter[1] - phases[1])
    return work.accumulation * forward + (work.accumulation - 1) * backward + last


def predict(work: Work, cp: int, speeds: Speeds) -> Split:
    """One split of a work.

    Args:
        work: what is trained.
        cp: GPUs that share a sequence, a divisor of ``work.gpus``.
        speeds: of the machine.

    Raises:
        ValueError: the model can't be built, patched or run.
    """
    notes: list[str] = []
    sharded, accumulates = work.fsdp and work.gpus > 1, work.accumulation > 1
    try:
        sharing = _Sharing(work, cp)
        step = trace(
            work.config,
            work.batch,
            sharing.tokens,
            work.torch_dtype,
            workspace=sharing.workspace,
            checkpointing=work.checkpointing,
            sharded=sharded,
            accumulates=accumulates,
            shared=cp > 1,
        )
    except Exception as error:  # releases differ in what a model raises
        raise ValueError(f"{work.config.model_type}: {one_line(error)}") from error
    if sharing.mode == "ulysses" and not work.checkpointing:
        # The output of a rank's heads is saved beside that of its tokens.
        forward = [call for call in step.attention if not call.is_backward]
        kept = sum(call.batch * call.num_heads * call.head_dim for call in forward)
        kept *= sharing.tokens * sharing.itemsize
        step.held, step.peak = step.held + kept, step.peak + kept
    product, copy = speeds.product(work.dtype, notes), speeds.copy(notes)

    def ms(operations: Sequence[Operation]) -> float:
        return sum(max(op.flops / product, op.bytes / copy) for op in operations) * 1e3

    attention, exchange = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for call in step.attention:
        own = sharing.attention_ms(call, work.dtype, speeds, notes)
        attention[call.is_backward] += own
        exchange[call.is_backward] += sharing.exchange_ms(call, own, speeds, notes)
    phases = ms(step.forward), ms(step.backward)
    busy = phases[0] + attention[False] + exchange[False], phases[1] + attention[True] + exchange[True]
    count, micro = sum(step.parameters), work.accumulation
    moved, reduce_ms = 28 + 12, 0.0  # AdamW's bytes of a parameter, and clipping's
    if sharded:
        whole = 3 * step.layer_parameters + step.outside_parameters + accumulates * count
        shares = 12 + 4 * (not accumulates)
        fixed, moved = shares * count // work.gpus + work.torch_dtype.itemsize * whole, moved / work.gpus
        reduce_ms = _shard_ms(work, step, busy, speeds, notes)
    else:
        fixed = count * (12 + 4 * (work.gpus > 1) + 4 * accumulates)
        if work.gpus > 1:
            reduce_ms = _reduce_ms(work, step, busy[1], speeds, notes)
    return Split(
        dp=work.gpus // cp,
        cp=cp,
        mode=sharing.mode,
        fixed=fixed,
        held=step.held,
        peak=fixed + step.peak,
        compute_ms=micro * sum(phases),
        attention_ms=micro * sum(attention.values()),
        exchange_ms=micro * sum(exchange.values()),
        reduce_ms=reduce_ms,
        optimizer_ms=moved * count / copy * 1e3,
        tokens=work.gpus // cp * work.batch * micro * work.seq_len,
        assumed=tuple(dict.fromkeys(notes)),
    )


def configuration(model: str) -> PretrainedConfig:
    """Of a shape's name or file, or of a saved model's folder.

    Raises:
        ValueError: there is none.
    """
    return load_pretrained(AutoConfig, "model", model) if Path(model).is_dir() else load_shape(model)


def stretch(config: PretrainedConfig, seq_len: int) -> list[str]:
    """Give a model positions for a length; says so where it had fewer, for a job refuses that."""
    positions = getattr(config, "max_position_embeddings", None) or seq_len
    config.max_position_embeddings = max(positions, seq_len)
    note = f"the model has {positions} positions: a job needs max_position_embeddings: {seq_len} in its shape"
    return [note] if positions < seq_len else []


def table(splits: Sequence[Split], memory: float | None) -> Table:
    """All splits, the fastest of those that fit marked.

    Args:
        splits: in their order.
        memory: bytes of a GPU; None: unknown.
    """
    headings = ("dp x cp", "mode", "fixed", "held", "peak", "compute", "attention", "exchange", "reduce")
    shown = Table(*headings, "optimizer", "step ms", "tokens/s", "", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.title = "GiB of a GPU: fixed, held for the backward, peak; milliseconds of a step"
    fitting = [split for split in splits if memory is None or split.peak <= memory]
    best = max(fitting, key=lambda split: split.tokens_per_s, default=None)
    for split in splits:
        words = ["simulated" if split.assumed else "measured speeds"]
        words += ["does not fit"] if split not in fitting else ["best"] if split is best else []
        sizes = (f"{size / 2**30:.2f}" for size in (split.fixed, split.held, split.peak))
        times = (split.compute_ms, split.attention_ms, split.exchange_ms, split.reduce_ms, split.optimizer_ms)
        cells = (*sizes, *(f"{ms:.1f}" for ms in (*times, split.step_ms)), f"{split.tokens_per_s:,.0f}")
        style = "bold" if split is best else None
        shown.add_row(f"{split.dp} x {split.cp}", split.mode, *cells, ", ".join(words), style=style)
    return shown


def _memory(device: str | None, given: float | None) -> tuple[float | None, str]:
    """Bytes of a GPU, and whose they are."""
    if given is not None:
        return given * 2**30, f"{given:g} GiB, as given"
    if device in GPU_GIB:
        return GPU_GIB[device] * 2**30, f"{GPU_GIB[device]:g} GiB of {device}"
    return None, "unknown; --memory-gib says"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    def positive(text: str) -> int:
        # Tensors' sizes have 63 bits; isdigit alone takes what int() refuses, as superscripts.
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
            raise argparse.ArgumentTypeError(f"expected a whole number from 1 to 999999999, got {text!r}")
        return int(text)

    def size(text: str) -> float:
        with suppress(ValueError):
            if 0 < float(text) < math.inf:
                return float(text)
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")

    parser = argparse.ArgumentParser(
        prog="streamattn info",
        description="Memory and time of training steps over data parallel x context parallel groups of GPUs.",
    )
    add = parser.add_argument
    add("--plan", metavar="MODEL", required=True, help="a shape in configs/shapes, or a saved model's folder")
    add("--seq", type=positive, required=True, help="tokens of a sequence")
    add("--gpus", type=positive, required=True, help="how many")
    add("--cp", type=positive, help="this split alone")
    add("--micro-batch-size", type=positive, default=1, help="sequences of a group in a micro-step")
    add("--accumulation", type=positive, default=1, help="micro-steps of a step")
    add("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the products")
    add("--gradient-checkpointing", action="store_true", help="layers are computed again")
    add("--fsdp", action="store_true", help="FSDP2 in place of DDP")
    add("--memory-gib", type=size, help="of a GPU; default: of the kernel CSV's GPU")
    kernel = str(KERNEL_CSV) if KERNEL_CSV.is_file() else None
    add("--kernel-csv", default=kernel, metavar="FILE", help="of bench kernel; default: an H200's attention")
    add("--comm-csv", metavar="FILE", help="of streamattn bench comm; default: speeds of links are assumed")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Print the plan.

    Args:
        argv: ``--plan MODEL --seq S --gpus N`` and more, see ``--help``.

    Returns:
        The exit status: 0, 1 where nothing fits, or 2 after a mistake, printed as one line.
    """
    options = _arguments(argv)
    try:
        return _plan(options)
    except ValueError as error:
        print(f"streamattn info: {error}", file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    console, gpus = Console(width=140), options.gpus
    most = max(1, options.seq // MIN_TOKENS)
    if options.cp and (gpus % options.cp or options.cp > most):
        raise ValueError(
            f"--cp: expected a divisor of the {gpus} GPUs that leaves each at least {MIN_TOKENS} of "
            f"the {options.seq} tokens, got {options.cp}; leave it out for all"
        )
    splits = [options.cp] if options.cp else [cp for cp in range(1, min(gpus, most) + 1) if gpus % cp == 0]
    speeds = Speeds(options.kernel_csv, options.comm_csv)
    config = configuration(options.plan)
    check_causal(config)
    stretched = stretch(config, options.seq)
    work = Work(
        config=config,
        seq_len=options.seq,
        gpus=gpus,
        batch=options.micro_batch_size,
        accumulation=options.accumulation,
        dtype=options.dtype,
        checkpointing=options.gradient_checkpointing,
        fsdp=options.fsdp,
    )
    found = [predict(work, cp, speeds) for cp in splits]
    memory, whose = _memory(speeds.device, options.memory_gib)
    notes = [
        f"{options.plan}: {work.batch} x {work.seq_len} tokens a group, {work.accumulation} micro-step(s), "
        f"{work.dtype}, {'FSDP2' if work.fsdp else 'DDP'}",
        f"memory of a GPU: {whose}; CUDA's context, which takes some of it, is in no number here",
        f"speeds: {options.kernel_csv or 'no kernel CSV'}, {options.comm_csv or 'no comm CSV'}",
    ]
    notes += stretched
    if gpus > most and not options.cp:
        notes.append(f"left out: splits that leave a GPU fewer than {MIN_TOKENS} tokens of a sequence")
    for note in dict.fromkeys(note for split in found for note in split.assumed):
        notes.append(f"simulated: {note}")
    console.print(table(found, memory))
    print("\n".join(notes))
    return int(memory is not None and all(split.peak > memory for split in found))
