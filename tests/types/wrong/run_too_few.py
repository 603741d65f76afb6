"""No argument where the function needs one."""

from __future__ import annotations

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


dt.run(f)  # mypy: call-overload; pyright: reportCallIssue
