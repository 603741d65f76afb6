"""The data channels that one peer has in a session, by number: 0 is the session's own, others are opened when needed.

The master numbers them and has all nodes open the same. A node has each twice: for transfers, and for collectives,
which are in no common order with them. The master takes part in no collective and has each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from ..protocol.arguments import Addresses
from ..protocol.errors import DisttensorError
from .base import MASTER, ChannelContext, DataChannel, PeerInfo
from .counted import CountedChannel
from .registry import usable_channel

#: Makes the channel of a name and number; the last argument says whether it is for collectives.
Make: TypeAlias = Callable[[str, int, bool], DataChannel]


def maker(context: ChannelContext) -> Make:
    """Returns a function that makes channels out of their classes; all sessions use it."""
    return partial(_make, context)


def _make(context: ChannelContext, name: str, number: int, collective: bool) -> DataChannel:
    job = context.job + (f"/{number}" if number else "") + ("/collectives" if collective else "")
    cls = usable_channel(name, context.rank)
    if why := context.protection.missing(cls.capabilities):
        raise DisttensorError(f"the data channel {cls.name!r} can't be used here: {why}")
    channel = cls(replace(context, job=job))
    return CountedChannel(channel, "collectives" if collective else "transfers")


class Channels:
    """A peer's open data channels, by number.

    ``open``, ``connect``, ``forget`` and ``close`` are for one thread at a time; any thread may use the rest.
    """

    def __init__(self, make: Make, name: str, collective: bool = True) -> None:
        """Opens number 0, the channel ``name``. Raises what ``open`` does."""
        self.data: dict[int, DataChannel] = {}
        self.collective: dict[int, DataChannel] = {}
        self._make, self._twice = make, collective
        self._lost: dict[int, str] = {}
        self.nodes: set[int] = set()  #: the other nodes of which this one has been told
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
        """Tells a channel the addresses of a peer, as the peer's ``open`` has returned them. Does nothing for a lost
        peer."""
        if rank != MASTER:
            self.nodes.add(rank)
        if rank in self._lost:
            return
        for channels, address in ((self.data, addresses.transfers), (self.collective, addresses.collectives)):
            if address and number in channels:
                channels[number].connect({rank: PeerInfo(rank, address, key)})

    def forget(self, rank: int, why: str) -> None:
        """Tells all channels that a peer is lost; those that are opened later don't connect to it."""
        self._lost[rank] = why
        for channel in self:
            channel.forget(rank, why)

    def __iter__(self) -> Iterator[DataChannel]:
        return iter([*self.data.values(), *self.collective.values()])

    def close(self) -> None:
        """Closes all channels."""
        for channel in self:
            channel.close()
