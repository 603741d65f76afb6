"""The Work of a float where the function takes an int."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


dt.submit(f, dt.submit(f, 1), node=1)  # mypy: arg-type; pyright: reportCallIssue
