"""The Hopper backward, compiled for sm_90: every row of its table fits, and the tensor cores run ahead.

What they compute is tested by the emulator, in `test_hopper_emulated`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamattn.dispatch import MAX_HOPPER_ORDERED_HEAD_DIM
from streamattn.kernels.tiles import HOPPER_BACKWARD_TILES
from streamattn.pattern import UNBOUNDED

triton = pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import hopper_backward  # noqa: E402
from tests.offline import SHARED_BYTES, Compiled, Launch, compiled  # noqa: E402

KERNELS = {
    "hopper_bwd_prepare_kernel": "prepare",
    "hopper_bwd_ranks_kernel": "ranks",
    "hopper_bwd_kernel": "main",
    "hopper_bwd_shared_kernel": "main",
    "hopper_bwd_finish_kernel": "finish",
}


@pytest.fixture
def compile_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Compiled]]:
    """What the launcher would launch for a call, compiled, by name."""
    seen: list[Launch] = []

    def keep(kernel: Any, key: Hashable, pointers: tuple[Any, ...], arguments: Callable[[], Any]) -> None:
        seen.append(Launch(kernel, {**dict(zip(kernel.arg_names, pointers, strict=False)), **arguments()[1]}))

    def compile_one(
        head_dim: int,
        dtype: torch.dtype,
        length: int = 4096,
        kv_length: int = 4096,
        kernels: tuple[str, ...] = ("main",),
        **features: Any,
    ) -> dict[str, Compiled]:
        monkeypatch.setattr(hopper_backward, "launch", keep)
        monkeypatch.setattr(hopper_backward, "multiprocessor_count", lambda device: 132)

        def empty(heads: int, length: int) -> torch.Tensor:
            return torch.empty(5, length, heads, head_dim, dtype=dtype, device="meta").transpose(1, 2)

        def whole(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        q, k, dout = empty(8, length), empty(4, kv_length), empty(8, length)
        lse = torch.empty(5, 8, length, device="meta")
        left, right = features.get("window", (UNBOUNDED, UNBOUNDED))
        spans = (None, None, None)
        if "segments" in features:
            spans = whole(5, -(-kv_length // 64), 8), whole(5, length + 512), whole(5, kv_length + 512)
        lengths = whole(5, dtype=torch.int64) if "lengths" in features else None
        seed = whole(1, dtype=torch.int64)
        options = (0.1, left, right, features.get("softcap", 0.0), features.get("dropout_p", 0.0))
        options += (features.get("deterministic", False),)
        grads = hopper_backward.attention_backward(
            dout, lse, q, k, k, dout, lse, *spans, lengths, seed, *options
        )
        assert [x.shape for x in grads] == [x.shape for x in (q, k, k)]
        launches = {KERNELS[each.kernel.__name__]: each for each in seen}
        return {name: compiled(launches[name], "sm_90", tmp_path) for name in kernels}

    return compile_one


# stores and loads of all loops together; why newer releases spill more is not understood
MOST_SPILLS = {"3.6": {64: 60, 128: 280, 256: 240}, "newer": {64: 160, 128: 520, 256: 400}}
DROPOUT_SPILLS = {"3.6": {64: 140, 128: 420, 256: 100}, "newer": {64: 300, 128: 640, 256: 360}}
# one loop more
ORDERED_SPILLS = {"3.6": {64: 90, 128: 420}, "newer": {64: 400, 128: 780}}
CAUSAL = {"window": (UNBOUNDED, 0)}
FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": {"window": (100, 0)},
    "segments": CAUSAL | {"segments": True},
    "lengths": CAUSAL | {"lengths": True},
    "softcap": CAUSAL | {"softcap": 20.0},
    "dropout": CAUSAL | {"dropout_p": 0.1},
    "deterministic": CAUSAL | {"deterministic": True},
    "deterministic window": {"window": (100, 0), "deterministic": True},
    "deterministic segments": CAUSAL | {"segments": True, "deterministic": True},
    "deterministic dropout": CAUSAL | {"dropout_p": 0.1, "deterministic": True},
}


def judge(binary: Compiled, head_dim: int, most: dict[str, dict[int, int]] = MOST_SPILLS) -> None:
    """Fits, spills at most so much, and the tensor cores run ahead."""
    series = "3.6" if triton.__version__.startswith("3.6.") else "newer"
    assert binary.shared <= SHARED_BYTES["sm_90"]
    assert binary.spills <= most[series][head_dim], binary.spills
    assert not binary.undefined
    # a compiler that sees no way to let products run waits behind each of their instructions
    assert 0 < 4 * binary.product_waits <= binary.instructions["HGMMA"], "the products are serialized"


OFTEN = {64: ("causal", "segments"), 128: ("full", "causal", "deterministic"), 256: ("causal", "dropout")}


@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        pytest.param(head_dim, x, marks=() if x in OFTEN[head_dim] else pytest.mark.sweep)
        for head_dim in HOPPER_BACKWARD_TILES
        for x in FEATURES
        if head_dim <= MAX_HOPPER_ORDERED_HEAD_DIM or "deterministic" not in x
    ],
)
def test_it_fits_and_overlaps(head_dim, features, compile_call):
    most = DROPOUT_SPILLS if "dropout" in features else MOST_SPILLS
    if features in ("deterministic window", "deterministic segments"):
        most = ORDERED_SPILLS
    judge(compile_call(head_dim, torch.bfloat16, **FEATURES[features])["main"], head_dim, most)


def test_it_does_in_float16_with_keys_that_fill_no_tile(compile_call):
    judge(compile_call(128, torch.float16, 900, 1001)["main"], 128)


@pytest.mark.sweep
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("length", "kv_length"), [(900, 1001), (900, 450), (1024, 512)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD_TILES)
def test_other_lengths_do_too(head_dim, dtype, length, kv_length, causal, compile_call):
    features = CAUSAL if causal else {}
    judge(compile_call(head_dim, dtype, length, kv_length, **features)["main"], head_dim)


@pytest.mark.parametrize(
    "head_dim", [96, 192, *(pytest.param(each, marks=pytest.mark.sweep) for each in (64, 128, 256))]
)
def test_the_small_kernels_spill_nothing(head_dim, compile_call):
    """Of 96 columns in tiles of 128, and 192 in 256: what other widths do, and that some are left out."""
    ordered = head_dim <= MAX_HOPPER_ORDERED_HEAD_DIM
    names = ("prepare", "ranks", "finish") if ordered else ("prepare", "finish")
    features = FEATURES["deterministic segments" if ordered else "segments"]
    small = compile_call(head_dim, torch.bfloat16, kernels=names, **features)
    assert all(binary.spills == 0 for binary in small.values())
