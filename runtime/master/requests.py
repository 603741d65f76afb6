"""Requests: answers that threads wait for (link.py), and the wakers of these threads."""

from __future__ import annotations

import os
import threading

from ..protocol import commands as c
from ..protocol.arguments import Message


class Waker:
    """Wakes a thread that polls. Its holder may do so even after the thread has ended."""

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
        os.close(self.fd)


class Request:
    """An answer that a thread waits for. ``reply`` is set before ``done``."""

    __slots__ = ("done", "due", "id", "kind", "node", "reply", "waker")

    def __init__(self, id: int, node: int, kind: type[Message] = c.Done, due: int = 0) -> None:
        self.id = id
        self.node = node
        self.kind = kind  #: the reply's type, if nothing has failed
        self.due = due  #: of reasons (Unusable): how many there have to be
        self.reply: c.Reply | None = None
        self.done = False
        self.waker: Waker | None = None  #: wakes the thread that waits

    def resolve(self, reply: c.Reply | None = None) -> None:
        """Ends the wait. Called by any thread."""
        self.reply = reply
        self.done = True
        waker = self.waker  # read once: the thread may stop waiting, and even end, while this one is here
        if waker is not None:
            waker.wake()
