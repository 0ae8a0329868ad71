"""Which backend serves a call, and the reasons where one can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamattn import dispatch
from streamattn.dispatch import Backend, Masks, choose, unavailable, unsupported, unsupported_backward
from streamattn.pattern import UNBOUNDED

CPU = torch.device("cpu")
SEGMENTS = torch.zeros(1, 128, dtype=torch.int32)
LENGTHS = torch.ones(1, dtype=torch.int32)
PLAIN: dict[str, Any] = {
    "masks": Masks(),
    "scale": 0.25,
    "window_left": UNBOUNDED,
    "softcap": 0.0,
    "dropout_p": 0.0,
}


def qkv(
    head_dim: int = 16, value_dim: int = 16, *, q_len: int = 8, kv_len: int = 8, device: str = "cpu", **kwargs
):
    q = torch.empty(1, 2, q_len, head_dim, device=device, **kwargs)
    k = torch.empty(1, 2, kv_len, head_dim, device=device, **kwargs)
    return q, k, torch.empty(1, 2, kv_len, value_dim, device=device, **kwargs)


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.parametrize(
    ("shapes", "options", "want"),
    [
        ({}, {}, Backend.SDPA),
        ({"value_dim": 24}, {}, Backend.REFERENCE),
        ({}, {"softcap": 2.0}, Backend.REFERENCE),
        ({}, {"dropout_p": 0.1}, Backend.REFERENCE),
        ({"q_len": 0}, {}, Backend.REFERENCE),
        ({"kv_len": 0}, {}, Backend.REFERENCE),
        ({"dtype": torch.float64}, {}, Backend.SDPA),
    ],
)
def test_auto_on_the_cpu_is_pytorchs_fused_attention_where_it_can(shapes, options, want):
    assert choose(Backend.AUTO, *qkv(**shapes), **(PLAIN | options)) is want


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.SDPA])
def test_an_explicit_backend_is_taken(backend):
    assert choose(backend, *qkv(), **PLAIN) is backend


@pytest.mark.parametrize(
    ("backend", "shapes", "options", "reason"),
    [
        (Backend.SDPA, {"value_dim": 24}, {}, "16 and 24"),
        (Backend.SDPA, {}, {"softcap": 2.0}, "softcap"),
        (Backend.SDPA, {}, {"dropout_p": 0.1}, "dropout"),
        (Backend.SDPA, {"q_len": 0}, {}, "empty"),
        (Backend.SDPA, {"device": "meta"}, {}, "meta"),
        (Backend.TRITON, {}, {}, "NVIDIA GPU"),
        (Backend.TRITON, {"device": "meta"}, {}, "NVIDIA GPU"),
        (Backend.DECODE, {}, {}, "NVIDIA GPU"),
    ],
)
def test_a_backend_that_can_not_says_why_and_what_else(backend, shapes, options, reason):
    q, k, v = qkv(**shapes)
    said = unsupported(backend, q, k, v, **(PLAIN | options))
    assert said is not None
    assert reason in said
    with pytest.raises(ValueError, match=f"{backend.value}.*{reason}.*auto"):
        choose(backend, q, k, v, **(PLAIN | options))


def test_the_reference_serves_every_call():
    q, k, v = qkv(300, 7, dtype=torch.float64)
    assert (
        unsupported(Backend.REFERENCE, q, k, v, **(PLAIN | dict[str, Any](softcap=1.0, dropout_p=0.5)))
        is None
    )


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 257}, "257"),
        ({"value_dim": 300}, "300"),
        ({"q_len": 0}, "empty"),
    ],
)
def test_limits_of_triton_in_the_interpreter(shapes, reason, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    for backend in (Backend.TRITON, Backend.DECODE):
        assert unavailable(backend, CPU) is None
        said = unsupported(backend, *qkv(**shapes), **PLAIN)
        assert said is not None
        assert reason in said
        assert unsupported(backend, *qkv(256, 1), **PLAIN) is None


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"head_dim": 257}, None),
        ({"value_dim": 8192}, None),
        ({"head_dim": 256, "value_dim": 256}, "from 257 to 8192, got 256"),
        ({"head_dim": 300, "value_dim": 8193}, "from 257 to 8192, got 8193"),
        ({"head_dim": 300, "dtype": torch.bfloat16}, "bfloat16"),
        ({"head_dim": 300, "dtype": torch.float64}, "float64"),
        ({"head_dim": 300, "kv_len": 0}, "empty"),
    ],
    ids=str,
)
def test_limits_of_the_kernels_for_wide_heads(shapes, reason, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    said = unsupported(Backend.WIDE, *qkv(**shapes), **PLAIN)
    assert (said is None) if reason is None else (said is not None and reason in said)


@pytest.mark.parametrize(("capability", "serves"), [((7, 5), False), ((8, 6), True), ((9, 0), True)])
def test_wide_heads_need_an_ampere_gpu_or_the_interpreter(capability, serves, monkeypatch):
    assert unavailable(Backend.WIDE, CPU) is not None
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    assert (unavailable(Backend.WIDE, torch.device("cuda:0")) is None) == serves


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype", "want"),
    [
        (256, 256, torch.float16, Backend.TRITON),
        (257, 64, torch.float16, Backend.WIDE),
        (64, 512, torch.float32, Backend.WIDE),
        (512, 512, torch.float64, Backend.REFERENCE),
        (8193, 64, torch.float16, Backend.REFERENCE),
    ],
)
def test_auto_on_a_gpu_takes_the_kernels_for_wide_heads_above_256(
    head_dim, value_dim, dtype, want, monkeypatch
):
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    q, k, v = qkv(head_dim, value_dim, device="meta", dtype=dtype)
    options = PLAIN | dict[str, Any](softcap=2.0, dropout_p=0.1)
    assert choose(Backend.AUTO, q, k, v, **options) is want


def test_the_interpreter_changes_no_default(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(Backend.AUTO, *qkv(), **PLAIN) is Backend.SDPA


def test_triton_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    said = unavailable(Backend.TRITON, torch.device("cuda:0"))
    assert said is not None
    assert "pip install triton" in said
    on_cpu = unavailable(Backend.TRITON, CPU)
    assert on_cpu is not None
    assert "NVIDIA GPU" in on_cpu, "Triton would not help there"


def test_a_rocm_build_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for backend in (Backend.TRITON, Backend.HOPPER, Backend.DECODE):
        said = unavailable(backend, torch.device("cuda:0"))
        assert said is not None
        assert "NVIDIA GPU" in said
        assert "ROCm" in said
        on_cpu = unavailable(backend, CPU)
        assert on_cpu is not None
        assert on_cpu.endswith("the tensors are on CPU")


@pytest.mark.parametrize(("capability", "serves"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_older_than_ampere_are_refused(capability, serves, monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    said = unavailable(Backend.TRITON, torch.device("cuda:0"))
    assert (said is None) == serves
    if said is not None:
        assert "8.0" in said
        assert "7.5" in said


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((9, 0), (3, 6), None),
        ((9, 0), (3, 9), None),
        ((8, 0), (3, 6), "9.0"),
        ((10, 0), (3, 6), "9.0"),
        ((9, 0), (3, 5), "Triton 3.6 to 3.9, got 3.5"),
        ((9, 0), (3, 10), "Triton 3.6 to 3.9, got 3.10"),
    ],
)
def test_the_hopper_kernel_is_for_one_capability_and_some_tritons(capability, version, reason, monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    monkeypatch.setattr(dispatch, "_triton_version", lambda: version)
    said = unavailable(Backend.HOPPER, torch.device("cuda:0"))
    assert (said is None) if reason is None else (said is not None and reason in said)


def test_the_interpreter_runs_no_gluon(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    said = unavailable(Backend.HOPPER, CPU)
    assert said is not None
    assert "NVIDIA GPU" in said


@pytest.mark.parametrize(
    ("shapes", "options", "reason"),
    [
        ({}, {}, None),
        ({"q_len": 64}, {}, None),
        ({"head_dim": 256, "value_dim": 256}, {}, None),
        ({}, {"softcap": 1.0, "dropout_p": 0.1}, None),
        ({}, {"masks": Masks(attn_mask=torch.zeros(1, 1, 1, 1))}, "attn_mask"),
        ({}, {"masks": Masks(sinks=torch.zeros(2))}, "sinks"),
        ({}, {"masks": Masks(kv_lengths=LENGTHS)}, None),
        ({}, {"masks": Masks(kv_lengths=LENGTHS), "dropout_p": 0.1}, "dropout with kv_lengths"),
        ({}, {"masks": Masks(None, SEGMENTS, SEGMENTS), "dropout_p": 0.1}, None),
        ({}, {"masks": Masks(None, SEGMENTS, SEGMENTS[:])}, None),
        ({}, {"masks": Masks(None, SEGMENTS, SEGMENTS, LENGTHS)}, "both"),
        ({}, {"scale": 0.0}, "a scale above 2^-100"),
        ({}, {"scale": 1e-40}, "a scale above 2^-100"),
        ({"dtype": torch.float32}, {}, "float32"),
        ({"value_dim": 128}, {}, "64 and 128"),
        ({"head_dim": 68, "value_dim": 68}, {}, "multiple of 8"),
        ({"head_dim": 32, "value_dim": 32}, {}, "32"),
        ({"q_len": 63}, {}, "63"),
        ({"kv_len": 0}, {}, "empty"),
        ({"kv_len": 129}, {"window_left": 0}, "no query sees"),
        ({"kv_len": 129}, {"window_left": 1}, None),
    ],
    ids=str,
)
def test_what_the_hopper_kernel_takes(shapes, options, reason, monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    shapes = {"head_dim": 64, "value_dim": 64, "q_len": 128, "kv_len": 128, "dtype": torch.float16} | shapes
    said = unsupported(Backend.HOPPER, *qkv(**shapes), **(PLAIN | options))
    assert (said is None) if reason is None else (said is not None and reason in said)


def test_the_hopper_kernel_reads_whole_16_bytes(monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    q, _, v = qkv(64, 64, q_len=128, kv_len=128, dtype=torch.float16)
    store = torch.empty(2 * 128 * 68 + 8, dtype=torch.float16)
    for shift, row, head in ((1, 64, 128 * 64), (0, 68, 128 * 64), (0, 64, 0), (0, 64, 4)):
        x = store.as_strided((1, 2, 128, 64), (1, head, row, 1), shift)
        said = unsupported(Backend.HOPPER, q, x, v, **PLAIN)
        assert said is not None
        assert "16 bytes" in said
    aligned = store.as_strided((1, 2, 128, 64), (1, 64, 128, 1), 8)
    assert unsupported(Backend.HOPPER, q, aligned, v, **PLAIN) is None


def test_the_names_that_attention_takes():
    assert dispatch.BACKEND_NAMES == ("auto", "reference", "sdpa", "triton", "hopper", "decode", "wide")


@pytest.mark.parametrize(
    ("shapes", "options", "reason"),
    [
        ({}, {}, None),
        ({"q_len": 16, "dtype": torch.float32, "kv_len": 1}, {"softcap": 1.0, "scale": 0.0}, None),
        ({"head_dim": 7, "value_dim": 256, "dtype": torch.float16}, {"window_left": 0}, None),
        ({}, {"masks": Masks(None, SEGMENTS[:, :1], SEGMENTS, LENGTHS, torch.zeros(2))}, None),
        ({}, {"masks": Masks(attn_mask=torch.zeros(1, 1, 1, 128))}, None),
        ({}, {"masks": Masks(attn_mask=torch.zeros(1, 4, 1, 128))}, "head to head"),
        ({}, {"masks": Masks(attn_mask=torch.zeros(1, 1, 1, 128).expand(1, 4, 1, 128))}, None),
        ({"heads": 2}, {"masks": Masks(attn_mask=torch.zeros(1, 2, 1, 128))}, None),
        ({}, {"masks": Masks(kv_lengths=LENGTHS, block_table=SEGMENTS[:, :3])}, None),
        ({}, {"masks": Masks(kv_lengths=LENGTHS, block_table=SEGMENTS[:, :0])}, "empty"),
        ({"q_len": 17}, {}, "up to 16 queries, got 17"),
        ({"head_dim": 257}, {}, "257"),
        ({"dtype": torch.float64}, {}, "float64"),
        ({"kv_len": 0}, {}, "empty"),
        ({}, {"dropout_p": 0.1}, "dropout"),
    ],
    ids=str,
)
def test_what_the_decode_kernel_takes(shapes, options, reason, monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    sizes = {"heads": 4, "q_len": 1, "kv_len": 128, "dtype": torch.bfloat16, "device": "meta"} | shapes
    heads = sizes.pop("heads")
    q, k, v = qkv(**sizes)
    q = q[:, :1].expand(-1, heads, -1, -1)
    said = unsupported(Backend.DECODE, q, k, v, **(PLAIN | options))
    assert (said is None) if reason is None else (said is not None and reason in said)


@pytest.mark.parametrize("backend", [x for x in Backend if x not in (Backend.AUTO, Backend.DECODE)])
def test_who_reads_no_paged_cache_says_so(backend, monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    options: dict[str, Any] = PLAIN | {"masks": Masks(kv_lengths=LENGTHS, block_table=SEGMENTS[:, :3])}
    said = unsupported(backend, *qkv(64, 64, q_len=64, dtype=torch.float16), **options)
    assert (said is None) if backend is Backend.REFERENCE else (said is not None and "block_table" in said)


@pytest.mark.parametrize(
    ("q_len", "options", "want"),
    [
        (1, {}, Backend.DECODE),
        (16, {}, Backend.DECODE),
        (17, {}, Backend.TRITON),
        (64, {}, Backend.HOPPER),
        (1, {"dropout_p": 0.1}, Backend.TRITON),
        (1, {"masks": Masks(attn_mask=torch.zeros(1, 4, 1, 1))}, Backend.TRITON),
        (64, {"masks": Masks(sinks=LENGTHS)}, Backend.TRITON),
    ],
    ids=str,
)
def test_auto_on_a_gpu_goes_by_the_number_of_queries(q_len, options, want, monkeypatch):
    """Whatever the number of keys."""
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    for kv_len in (64, 5000):
        _, k, v = qkv(64, 64, kv_len=kv_len, dtype=torch.float16, device="meta")
        q = torch.empty(1, 4, q_len, 64, device="meta", dtype=torch.float16)
        assert choose(Backend.AUTO, q, k, v, **(PLAIN | options)) is want


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_what_the_hopper_backward_takes(head_dim):
    q = torch.empty(1, 4, 128, head_dim, device="meta", dtype=torch.bfloat16)
    for deterministic in (False, True):
        assert unsupported_backward(torch.empty_like(q), q, deterministic) is None


def test_the_hopper_backward_adds_in_order_up_to_128_columns():
    q = torch.empty(1, 4, 128, 136, device="meta", dtype=torch.bfloat16)
    assert unsupported_backward(torch.empty_like(q), q, False) is None
    assert "136" in (unsupported_backward(torch.empty_like(q), q, True) or "")


@pytest.mark.parametrize("way", ["start", "row", "head", "expanded", "columns"])
def test_the_hopper_backward_copies_dout_in_whole_words(way):
    q, _, _ = qkv(64, 64, q_len=128, kv_len=128, dtype=torch.bfloat16)
    dout = {
        "start": torch.empty(1, 2, 128, 72, dtype=torch.bfloat16)[..., 4:68],
        "row": torch.empty(1, 2, 128, 68, dtype=torch.bfloat16)[..., :64],
        "head": torch.empty(2 * 128 * 64 + 4, dtype=torch.bfloat16).as_strided(q.shape, (1, 8196, 64, 1)),
        "expanded": torch.empty(1, 1, 128, 64, dtype=torch.bfloat16).expand(q.shape),
        "columns": torch.empty(1, 2, 64, 128, dtype=torch.bfloat16).mT,
    }[way]
    reason = unsupported_backward(dout, q, False)
    assert reason is not None and "16 bytes" in reason
    assert unsupported_backward(torch.empty_like(q), q, False) is None
