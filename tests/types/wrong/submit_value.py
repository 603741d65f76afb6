"""A Work in the place of its value."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


more = dt.submit(f, 1) + 1  # mypy: operator; pyright: reportOperatorIssue
