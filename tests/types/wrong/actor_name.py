"""A method that the class has not."""

from __future__ import annotations

import disttensor as dt


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, times: int) -> int:
        return self.count + times


counter = dt.actor(Counter, 1)
counter[Counter.ad](1)  # mypy: attr-defined; pyright: reportAttributeAccessIssue
