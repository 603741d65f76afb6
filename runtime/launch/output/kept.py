"""The last lines that nodes have printed, for who looks at a job from outside."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from .lines import TAIL_WIDTH, shown_in_tail

#: The lines of each node that are kept, and how many are told at once.
KEPT, AT_ONCE = 1000, 500
#: The most bytes of a line that are kept, escape sequences included.
_WIDE = 4 * TAIL_WIDTH


class KeptLine(NamedTuple):
    """A line of a node."""

    number: int  #: of all lines of all nodes, from 1 on
    rank: int
    text: str


class KeptOutput:
    """The last lines of each node. No I/O."""

    def __init__(self) -> None:
        self._count = 0
        self._lines: dict[int, deque[tuple[int, bytes]]] = {}

    def add(self, rank: int, lines: Iterable[bytes]) -> None:
        """Keeps lines of a node, and drops its oldest ones for them."""
        kept = self._lines.get(rank)
        if kept is None:
            kept = self._lines[rank] = deque(maxlen=KEPT)
        for line in lines:
            self._count += 1
            kept.append((self._count, line[:_WIDE]))

    def after(self, number: int, ranks: Collection[int]) -> tuple[list[KeptLine], bool]:
        """Returns the lines of nodes behind line ``number``, the oldest first and AT_ONCE at most, and whether there
        are more. -10 stands for the last ten."""
        found = (
            (at, rank, line)
            for rank, kept in self._lines.items()
            if rank in ranks
            for at, line in itertools.takewhile(lambda each: each[0] > number, reversed(kept))
        )
        lines = sorted(found, key=operator.itemgetter(0))[min(0, number) :]
        return [KeptLine(at, rank, shown_in_tail(line)) for at, rank, line in lines[:AT_ONCE]], len(lines) > AT_ONCE

    def clear(self) -> None:
        """Drops all lines: the next ones are another session's. Numbers go on."""
        self._lines.clear()
