"""A text where the class takes a number."""

from __future__ import annotations

import disttensor as dt


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, times: int) -> int:
        return self.count + times


dt.actor(Counter, "1")  # mypy: arg-type; pyright: reportArgumentType
dt.actor(Counter, "1", node=1)  # mypy: arg-type; pyright: reportCallIssue
dt.actor(Counter)  # mypy: call-overload; pyright: reportCallIssue
