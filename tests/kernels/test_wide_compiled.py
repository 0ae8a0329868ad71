"""The kernels for wide heads, compiled: they fit, spill nothing where it counts, and use the tensor cores.

As `test_tiles_compiled.py` does it: the launchers are asked what they would launch, and that is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn.pattern import UNBOUNDED

pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import wide, wide_backward, wide_launch, wide_short
from tests.offline import SHARED_BYTES, Launch, compiled

SHAPES = {  # batch, heads, tokens, head_dim
    "many tokens": (4, 4, 4096, 512),
    "one head": (1, 1, 4096, 512),
    "some tokens": (1, 4, 256, 2048),
    "hundreds of tokens": (1, 4, 512, 512),
    "few tokens": (1, 4, 16, 8192),
    "ragged": (1, 4, 300, 257),
}
Launches = Callable[..., dict[str, tuple[Launch, int]]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What the launchers would launch on a GPU of an architecture, by pass, with the number of programs."""
    seen: dict[str, tuple[Launch, int]] = {}

    def keep(
        kernel: Any, key: Any, pointers: tuple[Any, ...], arguments: Callable[[], Any], varying: Hashable = ()
    ) -> None:
        name = kernel.__name__.removeprefix("attention_wide_").removesuffix("_kernel")
        name = key[-1] if name == "dkdv" else name
        programs, others = arguments()
        named = dict(zip(kernel.arg_names, pointers, strict=False))
        seen.setdefault(name, (Launch(kernel, {**named, **others}), programs))

    def record(arch: str, dtype: torch.dtype, shape: str, **options: Any) -> dict[str, tuple[Launch, int]]:
        seen.clear()
        for module in (wide_short, wide_launch):
            monkeypatch.setattr(module, "architecture_of", lambda x: arch)
            monkeypatch.setattr(module, "multiprocessors", lambda x: 132)
        for module in (wide, wide_short, wide_backward):
            monkeypatch.setattr(module, "launch", keep)
        for module in (wide, wide_short):
            monkeypatch.setattr(module, "starts_early", lambda x: arch == "sm_90")
        launch_all(dtype, *SHAPES[shape], **options)
        return dict(seen)

    return record


def launch_all(
    dtype: torch.dtype,
    batch: int,
    heads: int,
    tokens: int,
    head_dim: int,
    *,
    mask: torch.dtype | None = None,
    everything: bool = False,
) -> None:
    """Forward and backward of full attention, or with a dense mask, or with everything else there is."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v, out = (empty(batch, tokens, heads, head_dim).transpose(1, 2) for _ in range(4))
    lse = empty(batch, heads, tokens, dtype=torch.float32)
    attn_mask = None if mask is None else empty(batch, heads, tokens, tokens, dtype=mask)
    segments = empty(batch, tokens, dtype=torch.int32) if everything else None
    lengths, seed = (empty(n, dtype=torch.int64) if everything else None for n in (batch, 1))
    sinks = empty(heads) if everything else None
    masks = (segments, segments, lengths, seed, sinks)
    left, right = (12, 5) if everything else (UNBOUNDED, UNBOUNDED)
    options = (0.1, left, right, 30.0 if everything else 0.0, 0.1 if everything else 0.0)
    wide.attention_forward(q, k, v, attn_mask, *masks, *options)
    dlse = lse if everything else None
    wide_backward.attention_backward(out, dlse, q, k, v, out, lse, attn_mask, *masks, *options)


def test_many_tokens_use_wgmma_and_spill_nothing(launches: Launches, tmp_path):
    found = launches("sm_90", torch.bfloat16, "many tokens")
    assert set(found) == {"weights", "out", "delta", "dscores", "dq", "dk", "dv"}
    for name, (launch, programs) in found.items():
        binary = compiled(launch, "sm_90", tmp_path)
        assert binary.spills == 0, (name, binary)
        assert binary.shared <= SHARED_BYTES["sm_90"], (name, binary.shared)
        assert binary.undefined == [], name
        assert programs >= 128, name
        if name != "delta":
            assert binary.instructions["HGMMA"] > 0, (name, binary.products)
            assert binary.instructions["HMMA"] == 0, (name, binary.products)
    # two programs share a multiprocessor: one multiplies while the other takes exponentials
    assert 2 * compiled(found["weights"][0], "sm_90", tmp_path).shared <= SHARED_BYTES["sm_90"]


def test_few_tokens_fill_the_gpu_in_two_launches(launches: Launches, tmp_path):
    found = launches("sm_90", torch.float32, "few tokens")
    assert list(found)[:2] == ["partial", "short"]
    for name in ("partial", "short"):
        launch, programs = found[name]
        binary = compiled(launch, "sm_90", tmp_path)
        assert programs == 128, name
        assert binary.spills == 0, (name, binary)
        assert binary.products, name
        assert all(product.endswith(".TF32") for product in binary.products), (name, binary.products)


def test_hundreds_of_float32_tokens_fill_the_gpu_and_spill_nothing(launches: Launches, tmp_path):
    found = launches("sm_90", torch.float32, "hundreds of tokens")
    for name in ("weights", "out"):
        launch, programs = found[name]
        binary = compiled(launch, "sm_90", tmp_path)
        assert programs == 128, name
        assert binary.spills == 0, (name, binary)
        assert binary.instructions["HGMMA"] > 0, (name, binary.products)
        assert all(product.endswith(".TF32") for product in binary.products), (name, binary.products)


@pytest.mark.parametrize(
    ("arch", "shape", "first", "second"),
    [
        ("sm_80", "few tokens", "partial", "short"),
        ("sm_90", "few tokens", "partial", "short"),
        ("sm_90", "hundreds of tokens", "weights", "out"),
        pytest.param("sm_80", "hundreds of tokens", "weights", "out", marks=pytest.mark.sweep),
    ],
)
def test_the_second_kernel_starts_early_and_waits_before_it_reads(
    launches: Launches, arch, shape, first, second, tmp_path
):
    """The first kernel says when it may start: the machine code's PREEXIT; the wait is its ACQBULK."""
    early = int(arch == "sm_90")
    found = launches(arch, torch.float32, shape)
    for name in (first, second):
        launch, _ = found[name]
        binary = compiled(launch, arch, tmp_path)
        assert bool(launch.arguments.get("launch_pdl")) is (name == second and arch == "sm_90")
        assert binary.instructions["PREEXIT"] == early * (name == first)
        assert binary.instructions["ACQBULK"] == early * (name == second)
        if early and name == second:
            assert not {"LDG", "STG", "LDGSTS"} & set(binary.before_wait), binary.before_wait


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {"everything": True},
    "everything, dense mask": {"everything": True, "mask": torch.float32},
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_fits(launches: Launches, shape, arch, dtype, tmp_path):
    for title, options in CALLS.items():
        for name, (launch, _) in launches(arch, dtype, shape, **options).items():
            binary = compiled(launch, arch, tmp_path)
            assert binary.shared <= SHARED_BYTES[arch], (title, name, binary.shared)
            assert binary.spills < binary.instructions.total() / 4, (title, name, binary.spills)
            assert binary.undefined == [], (title, name)
