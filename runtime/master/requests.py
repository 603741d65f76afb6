"""Answers that threads wait for (link.py), and how they are woken."""

from __future__ import annotations

import os
import threading

from ..protocol import commands as c


class Waker:
    """Wakes a thread that polls. Whoever holds it can do so, though the thread may have ended."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.polling = False  #: it polls: if by this very thread, then below the handler of a signal
        self._thread = threading.get_ident()

    def wake(self) -> None:
        if self.polling or self._thread != threading.get_ident():
            os.eventfd_write(self.fd, 1)

    def __del__(self) -> None:
        os.close(self.fd)


class Request:
    """An answer that a thread waits for. ``reply`` is set before ``done``."""

    __slots__ = ("done", "id", "kind", "node", "reply", "waker")

    def __init__(self, id: int, node: int, kind: type[c.Reply] = c.Done) -> None:
        self.id = id
        self.node = node
        self.kind = kind  #: of the reply, if nothing has failed
        self.reply: c.Reply | None = None
        self.done = False
        self.waker: Waker | None = None  #: wakes the thread that waits

    def resolve(self, reply: c.Reply | None = None) -> None:
        """Ends the waiting. Called by any thread."""
        self.reply = reply
        self.done = True
        waker = self.waker  # read once: the thread may stop waiting, and even end, while this one is here
        if waker is not None:
            waker.wake()
