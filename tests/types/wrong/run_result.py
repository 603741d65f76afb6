"""The result of a function as something else."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


text: str = dt.run(f, 1, node=1)  # mypy: assignment; pyright: reportAssignmentType
