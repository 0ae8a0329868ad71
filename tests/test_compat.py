"""flash-attn's functions against a dense float64 reference written here from their documented meaning."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from streamattn import compat
from streamattn.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    first_key: int = 0,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [Tq, H, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv] to out [Tq, H, Dv] and lse [H, Tq]."""
    q_len, heads, dim = q.shape
    k_len, kv_heads, _ = k.shape
    q, k, v = q.double(), k.double(), v.double()
    of = torch.arange(heads) // (heads // kv_heads)
    scores = torch.einsum("ihd,jhd->hij", q, k[:, of]) * (
        dim**-0.5 if softmax_scale is None else softmax_scale
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    offset = torch.arange(k_len)[None, :] - torch.arange(q_len)[:, None] - (k_len - q_len)  # j - p
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * offset.abs()
    seen = (torch.arange(k_len) >= first_key).expand(q_len, k_len)
    left, right = window_size
    if causal:
        right = 0
    if left >= 0:
        seen = seen & (offset >= -left)
    if right >= 0:
        seen = seen & (offset <= right)
    blind = ~seen.any(1)
    weights = torch.softmax(scores.masked_fill(~seen & ~blind[:, None], -torch.inf), -1)
    weights = weights * (~blind[:, None])
    lse = torch.logsumexp(scores.masked_fill(~seen, -torch.inf), -1)
    return torch.einsum("hij,jhd->ihd", weights, v[:, of]), lse


def dense_batch(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, **options: Any):
    """[B, T, H, D] to out [B, Tq, H, Dv] and lse [B, H, Tq]."""
    batch = q.shape[0]
    per_row = [None] * batch if slopes is None else slopes.expand(batch, q.shape[2])
    rows = [dense(*row, slopes=s, **options) for *row, s in zip(q, k, v, per_row, strict=True)]
    return torch.stack([out for out, _ in rows]), torch.stack([lse for _, lse in rows])


def dense_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: list[int],
    k_lens: list[int],
    slopes: Tensor | None = None,
    **options,
):
    """[total, H, D] to out [total_q, H, Dv] and lse [H, total_q]; tokens past the last document give 0."""
    q_tail, k_tail = q.shape[0] - sum(q_lens), k.shape[0] - sum(k_lens)
    q_parts, k_parts, v_parts = (
        x.split([*lens, tail])[:-1]
        for x, lens, tail in ((q, q_lens, q_tail), (k, k_lens, k_tail), (v, k_lens, k_tail))
    )
    per_row = [None] * len(q_lens) if slopes is None else slopes.expand(len(q_lens), q.shape[1])
    rows = [
        dense(*row, slopes=s, **options) for *row, s in zip(q_parts, k_parts, v_parts, per_row, strict=True)
    ]
    outs = [out for out, _ in rows] + [torch.zeros(q_tail, q.shape[1], v.shape[2], dtype=torch.float64)]
    lses = [lse for _, lse in rows] + [torch.full((q.shape[1], q_tail), -torch.inf, dtype=torch.float64)]
    return torch.cat(outs), torch.cat(lses, dim=1)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def compare(got: tuple[Tensor, ...], want: tuple[Tensor, Tensor], *leaves: Tensor, tolerance=1e-11) -> None:
    """Values, softmax_lse and the gradients of both with respect to `leaves`."""
    (out, lse, probs), (want_out, want_lse) = got, want
    assert probs.numel() == 0
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=tolerance)
    weights = torch.randn_like(want_out), torch.randn_like(want_lse)

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        finite = torch.where(want_lse.isfinite(), lse.double(), 0.0)
        loss = (weights[0] * out.double()).sum() + (weights[1] * finite).sum()
        return torch.autograd.grad(loss, leaves, retain_graph=True)

    for ours, theirs in zip(gradients(out, lse), gradients(want_out, want_lse), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=20 * tolerance)


HEADS = [(4, 4), (6, 2), (4, 1)]
SIZES = [(7, 7), (3, 9), (9, 3), (1, 8)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"window_size": (3, -1), "softmax_scale": 0.4},
    {"causal": True, "window_size": (2, -1), "softcap": 1.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_flash_attn_func(heads, sizes, options):
    q, k, v = (
        normal(2, sizes[0], heads[0], 8),
        normal(2, sizes[1], heads[1], 8),
        normal(2, sizes[1], heads[1], 8),
    )
    got = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    compare(got, dense_batch(q, k, v, **options), q, k, v)
    assert torch.equal(flash_attn_func(q, k, v, **options), got[0])
    assert got[0].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype):
    q, k, v = (normal(2, 9, 2, 16, dtype=dtype) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    want, _ = dense_batch(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def test_options_stand_where_flash_attn_has_them():
    """By position, from dropout_p to return_attn_probs."""
    q, k, v = normal(2, 5, 2, 8), normal(2, 6, 2, 8), normal(2, 6, 2, 8)
    slopes = torch.tensor([0.5, 0.1])
    positional = (0.0, 0.3, True, (3, -1), 2.0, slopes, True, True)
    want = dense_batch(q, k, v, slopes, softmax_scale=0.3, causal=True, window_size=(3, -1), softcap=2.0)
    kv, cu_q, cu_k = torch.stack((k, v), 2), cumulative([5, 5]), cumulative([6, 6])
    compare(flash_attn_func(q, k, v, *positional), want, q, k, v)
    compare(flash_attn_kvpacked_func(q, kv, *positional), want, q, k, v)
    flat_q, flat_k, flat_v, flat_kv = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), kv.flatten(0, 1)
    bounds = (cu_q, cu_k, 5, 6)
    for out, lse, _ in (
        flash_attn_varlen_func(flat_q, flat_k, flat_v, *bounds, *positional),
        flash_attn_varlen_kvpacked_func(flat_q, flat_kv, *bounds, *positional),
    ):
        torch.testing.assert_close(out.view(2, 5, 2, 8), want[0], rtol=0, atol=1e-11)
        torch.testing.assert_close(lse.view(2, 2, 5).transpose(0, 1), want[1], rtol=0, atol=1e-11)
    square = torch.stack((q, k[:, :5], v[:, :5]), 2)
    want = dense_batch(
        *square.unbind(2), slopes=slopes, softmax_scale=0.3, causal=True, window_size=(3, -1), softcap=2.0
    )
    compare(flash_attn_qkvpacked_func(square, *positional), want, q, k, v)
    out, *_ = flash_attn_varlen_qkvpacked_func(square.flatten(0, 1), cu_q, 5, *positional)
    torch.testing.assert_close(out.view(2, 5, 2, 8), want[0], rtol=0, atol=1e-11)


OPTION_NAMES = [
    ("dropout_p", 0.0),
    ("softmax_scale", None),
    ("causal", False),
    ("window_size", (-1, -1)),
    ("softcap", 0.0),
    ("alibi_slopes", None),
    ("deterministic", False),
    ("return_attn_probs", False),
]


@pytest.mark.parametrize(
    ("name", "tensors", "more"),
    [
        ("flash_attn_func", "q k v", []),
        ("flash_attn_qkvpacked_func", "qkv", []),
        ("flash_attn_kvpacked_func", "q kv", []),
        (
            "flash_attn_varlen_func",
            "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
            [("block_table", None)],
        ),
        ("flash_attn_varlen_qkvpacked_func", "qkv cu_seqlens max_seqlen", []),
        (
            "flash_attn_varlen_kvpacked_func",
            "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
            [],
        ),
    ],
)
def test_names_and_defaults(name, tensors, more):
    parameters = inspect.signature(getattr(compat, name)).parameters.values()
    empty = inspect.Parameter.empty
    assert [(p.name, p.default) for p in parameters] == [
        *((tensor, empty) for tensor in tensors.split()),
        *OPTION_NAMES,
        *more,
    ]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)


def storages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Records the storages of q, k and v that reach the op."""
    seen: list[tuple[int, ...]] = []
    through = compat.attention

    def spy(q: Tensor, k: Tensor, v: Tensor, **options: Any):
        seen.append(tuple(x.untyped_storage().data_ptr() for x in (q, k, v)))
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        return through(q, k, v, **options)

    def spy_packed(qkv: Tensor, **options: Any):
        seen.append((qkv.untyped_storage().data_ptr(),) * 3)
        return through_packed(qkv, **options)

    through_packed = compat.packed_attention
    monkeypatch.setattr(compat, "attention", spy)
    monkeypatch.setattr(compat, "packed_attention", spy_packed)
    return seen


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_tensors_are_read_in_place(options, monkeypatch):
    seen = storages(monkeypatch)
    qkv = normal(2, 7, 3, 4, 8)
    compare(
        flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True),
        dense_batch(*qkv.unbind(2), **options),
        qkv,
    )
    q, kv = normal(2, 3, 4, 8), normal(2, 7, 2, 2, 8)
    compare(
        flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True),
        dense_batch(q, *kv.unbind(2), **options),
        q,
        kv,
    )
    flat = normal(12, 3, 4, 8)
    lengths = [5, 0, 7]
    compare(
        flash_attn_varlen_qkvpacked_func(flat, cumulative(lengths), 7, **options, return_attn_probs=True),
        dense_varlen(*flat.unbind(1), q_lens=lengths, k_lens=lengths, **options),
        flat,
    )
    origin, flat_origin = qkv.untyped_storage().data_ptr(), flat.untyped_storage().data_ptr()
    kv_origin = kv.untyped_storage().data_ptr()
    assert seen == [
        (origin,) * 3,
        (q.untyped_storage().data_ptr(), kv_origin, kv_origin),
        (flat_origin,) * 3,
    ]


DOCUMENTS = [
    ([4, 6, 3], [4, 6, 3]),
    ([4, 0, 6, 0], [4, 0, 6, 0]),
    ([0, 5], [3, 5]),
    ([2, 5, 1, 3], [6, 2, 4, 0]),
    ([1, 1, 1], [4, 9, 2]),
    ([8], [3]),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_flash_attn_varlen_func(heads, lengths, options):
    q_lens, k_lens = lengths
    q = normal(sum(q_lens), heads[0], 8)
    k, v = normal(sum(k_lens), heads[1], 8), normal(sum(k_lens), heads[1], 12)
    bounds = (cumulative(q_lens), cumulative(k_lens), max(q_lens), max(k_lens))
    got = flash_attn_varlen_func(q, k, v, *bounds, **options, return_attn_probs=True)
    compare(got, dense_varlen(q, k, v, q_lens, k_lens, **options), q, k, v)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_tensor_of_bounds_and_two_equal_ones_mean_the_same(options):
    lengths, bounds = [4, 0, 7], cumulative([4, 0, 7])
    q, k, v = normal(11, 4, 8), normal(11, 2, 8), normal(11, 2, 8)
    one = flash_attn_varlen_func(q, k, v, bounds, bounds, 7, 7, **options)
    two = flash_attn_varlen_func(q, k, v, bounds, bounds.clone(), 7, 7, **options)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    got = flash_attn_varlen_func(q, k, v, bounds, bounds, 7, 7, **options, return_attn_probs=True)
    compare(got, dense_varlen(q, k, v, lengths, lengths, **options), q, k, v)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("totals", [(12, 12), (13, 12), (10, 15)], ids=str)
def test_tokens_of_no_document_give_nothing(same, totals):
    lengths, bounds = [4, 6], cumulative([4, 6])
    q, k, v = (normal(total, 2, 8) for total in (totals[0], totals[1], totals[1]))
    other = bounds if same else bounds.clone()
    got = flash_attn_varlen_func(q, k, v, bounds, other, 6, 6, causal=True, return_attn_probs=True)
    compare(got, dense_varlen(q, k, v, lengths, lengths, causal=True), q, k, v)


def test_documents_may_start_after_the_first_token():
    q, k, v = normal(9, 2, 8), normal(9, 2, 8), normal(9, 2, 8)
    bounds = torch.tensor([2, 5, 9], dtype=torch.int32)
    for other in (bounds, bounds.clone()):
        out = flash_attn_varlen_func(q, k, v, bounds, other, 4, 4, causal=True)
        want, _ = dense_varlen(q[2:], k[2:], v[2:], [3, 4], [3, 4], causal=True)
        torch.testing.assert_close(out[2:], want, rtol=0, atol=1e-11)
        assert not out[:2].any()


@pytest.mark.parametrize("lengths", [[4, 6], [6, 4]], ids=str)
def test_a_nan_stays_in_its_document_where_documents_are_padded(lengths):
    q, k, v = normal(10, 2, 8), normal(10, 2, 8), normal(10, 2, 8)
    bounds = cumulative(lengths)
    first = lengths[0]
    with torch.no_grad():
        for x in (q, k, v):
            x[:first] = torch.nan
    out = flash_attn_varlen_func(q, k, v, bounds, bounds.clone(), 6, 6, window_size=(4, 2))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert out[:first].isnan().all()
    for x in (out, *grads):
        assert x[first:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_lens", "k_lens"), [([], []), ([0, 0], [0, 0]), ([3, 2], [0, 0]), ([0, 0], [3, 1])], ids=str
)
def test_nothing_to_attend(q_lens, k_lens, causal):
    q = normal(sum(q_lens), 2, 8)
    k, v = normal(sum(k_lens), 2, 8), normal(sum(k_lens), 2, 8)
    bounds = (cumulative(q_lens), cumulative(k_lens), max(q_lens, default=0), max(k_lens, default=0))
    for slopes in (None, torch.ones(2)):
        out = flash_attn_varlen_func(q, k, v, *bounds, causal=causal, alibi_slopes=slopes)
        assert out.shape == q.shape
        assert not out.any()
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}], ids=str)
@pytest.mark.parametrize("sloped", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("longest", [0, torch.tensor(0)], ids=str)
def test_tokens_beside_empty_documents(longest, same, sloped, options):
    """No document has a query, or none a key, and the longest has none either."""
    empty, filled = torch.zeros(3, dtype=torch.int32), cumulative([2, 1])
    slopes = torch.rand(2, 2, dtype=torch.float64) if sloped else None
    q, k, v = normal(3, 2, 8), normal(3, 2, 8), normal(3, 2, 8)
    if same:
        calls: list[Any] = [(empty, empty, longest, longest)]
    else:
        calls = [
            (empty, empty.clone(), longest, longest),
            (empty, filled, longest, 2),
            (filled, empty, 2, longest),
        ]
    for bounds in calls:
        out, lse, _ = flash_attn_varlen_func(
            q, k, v, *bounds, **options, alibi_slopes=slopes, return_attn_probs=True
        )
        assert torch.equal(out, torch.zeros(3, 2, 8, dtype=torch.float64))
        assert torch.equal(lse, torch.full((2, 3), -torch.inf, dtype=lse.dtype))
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(("q_lens", "k_lens"), [([2, 5], [0, 0]), ([0, 0], [2, 5]), ([], [])], ids=str)
def test_slopes_of_documents_that_are_empty(q_lens, k_lens):
    """Slopes for each document, [B, H], are served, and get gradients of 0, where no key is seen."""
    q = normal(sum(q_lens) if q_lens else 3, 2, 8)  # tokens of no document
    k, v = normal(sum(k_lens), 2, 8), normal(sum(k_lens), 2, 8)
    slopes = normal(len(q_lens), 2)
    bounds = (cumulative(q_lens), cumulative(k_lens), max(q_lens, default=0), max(k_lens, default=0))
    out = flash_attn_varlen_func(q, k, v, *bounds, alibi_slopes=slopes)
    assert torch.equal(out, torch.zeros_like(q))
    grads = torch.autograd.grad(out.sum(), (q, k, v, slopes))
    assert [g.shape for g in grads] == [x.shape for x in (q, k, v, slopes)]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 2.0, "window_size": (3, 2)}], ids=str)
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi(per_sequence, options):
    q, k, v = normal(3, 5, 4, 8), normal(3, 8, 2, 8), normal(3, 8, 2, 8)
    slopes = torch.rand((3, 4) if per_sequence else 4, dtype=torch.float64)
    got = flash_attn_func(q, k, v, alibi_slopes=slopes, **options, return_attn_probs=True)
    compare(got, dense_batch(q, k, v, slopes, **options), q, k, v)
    q_lens, k_lens = [3, 0, 6], [3, 5, 4]
    q, k, v = normal(9, 4, 8), normal(12, 2, 8), normal(12, 2, 8)
    bounds = (cumulative(q_lens), cumulative(k_lens), 6, 5)
    got = flash_attn_varlen_func(q, k, v, *bounds, alibi_slopes=slopes, **options, return_attn_probs=True)
    compare(got, dense_varlen(q, k, v, q_lens, k_lens, slopes, **options), q, k, v)


@pytest.mark.parametrize("call", ["func", "varlen", "padded"])
def test_dropout(call):
    """Drawn by torch's generator, of the asked share, rescaled, and the same forward and backward."""

    def run(v: Tensor) -> Tensor:
        q, k = torch.zeros(2, 300, 2, 8), torch.zeros(2, 300, 2, 8)
        if call == "func":
            return flash_attn_func(q, k, v, 0.25)
        bounds = cumulative([300, 300])
        other = bounds if call == "varlen" else bounds.clone()
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        return flash_attn_varlen_func(q, k, v, bounds, other, 300, 300, 0.25, window_size=(300, 300))

    v = torch.ones(2, 300, 2, 8, requires_grad=True)
    torch.manual_seed(1)
    first = run(v)
    second = run(v)
    torch.manual_seed(1)
    again = run(v)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert abs(float(first.detach().mean()) - 1.0) < 0.01
    assert float(first.detach().std()) > 0.01
    # out is linear in v, so its gradient gives the output back only if the mask is the same
    (grad,) = torch.autograd.grad(first.sum(), v)
    torch.testing.assert_close((grad * v).sum(), first.sum(), rtol=1e-4, atol=0)


def test_deterministic_is_passed_on(monkeypatch):
    asked = []
    through = compat.attention
    monkeypatch.setattr(
        compat, "attention", lambda *a, **o: (asked.append(o["deterministic"]), through(*a, **o))[1]
    )
    q = normal(1, 3, 1, 8)
    flash_attn_func(q, q, q, deterministic=True)
    flash_attn_func(q, q, q)  # torch's flag decides
    assert asked == [True, None]


@torch._dynamo.config.patch(capture_scalar_outputs=True)  # monkeypatch would leave it hidden
def test_a_longest_length_found_inside_a_graph_is_not_looked_at():
    q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
    bounds = cumulative([4, 6])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        longest: Any = bounds.diff().max().item()
        return flash_attn_varlen_func(q, k, v, bounds, bounds.clone(), longest, longest, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


def packed_call(bounds: Tensor, other: Tensor) -> Callable[..., Any]:
    return lambda q, k, v: flash_attn_varlen_func(q, k, v, bounds, other, 6, 6, causal=True)


@pytest.mark.parametrize("same", [True, False])
def test_varlen_reads_no_value_on_the_host(same):
    """One graph: a value that had to be known on the host would break it."""
    q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
    bounds = cumulative([4, 6])
    call = packed_call(bounds, bounds if same else bounds.clone())
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), call(q, k, v))


@pytest.mark.parametrize("same", [True, False])
def test_the_longest_lengths_may_be_tensors(same):
    """As transformers hands them to its attention functions."""
    q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
    bounds = cumulative([4, 6])
    other = bounds if same else bounds.clone()
    longest: Any = torch.tensor(6)
    got = flash_attn_varlen_func(q, k, v, bounds, other, longest, longest, causal=True)
    assert torch.equal(got, flash_attn_varlen_func(q, k, v, bounds, other, 6, 6, causal=True))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse_packed_tensors_are_refused_by_name(requires_grad):
    qkv = torch.randn(2, 7, 3, 4, 8, requires_grad=requires_grad).to_sparse()
    with pytest.raises(TypeError, match="q must be a dense tensor"):
        flash_attn_qkvpacked_func(qkv)
