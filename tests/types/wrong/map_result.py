"""The results of a map as something else."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


texts: list[str] = list(dt.map(f, [1, 2]))  # mypy: arg-type; pyright: reportAssignmentType
