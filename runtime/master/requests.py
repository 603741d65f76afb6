"""Requests: answers that threads wait for (link.py), and the wakers of these threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..protocol import commands as c
from ..protocol.arguments import Message

if TYPE_CHECKING:
    from .command_queue import CommandQueue


class Waker:
    """Wakes a thread that polls. Its holder may do so even after the thread has ended."""

    fd = -1  #: of one that could not be made

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        #: true while the thread polls; if this very thread calls ``wake`` then, a signal's handler below the poll does
        self.launcher = -1  #: the launcher's descriptor, while the thread's polls look at it
        self.polling = False
        self._thread = threading.get_ident()

    def wake(self) -> None:
        if self.polling or self._thread != threading.get_ident():
            os.eventfd_write(self.fd, 1)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Request:
    """An answer that a thread waits for. ``reply`` is set before ``done``."""

    __slots__ = ("done", "due", "id", "kind", "node", "queue", "reply", "waker")

    def __init__(self, id: int, node: int, kind: type[Message] = c.Done, due: int = 0) -> None:
        self.id = id
        self.node = node  #: the node that answers; of several, one of those that have not yet
        self.kind = kind  #: the reply's type, if nothing has failed
        self.due = due  #: of reasons (Unusable): how many there have to be
        self.reply: c.Reply | None = None
        self.done = False
        self.waker: Waker | None = None  #: wakes the thread that waits
        self.queue: CommandQueue | None = None  #: for several nodes: their queue

    def asks(self, rank: int) -> bool:
        """Returns whether a node's answer is due."""
        return self.node == rank

    @property
    def ranks(self) -> list[int]:
        """The nodes whose answers are due."""
        return [self.node]

    def take(self, rank: int, reply: c.Reply) -> bool:
        """Takes a node's reply; returns whether it was the last one that was due."""
        return True

    def resolve(self, reply: c.Reply | None = None) -> None:
        """Ends the wait. Called by any thread."""
        self.reply = reply
        self.done = True
        waker = self.waker  # read once: the thread may stop waiting, and even end, while this one is here
        if waker is not None:
            waker.wake()


class Told(Request):
    """An answer whose arrival is told to ``then``, in whichever thread takes it; that must not block."""

    __slots__ = ("then",)

    def __init__(self, id: int, node: int, kind: type[Message], then: Callable[[], object]) -> None:
        super().__init__(id, node, kind)
        self.then = then

    def resolve(self, reply: c.Reply | None = None) -> None:
        super().resolve(reply)
        self.then()


class MeshRequest(Request):
    """An answer of each of several nodes, which are asked by one command."""

    __slots__ = ("replies", "waiting")

    def __init__(self, id: int, queue: CommandQueue, kind: type[Message], due: int) -> None:
        super().__init__(id, queue.ranks[0], kind, due)
        self.queue = queue
        self.waiting = set(queue.ranks)  #: those that have not answered
        self.replies: dict[int, c.Reply] = {}

    def asks(self, rank: int) -> bool:
        return rank in self.waiting

    @property
    def ranks(self) -> list[int]:
        return list(self.waiting)

    def take(self, rank: int, reply: c.Reply) -> bool:
        self.replies[rank] = reply
        self.waiting.discard(rank)
        self.node = next(iter(self.waiting), rank)
        return not self.waiting
