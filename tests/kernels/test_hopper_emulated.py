"""The kernels for Hopper from end to end, emulated: what they compute, and that no barrier is miscounted.

`attention` itself is called, on the CPU. The emulator takes the place of Gluon when the kernels are imported,
so nothing else of this process may have imported them.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from tests import emulator

emulator.install()

from streamattn import attention, dispatch  # noqa: E402
from streamattn.kernels import (  # noqa: E402
    hopper_backward,
    hopper_backward_order,
    hopper_backward_shared,
    hopper_backward_warps,
    hopper_forward,
    hopper_primitives,
    hopper_producer,
    segments,
    tiles,
)
from streamattn.kernels.launch import launch  # noqa: E402
from streamattn.kernels.tiles import HOPPER_BACKWARD_TILES  # noqa: E402
from streamattn.packed import packed_attention, unpacked  # noqa: E402
from tests.cases import Case, Result, expected, judge, keep_of, run  # noqa: E402
from tests.emulator import machine  # noqa: E402
from tests.hopper_cases import HIDING, feature_case  # noqa: E402
from tests.oracle import visible_pairs  # noqa: E402
from tests.pairwise import pairwise  # noqa: E402

HALF = torch.float16
MULTIPROCESSORS = 3  # fewer than items, so that a program has several


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Gluon kernels that were run, by name; each run copies in an order of its own.

    Sums are in order where a call asks for it, however few its queries. All forwards draw from one counter.
    """
    names: list[str] = []
    counter = torch.zeros(1, dtype=torch.int32)
    for head_dim, tile in HOPPER_BACKWARD_TILES.items():
        monkeypatch.setitem(HOPPER_BACKWARD_TILES, head_dim, replace(tile, IN_ORDER=0))

    def emulate(
        kernel: Any, key: Hashable, pointers: tuple[Any, ...], arguments: Callable[[], Any], varying: Any = ()
    ) -> None:
        if not inspect.isfunction(kernel):  # plain Triton's, interpreted
            return launch(kernel, key, pointers, arguments, varying)
        names.append(kernel.__name__)
        programs, rest = arguments()
        tensors = dict(zip(inspect.signature(kernel).parameters, pointers, strict=False))
        ordered = rest.get("ORDERED", False)
        together = MULTIPROCESSORS if ordered else 1
        emulator.run(kernel, programs, {**tensors, **rest}, seed=len(names), together=together)
        for adders in machine.additions.values() if ordered else ():
            assert adders == sorted(set(adders)), f"the programs {adders} added to one tile in this order"
        assert counter == 0, "the next launch begins with another item"

    for module in (hopper_forward, hopper_backward):
        monkeypatch.setattr(module, "launch", emulate)
        monkeypatch.setattr(module, "multiprocessor_count", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(hopper_forward, "counter_of", lambda device: counter)
    monkeypatch.setattr(segments, "SCAN", 512)  # fewer numbers for the interpreter
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    return names


def check_forward(case: Case) -> None:
    """out and lse of a call against float64."""
    inputs = case.build(torch.float16)
    torch.manual_seed(1)
    with torch.no_grad():
        out, lse = attention(
            inputs.q, inputs.k, inputs.v, **inputs.options, backend="hopper", return_lse=True
        )
    want = expected(inputs, keep_of(case, seed=1))
    judge(Result({"out": out, "lse": lse}), Result({name: want[name] for name in ("out", "lse")}), HALF, case)


def check(case: Case, deterministic: bool = False) -> None:
    """out, lse, dq, dk and dv of a call against float64."""
    inputs = case.build(HALF)
    torch.manual_seed(1)
    got = run(attention, inputs, return_lse=True, backend="hopper", deterministic=deterministic)
    judge(got, expected(inputs, keep_of(case, seed=1)), HALF, case)


FEATURES: dict[str, list[Any]] = {
    "size": [(64, 64), (150, 150), (300, 300), (130, 200), (200, 330), (257, 90)],
    "head_dim": [64, 96, 128],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "window": [None, "causal", (70, 0), (100, 40), (-1, 30)],
    "extra": ["nothing", "pair", "lengths", "softcap", "dropout", "pair and softcap", "lengths and softcap"],
    "layout": ["bthd", "bhtd", "fused"],
}


@pytest.mark.parametrize("row", pairwise(FEATURES), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_features(row, served):
    check(feature_case(row))
    assert served == ["hopper_fwd_kernel", "hopper_bwd_kernel"]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 96), (2, 1, 128)])
def test_gradients_side_by_side(heads, kv_heads, head_dim, deterministic, served):
    check_side_by_side(heads, kv_heads, head_dim, deterministic)
    assert served == ["hopper_fwd_kernel", "hopper_bwd_kernel"] * 2


def check_side_by_side(heads: int, kv_heads: int, head_dim: int, deterministic: bool) -> None:
    """dq, dk and dv are written into one tensor, nothing of it twice or not at all."""
    qkv = torch.randn(2, 150, heads + 2 * kv_heads, head_dim).to(HALF).requires_grad_()
    options: dict[str, Any] = {"causal": True, "backend": "hopper", "deterministic": deterministic}
    out, _ = packed_attention(qkv, num_kv_heads=kv_heads, **options)
    parts = unpacked(qkv, heads)
    dout = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, qkv, dout)
    want = torch.autograd.grad(attention(*parts, **options), parts, dout)
    assert got.is_contiguous()
    for name, one, two in zip("qkv", unpacked(got, heads), want, strict=True):
        if name == "q" and not deterministic:  # its sums take their terms in any order
            torch.testing.assert_close(one, two, rtol=2e-3, atol=2e-3)
        else:
            assert torch.isfinite(one).all() and torch.equal(one, two)


@pytest.mark.parametrize("row", pairwise(FEATURES | {"head_dim": [256, 192]}), ids=str)
def test_every_feature_of_wide_heads(row, served):
    check(feature_case(row))
    assert served == ["hopper_fwd_kernel", "hopper_bwd_shared_kernel"]


def test_gradients_of_wide_heads_side_by_side(served):
    check_side_by_side(3, 3, 256, False)
    assert served == ["hopper_fwd_kernel", "hopper_bwd_shared_kernel"] * 2


SIZES = [(300, 300), (200, 130), (64, 1)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward_and_backward(size, head_dim, causal, served):
    check(
        Case(
            q_heads=4,
            kv_heads=2,
            q_len=size[0],
            kv_len=size[1],
            head_dim=head_dim,
            causal=causal,
            layout="bthd",
        )
    )
    assert served == ["hopper_fwd_kernel", "hopper_bwd_kernel"]


TILES = {name: tile for name, tile in vars(tiles).items() if isinstance(tile, tiles.HopperTile)}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_every_tile(tile, causal, monkeypatch):
    monkeypatch.setattr(hopper_forward, "choose_hopper_tile", lambda *args: tile)
    check_forward(Case(q_len=700, kv_len=700, head_dim=tile.BLOCK_D, causal=causal))


@pytest.mark.parametrize("together", [1, 4], ids=["in turn", "together"])
@pytest.mark.parametrize("programs", [1, 3, 11, 12, 13, 20])
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window_size": (40, 9)}, {"causal": True, "lengths": "ragged"}],
    ids=["causal", "window", "lengths"],
)
def test_the_last_draw_leaves_the_counter_at_zero(options, programs, together, monkeypatch):
    """Each of 12 work items makes one draw, however many programs there are and whichever is fast."""
    case = Case(batch=3, q_heads=2, kv_heads=1, q_len=200, kv_len=200, head_dim=64, **options)
    inputs = case.build(HALF)
    counter = torch.zeros(1, dtype=torch.int32)
    draws: list[int] = []

    def draw(ptr: Any, value: int, sem: str) -> Any:
        assert len(draws) < 12, "the counter began anew while items were left"
        draws.append(0)
        return machine.atomic_add(ptr, value, sem)

    def emulate(kernel: Any, key: Hashable, pointers: tuple[Any, ...], arguments: Callable[[], Any]) -> None:
        tensors = dict(zip(inspect.signature(kernel).parameters, pointers, strict=False))
        emulator.run(kernel, programs, {**tensors, **arguments()[1]}, seed=programs, together=together)

    monkeypatch.setattr(hopper_forward, "choose_hopper_tile", lambda *args: tiles._SMALL_64)
    monkeypatch.setattr(hopper_producer.gl, "atomic_add", draw)
    monkeypatch.setattr(hopper_forward, "launch", emulate)
    monkeypatch.setattr(hopper_forward, "counter_of", lambda device: counter)
    with torch.no_grad():
        out = attention(inputs.q, inputs.k, inputs.v, **inputs.options, backend="hopper")
    judge(Result({"out": out}), Result({"out": expected(inputs)["out"]}), HALF, case)
    assert (len(draws), int(counter)) == (12, 0)


def test_padding_between_the_queries_of_two_halves_reaches_nothing():
    """No span of 64 keys has those queries near, but the tiles of 128 keys' spans together do."""
    case = Case(q_len=384, kv_len=384, head_dim=64, layout="bthd", segments="pair")
    inputs = case.build(HALF)
    ids = torch.tensor([0, -1, 1], dtype=torch.int32).repeat_interleave(128).expand(2, -1).contiguous()
    theirs = torch.tensor([0, 1], dtype=torch.int32).repeat_interleave(192).expand(2, -1).contiguous()
    inputs.options["segment_ids"] = (ids, theirs)
    want = expected(inputs)
    blind = (ids < 0)[:, None, :, None]
    inputs.dout.masked_fill_(blind, torch.nan)
    inputs = replace(inputs, q=inputs.q.detach().masked_fill(blind, torch.nan).requires_grad_())
    judge(run(attention, inputs, return_lse=True, backend="hopper", deterministic=False), want, HALF, case)


@pytest.mark.parametrize("options", [*HIDING, {"causal": True, "q_len": 400}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_what_nobody_sees_reaches_nothing(head_dim, options):
    """Keys and values that no query sees, queries that see no key and their gradients hold NaN."""
    case = Case(**({"q_len": 300, "kv_len": 300, "head_dim": head_dim, "layout": "bthd"} | options))
    inputs = case.build(HALF)
    want = expected(inputs)
    rule = {name: x for name, x in inputs.options.items() if name in ("causal", "kv_lengths", "segment_ids")}
    seen = visible_pairs(case.batch, case.q_len, case.kv_len, **rule)
    unseen, blind = (~seen.any(dim).expand(-1, 2, -1) for dim in (2, 3))
    assert unseen.any() or blind.any()

    def poisoned(x: Tensor, where: Tensor) -> Tensor:
        return x.detach().masked_fill(where[..., None], torch.nan).requires_grad_()

    inputs = replace(
        inputs,
        q=poisoned(inputs.q, blind),
        k=poisoned(inputs.k, unseen),
        v=poisoned(inputs.v, unseen),
        dout=inputs.dout.masked_fill(blind[..., None], torch.nan),
        dlse=inputs.dlse.masked_fill(blind, torch.nan),
    )
    got = run(attention, inputs, return_lse=True, backend="hopper", deterministic=False)
    judge(got, want, HALF, case)
    assert (got["dq"].masked_select(blind[..., None]) == 0).all()


@pytest.mark.parametrize(
    ("lengths", "segments", "in_order"),
    [
        ((128, 128), "none", True),
        ((129, 129), "none", False),
        ((128, 300), "none", False),
        ((128, 128), "pair", False),
    ],
)
def test_short_sums_are_in_order_unasked(lengths, segments, in_order, served, monkeypatch):
    tile = replace(HOPPER_BACKWARD_TILES[64], IN_ORDER=128)
    monkeypatch.setitem(HOPPER_BACKWARD_TILES, 64, tile)
    orders: list[bool] = []
    emulate = hopper_backward.launch

    def listening(kernel, key, pointers, arguments):
        orders.extend(value for name, value in arguments()[1].items() if name == "ORDERED")
        emulate(kernel, key, pointers, arguments)

    monkeypatch.setattr(hopper_backward, "launch", listening)
    check(Case(q_len=lengths[0], kv_len=lengths[1], head_dim=64, segments=segments))
    assert orders == [in_order]


ORDERED: dict[str, list[Any]] = {
    "size": [(300, 300), (130, 400), (500, 200)],
    "head_dim": [64, 128],
    "heads": [(1, 1), (2, 1)],
    "window": [None, "causal", (100, 40), (90, -1)],
    "extra": ["nothing", "lengths", "dropout", "pair and softcap"],
    "layout": ["bthd"],
}


@pytest.mark.parametrize("row", pairwise(ORDERED), ids=lambda row: "-".join(map(str, row.values())))
def test_deterministic_sums_take_their_terms_in_one_order(row, served):
    check(replace(feature_case(row), batch=1), deterministic=True)  # so that programs of a head meet
    assert served == ["hopper_fwd_kernel", "hopper_bwd_kernel"]


# module, function, what it says, what it could say by mistake
FAULTS = [
    (hopper_forward, "step", "n > n_end", "n >= n_end"),
    (hopper_forward, "hide", "keys[None, :] <= last[:, None]", "keys[None, :] < last[:, None]"),
    (hopper_forward, "online_softmax", "rescale = exp2(m - base)", "rescale = exp2(m - m)"),
    (hopper_producer, "producer", "if u >= STAGES:", "if u > STAGES:"),
    (hopper_producer, "producer", "((count // Q_BUFFERS) & 1) ^ 1", "(count // Q_BUFFERS) & 1"),
    (hopper_producer, "producer", "gl.store(counter, 0, mask=item == programs + items - 1)", "pass"),
    (hopper_producer, "producer", "mask=item == programs + items - 1", "mask=item == programs + items"),
    (
        hopper_backward_warps,
        "step",
        "deps=[dv, dq])\n",
        "deps=[dv, dq])\n        release(Q_FREE + t % STAGES, THREADS)\n",
    ),
    (hopper_backward_warps, "step", "await_release(DS_FULL, CONSUMERS * 128)", "pass"),
    (hopper_backward_warps, "add_dq", "tma.store_wait(0)", "pass"),
    (hopper_backward_warps, "copy_pair", "ROW_BYTES + ROWS * 4", "ROW_BYTES + ROWS * 8"),
    (hopper_backward_warps, "hide", "(rows + last_of_0)", "(rows + last_of_0 - 1)"),
    (hopper_backward_warps, "producer", "if t >= STAGES:", "if t > STAGES:"),
]
# likewise above a head dimension of 128
SHARED_FAULTS = [
    (hopper_backward_shared, "dk_step", "await_release(P_FULL, PAIR_THREADS)", "pass"),
    (hopper_backward_shared, "dv_step", "await_release(DS_FULL, PAIR_THREADS)", "pass"),
    (hopper_backward_shared, "dv_step", "dq = warpgroup_mma_wait(0, deps=[dq])", "pass"),
    (hopper_backward_shared, "dk_step", "dp = warpgroup_mma_wait(0, deps=[dp])", "pass"),
    (hopper_backward_shared, "dk_step", "at + part * (ROWS * DQ_COLUMNS)", "at"),
    (hopper_backward_shared, "dk_step", "await_tile(dout_full, t + 1, STAGES)", "pass"),
    (hopper_backward_shared, "dk_step", "dk = warpgroup_mma_wait(1, deps=[dk])", "pass"),
    (hopper_backward_shared, "dq_part", ".permute((1, 0))", ""),
    (hopper_backward_shared, "add_to_sums", "x0, x1, x2, x3]", "x0, x2, x1, x3]"),
    (hopper_backward_shared, "dv_consumer", "m_full - m_start + m_end - m_tail", "m_full - m_start"),
    (hopper_backward_warps, "work", "start // ROWS", "start // ROWS + 1"),
]
# where dq is added up in one order
ORDER_FAULTS = [
    (hopper_backward_order, "dq_adder", "await_turn(turns_ptr + at, turn)", "pass"),
    (hopper_backward_order, "dq_adder", "mbarrier.wait(dq_full.index(WHICH), t // ADDERS & 1)", "pass"),
    (hopper_backward_order, "turn_of", "last // KEYS - first_key // KEYS", "first_key // KEYS"),
    (hopper_backward_order, "turn_of", "m * ROWS + ROWS - 1", "m * ROWS"),
    (hopper_backward_order, "dq_adder", "row * gl.cdiv(q_len, ROWS) + m", "row * gl.cdiv(q_len, ROWS)"),
    (hopper_primitives, "pass_on", "cp.async.bulk.wait_group 0;", ""),
    (
        hopper_backward_warps,
        "hand_dq",
        "mbarrier.wait(dq_free.index(t % ADDERS), ((t // ADDERS) & 1) ^ 1)",
        "pass",
    ),
    (hopper_backward_warps, "work", "- 1 - tile", "- 1 - gl.cdiv(kv_len, KEYS) + 1 + tile"),
]


@pytest.mark.parametrize(
    ("module", "function", "right", "wrong", "kind"),
    [(*fault, "plain") for fault in FAULTS]
    + [(*fault, "shared") for fault in SHARED_FAULTS]
    + [(*fault, "ordered") for fault in ORDER_FAULTS],
)
def test_the_emulator_sees_faults(module, function, right, wrong, kind, monkeypatch):
    """Wrong numbers, a buffer handed back too early, a barrier miscounted, a turn not awaited."""
    source = textwrap.dedent(inspect.getsource(getattr(module, function)))
    assert right in source
    names: dict[str, Any] = dict(vars(module))
    exec(compile(source.replace(right, wrong), "<fault>", "exec"), names)
    users = (
        hopper_forward,
        hopper_producer,
        hopper_backward,
        hopper_backward_warps,
        hopper_backward_order,
        hopper_backward_shared,
    )
    for at in users:
        if hasattr(at, function) and getattr(at, function) is getattr(module, function):
            monkeypatch.setattr(at, function, names[function])
    monkeypatch.setattr(machine, "TIMEOUT", 1.0)
    if function == "hand_dq":  # the adder that isn't waited for comes late
        monkeypatch.setattr(machine, "TURN_DELAY", 0.05)
    cases = [Case(q_len=400, kv_len=400, head_dim=128, causal=True)]
    if kind == "shared":
        wide = replace(cases[0], head_dim=256)
        cases = [wide, replace(wide, causal=False, window_size=(100, 40))]
    if kind == "ordered":  # all programs are of one head; without a mask they meet at once
        one_head = replace(cases[0], batch=1, q_heads=1, kv_heads=1, kv_len=450)
        cases = [replace(one_head, causal=False), one_head]
        if "row" in right:
            cases = [replace(one_head, segments="pair")]
    with pytest.raises((AssertionError, IndexError)):  # noqa: PT012
        for case in cases:
            check(case, kind == "ordered")
