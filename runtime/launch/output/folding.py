"""Folds lines: one line for the same line of many nodes at about the same time, ``[4 nodes] epoch 1``.

A line waits up to ``HOLD`` for the same one of other nodes; a line that all have printed does not wait. The lines of a
node stay in their order: a node joins a line that is waiting only if it has printed nothing that would be shown after
it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from operator import attrgetter

#: The time that a line waits for others (seconds). Nodes that do the same are a few milliseconds apart.
HOLD = 0.02
#: The most bytes that wait.
ROOM = 1 << 18


class FoldedLine:
    """A line and the nodes that have printed it."""

    __slots__ = ("deadline", "gone", "place", "ranks", "stream", "text")

    def __init__(self, rank: int, stream: int, text: bytes, place: int, deadline: float) -> None:
        self.ranks = [rank]
        self.stream = stream
        self.text = text
        self.place = place  #: the order in which they are shown
        self.deadline = deadline
        self.gone = False  #: it has been shown


_place = attrgetter("place")


class OutputFolding:
    """The waiting lines, in order. No I/O, and no clock: times are the caller's, in seconds."""

    def __init__(self, hold: float = HOLD) -> None:
        self._hold = hold
        self._queue: OrderedDict[FoldedLine, None] = OrderedDict()  #: by place
        self._ages: deque[FoldedLine] = deque()  #: by deadline
        self._same: dict[tuple[int, bytes], list[FoldedLine]] = {}  #: waiting groups with this text, by place
        self._last: dict[int, FoldedLine] = {}  #: the group of each node's latest line
        self._places = 0
        self._size = 0

    def add(self, rank: int, stream: int, text: bytes, now: float) -> None:
        same = self._same.setdefault((stream, text), [])
        group = self._to_join(rank, same)
        if group is None:
            group = FoldedLine(rank, stream, text, self._next_place(), now + self._hold)
            self._queue[group] = None
            self._ages.append(group)
            self._size += len(text)
            same.append(group)
        else:
            group.ranks.append(rank)
        self._last[rank] = group

    def _to_join(self, rank: int, same: list[FoldedLine]) -> FoldedLine | None:
        if not same:
            return None
        last = self._last.get(rank)
        if last is None or last.gone:
            return same[0]
        after = bisect_right(same, last.place, key=_place)
        if after < len(same):
            return same[after]
        # It stands before a line that this node has printed already. If no line of its own nodes comes after it, it
        # can as well be shown later.
        newest = same[-1]
        if rank not in newest.ranks and all(self._last[other] is newest for other in newest.ranks):
            newest.place = self._next_place()
            self._queue.move_to_end(newest)
            return newest
        return None

    def _next_place(self) -> int:
        self._places += 1
        return self._places

    def take_due(self, now: float, everyone: int) -> list[FoldedLine]:
        """Takes the groups that are to be shown now. ``everyone``: the number of nodes that may print."""
        out: list[FoldedLine] = []
        ages = self._ages
        while ages and (ages[0].gone or ages[0].deadline <= now):
            oldest = ages.popleft()
            while not oldest.gone:
                out.append(self._pop())
        while self._queue and (self._size > ROOM or len(next(iter(self._queue)).ranks) >= everyone):
            out.append(self._pop())
        return out

    def _pop(self) -> FoldedLine:
        group, _ = self._queue.popitem(last=False)
        group.gone = True
        self._size -= len(group.text)
        key = (group.stream, group.text)
        same = self._same[key]
        del same[0]
        if not same:
            del self._same[key]
        return group

    def due(self) -> float | None:
        """Returns the time when the next group has waited long enough."""
        while self._ages and self._ages[0].gone:
            self._ages.popleft()
        return self._ages[0].deadline if self._ages else None
