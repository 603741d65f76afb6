"""The base of channels that leave collectives to a library: one group of the library's for each set of ranks.

Groups are made at their first collective, and thrown away after one in which a rank was in trouble. Their members find
each other by messages over the authenticated connections, which also tell of a peer's end: then the groups that the
peer is in are cut, and every thread that waits in them comes out.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch

from ..protocol.errors import BrokenError, ProtocolError
from .base import ChannelContext
from .tcp.channel import TcpChannel

#: Seconds to wait, after a failure, for news of which rank it was.
_NEWS = 5.0

Tensors = Sequence[torch.Tensor]


class LibraryGroup(Protocol):
    """A process group of the library's."""

    def run(self, kind: str, inputs: Tensors, outs: Tensors, op: str, root: int) -> None:
        """Does this rank's part of a collective: see ``DataChannel.collective``."""

    def cut(self) -> None:
        """Has every thread that waits in the group come out with an error. In any thread, any number of times."""

    def close(self) -> None:
        """Releases the library's resources of the group. Does not block. In any thread, any number of times."""

    def join(self, seconds: float) -> None:
        """Waits until the resources that ``close`` releases are released."""


@runtime_checkable
class MailboxCarrier(Protocol):
    """A carrier that can put a value into the peer's mailbox."""

    def put_in_mailbox(self, key: str, value: bytes) -> None: ...


def entry(word: bytes) -> tuple[str, bytes]:
    """Returns the key and the value of a peer's word. Raises ProtocolError for a key that is no text."""
    key, _, value = word.partition(b"\0")
    try:
        return key.decode(), value
    except UnicodeDecodeError:
        raise ProtocolError(f"{key[:100]!r} is no key of a mailbox") from None


class Mailbox:
    """The values that a channel's peers have sent it, by key."""

    def __init__(self) -> None:
        # Re-entrant: the collector may run a finalizer that aborts the channel, which calls ``wake``.
        self._changed = threading.Condition(threading.RLock())
        self._values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, over: Callable[[], Exception | None]) -> bytes:
        """Waits for the value of a key.

        Raises the error that ``over`` returns; ``over`` is asked again after each ``wake``.
        """
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
        """Has waiting threads ask whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def clear(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]


class GroupedChannel(TcpChannel):
    """A channel whose collectives are a library's. Its carriers have to be MailboxCarriers."""

    library: ClassVar[str]

    def __init__(self, context: ChannelContext) -> None:
        self.mailbox = Mailbox()
        self.rank = context.rank
        self._groups: dict[tuple[int, ...], LibraryGroup] = {}
        self._ended: set[tuple[int, ...]] = set()  #: those of which a rank has gone since they were made
        self._thrown = weakref.WeakSet[
            LibraryGroup
        ]()  #: groups in which a rank was in trouble; their end may be under way
        self._broke = ""  #: the key by which other ranks give up the current collective
        super().__init__(context)

    @abstractmethod
    def _group(self, name: str, ranks: tuple[int, ...]) -> LibraryGroup:
        """Makes a group; ``name`` is the same for all ranks, and not used again.

        Raises anything, also ``lost``'s error.
        """

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
            if ranks in self._ended:  # another worker may be in that rank's place by now, and is in no group
                self._ended.discard(ranks)
                self.regroup(ranks)
            group = self._groups.get(ranks)
            if group is None:
                if (lost := self.lost(ranks)) is not None:  # collectives issued behind it are over at once
                    raise lost
                group = self._groups[ranks] = self._group(f"ranks {ranks} {number}", ranks)
            if (lost := self.lost(ranks)) is not None:  # perhaps lost before there was a group to cut
                raise lost
            group.run(kind, inputs, outs, op, root)
        except Exception as error:
            self.regroup(ranks)
            self.teller(ranks)(self._broke, b"")  # a library may not see that a connection ends
            deadline = time.monotonic() + _NEWS
            while (lost := self.lost(ranks)) is None and time.monotonic() < deadline:
                time.sleep(0.01)  # the library may know earlier that a rank is gone, but not which
            raise lost or BrokenError(f"{kind} of ranks {list(ranks)} by {self.library} broke off: {error}") from error
        finally:
            self.mailbox.clear(self._broke)

    def regroup(self, ranks: Sequence[int]) -> None:
        """Drops the old group: every thread that waits for this rank in it comes out, as the connections end."""
        group = self._groups.pop(tuple(ranks), None)
        if group is not None:
            group.cut()
            group.close()
            self._thrown.add(group)

    def teller(self, ranks: Sequence[int]) -> Callable[[str, bytes], None]:
        """Returns a function that puts a value into the mailboxes of all others of ``ranks``."""
        peers = [self._peer(rank, 0) for rank in ranks if rank != self.rank]
        others = [peer.carrier for peer in peers]

        def tell(key: str, value: bytes) -> None:
            for carrier in others:
                if isinstance(carrier, MailboxCarrier):
                    carrier.put_in_mailbox(key, value)

        return tell

    def lost(self, ranks: Sequence[int]) -> BrokenError | None:
        """Returns the error for a rank with which the connection is over, or None."""
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is not None and peer.failure is not None:
                return BrokenError(peer.failure[1], rank)
        return None

    def given_up(self, ranks: Sequence[int]) -> BrokenError | None:
        """Returns the error of ``lost``, or one if another rank has given up the current collective."""
        if (lost := self.lost(ranks)) is None and self.mailbox.has(self._broke):
            return BrokenError("another rank gave it up")
        return lost

    def over(self, rank: int) -> None:
        """Cuts the groups of a peer, with which the connection is over."""
        self.mailbox.wake()
        for ranks, group in list(self._groups.items()):
            if rank in ranks:
                self._ended.add(ranks)
                group.cut()

    def _end_threads(self, join: float) -> None:
        super()._end_threads(join)
        groups = [*self._groups.values(), *self._thrown]
        self._groups.clear()
        for group in groups:
            group.close()
        for group in groups:
            group.join(join)
