"""`parallel.attention` on one process, the choice of a mode, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import streamattn
from streamattn import parallel
from streamattn.parallel import functional, gather
from streamattn.parallel.__main__ import main
from streamattn.parallel.functional import choose_mode
from streamattn.parallel.layout import Layout
from tests.parallel_cases import CAUSAL, EVERY_MODE, Case, error, several_processes
from tests.parallel_cases import one_process as expected_of


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one."""
    if not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def qkv(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape) for _ in range(3)]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_group_of_one(mode: str) -> None:
    for options in (CAUSAL, {"window_size": (4, 2), "segments": True} if mode != "ring" else {}):
        case = Case(f"{mode} alone", 21, 4, 2, options)
        assert error(several_processes(case), expected_of(case)) < 2e-6


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "rings"}, "mode must be one of auto, gather, ring, ulysses, replicated, got 'rings'"),
        ({"mode": "ring", "window_size": 4}, "full and causal attention, and got window_size; use mode="),
        ({"mode": "ring", "segment_ids": torch.zeros(1, 8, dtype=torch.int32)}, "got segment_ids"),
        ({"mode": "ring", "kv_lengths": torch.tensor([8]), "sinks": torch.zeros(2)}, "kv_lengths and sinks"),
        (
            {"mode": "ulysses", "segment_ids": tuple(torch.zeros(2, 1, 8, dtype=torch.int32))},
            "needs one segment_ids tensor",
        ),
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, "attn_mask is not served over several ranks"),
        ({"kv_lengths": torch.tensor([9])}, "kv_lengths must lie in"),
        ({"mode": "replicated", "seq_len": 7}, "k and v must hold seq_len=7 tokens, got 8"),
        ({"seq_len": 0}, "seq_len must be 1 or more, got 0"),
        ({"seq_len": 9}, "seq_len=9 over 1 ranks makes shards of 10 tokens, got 8"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
        ({"backend": "triton"}, "backend='triton' can't serve this call"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    q, k, v = qkv(1, 2, 8, 16)
    with pytest.raises(ValueError, match=message):
        parallel.attention(q, k, v, **options)


@pytest.mark.usefixtures("one_process")
def test_shapes_that_do_not_fit() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    with pytest.raises(ValueError, match="shards of one length, got 4 and 8 tokens"):
        parallel.attention(q[:, :, :4], k, v)
    with pytest.raises(ValueError, match="4-D here, got 3 dimensions"):
        parallel.attention(q[0], k[0], v[0])
    with pytest.raises(TypeError, match="must have one dtype"):
        parallel.attention(q, k, v.double())


@pytest.mark.usefixtures("one_process")
def test_differentiable_once() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 8, 16))
    (grad,) = torch.autograd.grad(parallel.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        (grad * q).sum().backward()


@pytest.mark.usefixtures("one_process")
def test_autocast_casts_as_attention_does() -> None:
    q, k, v = qkv(1, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel.attention(q, k, v).dtype == streamattn.attention(q, k, v).dtype == torch.bfloat16


@pytest.mark.usefixtures("one_process")
def test_kernels_get_what_they_were_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable backward takes lse for contiguous; kernels are compiled for seeds at whole 16 bytes."""
    seen = []

    def spy(
        dout: torch.Tensor, dlse: Any, q: torch.Tensor, k: Any, v: Any, out: Any, lse: Any, *rest: Any
    ) -> Any:
        seen.append((lse.is_contiguous(), lse.shape == q.shape[:3], rest[4].data_ptr() % 16))
        return torch.ops.streamattn.attention_backward(dout, dlse, q, k, v, out, lse, *rest)

    monkeypatch.setattr("streamattn.parallel.call._backward", spy)
    monkeypatch.setattr("streamattn.parallel.layout.rank_and_size", lambda group: (0, 2))
    q, k, v = (x.requires_grad_() for x in (*qkv(1, 2, 8, 16)[:1], *qkv(1, 2, 13, 16)[:2]))
    options: dict[str, Any] = {"mode": "replicated", "reduce_kv_grads": False, "dropout_p": 0.5}
    parallel.attention(q, k, v, **options, causal=True).sum().backward()
    assert seen == [(True, True, 0)] * 2


def test_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    q, k, v = qkv(1, 2, 8, 16)
    with pytest.raises(ValueError, match="no process group; launch with torchrun"):
        parallel.attention(q, k, v)


def test_the_program_needs_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main([]) == 2
    assert "torchrun --nproc-per-node 2 -m streamattn.parallel" in capsys.readouterr().err


def test_the_program_notices_half_a_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("RANK, WORLD_SIZE, MASTER_PORT, MASTER_ADDR: not set")


@pytest.mark.parametrize("words", [["--seq-len", "0"], ["--num-kv-heads", "0"], ["--num-kv-heads", "3"]])
def test_the_program_refuses_sizes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert (
        f"error: argument {words[0]}: expected 1" in (err := capsys.readouterr().err)
        or "a multiple of" in err
    )


@pytest.mark.usefixtures("one_process")
def test_the_program_passes_no_nan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-heads", "2", "--head-dim", "8", "--seq-len"]
    assert main([*sizes, "1", "--modes", "gather"]) == 0, "of one token dq and dk are 0"
    original = parallel.attention
    monkeypatch.setattr(parallel, "attention", lambda *x, **y: original(*x, **y) * torch.nan)
    assert main([*sizes, "9", "--modes", "gather"]) == 1
    assert "inf" in capsys.readouterr().out


def chosen(size: int, num_heads: int, num_kv_heads: int, length: int, ring_can: bool = True) -> str:
    """For shards of ``length`` tokens of head_dim 128 in bfloat16."""
    q, k = (
        torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta")
        for heads in (num_heads, num_kv_heads)
    )
    return choose_mode(q, k, k, Layout(0, size, size * length), ring_can)


def test_auto_gathers_until_another_mode_is_better() -> None:
    assert chosen(2, 32, 32, 16384) == "ulysses", "as many bytes"
    assert chosen(2, 32, 8, 65536) == "gather"
    assert chosen(4, 32, 8, 65536) == "gather"
    assert chosen(8, 32, 8, 65536) == "ulysses"
    assert chosen(16, 24, 24, 8192) == "gather", "24 heads are no multiple of 16"


def test_auto_minds_memory() -> None:
    """Keys and values of two of four groups of heads of the sequence: 4 GiB at 524,288 tokens of 32 heads."""
    length = functional.MAX_GATHERED_BYTES // (2 * 32 * 128 * 2 * 2 // gather.MAX_HEAD_GROUPS) // 4
    assert chosen(4, 32, 8, 4 * length) == "gather"
    assert chosen(4, 32, 8, 4 * length + 8) == "ulysses"
    assert chosen(3, 32, 32, 2 * length) == "ring"
    assert chosen(3, 32, 32, 2 * length, ring_can=False) == "gather"


def test_groups_of_heads_are_worth_a_message() -> None:
    def groups(heads: int, length: int) -> int:
        k = torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta")
        return gather.count_head_groups(k, k)

    assert [groups(32, length) for length in (1024, 4096, 16384, 65536)] == [1, 2, 4, 4]
    assert [groups(heads, 65536) for heads in (1, 2, 3, 5, 6, 8)] == [1, 2, 3, 1, 3, 4]
