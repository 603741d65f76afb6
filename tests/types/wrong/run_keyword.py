"""An argument that the function has not."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


dt.run(f, 1, kk=2.0)  # mypy: call-arg; pyright: reportCallIssue
