"""Several documents in one row: they must not see each other."""

from __future__ import annotations

import pytest
import torch

from streamattn import attention
from tests.cases import Case, expected, judge, run


def ids_of(lengths: list[int], device: str) -> torch.Tensor:
    return (
        torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])
        .unsqueeze(0)
        .to(device)
    )


# inclusionAI/AReaL#1442: packed documents attended to each other
@pytest.mark.parametrize("causal", [False, True])
def test_perturbing_one_document_leaves_the_others_alone(causal, device, backend):
    lengths = [5, 9, 4]
    inputs = Case(batch=1, q_len=18, kv_len=18, causal=causal).build(device=device)
    inputs.options["segment_ids"] = ids_of(lengths, device)
    before = run(attention, inputs, return_lse=True, backend=backend)
    with torch.no_grad():
        for x in (inputs.q, inputs.k, inputs.v):
            x[:, :, 5:14] += 100.0
    after = run(attention, inputs, return_lse=True, backend=backend)
    others = [*range(5), *range(14, 18)]
    for name in ("out", "lse", "dq", "dk", "dv"):
        torch.testing.assert_close(after[name][:, :, others], before[name][:, :, others], rtol=0, atol=5e-6)
    assert not torch.allclose(after["lse"][:, :, 5:14], before["lse"][:, :, 5:14])


# inclusionAI/AReaL#1442: each packed document equals itself alone
@pytest.mark.parametrize("lengths", [[1, 1, 1], [7], [3, 300, 1, 20], [64, 64, 64]], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": 3}], ids=str)
def test_packed_documents_equal_documents_alone(lengths, options, device, backend):
    total = sum(lengths)
    inputs = Case(batch=1, q_heads=4, q_len=total, kv_len=total, **options).build(device=device)
    packed = run(attention, inputs, segment_ids=ids_of(lengths, device), return_lse=True, backend=backend)
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        cotangents = {"dout": inputs.dout[:, :, part], "dlse": inputs.dlse[:, :, part]}
        alone = inputs.mapped(lambda x, part=part: x[:, :, part], **cotangents)
        want = expected(alone)
        got = {name: packed[name][:, :, part] for name in want.tensors}
        judge(type(packed)(got), want, torch.float32, (lengths, n))
        start += n


# Dao-AILab/flash-attention#1537, #1713: zero-length documents
def test_documents_of_length_zero_are_just_absent(device, backend):
    inputs = Case(batch=1, q_len=6, kv_len=9, causal=False).build(device=device)
    q_ids = torch.tensor([[0, 0, 2, 2, 4, 4]], dtype=torch.int32, device=device)  # 1 and 3 have no queries
    kv_ids = torch.tensor([[0, 0, 0, 1, 3, 3, 4, 4, 4]], dtype=torch.int32, device=device)  # 2 has no keys
    inputs.options["segment_ids"] = (q_ids, kv_ids)
    got = run(attention, inputs, return_lse=True, backend=backend)
    assert not got["out"][:, :, 2:4].any()
    for name in ("dk", "dv"):
        assert not got[name][:, :, 3:6].any()
    judge(got, expected(inputs), torch.float32)


# inclusionAI/AReaL#1442: padding behind the documents neither sees nor is seen
def test_negative_segments_are_padding(device, backend):
    inputs = Case(q_len=12, kv_len=12, causal=True).build(device=device)
    ids = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [3] * 12], dtype=torch.int32, device=device)
    inputs.options["segment_ids"] = ids
    with torch.no_grad():
        for x in (inputs.k, inputs.v):
            x[0, :, 9:] = float("nan")
    got = run(attention, inputs, return_lse=True, backend=backend)
    assert not got["out"][0, :, 9:].any()
    judge(got, expected(inputs), torch.float32)


# inclusionAI/AReaL#1442: ids need no order; interleaved documents stay apart
def test_interleaved_documents(device, backend):
    inputs = Case(batch=1, q_len=300, kv_len=300, causal=True).build(device=device)
    inputs.options["segment_ids"] = (torch.arange(300, device=device) % 3).int().unsqueeze(0)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)


# huggingface/transformers#32487: three new tokens on a cache of five are one document
def test_new_tokens_on_a_cache_are_plain_causal(device, backend):
    inputs = Case(q_len=3, kv_len=8, causal=True).build(device=device)
    judge(run(attention, inputs, return_lse=True, backend=backend), expected(inputs), torch.float32)
