"""What flash-attn's functions refuse, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamattn.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

Q = torch.zeros(2, 4, 2, 8)
NONSENSE: Any = 3
FLAT, BOUNDS = torch.zeros(8, 2, 8), torch.tensor([0, 3, 8], dtype=torch.int32)
PAGES = torch.zeros(2, 1, dtype=torch.int32)
NONE = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: flash_attn_func(Q[0], Q, Q), ValueError, r"q must be \[B, T, H, D\], got shape \[4, 2, 8\]"),
        (lambda: flash_attn_func(NONSENSE, Q, Q), TypeError, "q must be a torch.Tensor"),
        (lambda: flash_attn_func(Q, Q[:, :, :1].expand(2, 4, 3, 8), Q), ValueError, "heads|agree"),
        (lambda: flash_attn_func(Q, Q, Q, window_size=NONSENSE), TypeError, r"pair .*\(W - 1, 0\)"),
        (lambda: flash_attn_func(Q, Q, Q, softcap=-1.0), ValueError, "softcap"),
        (lambda: flash_attn_func(Q, Q, Q, 1.0), ValueError, "dropout_p"),
        (lambda: flash_attn_func(Q, Q, Q, 0.1, return_attn_probs=True), NotImplementedError, "S_dmask"),
        (lambda: flash_attn_func(Q, Q, Q, alibi_slopes=torch.ones(3)), ValueError, r"\[2\] or \[2, 2\]"),
        (lambda: flash_attn_qkvpacked_func(Q), ValueError, r"qkv must be \[B, T, 3, H, D\]"),
        (
            lambda: flash_attn_qkvpacked_func(torch.zeros(2, 4, 2, 2, 8)),
            ValueError,
            r"3, H, D\], got shape \[2, 4, 2, 2, 8\]",
        ),
        (lambda: flash_attn_kvpacked_func(Q, Q), ValueError, r"kv must be \[B, T, 2, H, D\]"),
        (
            lambda: flash_attn_varlen_qkvpacked_func(FLAT, BOUNDS, 5),
            ValueError,
            r"qkv must be \[total, 3, H, D\]",
        ),
        (
            lambda: flash_attn_varlen_func(Q, FLAT, FLAT, BOUNDS, BOUNDS, 5, 5),
            ValueError,
            r"q must be \[total, H, D\]",
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, BOUNDS.float(), BOUNDS, 5, 5),
            TypeError,
            "cu_seqlens_q must be an int32 or int64 tensor, got torch.float32",
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, BOUNDS, NONSENSE, 5, 5),
            TypeError,
            "cu_seqlens_k .* int",
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, BOUNDS[None], BOUNDS, 5, 5),
            ValueError,
            r"\[B \+ 1\], got \[1, 3\]",
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, BOUNDS, BOUNDS[:2], 5, 5),
            ValueError,
            "same length B . 1, got 3 and 2",
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, BOUNDS, BOUNDS + 1, 5, 5),
            ValueError,
            r"cu_seqlens_k .*\[0, 8\].* got \[1, 4, 9\]",
        ),
        (
            lambda: flash_attn_varlen_func(
                FLAT, FLAT, FLAT, BOUNDS, torch.tensor([0, 3, 2], dtype=torch.int32), 5, 5
            ),
            ValueError,
            "must not fall",
        ),
        *(
            (
                lambda k=k, v=v: flash_attn_varlen_func(FLAT, k, v, NONE, NONE, 0, 0),
                ValueError,
                f"k and v must have as many tokens, got {k.shape[0]} and {v.shape[0]}",
            )
            for k, v in ((FLAT[:7], FLAT), (FLAT, FLAT[:0]))
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, NONE, NONE, 0, 0, alibi_slopes=torch.ones(3, 2)),
            ValueError,
            r"alibi_slopes must have shape \[2\] or \[1, 2\], got \[3, 2\]",
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, BOUNDS, BOUNDS, 5, 4),
            ValueError,
            "cu_seqlens_k has 5 tokens, more than the 4",
        ),
        (
            lambda: flash_attn_varlen_func(FLAT, FLAT, FLAT, BOUNDS, BOUNDS, 5, 5, block_table=BOUNDS),
            NotImplementedError,
            "paged cache.*flash_attn_with_kvcache",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, block_table=BOUNDS),
            ValueError,
            r"block_table must have shape \[2, pages of a sequence\], got \[3\]",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, block_table=BOUNDS[None].long()),
            TypeError,
            "block_table must be an int32 tensor, got torch.int64",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, block_table=PAGES, cache_batch_idx=PAGES[:, 0]),
            ValueError,
            "block_table and cache_batch_idx both",
        ),
        *(
            (
                lambda page=page: flash_attn_with_kvcache(
                    Q, Q, Q, Q, Q, cache_seqlens=0, block_table=torch.full_like(PAGES, page)
                ),
                ValueError,
                f"must name a page of the cache, 0 to 1, for each new token, got .*{page}",
            )
            for page in (-1, 99)
        ),
        (lambda: flash_attn_with_kvcache(Q, Q, Q, Q), ValueError, "k and v must be passed together"),
        (lambda: flash_attn_with_kvcache(Q, Q, Q, Q, Q), ValueError, "k needs cache_seqlens"),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q, Q, cache_seqlens=1),
            ValueError,
            r"room for 4 new tokens in a cache of 4, got \[1\]",
        ),
        (
            lambda: flash_attn_with_kvcache(
                Q, Q, Q, Q[:, :1], Q[:, :1], cache_seqlens=torch.tensor([3, 4], dtype=torch.int32)
            ),
            ValueError,
            r"room for 1 new tokens in a cache of 4, got \[3, 4\]",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=torch.ones(3, dtype=torch.int32)),
            ValueError,
            r"shape \[2\], got \[3\]",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q[:, :1, :1], Q[:, :1, :1], cache_seqlens=0),
            ValueError,
            r"k must have shape \[2, 1, 2, 8\], got \[2, 1, 1, 8\]",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q.half(), Q.half(), cache_seqlens=0),
            TypeError,
            "k must have its cache's dtype torch.float32, got torch.float16",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q[:, :1], Q[:, :1], cache_seqlens=torch.zeros(2)),
            TypeError,
            "cache_seqlens must hold int32 or int64, got torch.float32",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=[1, 2]),  # pyright: ignore[reportArgumentType]
            TypeError,
            "cache_seqlens must hold .*, got list",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, cache_batch_idx=BOUNDS),
            ValueError,
            r"cache_batch_idx must have shape \[2\], got \[3\]",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, cache_leftpad=NONSENSE),
            TypeError,
            "cache_leftpad must hold int32 or int64, got int",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, cache_leftpad=BOUNDS[:2].to("meta")),
            ValueError,
            "cache_leftpad must be on cpu, got meta",
        ),
        (
            lambda: flash_attn_with_kvcache(Q.half(), Q, Q, Q[:, :1], Q[:, :1], cache_seqlens=0),
            TypeError,
            "q must have the cache's dtype torch.float32, got torch.float16",
        ),
        (
            lambda: flash_attn_func(Q, Q, Q, alibi_slopes=NONSENSE),
            TypeError,
            "alibi_slopes must be .* got int",
        ),
        *(
            (
                lambda tables=tables: flash_attn_with_kvcache(
                    Q, Q, Q, Q[:, :1], Q[:, :1], *map(torch.zeros, tables), cache_seqlens=0
                ),
                ValueError,
                r"\[positions, R / 2\] with R of at most q's 8 and positions of at least the cache's 4, got",
            )
            for tables in [((3, 4), (3, 4)), ((4, 5), (4, 5)), ((4, 4), (4, 2)), ((2, 4, 4), (2, 4, 4))]
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, rotary_cos=Q[0, :, 0], rotary_sin=Q[0, :, 0]),
            ValueError,
            "rotary_cos needs new keys",
        ),
        (
            lambda: flash_attn_with_kvcache(Q, Q, Q, Q, Q, rotary_cos=Q[0, :, 0], cache_seqlens=0),
            ValueError,
            "rotary_cos and rotary_sin",
        ),
        *(
            (  # its last queries lie behind the cache
                lambda seen=seen: flash_attn_with_kvcache(
                    Q, Q, Q, Q[:, :1], Q[:, :1], *torch.ones(2, 6, 4), cache_seqlens=3, **seen
                ),
                ValueError,
                "a row for each place of q, the last of which is 6, got 6 rows; make them longer",
            )
            for seen in ({"causal": True}, {"window_size": (0, 0)})
        ),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_seqlens": 2},
        {"cache_seqlens": torch.zeros(2)},
        {"q": torch.ones(2, 3, 2, 8).half()},
        {"cache_leftpad": BOUNDS},
        {"cache_batch_idx": BOUNDS},
        {"rotary_cos": torch.ones(3, 4), "rotary_sin": torch.ones(3, 4)},
        {
            "q": torch.ones(2, 4, 2, 8),
            "causal": True,
            "rotary_cos": torch.ones(4, 4),
            "rotary_sin": torch.ones(4, 4),
        },
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_refused_call_leaves_the_cache_alone(wrong):
    k_cache, v_cache = torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    ones = torch.ones(2, 3, 2, 8)
    call: dict[str, Any] = {"q": ones, "k": ones, "v": ones, "cache_seqlens": 1, **wrong}
    with pytest.raises((TypeError, ValueError)):
        flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **call)
    assert not k_cache.any()
    assert not v_cache.any()
