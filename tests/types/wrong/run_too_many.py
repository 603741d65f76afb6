"""More arguments than the function has."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


dt.run(f, 1, "y", 2)  # mypy: arg-type; pyright: reportCallIssue
dt.run(f, 1, "y", 2, node=1)  # mypy: arg-type; pyright: reportCallIssue
