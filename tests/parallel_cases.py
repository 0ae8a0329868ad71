"""Cases of context parallelism, and what a process of several does with them; tests/distributed starts those.

A process runs all cases in turn and reports, for each, the largest error of the output, lse and every
gradient relative to the largest entry that one process gets, and how many collectives of each kind it took.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import streamattn
from streamattn import parallel
from streamattn.parallel import collectives, gather
from streamattn.parallel.__main__ import main as program

BATCH, HEAD_DIM = 2, 16
COLLECTIVES = ("all_gather", "all_to_all", "all_reduce", "pass_on")


@dataclass(frozen=True)
class Case:
    """One call of `parallel.attention` on all ranks.

    Attributes:
        name: of the case; starts with its mode.
        seq_len: tokens of the whole sequence.
        num_heads: Hq.
        num_kv_heads: Hkv.
        options: those of `attention`; "segments", "lengths" and "sinks" stand for tensors made from the seed.
        dtype: of q, k and v.
        value_dim: Dv.
    """

    name: str
    seq_len: int = 64
    num_heads: int = 4
    num_kv_heads: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    value_dim: int = HEAD_DIM

    @property
    def mode(self) -> str:
        return self.name.split()[0]


FULL: dict[str, Any] = {}
CAUSAL: dict[str, Any] = {"causal": True}
# name, seq_len, num_heads, num_kv_heads, options; with 2 and 4 ranks 61, 59 and 9 tokens need padding
Sizes = tuple[str, int, int, int, dict[str, Any]]
SHAPES: list[Sizes] = [
    ("full", 64, 4, 4, FULL),
    ("full uneven", 61, 4, 4, FULL),
    ("causal", 64, 4, 4, CAUSAL),
    ("causal grouped", 64, 8, 4, CAUSAL),
    ("causal uneven grouped", 59, 4, 2, CAUSAL),
    ("causal few tokens", 3, 4, 4, CAUSAL),
    ("causal 9", 9, 4, 4, CAUSAL),  # with four ranks some chunks are nothing but padding
    ("causal softcap scale", 64, 4, 4, {**CAUSAL, "softcap": 2.0, "scale": 0.5}),
]
GATHERED: list[Sizes] = [
    ("window", 64, 4, 4, {"window_size": 11}),
    ("window uneven", 59, 4, 2, {"window_size": 20}),
    ("two-sided window uneven", 61, 4, 4, {"window_size": (5, 9)}),
    ("left window", 61, 4, 4, {"window_size": (7, -1)}),
    ("right window", 59, 4, 4, {"window_size": (-1, 30)}),
    ("segments", 64, 4, 2, {**CAUSAL, "segments": True}),
    ("full segments uneven", 61, 4, 4, {"segments": True}),
    ("lengths", 64, 4, 4, {**CAUSAL, "lengths": True}),
    ("full lengths uneven", 61, 4, 2, {"lengths": True}),
    ("two-sided window lengths uneven", 61, 4, 4, {"window_size": (9, 6), "lengths": True}),
    ("sinks", 64, 4, 4, {**CAUSAL, "sinks": True}),
    ("window segments sinks", 59, 4, 2, {"window_size": 17, "segments": True, "sinks": True}),
]
EVERY_MODE = ("gather", "ring", "ulysses", "replicated")


def _case(mode: str, sizes: Sizes) -> Case:
    name, seq_len, num_heads, num_kv_heads, options = sizes
    return Case(f"{mode} {name}", seq_len, num_heads, num_kv_heads, options)


CASES = [
    *(_case(mode, sizes) for mode in EVERY_MODE for sizes in SHAPES),
    *(_case(mode, sizes) for mode in EVERY_MODE if mode != "ring" for sizes in GATHERED),
    *(Case(f"{mode} wide values", 61, options=CAUSAL, value_dim=24) for mode in EVERY_MODE),
    *(Case(f"{mode} float64", 61, options=CAUSAL, dtype=torch.float64) for mode in EVERY_MODE),
    # fewer key heads than ranks, or no multiple
    Case("ulysses one key head", 64, 8, 1, CAUSAL),
    Case("ulysses three key heads", 61, 12, 3, CAUSAL),
    Case("gather three key heads", 61, 6, 3, CAUSAL),
    Case("auto causal", 61, options=CAUSAL),
    Case("auto window", 61, options={"window_size": 9}),
]


def whole_inputs(case: Case) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    """q, k, v (and sinks) of one sequence, the options of `attention`, and weights of its results."""
    generator = torch.Generator().manual_seed(sum(map(ord, case.name)))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    length = case.seq_len
    tensors = [
        draw(BATCH, case.num_heads, length, HEAD_DIM),
        draw(BATCH, case.num_kv_heads, length, HEAD_DIM),
        draw(BATCH, case.num_kv_heads, length, case.value_dim),
    ]
    options = dict(case.options)
    if options.pop("segments", False):
        ids = torch.zeros(BATCH, length, dtype=torch.int32)
        ids[:, length // 3 :] = 1
        ids[1, length // 2 :] = 4
        ids[1, -7:] = -1
        options["segment_ids"] = ids
    if options.pop("lengths", False):
        options["kv_lengths"] = torch.tensor([length - 5, length // 3], dtype=torch.int32)
    if options.pop("sinks", False):
        tensors.append(draw(case.num_heads))
    weights = [draw(BATCH, case.num_heads, length, case.value_dim), draw(BATCH, case.num_heads, length)]
    return tensors, options, weights


def results(call: Any, tensors: list[Tensor], weights: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """out, lse and the gradients of all tensors, of a loss that reads both."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    q, k, v, *sinks = leaves
    if sinks:
        options = {**options, "sinks": sinks[0]}
    out, lse = call(q, k, v, **options, return_lse=True)
    finite = torch.where(lse.isfinite(), lse, 0.0)
    loss = (out * weights[0]).sum() + (finite * weights[1]).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def one_process(case: Case) -> list[Tensor]:
    tensors, options, weights = whole_inputs(case)
    return results(streamattn.attention, tensors, weights, options)


def several_processes(case: Case, forward_alone: bool = False) -> list[Tensor]:
    """The same, put together from the shards of all ranks; or nothing, after a forward without lse."""
    tensors, options, weights = whole_inputs(case)
    replicated = case.mode == "replicated"
    held = [parallel.shard(x, dim=2) for x in tensors[:3]]
    if replicated:
        held[1:] = tensors[1:3]
    ids = options.pop("segment_ids", None)
    if ids is not None:
        mine = parallel.shard(ids, dim=1)
        options["segment_ids"] = (mine, ids) if replicated else mine
    shares = [parallel.shard(x, dim=2) for x in weights]
    options |= {"mode": case.mode, "seq_len": case.seq_len}
    if forward_alone:
        parallel.attention(held[0], held[1], held[2], **options)
        return []
    found = results(parallel.attention, held + tensors[3:], shares, options)
    padding = parallel.shard(torch.ones(case.seq_len), dim=0) == 0
    out, lse, dq = (x[:, :, padding] for x in found[:3])
    assert not out.any()
    assert (lse == -math.inf).all()
    assert not dq.any()
    for i, x in enumerate(found[:5]):
        if not (replicated and i in (3, 4)):
            found[i] = parallel.unshard(x, dim=2, seq_len=case.seq_len)
    for x in found[5:]:  # sinks are weights
        dist.all_reduce(x)
    return found


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of each tensor over its largest entry; infinite where one is NaN."""
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, f"{one.shape}, expected {other.shape}"
        assert one.dtype == other.dtype
        assert torch.equal(one == -math.inf, other == -math.inf)  # lse of who sees nothing
        one, other = (torch.where(x == -math.inf, 0.0, x) for x in (one, other))
        difference = ((one - other).abs().max() / other.abs().max()).item()
        worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def dropout(mode: str) -> dict[str, float]:
    """How dropout behaves in a mode, with all ranks seeded alike.

    Returns:
        "slope": the relative error of the gradients' product with a direction against a difference quotient,
        which is large if backward drops other elements than forward. "kept" and "rms": mean and root mean
        square, over all elements of all ranks, of weights that are 1 / seq_len without dropout, times
        seq_len. "alike": on how many ranks the elements are those of this one.
    """
    case = Case(f"{mode} dropout", 48, options=CAUSAL, dtype=torch.float64)
    tensors, _, weights = whole_inputs(case)
    directions = [torch.cos(1000 * x) for x in tensors]
    held = [x if mode == "replicated" and i else parallel.shard(x, dim=2) for i, x in enumerate(tensors)]
    ways = [x if mode == "replicated" and i else parallel.shard(x, dim=2) for i, x in enumerate(directions)]
    share = parallel.shard(weights[0], dim=2)
    options: dict[str, Any] = {"mode": mode, "dropout_p": 0.5}

    def loss(step: float) -> Tensor:
        torch.manual_seed(5)
        moved = [x + step * way for x, way in zip(held, ways, strict=True)]
        total = (parallel.attention(*moved, **options, causal=True) * share).sum()
        dist.all_reduce(total)
        return total

    quotient = (loss(1e-6) - loss(-1e-6)) / 2e-6
    torch.manual_seed(5)
    leaves = [x.clone().requires_grad_() for x in held]
    grads = torch.autograd.grad((parallel.attention(*leaves, **options, causal=True) * share).sum(), leaves)
    parts = [(grad * way).sum() for grad, way in zip(grads, ways, strict=True)]
    if mode == "replicated":  # summed over the ranks already
        parts[1:] = [x / dist.get_world_size() for x in parts[1:]]
    slope = torch.stack(parts).sum()
    dist.all_reduce(slope)

    length = case.seq_len
    eye = torch.eye(length, dtype=torch.float64).expand(BATCH, 4, -1, -1)
    v = eye if mode == "replicated" else parallel.shard(eye, dim=2)
    torch.manual_seed(5)
    found = parallel.attention(torch.zeros_like(held[0]), torch.zeros_like(held[1]), v, **options) * length
    every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(every, found.contiguous())
    whole = torch.stack(every)
    return {
        "slope": ((slope - quotient) / quotient).abs().item(),
        "kept": whole.mean().item(),
        "rms": whole.square().mean().sqrt().item(),
        "alike": float(sum(torch.equal(x, found) for x in every)),
    }


def run_all(rank: int, size: int, folder: str) -> None:
    """What a process does: all cases, and its report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(collectives, name, _counted(counts, name, getattr(collectives, name)))
        patch.setattr(gather, "MIN_GROUP_BYTES", 1)  # as many groups of heads as there may be
        report = {}
        for case in CASES:
            if case.mode == "ulysses" and case.num_heads % size:
                continue
            expected = one_process(case)
            counts.clear()
            found = several_processes(case)
            collected = {name: counts[name] for name in COLLECTIVES if counts[name]}
            report[case.name] = {"error": error(found, expected), "collectives": collected}
        for mode in EVERY_MODE:
            report[f"{mode} dropout"] = dropout(mode)
            counts.clear()
            several_processes(Case(f"{mode} forward alone", 64, 8, 4, CAUSAL), forward_alone=True)
            report[f"{mode} bytes"] = counts["bytes"]
        printed = io.StringIO()
        with redirect_stdout(printed):
            report["program"] = [program(["--seq-len", "50", "--num-kv-heads", "2"]), printed.getvalue()]
            patch.setattr("streamattn.parallel.__main__.TOLERANCE", {torch.float32: 0.0})
            report["program"].append(program(["--seq-len", "50", "--modes", "ring"]))
    dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def _counted(counts: Counter[str], name: str, function: Any) -> Any:
    """A collective that counts its calls, and the bytes that come from other ranks to this one."""

    def wrapped(x: Tensor, *rest: Any) -> Any:
        size, own = dist.get_world_size(), x.numel() * x.element_size()
        arriving = {"all_gather": own * (size - 1), "all_to_all": own * (size - 1) // size, "pass_on": own}
        counts[name] += 1
        counts["bytes"] += arriving.get(name, 0)
        return function(x, *rest)

    return wrapped
