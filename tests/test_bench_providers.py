"""Each provider's call is right on the CPU where it can run there; absent ones say why."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

import streamattn
from streamattn import attention
from streamattn.bench import providers
from streamattn.bench.cases import Case
from streamattn.bench.gate import Gate
from streamattn.bench.providers import PROVIDERS, Unsupported, find
from streamattn.dispatch import Backend

CPU = torch.device("cpu")
CASE = Case("sweep", "float32", 2, 4, 2, 64, 16, True)
PATTERNS = [
    CASE,
    replace(CASE, causal=False),
    replace(CASE, num_kv_heads=4),
    replace(CASE, window=5),
    replace(CASE, document=16),
]


def judge(name: str, case: Case) -> None:
    provider = PROVIDERS[name]()
    gate = Gate(case, case.tensors(CPU))
    with provider.around():
        gate.check(provider.bind, provider.bind(case, CPU), backward=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: case.label)
@pytest.mark.parametrize(
    "name", ["streamattn", "sdpa_flash", "sdpa_default", "flex", "eager", "eager_compiled"]
)
def test_calls_are_right(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    if name.startswith("sdpa") and not case.plain:
        with pytest.raises(Unsupported, match="but as a mask"):
            judge(name, case)
    elif name.startswith("eager") and not case.plain:
        with pytest.raises(Unsupported, match="not asked for patterns"):
            judge(name, case)
    elif name == "flex":
        provider, gate = PROVIDERS[name](), Gate(case, case.tensors(CPU))
        gate.check(provider.bind, provider.bind(case, CPU), backward=False)  # it has no backward on a CPU
    else:
        judge(name, case)


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_backend_of_sdpa_without_a_kernel_is_unsupported(name: str) -> None:
    with pytest.raises(Unsupported, match="has no kernel for it here"):
        judge(name, replace(CASE, num_kv_heads=4))


def test_other_errors_of_sdpa_are_not_taken_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> Tensor:
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
    with pytest.raises(RuntimeError, match="misaligned"):
        judge("sdpa_flash", CASE)


def test_the_version_is_that_of_the_code_that_runs() -> None:
    assert PROVIDERS["streamattn"]().version == f"streamattn {streamattn.__version__}"


def test_a_backend_that_needs_a_gpu_says_so_before_it_is_called() -> None:
    with pytest.raises(Unsupported, match="NVIDIA GPU"):
        PROVIDERS["streamattn-portable"]().bind(CASE, CPU)


def test_a_backend_that_can_not_serve_wide_heads_says_so_before_it_is_called() -> None:
    with pytest.raises(Unsupported, match="256"):
        PROVIDERS["streamattn-portable"]().bind(replace(CASE, head_dim=512), torch.device("cuda"))


def flash_package(name: str, monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    """A module with FlashAttention-3's functions, computed by the reference."""
    module = ModuleType(name)

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = attention(q, k, v, causal=causal, window_size=window_size).transpose(1, 2)
        return (out, None) if with_lse else out

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False
    ):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q[-1] == q.shape[0]
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
        assert int(cu_seqlens_k.diff().max()) == max_seqlen_k
        ends = cu_seqlens_q.tolist()
        parts = [
            flash_attn_func(*(x[None, start:end] for x in (q, k, v)), causal=causal)
            for start, end in pairwise(ends)
        ]
        return torch.cat([part[0][0] if with_lse else part[0] for part in parts])

    vars(module).update(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: case.label)
@pytest.mark.parametrize(
    ("provider", "package", "with_lse"),
    [
        ("fa3", "flash_attn_interface", True),
        ("fa3", "fa3_fwd_interface", False),
        ("fa4", "flash_attn.cute", True),
    ],
)
def test_flash_attention_is_called_rightly(
    provider: str, package: str, with_lse: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_package(package, monkeypatch, with_lse)
    judge(provider, case)


@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: case.label)
def test_xformers_is_called_rightly(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    module, package = ModuleType("xformers.ops"), ModuleType("xformers")

    class LowerTriangularMask:
        pass

    def memory_efficient_attention(q, k, v, attn_bias, p):
        assert p == 0.0
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention(q, k, v, causal=isinstance(attn_bias, LowerTriangularMask)).transpose(1, 2)

    vars(module).update(
        LowerTriangularMask=LowerTriangularMask, memory_efficient_attention=memory_efficient_attention
    )
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", module)
    if not case.plain or case.num_heads != case.num_kv_heads:
        with pytest.raises(Unsupported, match="not asked for"):
            judge("xformers", case)
    else:
        judge("xformers", case)


@pytest.mark.parametrize("case", PATTERNS, ids=lambda case: case.label)
def test_cupy_is_called_rightly(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its sister numpy, which shares the names and lives on the CPU."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    if not case.plain or case.num_heads != case.num_kv_heads:
        with pytest.raises(Unsupported, match="not asked for"):
            judge("cupy", case)
        return
    judge("cupy", case)
    judge("cupy", replace(case, causal=not case.causal, dtype="float16"))
    with pytest.raises(Unsupported, match="no bfloat16"):
        judge("cupy", replace(case, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("name", "backend"), [("streamattn", "sdpa"), ("sdpa_default", "flash"), ("sdpa_cudnn", "cudnn")]
)
def test_what_serves_a_call_is_told(name: str, backend: str) -> None:
    provider = PROVIDERS[name]()
    assert provider.backend is not None
    q, k, v, _ = CASE.tensors(CPU)
    assert {provider.backend(CASE, q, k, v, backward) for backward in (False, True)} == {backend}
    assert provider.named == (name == "sdpa_cudnn"), "the others may choose"
    if name == "streamattn":
        assert provider.backend(replace(CASE, dropout_p=0.1), q, k, v, False) == "reference"


@pytest.mark.parametrize(
    ("forward", "backward"), [(Backend.HOPPER, "hopper"), (Backend.DECODE, "triton"), (Backend.WIDE, "wide")]
)
def test_a_forward_for_decode_has_another_backward(
    forward: Backend, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "choose", lambda *arguments: forward)
    served = PROVIDERS["streamattn"]().backend
    assert served is not None
    q, k, v, _ = CASE.tensors(CPU)
    assert served(CASE, q, k, v, False) == forward.value
    assert served(CASE, q, k, v, True) == backward


def test_eager_is_right_in_half_precision_and_compiled_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    resets: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    for dtype in ("bfloat16", "float16"):
        judge("eager_compiled", replace(CASE, dtype=dtype, seq_len=256, head_dim=64))
    assert len(resets) == 2


@pytest.mark.parametrize("name", ["fa3", "fa4", "flex"])
def test_no_dropout_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flash_package("flash_attn_interface", monkeypatch, False)
    flash_package("flash_attn.cute", monkeypatch, False)
    with pytest.raises(Unsupported, match="it has no dropout"):
        PROVIDERS[name]().bind(replace(CASE, dropout_p=0.1), CPU)


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    class Finder:
        @staticmethod
        def find_spec(name: str, path=None, target=None):
            if name in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


def test_absent_peers_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "flash_attn_interface", "fa3_fwd_interface", "flash_attn", "xformers", "cupy")
    found, absent = find(list(PROVIDERS))
    assert set(absent) == {"fa3", "fa4", "xformers", "cupy"}
    assert set(found) == set(PROVIDERS) - set(absent)
    assert (
        absent["fa3"] == "no module flash_attn_interface or fa3_fwd_interface; pip install fa3-fwd brings it"
    )
    assert "flash-attn-4" in absent["fa4"]


def test_a_peer_that_fails_to_load_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('undefined symbol: x')\n")
    (tmp_path / "fa3_fwd_interface.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    assert find(["fa3"])[1] == {"fa3": "flash_attn_interface can't be imported: OSError: undefined symbol: x"}
    hide(monkeypatch, "flash_attn_interface")
    assert find(["fa3"])[1] == {"fa3": "fa3_fwd_interface misses no_such_thing"}


def test_flex_compiles_afresh_for_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict] = []
    resets: list[int] = []

    def compile(function, **options):
        compiled.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(len(compiled)))
    provider = PROVIDERS["flex"]()
    for case in PATTERNS[:3]:
        provider.bind(case, CPU)
    assert compiled == [{"dynamic": False}] * 3
    assert resets == [0, 1, 2]


def test_flex_skips_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern reaches it as blocks to visit, not as a score that is hidden."""
    masks: list[flex_attention.BlockMask] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, *, block_mask, enable_gqa: bool) -> Tensor:
        masks.append(block_mask)
        return q

    monkeypatch.setattr(torch, "compile", lambda function, **options: noting)
    for window in (None, 128):
        case = replace(CASE, seq_len=512, window=window)
        q, k, v, _ = case.tensors(CPU)
        PROVIDERS["flex"]().bind(case, CPU)(q, k, v)
    causal, window = (mask.to_dense().sum().item() for mask in masks)
    assert (causal, window) == (10, 7)
