"""The results of several nodes as one."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


half = dt.run(f, 1, node=[0, 1]) / 2  # mypy: operator; pyright: reportOperatorIssue
