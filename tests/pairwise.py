"""All pairs of option values in few cases: a small greedy covering array."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any


def pairwise(factors: dict[str, list[Any]], *, seed: int = 0, candidates: int = 40) -> list[dict[str, Any]]:
    """Rows in which any two values of any two factors occur together at least once.

    Args:
        factors: name -> its values.
        seed: the choice is a function of `factors` and `seed` alone.
        candidates: random completions tried for each row; more make fewer rows.
    """
    rng = random.Random(seed)
    names = list(factors)
    uncovered = {
        (a, x, b, y)
        for a, b in combinations(range(len(names)), 2)
        for x, y in product(range(len(factors[names[a]])), range(len(factors[names[b]])))
    }
    rows = []
    while uncovered:
        a, x, b, y = min(uncovered)
        best: tuple[int, list[int]] = (0, [])
        for _ in range(candidates):
            row = [rng.randrange(len(factors[name])) for name in names]
            row[a], row[b] = x, y
            gain = sum((c, row[c], d, row[d]) in uncovered for c, d in combinations(range(len(names)), 2))
            best = max(best, (gain, row))
        row = best[1]
        uncovered -= {(c, row[c], d, row[d]) for c, d in combinations(range(len(names)), 2)}
        rows.append({name: factors[name][value] for name, value in zip(names, row, strict=True)})
    return rows
