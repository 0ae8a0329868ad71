"""The Hopper backward, compiled for sm_90: every row of its table fits, and the tensor cores run ahead.

Its kernels in plain Triton are tested by the interpreter, in `test_hopper_backward_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamattn.kernels.tiles import HOPPER_BACKWARD_TILES
from streamattn.pattern import UNBOUNDED

triton = pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import hopper_backward  # noqa: E402
from tests.offline import SHARED_BYTES, Compiled, Launch, compiled  # noqa: E402

KERNELS = ["prepare", "main", "finish"]


@pytest.fixture
def compile_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Compiled]]:
    """What the launcher would launch for a call, compiled, by name."""
    seen: list[Launch] = []

    def keep(kernel: Any, key: Hashable, pointers: tuple[Any, ...], arguments: Callable[[], Any]) -> None:
        seen.append(Launch(kernel, {**dict(zip(kernel.arg_names, pointers, strict=False)), **arguments()[1]}))

    def compile_one(
        head_dim: int,
        dtype: torch.dtype,
        causal: bool,
        length: int = 4096,
        kv_length: int = 4096,
        kernels: tuple[str, ...] = ("main",),
    ) -> dict[str, Compiled]:
        monkeypatch.setattr(hopper_backward, "launch", keep)
        monkeypatch.setattr(hopper_backward, "multiprocessor_count", lambda device: 132)

        def empty(heads: int, length: int) -> torch.Tensor:
            return torch.empty(5, length, heads, head_dim, dtype=dtype, device="meta").transpose(1, 2)

        q, k, dout = empty(8, length), empty(4, kv_length), empty(8, length)
        lse = torch.empty(5, 8, length, device="meta")
        right = 0 if causal else UNBOUNDED
        grads = hopper_backward.attention_backward(dout, lse, q, k, k, dout, lse, 0.1, right)
        assert [x.shape for x in grads] == [x.shape for x in (q, k, k)]
        launches = dict(zip(KERNELS, seen, strict=True))
        return {name: compiled(launches[name], "sm_90", tmp_path) for name in kernels}

    return compile_one


# stores and loads of all loops together; why newer releases spill more is not understood
MOST_SPILLS = {"3.6": {64: 40, 128: 130}, "newer": {64: 70, 128: 340}}


def judge(binary: Compiled, head_dim: int) -> None:
    """Fits, spills at most so much, and the tensor cores run ahead."""
    series = "3.6" if triton.__version__.startswith("3.6.") else "newer"
    assert binary.shared <= SHARED_BYTES["sm_90"]
    assert binary.spills <= MOST_SPILLS[series][head_dim], binary.spills
    assert not binary.undefined
    # a compiler that sees no way to let products run waits behind each of their instructions
    assert 0 < 4 * binary.product_waits <= binary.instructions["HGMMA"], "the products are serialized"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD_TILES)
def test_it_fits_and_overlaps(head_dim, causal, compile_call):
    judge(compile_call(head_dim, torch.bfloat16, causal)["main"], head_dim)


@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD_TILES)
def test_it_does_in_float16_with_keys_that_fill_no_tile(head_dim, compile_call):
    judge(compile_call(head_dim, torch.float16, False, 900, 1001)["main"], head_dim)


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("length", "kv_length"), [(900, 1001), (900, 450), (1024, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD_TILES)
def test_other_lengths_do_too(head_dim, dtype, length, kv_length, causal, compile_call):
    judge(compile_call(head_dim, dtype, causal, length, kv_length)["main"], head_dim)


@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD_TILES)
def test_the_small_kernels_spill_nothing(head_dim, compile_call):
    for binary in compile_call(head_dim, torch.bfloat16, True, kernels=("prepare", "finish")).values():
        assert binary.spills == 0
