"""A text where the method takes a number, and one of another class."""

from __future__ import annotations

import disttensor as dt


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, times: int) -> int:
        return self.count + times


counter = dt.actor(Counter, 1)
counter[Counter.add]("1")  # mypy: arg-type; pyright: reportArgumentType
counter[str.upper]()  # mypy: index; pyright: reportArgumentType
