"""What a function returns in its place."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


dt.run(f(1), node=1)  # mypy: call-overload; pyright: reportCallIssue
