"""Texts for nodes whose function takes numbers."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


dt.run(f, dt.tasks.Each(["a", "b"]), node=[0, 1])  # mypy: list-item; pyright: reportCallIssue
