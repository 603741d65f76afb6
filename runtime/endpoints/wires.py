"""Wires: streams of messages over sockets, which one thread reads and writes, so that an interrupt never splits one.

who sends     --- out   -->
who receives  <-- inbox, or a Future ---  the thread "disttensor-wires" == socket, a tunnel's end == other program
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any

from ..master.patience import PATIENCE
from ..process.own_time import Unheard
from ..process.signals import LOOK
from ..protocol.errors import BrokenError, ClosedError, DisttensorError, ProtocolError
from .frames import MAX_FIRST, MAX_HEAD, Bye, Come, EndpointValue, MessageReader, Refused, frame, unpack

#: Bytes of messages, and messages, that nobody has taken, beyond which no more of a wire is read.
FULL_BYTES, FULL_MESSAGES = 64 << 20, 1024
#: The most bytes that are read from one wire, or written to it, in one turn.
_TURN = 4 << 20
#: Seconds in which a close sends what is left.
FLUSH = 5.0


_log = logging.getLogger("disttensor")


class _Sending:
    """A message on its way out."""

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.views = deque(views)
        self.done = False


class Wire:
    """One stream of messages. All is under the lock of its thread's condition."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.reader = sock, MessageReader(MAX_FIRST)
        self.out: deque[_Sending] = deque()
        self.inbox: deque[tuple[int, Any, int]] = deque()  #: when it came, in the order of all; the value; its bytes
        self.waiting: deque[Future[Any]] = deque()
        self.held = 0  #: bytes in the inbox
        self.admitted = False  #: the other end has said who it is
        self.refused = False  #: it is to end when it has been told so
        self.said_bye = False  #: this end has
        self.deaf = False  #: the other end reads nothing more
        self.dropping = ""  #: why it is to end, when the thread has seen it
        self.ended: str | None = None  #: why nothing more comes, and nothing goes
        self.closed = False  #: that was a close of either end
        self.name = "the other end"

    def admit(self) -> None:
        """Lets the other end send whatever a message may be: it has said who it is."""
        self.admitted, self.reader.most = True, MAX_HEAD

    @property
    def full(self) -> bool:
        return bool(self.inbox) and (self.held >= FULL_BYTES or len(self.inbox) >= FULL_MESSAGES)

    def error(self) -> BrokenError | ClosedError:
        """Returns a fresh exception that says how it has ended."""
        return (ClosedError if self.closed else BrokenError)(f"{self.name} {self.ended}")


class Wires:
    """The thread, and its wires. ``start`` follows: the thread calls who has made this."""

    def __init__(
        self,
        heard: Callable[[Wire, Come], None],
        arrivals: int = -1,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """``heard`` gets, under the lock, what is no value; it may raise ProtocolError. ``arrived`` is called, without
        it, when the descriptor ``arrivals`` is readable."""
        self.cond = threading.Condition(threading.Lock())
        self.wires: list[Wire] = []
        self._heard, self._arrivals, self._arrived = heard, arrivals, arrived
        self._order = count()
        self._futures: deque[tuple[Future[Any], BaseException]] = deque()  #: those of wires that have ended
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = self._closed = False
        self._thread = threading.Thread(target=self._run, name="disttensor-wires", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- for users' threads ------------------------------------------------------------------------------------------

    def wait(self, until: Callable[[], bool], timeout: float | None, slow: Callable[[], str] | None = None) -> bool:
        """Waits, with the lock, until something is true; ``timeout`` seconds at most. Returns whether it is.

        A wait that takes long says so, in the words of ``slow``. Interruptible in every thread. Raises DisttensorError
        in a callback of a Future."""
        if self.is_own_thread():
            raise DisttensorError("a callback of recv_async() runs in the thread that moves messages: it can't wait")
        deadline = None if timeout is None else time.monotonic() + timeout
        unheard, patience = Unheard(), PATIENCE
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if slow is not None and (seconds := unheard.look()) >= patience:
                patience = 2 * seconds
                _log.warning("waiting for %.0f s: %s", seconds, slow())
            self.cond.wait(LOOK if left is None else min(LOOK, left))
        return True

    def queue(self, wire: Wire, views: Iterable[memoryview]) -> _Sending:
        """Has a message leave, with the lock. Raises what has ended the wire."""
        if wire.ended is not None:
            raise wire.error()
        if wire.said_bye:
            raise ClosedError(f"the connection with {wire.name} is closed here")
        if wire.deaf:
            raise BrokenError(f"{wire.name} reads nothing more")
        sending = _Sending(views)
        wire.out.append(sending)
        self.wake()
        return sending

    def take_message(self, wire: Wire) -> tuple[int, Any, int]:
        """Takes the next message of an inbox that has one, with the lock."""
        entry = wire.inbox.popleft()
        was_full = wire.full
        wire.held -= entry[2]
        if was_full or wire.held + entry[2] >= FULL_BYTES or len(wire.inbox) + 1 >= FULL_MESSAGES:
            self.wake()
        return entry

    def put_back(self, wire: Wire, entry: tuple[int, Any, int]) -> None:
        """Puts back what was taken: it is the next one again."""
        wire.inbox.appendleft(entry)
        wire.held += entry[2]
        self.cond.notify_all()

    def leave(self, wires: Iterable[Wire], bound: float) -> None:
        """Closes wires, with the lock: what is on its way out leaves first, and the other end hears of it, in ``bound``
        seconds."""
        wires = list(wires)
        try:
            for wire in wires:
                if wire.ended is None and not wire.said_bye and not wire.deaf:
                    self.queue(wire, [memoryview(frame(Bye()))])
                wire.said_bye = True
            # until the other end has ended it: who ends a connection with something unread in it takes back what is on
            # its way out
            self.wait(lambda: all(wire.ended is not None for wire in wires), bound)
        finally:
            for wire in wires:
                wire.dropping = wire.dropping or "is closed here"
            self.wake()
        self.wait(lambda: all(wire.ended is not None for wire in wires), None)

    def add(self, sock: socket.socket) -> Wire:
        """Takes a socket, with the lock."""
        self.wires.append(wire := Wire(sock))
        self.wake()
        return wire

    def is_own_thread(self) -> bool:
        """Returns whether a callback of a Future asks."""
        return threading.get_ident() == self._thread.ident

    def wake(self) -> None:
        """Has the thread look at what has changed; with the lock."""
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    def close(self, bound: float = FLUSH) -> None:
        """Says goodbye on all wires, and ends the thread."""
        with self.cond:
            try:
                self.leave(self.wires, bound)
            finally:
                self._stopping = True
                self.wake()
        self._thread.join()
        with self.cond:
            if not self._closed:
                self._closed = True
                os.close(self._wake)

    def forked(self) -> None:
        """Closes a forked child's copies of the sockets."""
        self.cond = threading.Condition(threading.Lock())
        for wire in self.wires:
            wire.ended, wire.closed = "belongs to the process that this one was forked from", True
            wire.reader.close()
            wire.sock.close()
        self.wires.clear()
        self._closed = True
        os.close(self._wake)

    def end_wire(self, wire: Wire, why: str, closed: bool = False) -> None:
        """Ends a wire, with the lock; called by the thread. What has come stays to be taken."""
        if wire.ended is None:
            wire.ended, wire.closed = why, closed
            wire.out.clear()
            wire.reader.close()  # now, and not when somebody asks for the next message of one that is gone
            wire.sock.close()
            self.wires.remove(wire)
            self._futures += [(future, wire.error()) for future in wire.waiting]
            wire.waiting.clear()
            self.cond.notify_all()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            while self._futures:  # without the lock: callbacks are the user's
                future, error = self._futures.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            if self._arrivals >= 0:
                poller.register(self._arrivals, select.POLLIN)
            with self.cond:
                for wire in [wire for wire in self.wires if wire.dropping]:
                    self.end_wire(wire, wire.dropping, closed=True)
                if self._stopping:
                    return
                if self._futures:
                    continue
                polled = {wire.sock.fileno(): wire for wire in self.wires}
                for fd, wire in polled.items():
                    # one that is polled for nothing would still tell of its end, without a pause
                    if events := (0 if wire.full else select.POLLIN) | (select.POLLOUT if wire.out else 0):
                        poller.register(fd, events)
            for fd, event in poller.poll():
                if fd == self._wake:
                    with suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif fd == self._arrivals and self._arrived is not None:
                    self._arrived()
                elif (wire := polled[fd]).ended is None:
                    if event & select.POLLOUT:
                        self._write(wire)
                    if event & ~select.POLLOUT:
                        self._read(wire)

    def _write(self, wire: Wire) -> None:
        left = _TURN
        while left > 0:
            with self.cond:
                sending = wire.out[0] if wire.out else None
            if sending is None:
                return
            while sending.views and left > 0:
                try:
                    sent = wire.sock.send(sending.views[0][:left], socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    return
                except OSError:  # what is read tells how it has ended
                    with self.cond:
                        wire.deaf = True
                        wire.out.clear()
                        self.cond.notify_all()
                    return
                left -= sent
                if sent == len(sending.views[0]):
                    sending.views.popleft()
                else:
                    sending.views[0] = sending.views[0][sent:]
            if not sending.views:
                with self.cond:
                    if wire.out:
                        wire.out.popleft()
                    sending.done = True
                    if wire.refused and not wire.out:
                        wire.dropping = "was refused"
                    self.cond.notify_all()

    def _read(self, wire: Wire) -> None:
        left = _TURN
        while left > 0 and wire.ended is None and not wire.full:
            try:
                got = wire.sock.recv_into(wire.reader.room()[:left])
            except BlockingIOError:
                return
            except OSError:
                got = 0
            left -= got
            try:
                if not got:
                    raise EOFError
                if (come := wire.reader.took(got)) is not None:
                    self._handle_message(wire, come)
            except EOFError:
                with self.cond:
                    if wire.said_bye:
                        self.end_wire(wire, "is closed here", closed=True)
                    else:
                        self.end_wire(
                            wire, "has ended without a word: it was killed, or its host or the network is gone"
                        )
            except ProtocolError as e:
                with self.cond:
                    with suppress(BrokenError, ClosedError, OSError):
                        wire.sock.send(frame(Refused(str(e)[:300])), socket.MSG_NOSIGNAL)
                    self.end_wire(wire, f"has said what this version does not understand: {e}")

    def _handle_message(self, wire: Wire, come: Come) -> None:
        if isinstance(come.said, EndpointValue) and wire.admitted:
            nbytes = come.nbytes  # before it is made
            value = unpack(come)
            with self.cond:
                while wire.waiting:
                    future = wire.waiting.popleft()
                    if future.set_running_or_notify_cancel():
                        break
                else:
                    wire.inbox.append((next(self._order), value, nbytes))
                    wire.held += nbytes
                    self.cond.notify_all()
                    return
            future.set_result(value)  # without the lock: callbacks are the user's
        else:
            with self.cond:
                if isinstance(come.said, Bye):
                    self.end_wire(wire, "is closed here" if wire.said_bye else "has closed its end", closed=True)
                else:
                    self._heard(wire, come)
                    self.cond.notify_all()
