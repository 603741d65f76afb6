"""The data channels that one peer has in a session, by number: 0 is the session's own, others come as they are needed.

The master numbers them and has all nodes open the same. A node has each twice: for transfers, and for collectives,
which are in no common order with them. The master is in no collective and has each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from .base import ChannelContext, DataChannel, PeerInfo
from .counted import CountedChannel
from .registry import usable_channel

#: Makes the channel of a name and number; the last argument says whether it is for collectives.
Make: TypeAlias = Callable[[str, int, bool], DataChannel]


def maker(context: ChannelContext) -> Make:
    """Makes channels out of their classes: what all sessions use."""
    return partial(_make, context)


def _make(context: ChannelContext, name: str, number: int, joint: bool) -> DataChannel:
    job = context.job + (f"/{number}" if number else "") + ("/collectives" if joint else "")
    channel = usable_channel(name, context.rank)(replace(context, job=job))
    return CountedChannel(channel, "collectives" if joint else "transfers")


class Channels:
    """See above. ``open``, ``connect``, ``forget`` and ``close`` are for one thread at a time; any may use the rest."""

    def __init__(self, make: Make, name: str, joint: bool = True) -> None:
        """Opens number 0, the channel ``name``. Raises what ``open`` does."""
        self.data: dict[int, DataChannel] = {}
        self.joint: dict[int, DataChannel] = {}
        self._make, self._twice = make, joint
        self._lost: dict[int, str] = {}
        self.open(0, name)

    def open(self, number: int, name: str) -> str:
        """Opens a channel, unless it is open; gives its addresses, one a line: for transfers, for collectives.

        Raises ValueError for an unknown name, ImportError without its library, DisttensorError where it can't work,
        and what the channel itself does.
        """
        if number not in self.data:
            data = self._make(name, number, False)
            if self._twice:
                try:
                    self.joint[number] = self._make(name, number, True)
                except BaseException:
                    data.abort()
                    raise
            self.data[number] = data
        both = [self.data[number], *([self.joint[number]] if self._twice else [])]
        return "\n".join(channel.address() for channel in both)

    def connect(self, number: int, rank: int, addresses: str, key: bytes) -> None:
        """Tells a channel where a peer is: ``addresses`` as from its ``open``, the master's without the second line."""
        if rank in self._lost:
            return
        for channels, address in zip((self.data, self.joint), addresses.split("\n"), strict=False):
            if number in channels:
                channels[number].connect({rank: PeerInfo(rank, address, key)})

    def forget(self, rank: int, why: str) -> None:
        """A peer is lost: to all channels, and to those that are opened later."""
        self._lost[rank] = why
        for channel in self:
            channel.forget(rank, why)

    def __iter__(self) -> Iterator[DataChannel]:
        return iter([*self.data.values(), *self.joint.values()])

    def close(self) -> None:
        """Closes all."""
        for channel in self:
            channel.close()
