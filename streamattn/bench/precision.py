"""What a dtype costs in accuracy: ``streamattn bench precision --csv FILE``.

Three studies. Sums: 0.01 added a thousand times, in the dtypes that terms and sums can have. Autocast: the
dtypes of what each kind of layer of a GPT-2 gives, of its weights, gradients and loss. Attention: out, dq, dk
and dv of `attention` and of PyTorch's by dtype and length, against float64, as relative error over all
elements and as the largest one over the largest element. Left out on purpose: float8, and training runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from streamattn.bench.arguments import HelpFormatter, positive, writable
from streamattn.bench.cases import DTYPES, precision
from streamattn.bench.contestants import base_model, configuration
from streamattn.bench.gate import GRADIENTS, relative_error
from streamattn.bench.machine import sm_clock
from streamattn.bench.models import WIDTH
from streamattn.bench.resume import Mismatch, Stamp, appended, stamp
from streamattn.functional import attention

STUDIES = ("sums", "autocast", "attention")
COUNT, TERM = 1000, 0.01
LOW = ("float16", "bfloat16")


@dataclass(frozen=True)
class PrecisionRow(Stamp):
    """One figure of a study, one line of the CSV.

    Attributes:
        study: a name in `STUDIES`.
        name: of the sum, the layer, or the attention.
        tensor: what of it: sum, out, weight, gradient, loss, dq, dk, dv.
        dtype: of the tensor; of the sum.
        seq_len: queries and keys; None where there are none.
        value: the sum; None elsewhere.
        rms_error: relative, against 10 for a sum, against float64 for attention; None for layers.
        max_error: the largest of an element, over the largest element; None but for attention.
    """

    study: str
    name: str
    tensor: str
    dtype: str
    seq_len: int | None = None
    value: float | None = None
    rms_error: float | None = None
    max_error: float | None = None


def sums(device: str) -> list[dict[str, Any]]:
    """0.01 a thousand times: terms and sum in one dtype; and terms of less in a float32 sum.

    There the sum of two dtypes promotes the term (implicit), or the term is cast first (explicit); both round
    the term alone.
    """
    clock = sm_clock(device)

    def total(of: str, term: Callable[[], Tensor]) -> float:
        found = torch.tensor(0.0, dtype=DTYPES[of], device=device)
        for _ in range(COUNT):
            found += term()
        return found.item()

    def term(of: str) -> Tensor:
        return torch.tensor(TERM, dtype=DTYPES[of], device=device)

    cases: dict[str, tuple[str, Callable[[], Tensor]]] = {"float32": ("float32", lambda: term("float32"))}
    for low in LOW:
        cases[low] = (low, lambda low=low: term(low))
        cases[f"float32 of {low} terms, implicit"] = ("float32", lambda low=low: term(low))
        cases[f"float32 of {low} terms, explicit"] = ("float32", lambda low=low: term(low).float())
    rows = []
    for name, (dtype, make) in cases.items():
        value = total(dtype, make)
        figures = dict(value=value, rms_error=float(f"{abs(value / (COUNT * TERM) - 1.0):.3g}"))
        rows.append(dict(name=name, tensor="sum", dtype=dtype, sm_mhz=clock(), **figures))
    return rows


def short(dtype: torch.dtype) -> str:
    """A dtype's name without its package."""
    return str(dtype).removeprefix("torch.")


def autocast_dtypes(device: str, low: str) -> list[dict[str, Any]]:
    """Dtypes under autocast by kind of layer: of the first of a kind in a GPT-2, in the order they run.

    Args:
        device: ``cuda`` or ``cpu``.
        low: the dtype that autocast casts to.
    """
    model = base_model(configuration("gpt2-nano", 1, 16, 0.0), device)
    first: dict[str, dict[str, str]] = {}

    def note(layer: nn.Module, inputs: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor):
            first.setdefault(names[layer], {"out": short(out.dtype)})

    leaves = {name: layer for name, layer in model.named_modules() if not list(layer.children())}
    blocks = {name: layer for name, layer in model.named_modules() if name.endswith((".attn", ".mlp"))}
    names = {layer: name.removeprefix("transformer.") for name, layer in {**leaves, **blocks}.items()}
    handles = [layer.register_forward_hook(note) for layer in names]
    ids = torch.randint(0, 4096, (1, 16), device=device)
    with torch.autocast(device, DTYPES[low]):
        out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    mhz = sm_clock(device)()
    for handle in handles:
        handle.remove()
    for layer, name in names.items():
        for parameter in list(layer.parameters(recurse=False))[:1]:
            assert parameter.grad is not None, "every layer's weights have gradients"
            first[name] |= {"weight": short(parameter.dtype), "gradient": short(parameter.grad.dtype)}
    first["logits"] = {"out": short(out.logits.dtype)}
    first["loss"] = {"out": short(out.loss.dtype)}
    return [
        dict(name=f"{low}: {name}", tensor=tensor, dtype=dtype, sm_mhz=mhz)
        for name, tensors in first.items()
        for tensor, dtype in tensors.items()
    ]


def errors_of(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Sequence[Tensor]
) -> dict[str, tuple[float, float]]:
    """Relative and largest error of out and of the gradients, against the same inputs in float64.

    Args:
        function: causal attention of (q, k, v).
        inputs: q, k, v and dout, [B, H, T, D].
    """

    def results(call: Callable[..., Tensor], given: Sequence[Tensor]) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        out = call(*leaves)
        found = torch.autograd.grad(out, leaves, given[3])
        return {"out": out.detach(), **dict(zip(GRADIENTS, found, strict=True))}

    want = results(
        lambda q, k, v: attention(q, k, v, causal=True, backend="reference"), [x.double() for x in inputs]
    )
    got = results(function, inputs)
    return {
        name: (
            relative_error(got[name], x),
            ((got[name].double() - x).abs().max() / x.abs().max()).item(),
        )
        for name, x in want.items()
    }


def attention_errors(
    device: str, dtypes: Sequence[str], seq_lens: Sequence[int], heads: int, head_dim: int
) -> list[dict[str, Any]]:
    """Causal attention of one row, ours and PyTorch's, on random inputs."""
    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "streamattn": lambda q, k, v: attention(q, k, v, causal=True),
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    rows, clock = [], sm_clock(device)
    for dtype in dtypes:
        for seq_len in seq_lens:
            torch.manual_seed(0)
            size = (1, heads, seq_len, head_dim)
            inputs = [torch.randn(size, device=device, dtype=DTYPES[dtype]) for _ in range(4)]
            for name, function in functions.items():
                with precision(dtype):
                    errors = errors_of(function, inputs)
                mhz = clock()
                for tensor, (rms, most) in errors.items():
                    rows.append(
                        dict(
                            name=name,
                            tensor=tensor,
                            dtype=dtype,
                            seq_len=seq_len,
                            sm_mhz=mhz,
                            rms_error=float(f"{rms:.3g}"),
                            max_error=float(f"{most:.3g}"),
                        )
                    )
    return rows


def table(rows: Sequence[PrecisionRow], study: str) -> Table:
    """One study's figures; those of one attention, dtype and length in one line."""
    shown = Table(title=study, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    mine = [row for row in rows if row.study == study]
    if study == "sums":
        headings = ("dtypes", "sum of 1000 x 0.01", "relative error")
        lines = [(row.name, f"{row.value:.7g}", f"{row.rms_error:.1e}") for row in mine]
    else:
        wide = study == "attention"
        kinds = ("out", *GRADIENTS) if wide else ("out", "weight", "gradient")
        headings = (*(("attention", "dtype", "length") if wide else ("autocast to: layer",)), *kinds)
        cells: dict[tuple[str, ...], dict[str, str]] = {}
        for row in mine:
            key = (row.name, row.dtype, str(row.seq_len)) if wide else (row.name,)
            cell = f"{row.rms_error:.1e} / {row.max_error:.1e}" if wide else row.dtype
            cells.setdefault(key, {})[row.tensor] = cell
        lines = [(*key, *(found.get(kind, "") for kind in kinds)) for key, found in cells.items()]
        if wide:
            shown.title = "attention: relative error over all elements / largest over largest element"
    for heading in headings:
        shown.add_column(heading)
    for line in lines:
        shown.add_row(*line)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the studies, prints tables, and writes the CSV.

    Args:
        argv: see ``--help``; None = the process's arguments.

    Returns:
        The exit status, 0.

    Raises:
        SystemExit: the file has other columns, or there is no such device.
    """
    command, gpu = "streamattn bench precision", torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog=command,
        description="What a dtype costs in accuracy: sums, layers under autocast, attention.",
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=writable, required=True, help="where the rows go; they are added to those there")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu", help="where")
    add("--studies", nargs="+", choices=STUDIES, default=list(STUDIES), help="which")
    lengths = [128, 512, 2048, 8192] if gpu else [64, 256]
    add("--seq-lens", type=positive, nargs="+", default=lengths, help="of attention")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="of attention")
    add("--heads", type=positive, default=4, help="of attention")
    add("--head-dim", type=positive, default=64, help="of attention")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not gpu:
        raise SystemExit(f"{command}: no CUDA device is visible; --device cpu measures the CPU")
    on, device = asdict(stamp(options.device)), options.device
    studies: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "sums": lambda: sums(device),
        "autocast": lambda: [row for low in LOW for row in autocast_dtypes(device, low)],
        "attention": lambda: attention_errors(
            device, options.dtypes, options.seq_lens, options.heads, options.head_dim
        ),
    }
    console = Console(width=WIDTH)
    try:
        with appended(options.csv, PrecisionRow) as write:
            for study in options.studies:
                rows = [PrecisionRow(**{**on, **found}, study=study) for found in studies[study]()]
                for row in rows:
                    write(row)
                console.print(table(rows, study), highlight=False)
    except Mismatch as error:
        raise SystemExit(f"{command}: {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
