"""The data channels that one peer has in a session, by number: 0 is the session's own, others are opened when needed.

The master numbers them and has all nodes open the same. A node has each twice: for transfers, and for collectives,
which are in no common order with them. The master takes part in no collective and has each once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from ..process.observing import Seam
from ..protocol.arguments import Addresses
from ..protocol.errors import DisttensorError
from .base import MASTER, ChannelContext, DataChannel, PeerInfo
from .counted import CountedChannel
from .registry import usable_channel

#: Makes the channel of a name and number; the last argument says whether it is for collectives.
Make: TypeAlias = Callable[[str, int, bool], DataChannel]


def maker(context: ChannelContext, seam: Seam | None = None) -> Make:
    """Returns a function that makes channels out of their classes; all sessions use it. ``seam``: where observers are
    told of their transfers."""
    return partial(_make, context, Seam(context.rank) if seam is None else seam)


def _make(context: ChannelContext, seam: Seam, name: str, number: int, collective: bool) -> DataChannel:
    job = context.job + (f"/{number}" if number else "") + ("/collectives" if collective else "")
    cls = usable_channel(name, context.rank)
    if why := context.protection.missing(cls.capabilities):
        raise DisttensorError(f"the data channel {cls.name!r} can't be used here: {why}")
    channel = cls(replace(context, job=job))
    return CountedChannel(channel, "collectives" if collective else "transfers", seam)


class Channels:
    """A peer's open data channels, by number.

    ``open``, ``connect``, ``mark_lost`` and ``close`` are for one thread at a time; any thread may use the rest.
    """

    def __init__(self, make: Make, name: str, collective: bool = True) -> None:
        """Opens number 0, the channel ``name``. Raises what ``open`` does."""
        self.data: dict[int, DataChannel] = {}
        self.collective: dict[int, DataChannel] = {}
        self._make, self._twice = make, collective
        self._lost: dict[int, str] = {}
        self._told: dict[tuple[int, int], tuple[Addresses, bytes]] = {}  #: by the channel's number, and the rank
        self.nodes: set[int] = set()  #: the other nodes of which this one has been told
        #: peers that send nothing any more, with the reason: word of that may come before the peer's addresses
        self._expired: dict[int, str] = {}
        self._telling = threading.Lock()  #: held while a peer is told to the channels, or its end by ``expire``
        self._incarnations: dict[int, int] = {}  #: of peers in whose places other workers have come, by rank
        self.open(0, name)

    def open(self, number: int, name: str) -> Addresses:
        """Opens a channel, unless it is open; returns its addresses.

        Raises ValueError for an unknown name, ImportError without its library, DisttensorError where it can't work, and
        the errors of the channel itself.
        """
        if number not in self.data:
            data = self._make(name, number, False)
            if self._twice:
                try:
                    self.collective[number] = self._make(name, number, True)
                except BaseException:
                    data.abort()
                    raise
            self.data[number] = data
        return Addresses(self.data[number].address(), self.collective[number].address() if self._twice else "")

    def connect(self, number: int, rank: int, addresses: Addresses, key: bytes) -> None:
        """Tells a channel the addresses of a peer, as the peer's ``open`` has returned them; does nothing when it has
        been told. Transfers with a lost peer fail."""
        if self._told.get((number, rank)) == (addresses, key):
            return
        self._told[number, rank] = addresses, key
        if rank != MASTER:
            self.nodes.add(rank)
        with self._telling:
            for channels, address in ((self.data, addresses.transfers), (self.collective, addresses.collectives)):
                if address and number in channels:
                    channel = channels[number]
                    channel.connect({rank: PeerInfo(rank, address, key)})
                    if rank in self._lost:
                        channel.mark_lost(rank, self._lost[rank])
                    elif rank in self._expired:
                        channel.expire(rank, self._expired[rank])

    def expire(self, rank: int, why: str, incarnation: int = 0) -> None:
        """Tells all channels that a peer sends nothing any more, beyond what has arrived, unless another worker is in
        the place of that incarnation. Any thread may call it."""
        with self._telling:
            if incarnation < self._incarnations.get(rank, 0):
                return
            self._expired[rank] = why
            for channel in self:
                channel.expire(rank, why)

    def mark_lost(self, rank: int, why: str) -> None:
        """Tells all channels that a peer is lost. A channel that hears of the peer later is told then."""
        self._lost[rank] = why
        for channel in self:
            channel.mark_lost(rank, why)

    def forgive(self, rank: int, incarnation: int) -> None:
        """Notes that another worker is in a lost peer's place, which ``connect`` makes known by another key."""
        with self._telling:
            self._incarnations[rank] = incarnation
            self._lost.pop(rank, None)
            self._expired.pop(rank, None)

    def __iter__(self) -> Iterator[DataChannel]:
        return iter([*self.data.values(), *self.collective.values()])

    def close(self) -> None:
        """Closes all channels."""
        for channel in self:
            channel.close()
