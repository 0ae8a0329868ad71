"""Times the attention op beside PyTorch's own backends, forward and backward, in one run on one GPU.

``python -m streamattn.bench.kernels --csv results.csv``. The work is that of FlashAttention's benchmarks: a
constant number of tokens, heads times head_dim constant, storage [B, S, H, D], random data. Each case is
first checked against the float64 reference on one (batch, head); a wrong result stops the run. Times are
medians of CUDA events around single calls. TFLOP/s count 4 * D operations for each visible pair of query and
key forward, and 2.5 times that backward. Left out on purpose: whole models, CPU timings.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from streamattn.bench import results
from streamattn.functional import attention
from streamattn.pattern import UNBOUNDED, count_pairs

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PEERS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Row:
    """One measurement, one line of the CSV; times in milliseconds, memory in MiB beyond the inputs."""

    device: str
    torch: str
    dtype: str
    batch: int
    num_heads: int
    seq_len: int
    head_dim: int
    causal: bool
    provider: str
    forward_ms: float
    backward_ms: float
    forward_tflops: float
    backward_tflops: float
    peak_mib: float


def provide(name: str, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The attention function of a provider on [B, H, S, D]."""
    if name == "streamattn":
        return lambda q, k, v: attention(q, k, v, causal=causal)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(PEERS[name]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call on the GPU, after warm-up, the second-level cache cleared before each.

    Calls are queued without waiting for one another, so the host's time shows only where it is the longer.
    """
    scratch = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        scratch.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def check(
    call: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> None:
    """Raises RuntimeError where the last head of the last sequence is off by more than rounding explains."""
    length = min(q.shape[2], 2048)  # the reference takes a while
    part = [x[-1:, -1:, :length] for x in (q, k, v)]
    got = [x.detach().requires_grad_() for x in part]
    want = [x.detach().double().requires_grad_() for x in part]
    dout = torch.randn_like(part[0])
    outs = (call(*got), attention(*want, causal=causal, backend="reference"))
    results = [outs[0], *torch.autograd.grad(outs[0], got, dout)]
    wanted = [outs[1], *torch.autograd.grad(outs[1], want, dout.double())]
    limit = 1e-5 if q.dtype == torch.float32 else 1e-2
    for name, x, y in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
        error = ((x.double() - y).norm() / y.norm()).item()
        if not error <= limit:
            raise RuntimeError(f"{name} is wrong, relative error {error:.2e} above {limit}: nothing is timed")


def measure(
    name: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, repeats: int
) -> Row | None:
    """Checks and times one provider on one case; None where the peer can't serve it."""
    call = provide(name, causal)
    try:
        call(q, k, v)
    except RuntimeError as error:
        if name != "streamattn" and "No available kernel" in str(error):
            return None
        raise
    check(call, q, k, v, causal)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call(*inputs)
    torch.autograd.grad(out, inputs, dout, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    forward = median_ms(lambda: call(q, k, v), repeats)
    backward = median_ms(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), repeats)
    batch, num_heads, seq_len, head_dim = q.shape
    pairs = count_pairs(seq_len, seq_len, UNBOUNDED, 0 if causal else UNBOUNDED)
    flops = 4 * batch * num_heads * head_dim * pairs
    return Row(
        device=torch.cuda.get_device_name(q.device),
        torch=torch.__version__,
        dtype=str(q.dtype).removeprefix("torch."),
        batch=batch,
        num_heads=num_heads,
        seq_len=seq_len,
        head_dim=head_dim,
        causal=causal,
        provider=name,
        forward_ms=round(forward, 4),
        backward_ms=round(backward, 4),
        forward_tflops=round(flops / forward / 1e9, 1),
        backward_tflops=round(2.5 * flops / backward / 1e9, 1),
        peak_mib=round(peak / 2**20, 1),
    )


def main(argv: list[str] | None = None) -> None:
    """Runs all cases, prints a table with ratios to SDPA flash, and writes the CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--tokens", type=int, default=16384, help="batch size times sequence length")
    parser.add_argument("--hidden", type=int, default=2048, help="heads times head_dim")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--providers", nargs="+", choices=["streamattn", *PEERS], default=["streamattn", *PEERS]
    )
    parser.add_argument("--csv", required=True, help="where the measurements go")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")

    rows: list[Row] = []
    table = Table("head_dim", "mask", "S", "provider", "forward", "backward", "to sdpa_flash", "peak MiB")
    for head_dim in options.head_dims:
        for causal in (False, True):
            for seq_len in options.seq_lens:
                shape = (max(1, options.tokens // seq_len), seq_len, options.hidden // head_dim, head_dim)
                q, k, v, dout = (
                    torch.randn(shape, device="cuda", dtype=DTYPES[options.dtype]).transpose(1, 2)
                    for _ in range(4)
                )
                found = [measure(name, q, k, v, dout, causal, options.repeats) for name in options.providers]
                case = [row for row in found if row is not None]
                flash = next((row for row in case if row.provider == "sdpa_flash"), None)
                for row in case:
                    ratio = "-"
                    if flash is not None:
                        ratios = (flash.forward_ms / row.forward_ms, flash.backward_ms / row.backward_ms)
                        ratio = " / ".join(f"{value:.2f}" for value in ratios)
                    mask = "causal" if causal else "full"
                    speed = (f"{row.forward_tflops:.0f}", f"{row.backward_tflops:.0f}")
                    table.add_row(
                        str(head_dim), mask, str(seq_len), row.provider, *speed, ratio, f"{row.peak_mib:.0f}"
                    )
                rows += case
    results.write(options.csv, rows)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
