"""A job in which nothing goes on any more: who waits for whom is said once."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence

from .status import NodeStatus, QueueStatus, of, phrase

#: Seconds without any progress anywhere after which that is said.
STILL = 60.0
#: The share of one core from which on somebody is taken to get on with something.
BUSY = 0.05
#: The most nodes, and the most queues, that are named beside those of a circle.
NAMED = 10

_log = logging.getLogger("disttensor")


class Stall:
    """The watch for progress, over the waits of one session."""

    def __init__(self) -> None:
        self._mark: Hashable = None
        self._since = self._looked = 0.0
        self._used = 0.0
        self._said = False

    def look(self, now: float, began: float, mark: Hashable, used: float) -> float:
        """Takes note of how far all have come; returns for how many seconds nothing has gone on, if that is to be said
        now, else 0.

        ``began``: when the wait began; ``mark`` changes with any progress; ``used``: the seconds for which all
        processes have run on cores.
        """
        ran = used - self._used > BUSY * (now - self._looked)
        if mark != self._mark or ran or self._since < began:
            self._since, self._said = now if self._looked >= began else began, False
        self._mark, self._used, self._looked = mark, used, now
        if self._said or now - self._since < STILL:
            return 0.0
        self._said = True
        return now - self._since


def warn_of_stall(
    seconds: float,
    wait: str,
    first: int | None,
    rows: Sequence[NodeStatus],
    queues: Sequence[QueueStatus],
    record: str = "",
) -> None:
    """Logs who waits for whom. ``wait``: what the script waits for, in words; ``first``: the node that it waits for;
    ``record``: the file of the flight record, if there is one."""
    found = _lines(seconds, wait, first, rows, queues)
    _log.warning("%s", "\n".join([*found, f"  flight record: {record}"] if record else found))


def _lines(
    seconds: float, wait: str, first: int | None, rows: Sequence[NodeStatus], queues: Sequence[QueueStatus]
) -> list[str]:
    circle = circle_of({row.rank: row.waits_for for row in rows if row.waits_for is not None}, first)
    found = [f"nothing has gone on anywhere for {seconds:.0f} s:", f"  the script: {wait}"]
    at_work = [row for row in rows if row.state != "idle"]
    named = [row for row in at_work if row.rank in circle]
    others = [row for row in at_work if row.rank not in circle]
    for row in [*named, *others[:NAMED]]:
        found.append(f"  node {row.rank}: {phrase(row)}" + (f", issued at {row.line}" if row.line else ""))
    if (more := len(others) - NAMED) > 0:
        found.append(f"  and {more} other nodes")
    for queue in [queue for queue in queues if queue.taking or queue.putting][:NAMED]:
        waits = f"{queue.taking} wait for an item or a turn" if queue.taking else f"{queue.putting} wait for room"
        found.append(f"  {queue.kind} {queue.name}".rstrip() + f": {waits}")
    if circle:
        names = " -> ".join(map(of, [*circle, circle[0]]))
        found.append(f"  they wait for each other in a circle, which does not end by itself: {names}")
    return found


def circle_of(waits: Mapping[int, int], first: int | None) -> list[int]:
    """Returns the processes that wait for each other in a circle, each for the next one; none where there is none.

    ``waits``: whom each node waits for; ``first``: the node that the script waits for, which is -1 there.
    """
    edges = dict(waits) if first is None else {**waits, -1: first}
    for start in edges:
        path = [start]
        while (following := edges.get(path[-1])) is not None:
            if following in path:
                return path[path.index(following) :]
            path.append(following)
    return []
