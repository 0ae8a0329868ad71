"""Cases of the Hopper kernels that the tests on a GPU and those on the emulator share."""

from __future__ import annotations

from typing import Any

from tests.cases import Case

HIDING: list[dict[str, Any]] = [
    {"segments": "ids", "causal": True},
    {"segments": "pair", "causal": True},
    {"segments": "pair"},
    {"lengths": "ragged", "causal": True},
    {"lengths": "ragged"},
    {"lengths": "extreme", "causal": True},
]
"""Options of a `Case` under which some key is seen by no query, or some query sees no key."""


def feature_case(row: dict[str, Any]) -> Case:
    """The case of a row of `pairwise`: size (Tq, Tk), head_dim, heads (Hq, Hkv), window, extra, layout."""
    (q_len, kv_len), window, extra = row["size"], row["window"], row["extra"]
    if isinstance(window, tuple) and window[0] >= 0:  # every key is seen by some query
        window = (max(window[0], kv_len - q_len), window[1])
    return Case(
        q_heads=row["heads"][0],
        kv_heads=row["heads"][1],
        q_len=q_len,
        kv_len=kv_len,
        head_dim=row["head_dim"],
        causal=window == "causal",
        window_size=None if window == "causal" else window,
        segments="pair" if "pair" in extra else "none",
        lengths="ragged" if "lengths" in extra else "none",
        softcap=3.0 if "softcap" in extra else None,
        dropout_p=0.2 if "dropout" in extra else 0.0,
        layout=row["layout"] if q_len == kv_len else "bthd",
        seed=q_len,
    )
