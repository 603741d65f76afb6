"""A text for an executor, whose function takes a number."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


dt.tasks.Executor().submit(f, "1")  # mypy: arg-type; pyright: reportArgumentType
