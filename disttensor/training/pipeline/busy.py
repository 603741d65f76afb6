"""The part of the time for which nodes work, by their own clocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ...runtime.process.tables import columns
from ...session import current
from ...session.places import MeshPlace, Place
from ...streams import Event, default_stream, synchronize


class BusyRow(NamedTuple):
    """How long one node has worked."""

    node: int
    stages: tuple[int, ...]  #: those that it has
    coordinates: str  #: those on its mesh; "" for a node that is a place of its own
    busy: float  #: seconds for which it worked, and waited neither for commands nor for other nodes
    seconds: float  #: seconds from the beginning to the end
    expected: float  #: the share that the schedule would give

    @property
    def share(self) -> float:
        """The part of the time for which it worked."""
        return self.busy / self.seconds if self.seconds else 0.0


class Shares:
    """The busy shares of a pipeline's nodes: ``rows``, once the block has ended. As a text it is a table."""

    def __init__(self) -> None:
        self.rows: list[BusyRow] = []

    def __str__(self) -> str:
        if not self.rows:
            return "nothing is measured yet: the block has not ended"
        lines = [("stage", "node", "busy", "expected")]
        for row in self.rows:
            node = f"{row.node} ({row.coordinates})" if row.coordinates else str(row.node)
            busy = f"{row.share:.0%}" if row.busy else "unknown"  # nodes that are threads can't tell
            lines.append((", ".join(map(str, row.stages)), node, busy, f"{row.expected:.0%}"))
        return columns(lines)

    __repr__ = __str__


@contextmanager
def measured(places: Sequence[Place], expected: Sequence[float]) -> Iterator[Shares]:
    """Fills the Shares that it yields when the ``with`` block ends without an error."""
    rows: dict[int, BusyRow] = {}
    for stage, (place, share) in enumerate(zip(places, expected, strict=True)):
        for at, rank in enumerate(place.ranks):
            # a node has no coordinates
            where = place.where(at) if isinstance(place, MeshPlace) else ""
            row = rows.setdefault(rank, BusyRow(rank, (), where, 0.0, 0.0, share))
            rows[rank] = row._replace(stages=(*row.stages, stage))
    shares = Shares()
    begun = {rank: _now(rank) for rank in rows}
    yield shares
    for rank, row in rows.items():
        start, before = begun[rank]
        end, after = _now(rank)
        shares.rows.append(row._replace(busy=max(after - before, 0.0), seconds=start.elapsed_time(end) / 1000))


def _now(rank: int) -> tuple[Event, float]:
    """Returns a moment by a node's clock, when it has done everything, and the seconds for which it has worked."""
    synchronize(rank)
    moment = Event(enable_timing=True)
    moment.record(default_stream(rank))
    synchronize(rank)
    return moment, current.session().nodes[rank].connection.busy
