"""A hub without nodes: a test reads what was sent, and says what has arrived."""

from __future__ import annotations

import contextlib
import os
import threading

from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.arguments import Addresses
from disttensor.runtime.protocol.bundle import PROTOCOL
from disttensor.runtime.protocol.errors import BrokenError
from disttensor.runtime.transport.base import Hub

#: What a node says first.
HELLO = c.Hello(
    PROTOCOL, "job", 1, "host", "2.0", "3.11.0", ("cpu",), False, Addresses("a:1"),
    c.Abilities("AVX2", False, False, False),
)  # fmt: skip


class FakeHub(Hub):
    """Keeps what is sent, and gives out what a test says has arrived."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.arrived: list[tuple[int, bytes]] = []
        self.ended: list[int] = []
        self.were_cut: list[int] = []
        self.readmitted: list[tuple[int, str]] = []
        self.broken: set[int] = set()  #: nodes to which nothing can be sent
        self.deaf: list[int] = []  #: nodes whose connections ``cut_deaf`` cuts
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.has_sent = threading.Event()

    def send(self, rank: int, message: bytes) -> None:
        if rank in self.broken:
            raise BrokenError(f"node {rank} is gone")
        self.sent.append((rank, message))
        self.has_sent.set()

    def drain(self) -> list[tuple[int, bytes]]:
        with contextlib.suppress(OSError):  # nothing has arrived; closed
            os.eventfd_read(self.event)
        arrived, self.arrived = self.arrived, []
        return arrived

    def fileno(self) -> int:
        return self.event

    def gone(self) -> list[int]:
        ended, self.ended = self.ended, []
        return ended

    def admit(self, rank: int, key: str) -> None: ...

    def readmit(self, rank: int, key: str) -> None:
        self.readmitted.append((rank, key))

    def cut(self, rank: int) -> None:
        self.were_cut.append(rank)

    def cut_deaf(self) -> list[int]:
        deaf, self.deaf = self.deaf, []
        return deaf

    def forked(self) -> None: ...

    def close(self) -> None:
        """Closes the descriptor. Calling it twice is fine."""
        if self.event >= 0:
            os.close(self.event)
            self.event = -1

    def say(self, rank: int, *replies: c.Reply, done: int = 0) -> None:
        """A report of a node arrives."""
        self.arrived.append((rank, codec.encode(c.Report(done, replies))))
        os.eventfd_write(self.event, 1)

    def commands(self, rank: int) -> list[c.Command]:
        """What a node was sent."""
        return [each for to, data in self.sent if to == rank for each in codec.decode_batch(data).commands]
