"""The frames that were sent, until the peer has said that it has dealt with them: those may have to be sent again.

A connection may break while both of its ends live: a firewall or a proxy resets it. The next one goes on with the first
frame that the peer has not dealt with, so nothing is lost, and nothing comes twice. What was written may be gone,
though, and its memory may be another's by then. So of small payloads a copy is kept. Of a large one there is none:
while it is being written its memory is its own, and it is sent again from its beginning; once it was handed over, only
its last bytes can have been lost, and then ``GONE`` takes its place, which fails that one transfer.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

import torch

from ...protocol.errors import ProtocolError
from ..ticket import Ticket
from .frames import DATA, EAGER, GONE, Frame
from .shield import is_local

#: The largest payload of which a copy is kept where the network is between: what fits into the kernels' buffers, and so
#: may be on its way for long. On one host nobody resets a connection, and the copy would take as long as the transfer.
MOST_OF_ONE = 4 << 20
#: The most bytes of copies for one peer: one that says nothing does not fill this one's memory.
MOST = 64 << 20


@dataclass(eq=False)
class Out:
    """A frame to write. ``tensor`` keeps the memory alive; ``header`` is set once the frame's turn has come."""

    frame: Frame
    tensor: torch.Tensor | None
    ticket: Ticket
    extra: bytes = b""  #: bytes that go with the frame, under its MAC
    header: bytes = b""  #: bytes to write before the payload
    rest: bool = False  #: ``header`` holds all that is left to be written
    kept: bool = False  #: it is one of ``Kept``: it may have been written, and is sent again with the next connection
    copy: bytes | None = None  #: the payload, where ``tensor`` is not its any more
    #: the carrier's number of what the peer reads where it lies, until it has; the ticket ends then. 0: nothing
    lent: int = 0

    def take_back(self) -> None:
        """Has what was lent be staged anew."""
        if self.lent:
            self.frame, self.extra, self.header, self.lent = self.frame._replace(kind=DATA), b"", b"", 0


class TcpConnection:
    """One of the connections that a pair has one after the other. ``users``: threads that use its socket."""

    def __init__(self, sock: socket.socket, dialled: bool) -> None:
        """``dialled``: this end has called, so it knows that the other one has it, too."""
        self.sock, self.dialled, self.users, self.since = sock, dialled, 0, time.monotonic()
        try:
            self.local = is_local(sock)
        except OSError:  # it has ended already
            self.local = False
        self.most = EAGER if self.local else MOST_OF_ONE  #: the largest payload of which a copy is kept


class Kept:
    """The frames that were sent and are not known to have been dealt with, in order. Used with the peer's lock held.

    A frame that is to be sent again stays here: the peer may have dealt with it, and say so only with the connection
    after the next.
    """

    def __init__(self) -> None:
        self._outs: deque[Out] = deque()
        self._written = 0  #: the number of those that were written to this connection, or are about to be: the first
        self.receipt = 0  #: the number of frames that the peer has dealt with
        self._held = 0  #: bytes of copies

    def lent(self) -> list[Out]:
        """Returns the frames whose payloads the peer reads where they lie, and has not read yet."""
        return [out for out in self._outs if out.lent]

    def end_lent(self, number: int) -> list[Ticket]:
        """Lets go of payloads that the peer has read, up to the carrier's number of the last one; returns their
        tickets."""
        over = [out for out in self._outs if 0 < out.lent <= number]
        for out in over:
            out.lent, out.tensor = 0, None
        return [out.ticket for out in over]

    @property
    def sent(self) -> int:
        """The number of frames that were sent, by whatever connection."""
        return self.receipt + len(self._outs)

    def add(self, out: Out) -> None:
        """Notes a frame that is about to be written, in order."""
        self._written += 1
        if not out.kept:
            out.kept = True
            self._outs.append(out)

    def keep_copy(self, out: Out, copy: bytes) -> None:
        """Keeps a copy of the payload of one that was written, or is about to be."""
        self._held += len(copy) - len(out.copy or b"")
        out.copy = copy
        if self._held > MOST:
            for old in islice(self._outs, self._written):  # not of what is to be sent again
                if old.copy is not None and old is not out:
                    self._held -= len(old.copy)
                    old.copy = None
                if self._held <= MOST:
                    break

    def acknowledge(self, receipt: int) -> list[Ticket]:
        """Forgets what the peer has dealt with, as it tells by this connection; returns its tickets, to be ended well
        without the lock.

        Raises ProtocolError for a number that cannot be.
        """
        return self._drop_received(receipt, self.receipt + self._written)

    def begin_connection(self, receipt: int) -> tuple[list[Ticket], list[Out]]:
        """Begins a connection of a peer that has dealt with ``receipt`` frames by all others.

        Returns the tickets of those, as ``acknowledge`` does, and what is to be sent again. Raises ProtocolError.
        """
        over = self._drop_received(receipt, self.sent)
        self._written = 0
        return over, [_anew(out) for out in self._outs]

    def _drop_received(self, receipt: int, most: int) -> list[Ticket]:
        if not self.receipt <= receipt <= most:
            raise ProtocolError(f"it has received {receipt} frames, of {self.receipt} to {most}")
        over = [self._outs.popleft() for _ in range(receipt - self.receipt)]
        self._written = max(0, self._written - len(over))
        self.receipt = receipt
        for out in over:
            out.kept = False
            self._held -= len(out.copy or b"")
        return [out.ticket for out in over]

    def give_up(self) -> list[Out]:
        """Forgets all, and returns it."""
        outs = list(self._outs)
        self._outs.clear()
        self._written = self._held = 0
        return outs


def _anew(out: Out) -> Out:
    """Returns what to send for a frame in the next connection."""
    out.header, out.rest = b"", False
    out.take_back()
    if out.frame.kind == DATA and out.copy is None and (out.tensor is None or out.ticket.is_completed()):
        out.frame, out.tensor = Frame(GONE, out.frame.transfer, 0, 0, 0), None
    return out
