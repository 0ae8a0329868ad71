"""What comes before and after the Hopper backward's main kernel, interpreted; formulas stand for that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from streamattn.kernels import hopper_backward
from streamattn.kernels.launch import launch
from tests.cases import Case, expected, judge, run
from tests.oracle import attend, visible_pairs

SCALE = 0.2


def as_added(dq: Tensor) -> Tensor:
    """A tile's dq [64, 64 * parts] in the order in which it is added up."""
    parts = [x.reshape(4, 2, 8, 8, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten() for x in dq.split(64, dim=1)]
    return torch.cat(parts)


def stand_in(causal: bool, q, k, v, dout, stats, sums, dk, dv) -> None:
    """The main kernel by formulas; rows that do not exist must have no weight."""
    batch, num_heads, q_len, head_dim = q.shape
    group = num_heads // k.shape[1]
    lse2, delta = stats.view(2, batch, num_heads, -1)
    assert (lse2[..., q_len:] == torch.inf).all()
    assert (delta[..., q_len:] == 0).all()
    assert (sums == 0).all()
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ keys.mT * (SCALE / torch.log(torch.tensor(2.0)))
    seen = visible_pairs(batch, q_len, k.shape[2], causal=causal)
    p = torch.where(seen, torch.exp2(s - lse2[..., :q_len, None]), 0.0)
    ds = p * (dout @ values.mT - delta[..., :q_len, None])
    dk.copy_((ds.mT @ q * SCALE).unflatten(1, (-1, group)).sum(2))
    dv.copy_((p.mT @ dout).unflatten(1, (-1, group)).sum(2))
    dq = torch.nn.functional.pad(ds @ keys, (0, 0, 0, lse2.shape[-1] - q_len))
    tiles = dq.reshape(-1, 64, head_dim)
    sums.copy_(torch.stack([as_added(tile) for tile in tiles]).view_as(sums))


@pytest.mark.parametrize("dlse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize(("head_dim", "layout"), [(64, "bthd"), (64, "fused"), (128, "bhtd")])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal"),
    [(64, 64, True), (100, 130, True), (130, 70, False), (200, 77, True), (130, 1, True), (1, 3, False)],
)
def test_gradients(q_len, kv_len, causal, head_dim, layout, dlse, monkeypatch):
    def standing_in(
        kernel: Any, key: Hashable, pointers: tuple[Any, ...], arguments: Callable[[], Any]
    ) -> None:
        if kernel is hopper_backward.hopper_bwd_kernel:
            assert arguments()[1]["CAUSAL"] == causal
            stand_in(causal, *pointers)
        else:
            launch(kernel, key, pointers, arguments)

    monkeypatch.setattr(hopper_backward, "launch", standing_in)
    monkeypatch.setattr(hopper_backward, "multiprocessor_count", lambda device: 132)
    monkeypatch.setattr(hopper_backward, "descriptor", lambda *args: None)  # of 16-bit numbers alone
    layout = layout if q_len == kv_len else "bthd"
    case = Case(
        q_heads=4, q_len=q_len, kv_len=kv_len, head_dim=head_dim, causal=causal, scale=SCALE, layout=layout
    )
    inputs = case.build()
    if not dlse:
        inputs.dlse.zero_()
    want = expected(inputs)
    got = run(attend, inputs)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    blind = max(q_len - kv_len, 0) if causal else 0
    out, lse, dout = got["out"].float(), got["lse"].float(), inputs.dout.clone()
    q = q.clone()
    q[:, :, :blind], dout[:, :, :blind] = torch.nan, torch.nan  # of no interest to anybody
    right = 0 if causal else q_len + kv_len  # which reaches past every key
    grads = hopper_backward.attention_backward(
        dout, inputs.dlse if dlse else None, q, k, v, out, lse, SCALE, right
    )
    got.tensors |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert got["dq"].transpose(1, 2).is_contiguous()
    assert (got["dq"][:, :, :blind] == 0).all()
    judge(got, want, torch.float32, case)
