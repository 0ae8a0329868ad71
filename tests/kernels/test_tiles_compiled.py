"""Every row of the tiles' tables, compiled for its architecture: it fits shared memory and registers.

Needs Triton's compiler and no GPU. The launchers themselves are asked what they would launch, on tensors
without storage, so what is compiled here is what a GPU would be given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn.kernels import tiles
from streamattn.pattern import UNBOUNDED

pytest.importorskip("triton", reason="Triton is not installed")

import streamattn.kernels.launch
from streamattn.kernels import backward, decode, forward, mask_gradient
from tests.offline import SHARED_BYTES, Compiled, Launch, compiled, undefined_reads

EDGES = (512, 64)  # of a window


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Launch]]:
    """What the launchers would launch for a call on a GPU of an architecture, by pass."""
    names = {
        "attention_fwd_kernel": "forward",
        "attention_bwd_dq_kernel": "dq",
        "attention_bwd_dkdv_kernel": "dkdv",
        "attention_bwd_dmask_kernel": "dmask",
        "decode_fwd_kernel": "decode",
        "decode_combine_kernel": "combine",
    }
    seen: dict[str, Launch] = {}

    def keep(
        kernel: Any,
        key: Hashable,
        pointers: tuple[Any, ...],
        arguments: Callable[[], Any],
        varying: tuple[int, ...] = (),
    ) -> None:
        named = dict(zip(kernel.arg_names, pointers, strict=False))
        seen[names[kernel.__name__]] = Launch(kernel, {**named, **arguments()[1]})

    def record(arch: str, dtype: torch.dtype, head_dim: int, call: dict[str, Any]) -> dict[str, Launch]:
        seen.clear()
        monkeypatch.setattr(streamattn.kernels.launch, "architecture_of", lambda x: arch)
        for module in (forward, backward, mask_gradient, decode):
            monkeypatch.setattr(module, "launch", keep)
        (launch_decode if "group" in call else launch_all)(dtype, head_dim, **call)
        return dict(seen)

    return record


def launch_all(
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    window: tuple[int, int] = (UNBOUNDED, 0),
    mask: torch.dtype | None = None,
    everything: bool = False,
) -> None:
    """Forward and backward of 8 query heads over 4 key heads, 4096 tokens.

    value_dim: head dimension of v, None = that of q. mask: the type of a dense mask, None = none. everything:
    with segments, lengths, softcap, dropout, sinks and the gradient of lse.
    """

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q = empty(2, 4096, 8, head_dim).transpose(1, 2)
    k = empty(2, 4096, 4, head_dim).transpose(1, 2)
    v = empty(2, 4096, 4, value_dim or head_dim).transpose(1, 2)
    out = empty(2, 4096, 8, value_dim or head_dim).transpose(1, 2)
    lse = empty(2, 8, 4096, dtype=torch.float32)
    attn_mask = None if mask is None else empty(2, 8, 4096, 4096, dtype=mask)
    segments = empty(2, 4096, dtype=torch.int32) if everything else None
    lengths, seed = (empty(n, dtype=torch.int64) if everything else None for n in (2, 1))
    sinks = empty(8) if everything else None
    masks = (segments, segments, lengths, seed)
    options = (0.1, *window, 30.0 if everything else 0.0, 0.1 if everything else 0.0)
    forward.attention_forward(q, k, v, attn_mask, *masks, sinks, *options)
    dlse = lse if everything else None
    *_, lse2, delta = backward.attention_backward(
        out, dlse, q, k, v, out, lse, attn_mask, *masks, sinks, *options
    )
    if attn_mask is not None and attn_mask.is_floating_point():
        mask_gradient.attention_mask_gradient(out, q, k, v, lse2, delta, attn_mask, *masks, *options)


def launch_decode(
    dtype: torch.dtype,
    head_dim: int,
    *,
    group: int,
    q_len: int = 1,
    page: int | None = None,
    everything: bool = False,
) -> None:
    """Decoding of 4 key heads with a group of query heads each, over 4096 keys, in more than one split.

    page: keys of a page of a paged cache, None = one piece. everything: with a window, a mask, segments,
    softcap and sinks.
    """

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q = empty(2, 4 * group, q_len, head_dim)
    k, v, table = (*(empty(2, 4, 4096, head_dim) for _ in range(2)), None)
    if page is not None:
        k, v = (empty(100, page, 4, head_dim).transpose(1, 2) for _ in range(2))
        table = empty(2, 4096 // page, dtype=torch.int32)
    q_segments, kv_segments = (empty(2, n, dtype=torch.int32) if everything else None for n in (q_len, 4096))
    attn_mask = empty(2, 1, q_len, 4096) if everything else None
    lengths, sinks = empty(2, dtype=torch.int64), empty(4 * group) if everything else None
    (left, right), softcap = (EDGES, 30.0) if everything else ((UNBOUNDED, 0), 0.0)
    masks = (attn_mask, q_segments, kv_segments, lengths, None, sinks)
    decode.attention_forward(q, k, v, *masks, 0.1, left, right, softcap, 0.0, block_table=table)


DECODING: dict[str, dict[str, Any]] = {
    "one query": {"group": 1},
    "a group": {"group": 8, "q_len": 2},
    "pages": {"group": 4, "page": 16},
    "everything": {"group": 8, "q_len": 16, "everything": True, "page": 64},
}


DECODE_ROWS = {
    (arch, {2: torch.bfloat16, 4: torch.float32}[itemsize], head_dim): tile
    for (name, arch, itemsize), table in tiles._TABLES.items()
    if name == "decode"
    for head_dim, tile in table.items()
}


def check_decoding(launches: Any, arch: str, dtype: torch.dtype, head_dim: int, tmp_path: Path) -> None:
    """Tiles fit, keys and values are loaded ahead, and what matters most spills nothing."""
    for title, call in DECODING.items():
        for name, launch in launches(arch, dtype, head_dim, call).items():
            binary = compiled(launch, arch, tmp_path)
            spilling = title == "everything" or dtype == torch.float32
            assert binary.spills <= (binary.instructions.total() // 10 if spilling else 0), (
                title,
                name,
                binary,
            )
            assert binary.shared <= SHARED_BYTES[arch], (title, name, binary)
            assert binary.undefined == [], (title, name)
            if name == "decode":
                tile = {x: launch.arguments[x] for x in ("BLOCK_N", "BLOCK_D")}
                row = DECODE_ROWS[arch, dtype, head_dim]
                buffers = (row.num_stages - 1) * 2 * tile["BLOCK_N"] * tile["BLOCK_D"] * dtype.itemsize
                assert binary.shared >= buffers, (title, binary)
                assert binary.instructions["LDGSTS"] > 0, title


def test_decoding_spills_nothing_and_loads_ahead(launches, tmp_path):
    check_decoding(launches, "sm_90", torch.bfloat16, 128, tmp_path)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_adds_the_splits_up_starts_early_and_waits_before_it_reads(launches, arch, tmp_path):
    """The first kernel says when it may start: the machine code's PREEXIT; the wait is its ACQBULK."""
    early = int(arch == "sm_90")
    for name, launch in launches(arch, torch.bfloat16, 64, {"group": 1}).items():
        binary = compiled(launch, arch, tmp_path)
        combines = name == "combine"
        assert bool(launch.arguments.get("launch_pdl")) is (combines and arch == "sm_90")
        assert binary.instructions["PREEXIT"] == early * (not combines)
        assert binary.instructions["ACQBULK"] == early * combines
        if early and combines:
            assert not {"LDG", "STG"} & set(binary.before_wait), binary.before_wait


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim"),
    DECODE_ROWS,
    ids=str,
)
def test_every_row_of_decoding_fits(launches, arch, dtype, head_dim, tmp_path):
    check_decoding(launches, arch, dtype, head_dim, tmp_path)


@pytest.mark.parametrize(
    ("head_dim", "most_spills"),
    [(64, {"forward": 0, "dq": 0, "dkdv": 400}), (128, {"forward": 0, "dq": 0, "dkdv": 600})],
)
def test_the_main_case_uses_wgmma_and_spills_little(launches, head_dim, most_spills, tmp_path):
    """Causal bfloat16 on sm_90: what the measured speed rests on."""
    for name, launch in launches("sm_90", torch.bfloat16, head_dim, {}).items():
        binary = compiled(launch, "sm_90", tmp_path)
        assert binary.instructions["HGMMA"] > 0, name
        assert binary.spills <= most_spills[name], (name, binary)
        assert binary.shared <= SHARED_BYTES["sm_90"], (name, binary)


@pytest.mark.parametrize(
    ("head_dim", "name", "most_spills"),
    [(136, "dq", 600), (137, "dq", 1300)],
)
def test_wide_heads_of_any_width_spill_little(launches, head_dim, name, most_spills, tmp_path):
    """In float32: 136 columns begin at whole 16 bytes, which the strides alone don't say; 137 do not.

    Where operands of products are made anew in each thread's registers, 2 to 20 thousand instructions spill.
    """
    launch = launches("sm_90", torch.float32, head_dim, {})[name]
    assert launch.arguments["ALIGNED"] is (head_dim == 136)
    binary = compiled(launch, "sm_90", tmp_path)
    assert binary.spills <= most_spills, binary


# under a causal mask: products of a pair of tiles, and copies of the loop around them
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
COPIES = {"forward": 2, "dq": 2, "dkdv": 3}


def tf32_multiplications(binary: Compiled, num_warps: int) -> int:
    """What the tensor cores of a program multiply in TF32 if each instruction of the code runs once."""
    total = 0
    for name, count in binary.products.items():
        by_warp = re.fullmatch(r"HMMA\.168(4|8)\.F32\.TF32", name)  # 16 x 8 x 4 or 8
        by_group = re.fullmatch(r"HGMMA\.64x(\d+)x8\.F32\.TF32", name)
        if by_warp is not None:
            total += count * num_warps * 16 * 8 * int(by_warp[1])
        elif by_group is not None:
            total += count * num_warps // 4 * 64 * int(by_group[1]) * 8
    return total


def check_float32_products(name: str, launch: Launch, binary: Compiled) -> None:
    """Raises unless every product of a causal pass runs on the tensor cores, in three steps of TF32."""
    sizes = {x: launch.arguments[x] for x in ("BLOCK_M", "BLOCK_N", "BLOCK_D", "num_warps")}
    assert launch.arguments["BLOCK_DV"] == sizes["BLOCK_D"]
    wanted = 3 * COPIES[name] * PRODUCTS[name] * sizes["BLOCK_M"] * sizes["BLOCK_N"] * sizes["BLOCK_D"]
    assert tf32_multiplications(binary, sizes["num_warps"]) >= wanted, (name, sizes, binary.products)
    assert all(each.endswith(".TF32") for each in binary.products), (name, binary.products)


@pytest.mark.parametrize(("arch", "unit"), [("sm_80", "HMMA"), ("sm_90", "HGMMA")])
def test_float32_runs_on_the_tensor_cores_in_three_steps(launches, arch, unit, tmp_path):
    for name, launch in launches(arch, torch.float32, 64, {}).items():
        binary = compiled(launch, arch, tmp_path)
        assert binary.instructions[unit] > 0, (name, binary.products)
        check_float32_products(name, launch, binary)


def test_tf32_where_pytorch_allows_it_is_one_step(launches, tmp_path):
    torch.set_float32_matmul_precision("high")
    try:
        launch = launches("sm_80", torch.float32, 64, {})["forward"]
    finally:
        torch.set_float32_matmul_precision("highest")
    binary = compiled(launch, "sm_80", tmp_path)
    assert binary.products
    with pytest.raises(AssertionError, match="forward"):
        check_float32_products("forward", launch, binary)


CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "everything": {"window": EDGES, "everything": True},
    "everything, dense mask": {"window": EDGES, "everything": True, "mask": torch.float32},
}
ITEMSIZES = {2: torch.bfloat16, 4: torch.float32}
ROWS = [
    (arch, ITEMSIZES[itemsize], head_dim)
    for (name, arch, itemsize), table in tiles._TABLES.items()
    if name == "forward"
    for head_dim in table
]


@pytest.mark.sweep
@pytest.mark.parametrize(("arch", "dtype", "head_dim"), ROWS, ids=str)
def test_every_row_fits(launches, arch, dtype, head_dim, tmp_path):
    for title, call in CALLS.items():
        for name, launch in launches(arch, dtype, head_dim, call).items():
            binary = compiled(launch, arch, tmp_path)
            assert binary.shared <= SHARED_BYTES[arch], (title, name, binary.shared)
            if dtype == torch.float32 and not call:
                check_float32_products(name, launch, binary)
            # the gradient of a float32 mask spills more and is let be: it is rare
            if name != "dmask":
                assert binary.spills < binary.instructions.total() / 4, (title, name, binary.spills)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "mask"),
    [
        (64, 32, torch.bfloat16),
        pytest.param(128, 16, torch.bfloat16, marks=pytest.mark.sweep),
        (40, 24, None),
    ],
)
def test_every_product_has_its_address(launches, head_dim, value_dim, mask, tmp_path):
    """A compiler that lost it had products of v read anything (see `launch.padded`)."""
    call = {"value_dim": value_dim, "mask": mask}
    for name, launch in launches("sm_90", torch.bfloat16, head_dim, call).items():
        assert compiled(launch, "sm_90", tmp_path).undefined == [], name


def test_an_address_that_is_lost_is_found():
    """Lines of the machine code of that fault."""
    lines = [
        "ULDC.64 UR8, c[0x0][0x270] ",
        "UIADD3 UR16, UP0, UR16, 0x40, URZ ",
        "UIADD3.X UR9, UR17, -0x7fffffe0, URZ, UP0, !UPT ",
        "UIADD3 UR17, UR9, UR16, URZ ",
    ]
    assert undefined_reads(lines) == [line.strip() for line in lines[1:3]]


def test_a_tile_that_is_too_large_is_found(launches, tmp_path):
    """What is compared is what the compiler says, not the table."""
    launch = launches("sm_90", torch.bfloat16, 128, {})["dq"]
    assert compiled(launch, "sm_86", tmp_path).shared > SHARED_BYTES["sm_86"]
