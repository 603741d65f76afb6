"""``dt.channels.stats()``: the traffic of a session's data channels: how many bytes, how often and how fast."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ..runtime.channel.base import MASTER
from ..runtime.channel.counted import GROUP, count
from ..runtime.master.route import waits
from ..runtime.process.tables import columns
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import NodeLost
from ..session import current
from ..session.session import Session

_NAMES = {MASTER: "master", GROUP: "group"}


@dataclass(frozen=True)
class Flow:
    """The transfers in one direction: their number, bytes, and the seconds during which at least one was under way.

    A receive is under way from its announcement on, so its seconds hold the wait for the sender, too.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """The throughput in MB/s (10^6 bytes per second); 0 where nothing was carried."""
        return self.bytes / self.seconds / 1e6 if self.seconds else 0.0

    def __add__(self, other: Flow) -> Flow:
        return Flow(self.calls + other.calls, self.bytes + other.bytes, self.seconds + other.seconds)

    def __sub__(self, other: Flow) -> Flow:
        return Flow(self.calls - other.calls, self.bytes - other.bytes, max(0.0, self.seconds - other.seconds))


@dataclass(frozen=True)
class Traffic:
    """The traffic that one end of a data channel has counted with one peer."""

    at: str  #: the process that counted: "master" or "node:0"
    peer: str  #: the other process, or "group" for collectives without transfers, with the bytes read and written
    channel: str  #: the channel's name, such as "shm"
    use: str  #: "transfers" or "collectives"
    sent: Flow
    received: Flow

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.at, self.peer, self.channel, self.use


class Stats(tuple[Traffic, ...]):
    """A tuple of rows, one for each end, peer and channel, in this order. Prints as a table."""

    @property
    def sent(self) -> Flow:
        """The sum over all rows: every byte that was sent anywhere, once."""
        return sum((row.sent for row in self), Flow())

    @property
    def received(self) -> Flow:
        return sum((row.received for row in self), Flow())

    def __repr__(self) -> str:
        head = ["at", "peer", "channel", "for", *(w for way in ("sent", "received") for w in (way, "MB", "s", "MB/s"))]
        table = [head]
        for row in self:
            flows = (f for flow in (row.sent, row.received) for f in _cells(flow))
            table.append([row.at, row.peer, row.channel, row.use, *flows])
        return columns(table, [str.ljust] * 4 + [str.rjust] * (len(head) - 4))


def _cells(flow: Flow) -> Iterable[str]:
    if not flow.calls:
        return "0", "", "", ""
    return str(flow.calls), f"{flow.bytes / 1e6:.3f}", f"{flow.seconds:.4f}", f"{flow.rate:.0f}"


class _Baseline:
    """The counts of a session at its last ``reset_stats``."""

    def __init__(self) -> None:
        self.rows: dict[object, Traffic] = {}


def stats() -> Stats:
    """Returns the traffic of the data channels since the session's start or the last ``reset_stats``, as the nodes and
    the master have counted it. Lost nodes are missing.

    Transfers are counted from their beginning; call ``synchronize()`` first to count all that were issued. Waits for
    the nodes to come this far. Raises GraphError while a graph is recorded, DisttensorError without a session.
    """
    session = current.session()
    rows = (_since(row, session.part(_Baseline).rows.get(row.key)) for row in _count(session))
    return Stats(row for row in rows if row.sent.calls or row.received.calls)


def reset_stats() -> None:
    """Has ``stats`` count from here on. Waits, and raises, as ``stats`` does."""
    session = current.session()
    session.part(_Baseline).rows = {row.key: row for row in _count(session)}


def _since(row: Traffic, before: Traffic | None) -> Traffic:
    if before is None:
        return row
    return Traffic(*row.key, row.sent - before.sent, row.received - before.received)


def _count(session: Session) -> list[Traffic]:
    waits("counting what nodes have sent")
    link, requests = session.link, []
    for node in link.there():  # ask all first, so that they answer side by side
        with suppress(NodeLost), link.unheard():
            request = link.requests.new(node.rank, c.TrafficCounts)
            node.outbox.add(c.Count(request.id))
            requests.append(request)
    link.sender.flush_all()
    own = (*count(session.router.data.values()), *session.transfers.rows_by_command())
    rows = [_traffic(MASTER, *row) for row in own]
    for request in requests:
        with suppress(NodeLost), link.unheard():
            reply = link.waiting.wait(request)
            if isinstance(reply, c.TrafficCounts):
                rows += [_traffic(request.node, *row) for row in reply.rows]
    return rows


def _traffic(at: int, channel: str, use: str, peer: int, sent: c.Figures, received: c.Figures) -> Traffic:
    return Traffic(_name(at), _name(peer), channel, use, Flow(*sent), Flow(*received))


def _name(rank: int) -> str:
    return _NAMES.get(rank) or f"node:{rank}"
