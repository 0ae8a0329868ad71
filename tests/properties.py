"""What holds for every call of `attention`: it equals the oracle, forward and backward.

`calls` draws a call, `check` runs it. They are used on the CPU backends (tests/test_properties.py), on the
kernels in Triton's interpreter (tests/kernels/test_properties.py) and on a GPU
(tests/gpu/test_properties_gpu.py). A failure prints its `Call`; kept in `FOUND`, it is run first everywhere.

`PROPERTY_EXAMPLES=10000 pytest ...` searches for long.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from streamattn import attention
from streamattn.dispatch import MAX_DECODE_QUERIES
from tests.cases import LAYOUTS, MASKS, Case, Inputs, Result, expected, judge, keep_of, run, seen_pairs


@dataclass(frozen=True)
class Call:
    """A case and how it is called."""

    case: Case
    dtype: torch.dtype = torch.float32
    strides: int | None = None  # seed of random strides of every tensor; None: the case's layout
    with_lse: bool = True  # lse is asked for, judged, and has a cotangent


FOUND: list[Call] = [
    # the scale is 0 in float32: -inf * 0 in the exponent
    Call(Case(1, 1, 1, 1, 1, scale=2.225073858507203e-309), torch.float16, None, False),
    # ptxas 12.8 lost the address of v's tiles, whose order in memory was not that of k's
    Call(
        Case(1, 2, 2, 80, 100, 64, value_dim=32, causal=True, mask="trained_full", lengths="ragged"),
        torch.float16,
    ),
    # two rows of one column see something, some twenty values that nearly cancel, and the judge knew no floor
    Call(
        Case(
            1,
            2,
            2,
            5,
            1056,
            1,
            None,
            True,
            20,
            -0.0223,
            "additive_heads",
            "pair",
            "ragged",
            layout="expanded",
            seed=94,
        ),
        torch.float16,
        with_lse=False,
    ),
]
"""Calls that failed once."""


@st.composite
def calls(
    draw: Callable[..., Any],
    dtypes: tuple[torch.dtype, ...],
    *,
    longest: int,
    head_dims: SearchStrategy[int],
    shortest: int = 0,
    most_heads: int = 12,
    largest_batch: int = 3,
) -> Call:
    """Any call with `shortest` to `longest` queries and keys, and at most so many heads and sequences."""
    kv_heads = draw(st.integers(1, min(most_heads, 3)))
    near_tiles = [n + d for n in (16, 32, 64, 128, 256, 512) for d in (-1, 0, 1) if n + d <= longest]
    lengths = st.one_of(st.integers(shortest, longest), st.sampled_from([1, *near_tiles]))
    q_len = draw(lengths)
    kv_len = draw(st.one_of(st.just(q_len), lengths))
    side = st.integers(-1, max(longest // 4, 2))
    plain = draw(st.booleans())  # nothing that PyTorch's fused CPU attention lacks

    def unless_plain(strategy: SearchStrategy[Any], otherwise: Any) -> Any:
        return otherwise if plain else draw(st.one_of(st.just(otherwise), strategy))

    case = Case(
        batch=draw(st.integers(1, largest_batch)),
        q_heads=kv_heads * draw(st.integers(1, most_heads // kv_heads)),
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=draw(head_dims),
        value_dim=unless_plain(head_dims, None),
        causal=draw(st.booleans()),
        window_size=draw(st.one_of(st.none(), st.integers(1, longest + 5), st.tuples(side, side))),
        scale=draw(st.one_of(st.none(), st.floats(-1.0, 1.0))),
        mask=draw(st.one_of(st.just("none"), st.sampled_from(MASKS))),
        segments=draw(st.sampled_from(("none", "pair") if q_len != kv_len else ("none", "ids", "pair"))),
        lengths=draw(st.sampled_from(("none", "ragged", "extreme") if kv_len else ("none", "extreme"))),
        softcap=unless_plain(st.floats(0.5, 30.0), None),
        sinks=unless_plain(st.just(True), False),
        # above that the rescale makes rounding larger than `judge` expects; other tests drop up to 0.999
        dropout_p=unless_plain(st.floats(0.0, 0.5), 0.0),
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 1000)),
    )
    return Call(
        case,
        draw(st.sampled_from(dtypes)),
        strides=draw(st.one_of(st.none(), st.integers(0, 1000))),
        with_lse=unless_plain(st.just(True), False),
    )


def few_queries(call: Call) -> Call:
    """The call with as many queries as the decode kernel takes, and without what it leaves to others."""
    case = call.case
    by_head = case.mask in ("bool", "additive", "additive_heads", "trained", "trained_full")
    return replace(
        call,
        case=replace(
            case,
            q_len=1 + (case.q_len - 1) % MAX_DECODE_QUERIES,
            segments="none" if case.segments == "none" else "pair",
            dropout_p=0.0,
            mask="none" if by_head and case.q_heads != case.kv_heads else case.mask,
        ),
    )


def searched(
    strategy: SearchStrategy[Call], examples: int, suppress: tuple[HealthCheck, ...] = ()
) -> Callable[[Any], Any]:
    """Decorates a test of a `call`: the calls found so far, then as many drawn ones."""
    limits = settings(
        max_examples=int(os.environ.get("PROPERTY_EXAMPLES", examples)),
        suppress_health_check=[*settings().suppress_health_check, *suppress],
    )

    def decorate(test: Any) -> Any:
        test = given(call=strategy)(test)
        for call in FOUND:
            test = example(call=call)(test)
        return limits(test)

    return decorate


def stored_anyhow(x: Tensor, rng: random.Random) -> Tensor:
    """The values of `x` in storage of any order, with gaps and an offset; what lies between is poison."""
    order = rng.sample(range(x.dim()), x.dim())
    if rng.random() < 0.7:  # a last stride of 1, or attention would copy
        order.sort(key=lambda d: d == x.dim() - 1)
    steps = [rng.choice((1, 1, 2)) for _ in order[:-1]] + [1 if rng.random() < 0.9 else 2]
    sizes = [x.shape[d] * step for d, step in zip(order, steps, strict=True)]
    poison: Any = torch.nan if x.is_floating_point() else True if x.dtype == torch.bool else -(1 << 30)
    offset = rng.randrange(6)
    storage = torch.full((offset + math.prod(sizes),), poison, dtype=x.dtype, device=x.device)
    view = storage[offset:].view(sizes)[tuple(slice(None, None, step) for step in steps)]
    view = view.permute([order.index(d) for d in range(x.dim())])
    view.copy_(x)
    return view


def build(call: Call, device: str) -> Inputs:
    inputs = call.case.build(call.dtype, device)
    if not call.with_lse:
        inputs.dlse.zero_()
    if call.strides is None:
        return inputs
    rng = random.Random(call.strides)

    def anyhow(x: Tensor) -> Tensor:
        if x.dim() == 0 or 0 in x.stride():  # a broadcast mask stays one
            return x
        return stored_anyhow(x.detach(), rng).requires_grad_(x.requires_grad)

    options = dict(inputs.options)
    for name, x in options.items():
        if isinstance(x, tuple) and isinstance(x[0], Tensor):
            options[name] = tuple(anyhow(part) for part in x)
        elif isinstance(x, Tensor):
            options[name] = anyhow(x)
    return inputs.mapped(anyhow, options=options, dout=anyhow(inputs.dout), dlse=anyhow(inputs.dlse))


def only_noise(call: Call, inputs: Inputs) -> bool:
    """Whether gradients consist of rounding so much that `judge` says nothing about them.

    The score of an only key has no gradient: what is computed is the difference of two rounded numbers, and
    `judge` allows for one such term. Here more than a few queries share an only key, and dk adds them up, or
    dropout makes the terms larger and most queries have but one key.
    """
    if call.case.sinks:
        return False
    case, seen = call.case, seen_pairs(inputs)
    only = seen & (seen.sum(-1, keepdim=True) == 1)
    shared = only.unflatten(1, (case.kv_heads, -1)).sum((2, 3)) > 4
    mostly = case.dropout_p > 0.0 and int(only.sum()) > 0.5 * int(seen.any(-1).sum())
    return mostly or bool(shared.any())


def check(call: Call, *backends: str, device: str = "cpu", deterministic: bool | None = None) -> None:
    """out, lse and all gradients of the call on each backend are the oracle's."""
    inputs = build(call, device)
    assume(not only_noise(call, inputs))
    want = expected(inputs, keep_of(call.case, 11, device))
    if not call.with_lse:
        del want.tensors["lse"]
    for backend in backends:
        torch.manual_seed(11)
        judge(outcome(call, inputs, backend, deterministic), want, call.dtype, f"backend={backend}, {call}")


def outcome(call: Call, inputs: Inputs, backend: str, deterministic: bool | None) -> Result:
    if call.with_lse:
        return run(attention, inputs, return_lse=True, backend=backend, deterministic=deterministic)

    def without_lse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out = attention(q, k, v, **options, backend=backend, deterministic=deterministic)
        return out, torch.zeros_like(inputs.dlse, requires_grad=True)  # `run` differentiates two results

    result = run(without_lse, inputs)
    del result.tensors["lse"]
    return result
