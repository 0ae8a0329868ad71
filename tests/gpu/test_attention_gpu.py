"""The portable kernels on a GPU at real sizes: numbers, options, dropout, determinism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from streamattn import attention
from streamattn.dispatch import Backend, Masks, choose
from streamattn.pattern import UNBOUNDED
from tests.cases import LAYOUTS, MASKS, Case, Inputs, Result, expected, judge, keep_of, relative_errors, run
from tests.gpu.peers import NAMES, compare
from tests.pairwise import pairwise

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]


def ours(inputs: Inputs, **extra: Any) -> Result:
    return run(attention, inputs, return_lse=True, **extra)


def check(case: Case, dtype: torch.dtype, peer: SDPBackend) -> None:
    compare(case.build(dtype, "cuda"), ours, peer, f"{case}, {dtype}")


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [1, 64, 80, 128, 192, 256])
def test_auto_is_the_kernel(head_dim, dtype):
    q = torch.zeros(1, 1, 16, head_dim, device="cuda", dtype=dtype)
    options: dict[str, Any] = {"masks": Masks(), "scale": 1.0, "window_left": UNBOUNDED}
    assert choose(Backend.AUTO, q, q, q, softcap=5.0, dropout_p=0.1, **options) is Backend.TRITON


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("size", [512, 913, 2048])
def test_error_is_that_of_sdpa_flash(size, head_dim, causal, dtype, poisoned):
    case = Case(batch=2, q_heads=4, kv_heads=4, q_len=size, kv_len=size, head_dim=head_dim, causal=causal)
    check(case, dtype, SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (4, 1)], ids=str)
def test_error_is_that_of_sdpa_flash_with_grouped_heads(heads, dtype):
    case = Case(q_heads=heads[0], kv_heads=heads[1], q_len=1000, kv_len=1000, head_dim=64, causal=True)
    check(case, dtype, SDPBackend.FLASH_ATTENTION)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("sizes", [(127, 513), (1000, 3000), (1, 799)], ids=str)
def test_error_is_that_of_sdpa_flash_at_the_bottom_right(sizes, dtype):
    case = Case(q_heads=4, kv_heads=4, q_len=sizes[0], kv_len=sizes[1], head_dim=64, causal=True)
    check(case, dtype, SDPBackend.FLASH_ATTENTION)


PATTERNS: list[dict[str, Any]] = [
    {"window_size": 128},
    {"window_size": (100, 30)},
    {"segments": "pair"},
    {"lengths": "ragged"},
    *({"mask": mask} for mask in MASKS if mask != "none"),
    {"mask": "additive_heads", "causal": True},
]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("options", PATTERNS, ids=str)
def test_error_is_that_of_sdpa_efficient_under_masks(options, dtype):
    """Flash has no masks, boolean or additive."""
    case = Case(q_heads=4, kv_heads=4, q_len=1024, kv_len=1024, head_dim=64, **options)
    check(case, dtype, SDPBackend.EFFICIENT_ATTENTION)


@pytest.mark.parametrize("options", PATTERNS, ids=str)
def test_float32_error_is_that_of_the_plain_formula_under_masks(options):
    assert torch.get_float32_matmul_precision() == "highest"
    case = Case(q_len=512, kv_len=512, head_dim=64, **options)
    check(case, torch.float32, SDPBackend.MATH)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 160, 192, 256])
@pytest.mark.parametrize("size", [300, 1024])
def test_float32_error_is_that_of_the_plain_formula(size, head_dim, causal, poisoned):
    assert torch.get_float32_matmul_precision() == "highest"
    case = Case(q_len=size, kv_len=size, head_dim=head_dim, causal=causal)
    check(case, torch.float32, SDPBackend.MATH)


@pytest.mark.parametrize("allow", ["set_float32_matmul_precision", "fp32_precision"])
def test_tf32_only_when_pytorch_allows_it(allow):
    case = Case(q_len=512, kv_len=512, head_dim=64)
    inputs = case.build(torch.float32, "cuda")
    want = expected(inputs)["out"]
    exact = relative_errors(ours(inputs)["out"], want)[0]
    if allow == "fp32_precision":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    try:
        allowed = relative_errors(ours(inputs)["out"], want)[0]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert exact < 2e-6
    assert allowed < 3e-3
    assert allowed > 10 * exact, "TF32 was asked for and not used"


OPTIONS: dict[str, list[Any]] = {
    "heads": [(2, 2), (6, 2), (4, 1)],
    "sizes": [(200, 200), (127, 513), (513, 127), (1, 300), (1023, 1024)],
    "dims": [(64, 64), (128, 128), (80, 48), (192, 256), (64, 32)],
    "causal": [False, True],
    "window_size": [None, 100, (70, 20), (0, -1)],
    "mask": ["none", "bool", "additive_heads", "trained", "trained_keys", "additive_expanded"],
    "segments": ["none", "pair"],
    "lengths": ["none", "ragged", "extreme"],
    "softcap": [None, 5.0],
    "sinks": [False, True],
    "scale": [None, -0.2],
    "dropout_p": [0.0, 0.2],
    "layout": list(LAYOUTS),
    "dtype": [torch.bfloat16, torch.float16, torch.float32],
}


def case_of(row: dict[str, Any]) -> tuple[Case, torch.dtype]:
    row = dict(row)
    (q_heads, kv_heads), (q_len, kv_len), (head_dim, value_dim) = (
        row.pop(x) for x in ("heads", "sizes", "dims")
    )
    dtype = row.pop("dtype")
    shapes = {"q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    return Case(head_dim=head_dim, value_dim=value_dim, **shapes, **row), dtype


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_options(row, poisoned):
    case, dtype = case_of(row)
    inputs = case.build(dtype, "cuda")
    want = expected(inputs, keep_of(case, 11, "cuda"))
    torch.manual_seed(11)
    judge(ours(inputs), want, dtype, case)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_at_many_tiles(mask):
    case = Case(q_heads=4, q_len=700, kv_len=900, head_dim=64, mask=mask, causal=True)
    inputs = case.build(torch.bfloat16, "cuda")
    judge(ours(inputs), expected(inputs), torch.bfloat16, case)


@pytest.mark.parametrize("head_dim", [1, 8, 16, 20, 32, 40, 72, 80, 96, 112, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_head_dim(head_dim, dtype, poisoned):
    case = Case(batch=1, q_len=300, kv_len=333, head_dim=head_dim, causal=True)
    inputs = case.build(dtype, "cuda")
    judge(ours(inputs), expected(inputs), dtype, case)


@pytest.mark.parametrize("mask", ["none", "additive_rows", "bool_rows"])
@pytest.mark.parametrize(
    "dims", [(192, 128), (64, 256), (96, 20), (256, 16), (64, 32), (40, 24), (128, 32), (16, 64)], ids=str
)
def test_values_of_another_width(dims, mask, poisoned):
    case = Case(batch=1, q_len=300, kv_len=333, head_dim=dims[0], value_dim=dims[1], mask=mask)
    inputs = case.build(torch.bfloat16, "cuda")
    judge(ours(inputs), expected(inputs), torch.bfloat16, case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_layout(layout, dtype, poisoned):
    case = Case(q_len=500, kv_len=500, head_dim=64, layout=layout, causal=True)
    inputs = case.build(dtype, "cuda")
    got = ours(inputs)
    judge(got, expected(inputs), dtype, case)
    assert got["out"].transpose(1, 2).reshape(2, 500, 128).data_ptr() == got["out"].data_ptr()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unseen_keys_and_values_reach_nothing(poison, dtype, poisoned):
    case = Case(q_len=300, kv_len=700, head_dim=64, causal=True)
    inputs = case.build(dtype, "cuda")
    inputs.options["kv_lengths"] = torch.tensor([333, 0], device="cuda")
    want = expected(inputs)
    with torch.no_grad():
        for x in (inputs.k, inputs.v):
            x[0, :, 333:] = poison
            x[1] = poison
        for x in (inputs.q, inputs.dout, inputs.dlse):
            x[1] = poison
    got = ours(inputs)
    judge(got, want, dtype, case)
    for name in NAMES:
        assert not got[name][1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.999])
def test_dropout_mask_is_keep_mask_on_every_tile_shape(dropout_p, head_dim, dtype):
    """With equal scores and the identity as values, out shows the kept weights, Dv keys at a time."""
    batch, heads, q_len, kv_len = 2, 3, 300, 700
    q = torch.zeros(batch, heads, q_len, head_dim, device="cuda", dtype=dtype)
    k = torch.zeros(batch, heads, kv_len, head_dim, device="cuda", dtype=dtype)
    case = Case(batch=batch, q_heads=heads, q_len=q_len, kv_len=kv_len, dropout_p=dropout_p)
    keep = keep_of(case, 3, "cuda")
    assert keep is not None
    for start in range(0, kv_len, head_dim):
        v = torch.zeros(batch, heads, kv_len, head_dim, device="cuda", dtype=dtype)
        stop = min(start + head_dim, kv_len)
        v[:, :, torch.arange(start, stop), torch.arange(stop - start)] = 1.0
        torch.manual_seed(3)
        out = attention(q, k, v, dropout_p=dropout_p, backend="triton")
        assert torch.equal(out[..., : stop - start] != 0, keep[..., start:stop]), (start, stop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {}, {"q_heads": 8}, {"mask": "trained_keys"}, {"dropout_p": 0.2}, {"segments": "ids"}],
    ids=str,
)
def test_twenty_runs_give_the_same_bits(options, dtype):
    inputs = Case(q_len=1000, kv_len=1000, head_dim=64, **options).build(dtype, "cuda")

    def once() -> Result:
        torch.manual_seed(1)
        return ours(inputs, deterministic=True)

    first = once()
    for _ in range(19):
        for name, x in once().tensors.items():
            assert torch.equal(x, first[name]), name


def test_autocast_casts_as_sdpa_does():
    inputs = Case(q_len=256, kv_len=256, head_dim=64, causal=True).build(device="cuda")
    with torch.no_grad():
        for x in (inputs.q, inputs.k, inputs.v):
            x.copy_(x.bfloat16())
    with torch.autocast("cuda", torch.bfloat16):
        got = ours(inputs)
    assert got["out"].dtype == torch.bfloat16
    assert got["lse"].dtype == got["dq"].dtype == torch.float32
    judge(got, expected(inputs), torch.bfloat16)


def test_float64_is_float64_on_the_gpu_too():
    inputs = Case(q_len=100, kv_len=100, causal=True).build(torch.float64, "cuda")
    judge(run(attention, inputs, return_lse=True), expected(inputs), torch.float64)
    with pytest.raises(ValueError, match="float64"):
        attention(inputs.q, inputs.k, inputs.v, backend="triton")
