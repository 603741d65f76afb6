"""The result of a Work as something else."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


text: str = dt.submit(f, 1, "x", node=1).result()  # mypy: assignment; pyright: reportAssignmentType
