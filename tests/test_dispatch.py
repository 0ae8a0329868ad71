"""Which backend serves a call, and the reasons where one can't."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamattn import dispatch
from streamattn.dispatch import Backend, choose, unavailable, unsupported

CPU = torch.device("cpu")
PLAIN: dict[str, Any] = {"softcap": 0.0, "dropout_p": 0.0}


def qv(
    head_dim: int = 16, value_dim: int = 16, *, q_len: int = 8, kv_len: int = 8, device: str = "cpu", **kwargs
):
    q = torch.empty(1, 2, q_len, head_dim, device=device, **kwargs)
    return q, torch.empty(1, 2, kv_len, value_dim, device=device, **kwargs)


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
    assert choose(Backend.AUTO, *qv(**shapes), **(PLAIN | options)) is want


@pytest.mark.parametrize("backend", [Backend.REFERENCE, Backend.SDPA])
def test_an_explicit_backend_is_taken(backend):
    assert choose(backend, *qv(), **PLAIN) is backend


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
    ],
)
def test_a_backend_that_can_not_says_why_and_what_else(backend, shapes, options, reason):
    q, v = qv(**shapes)
    said = unsupported(backend, q, v, **(PLAIN | options))
    assert said is not None
    assert reason in said
    with pytest.raises(ValueError, match=f"{backend.value}.*{reason}.*auto"):
        choose(backend, q, v, **(PLAIN | options))


def test_the_reference_serves_every_call():
    q, v = qv(300, 7, dtype=torch.float64)
    assert unsupported(Backend.REFERENCE, q, v, softcap=1.0, dropout_p=0.5) is None


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
    assert unavailable(Backend.TRITON, CPU) is None
    said = unsupported(Backend.TRITON, *qv(**shapes), **PLAIN)
    assert said is not None
    assert reason in said
    assert unsupported(Backend.TRITON, *qv(256, 1), **PLAIN) is None


def test_the_interpreter_changes_no_default(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(Backend.AUTO, *qv(), **PLAIN) is Backend.SDPA


def test_triton_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    said = unavailable(Backend.TRITON, torch.device("cuda:0"))
    assert said is not None
    assert "pip install triton" in said
    on_cpu = unavailable(Backend.TRITON, CPU)
    assert on_cpu is not None
    assert "NVIDIA GPU" in on_cpu, "Triton would not help there"


@pytest.mark.parametrize(("capability", "serves"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_older_than_ampere_are_refused(capability, serves, monkeypatch):
    monkeypatch.setattr(dispatch, "_has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "_capability", lambda index: capability)
    said = unavailable(Backend.TRITON, torch.device("cuda:0"))
    assert (said is None) == serves
    if said is not None:
        assert "8.0" in said
        assert "7.5" in said


def test_every_name_is_a_backend():
    assert set(dispatch.BACKEND_NAMES) == {backend.value for backend in Backend}
    assert {"auto", "reference", "sdpa", "triton"} <= set(dispatch.BACKEND_NAMES)
