"""``torchrun --nproc-per-node N -m streamattn.parallel``: each mode on this machine, against one process.

Every process draws the same sequence, computes all of it by itself with `streamattn.attention`, and its shard
with each mode: with ``replicated`` it holds a slice of the queries, and the keys and values are global. What
is printed are the largest differences of the output and the gradients, over their largest entries, and the
time of forward and backward beside that of one process. On GPUs with NCCL, on the CPU with Gloo.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import streamattn
from streamattn import parallel
from streamattn.doctor import NEEDED
from streamattn.parallel.functional import MODES

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
LEAST_SIZE = 1e-2  # of what an error is compared with: of one token dq and dk are 0
REPEATS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Check and time the modes; the processes are torchrun's, or those of the process group that is there.

    Args:
        argv: the command line without the program's name; None = the process's arguments.

    Returns:
        0; 1 if a difference is larger than rounding explains, 2 without a launcher or a mode to check.
    """
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node N -m streamattn.parallel")
    parser.add_argument(
        "--seq-len", type=_positive, default=16384 if cuda else 512, help="tokens of the sequence"
    )
    parser.add_argument("--batch", type=_positive, default=1, help="sequences")
    parser.add_argument("--num-heads", type=_positive, default=16 if cuda else 4, help="query heads")
    parser.add_argument("--num-kv-heads", type=_positive, help="key heads; default: as many")
    parser.add_argument("--head-dim", type=_positive, default=128 if cuda else 64)
    parser.add_argument(
        "--dtype", choices=[str(d)[6:] for d in TOLERANCE], default="bfloat16" if cuda else "float32"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    options = parser.parse_args(argv)
    if options.num_heads % (options.num_kv_heads or 1):
        parser.error(f"--num-heads: expected a multiple of {options.num_kv_heads} key heads")
    if not dist.is_initialized() and "LOCAL_RANK" not in os.environ:
        print("no launcher; run: torchrun --nproc-per-node 2 -m streamattn.parallel", file=sys.stderr)
        return 2
    if not dist.is_initialized() and (missing := [name for name in NEEDED if name not in os.environ]):
        print(f"{', '.join(missing)}: not set; let torchrun launch it", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        return _check(options, device)
    finally:
        if started:
            dist.destroy_process_group()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def compared(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, list[float], float]]:
    """Run one process's attention and then each mode, in every process of the group.

    Args:
        options: sizes, dtype and modes, as `main` reads them.
        device: of this process.

    Yields:
        Name, errors and milliseconds; ``alone`` first. The errors are those of out, dq, dk and dv, the
        largest of all processes; none for ``alone``, and where a mode can't serve these sizes.
    """
    size, length = dist.get_world_size(), options.seq_len
    dtype = getattr(torch, options.dtype)
    heads, kv_heads = options.num_heads, options.num_kv_heads or options.num_heads
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(options.batch, h, length, options.head_dim, generator=generator).to(device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    )

    def alone() -> list[Tensor]:
        return _step(streamattn.attention, q, k, v, dout)

    expected = alone()
    yield "alone", [], _time(alone, device)
    for mode in options.modes:
        if mode == "ulysses" and heads % size:
            yield mode, [], 0.0
            continue
        replicated = mode == "replicated"
        parts = [parallel.shard(q, dim=2), k, v, parallel.shard(dout, dim=2)]
        if not replicated:
            parts[1:3] = (parallel.shard(x, dim=2) for x in (k, v))

        def together(mode: str = mode, parts: list[Tensor] = parts) -> list[Tensor]:
            return _step(parallel.attention, *parts, mode=mode, seq_len=length)

        found = together()
        wanted = [x if replicated and i > 1 else parallel.shard(x, dim=2) for i, x in enumerate(expected)]
        sizes = [x.abs().max().float().clamp(min=LEAST_SIZE) for x in expected]
        errors = torch.stack(
            [(a - b).abs().max() / size for a, b, size in zip(found, wanted, sizes, strict=True)]
        ).nan_to_num(nan=torch.inf)  # a maximum may lose a NaN
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
        yield mode, errors.tolist(), _time(together, device)


def _check(options: argparse.Namespace, device: torch.device) -> int:
    """Print a line for each mode."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = getattr(torch, options.dtype)
    heads, kv_heads = options.num_heads, options.num_kv_heads or options.num_heads
    alone_ms, status = 0.0, 2
    for mode, errors, milliseconds in compared(options, device):
        if mode == "alone":
            alone_ms = milliseconds
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
            what = (
                f"{options.batch} x {options.seq_len} tokens, {heads}:{kv_heads} heads of {options.head_dim}"
            )
            line = (
                f"{what}, {dtype}, causal, on {size} x {name}; "
                f"forward and backward in one process {alone_ms:.2f} ms\n"
                f"{'mode':<11}{'out':>9}{'dq':>9}{'dk':>9}{'dv':>9}{'ms':>10}{'speedup':>9}"
            )
        elif errors:
            shown = "".join(f"{error:9.1e}" for error in errors)
            line = f"{mode:<11}{shown}{milliseconds:10.2f}{alone_ms / milliseconds:9.2f}"
            status = 1 if status == 1 or max(errors) > TOLERANCE[dtype] else 0
        else:
            line = f"{mode:<11} not checked: it needs a multiple of {size} query heads"
        if rank == 0:
            print(line)
    return status


def _step(attention: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> list[Tensor]:
    """The output and the gradients of q, k and v of one causal call."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def _time(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a step: the median of `REPEATS`, of the slowest process."""
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    sys.exit(main())
