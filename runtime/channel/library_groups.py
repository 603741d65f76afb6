"""What channels have in common that leave collectives to a library: a group of the library's for each set of ranks.

Groups are made at their first collective, and thrown away after one in which a rank was in trouble. Their members find
each other by what is told over the authenticated connections, which also tell of a peer's end: then the groups that it
is in are cut, and whoever waits in them comes out.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch

from ..protocol.errors import BrokenError
from .base import ChannelContext
from .tcp.channel import TcpChannel

#: Seconds after a failure for news of who it was.
_NEWS = 5.0

Tensors = Sequence[torch.Tensor]


class Group(Protocol):
    """One of the library's."""

    def run(self, kind: str, inputs: Tensors, outs: Tensors, op: str, root: int) -> None:
        """As ``DataChannel.collective``."""

    def cut(self) -> None:
        """Everybody who waits in it comes out with an error. In any thread, any number of times."""

    def close(self) -> None:
        """Gives back what the library has for it. Does not block. In any thread, any number of times."""

    def join(self, seconds: float) -> None:
        """Waits until what ``close`` gives back is given back."""


@runtime_checkable
class MailboxCarrier(Protocol):
    """A carrier that can put something on the peer's board."""

    def tell(self, key: str, value: bytes) -> None: ...


class Board:
    """What a channel's peers have told it, by key."""

    def __init__(self) -> None:
        # Re-entrant: the collector may run a finalizer that aborts the channel, which calls ``wake``.
        self._changed = threading.Condition(threading.RLock())
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, over: Callable[[], Exception | None]) -> bytes:
        """Waits for it. Raises what ``over`` gives, which is asked again after each ``wake``."""
        with self._changed:
            while key not in self._values:
                error = over()
                if error is not None:
                    raise error
                self._changed.wait()
            return self._values[key]

    def has(self, key: str) -> bool:
        return key in self._values

    def wake(self) -> None:
        """Has those who wait ask whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def clear(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]


class GroupedChannel(TcpChannel):
    """See above. Its carriers have to be Tellers."""

    library: ClassVar[str]

    def __init__(self, context: ChannelContext) -> None:
        self.board = Board()
        self.rank = context.rank
        self._groups: dict[tuple[int, ...], Group] = {}
        self._thrown = weakref.WeakSet[Group]()  #: in which a rank was in trouble; their end may be under way
        self._broke = ""  #: what others say if they give up the collective that we are in
        super().__init__(context)

    @abstractmethod
    def _group(self, name: str, ranks: tuple[int, ...]) -> Group:
        """A new one; ``name`` is the same for all, and not used again. Raises anything, also what ``lost`` gives."""

    def collective(
        self,
        kind: str,
        ranks: Sequence[int],
        me: int,
        inputs: Tensors,
        outs: Tensors,
        op: str,
        root: int,
        number: int,
    ) -> None:
        ranks = tuple(ranks)
        if not (*inputs, *outs)[0].numel():
            return
        self._broke = f"broke {ranks} {number}"
        try:
            group = self._groups.get(ranks)
            if group is None:
                if (lost := self.lost(ranks)) is not None:  # what was issued behind it is over at once
                    raise lost
                group = self._groups[ranks] = self._group(f"ranks {ranks} {number}", ranks)
            if (lost := self.lost(ranks)) is not None:  # perhaps before there was a group to cut
                raise lost
            group.run(kind, inputs, outs, op, root)
        except Exception as error:
            self.regroup(ranks)
            self.teller(ranks)(self._broke, b"")  # a library may not see that a connection ends
            deadline = time.monotonic() + _NEWS
            while (lost := self.lost(ranks)) is None and time.monotonic() < deadline:
                time.sleep(0.01)  # the library may know before the connection that somebody is gone, but not who
            raise lost or BrokenError(f"{kind} of ranks {list(ranks)} by {self.library} broke off: {error}") from error
        finally:
            self.board.clear(self._broke)

    def regroup(self, ranks: Sequence[int]) -> None:
        """Whoever waits for us in the old group comes out, as our connections end."""
        group = self._groups.pop(tuple(ranks), None)
        if group is not None:
            group.cut()
            group.close()
            self._thrown.add(group)

    def teller(self, ranks: Sequence[int]) -> Callable[[str, bytes], None]:
        """Puts something on the boards of all others of ``ranks``."""
        peers = [self._peer(rank, 0) for rank in ranks if rank != self.rank]
        others = [peer.carrier for peer in peers]

        def tell(key: str, value: bytes) -> None:
            for carrier in others:
                if isinstance(carrier, MailboxCarrier):
                    carrier.tell(key, value)

        return tell

    def lost(self, ranks: Sequence[int]) -> BrokenError | None:
        """For a rank with which the connection is over."""
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is not None and peer.failure is not None:
                return BrokenError(peer.failure[1], rank)
        return None

    def given_up(self, ranks: Sequence[int]) -> BrokenError | None:
        """As ``lost``; or one of the others has said that it gives up the collective that we are in."""
        if (lost := self.lost(ranks)) is None and self.board.has(self._broke):
            return BrokenError("another rank gave it up")
        return lost

    def over(self, rank: int) -> None:
        """The connection with a peer is."""
        self.board.wake()
        for ranks, group in list(self._groups.items()):
            if rank in ranks:
                group.cut()

    def _end(self, join: float) -> None:
        super()._end(join)
        groups = [*self._groups.values(), *self._thrown]
        self._groups.clear()
        for group in groups:
            group.close()
        for group in groups:
            group.join(join)
