"""The control transport inside one process, for tests: queues, with the same contract as over ZeroMQ.

    InprocHub._inbox (deque + eventfd) <-- spoke.send          hub.send --> InprocSpoke._inbox (SimpleQueue)

As over ZeroMQ, a node is connected from its first drained message on, and gone for good once its spoke is closed.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque

from ..protocol.errors import BrokenError, ClosedError
from .base import TURN, Hub, Spoke
from .sockets import MAX_MESSAGE


class InprocHub(Hub):
    """The master's end for nodes 0 to ``n - 1`` of the same process."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._lock = threading.Lock()  # guards the pairing of _inbox with _event, and _spokes
        self._inbox: deque[tuple[int, bytes | None]] = deque()  # None: the spoke was closed
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._spokes: dict[int, InprocSpoke] = {}
        self._connected: set[int] = set()
        self._gone: list[int] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<InprocHub {'closed' if self._closed else f'connected={sorted(self._connected)}'} of {self._n}>"

    @property
    def connected(self) -> frozenset[int]:
        """The nodes that were heard from and are not gone."""
        return frozenset(self._connected)

    def spoke(self, rank: int) -> InprocSpoke:
        """Makes node ``rank``'s end.

        Raises ValueError for a rank out of range or taken, ClosedError after ``close``.
        """
        if not 0 <= rank < self._n:
            raise ValueError(f"no node {rank}: this hub has the nodes 0 to {self._n - 1}")
        with self._lock:
            if self._closed:
                raise ClosedError("the hub is closed")
            if rank in self._spokes:
                raise ValueError(
                    f"node {rank} has its spoke already; another worker comes in its place after readmit()"
                )
            spoke = self._spokes[rank] = InprocSpoke(self, rank)
        return spoke

    def send(self, rank: int, message: bytes) -> None:
        if self._closed:
            raise ClosedError(f"cannot send to node {rank}: the hub is closed")
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes; at most {MAX_MESSAGE} fit: split it")
        if rank not in self._connected or self._spokes[rank].closed:
            raise BrokenError(f"node {rank} is not connected (connected: {sorted(self._connected)})")
        self._spokes[rank].put(message)

    def drain(self) -> list[tuple[int, bytes]]:
        if self._closed:
            raise ClosedError("cannot receive: the hub is closed")
        if not self._inbox:
            return []
        with self._lock:
            arrived = [self._inbox.popleft() for _ in range(min(TURN, len(self._inbox)))]
            if not self._inbox:
                os.eventfd_read(self._event)
        out = []
        for rank, message in arrived:
            if message is not None:
                self._connected.add(rank)
                out.append((rank, message))
            elif rank in self._connected:
                self._connected.discard(rank)
                self._gone.append(rank)
        return out

    def gone(self) -> list[int]:
        """Returns the nodes lost since the last call, each once; ``drain`` has given out all they had sent."""
        out, self._gone = self._gone, []
        return out

    def admit(self, rank: int, key: str) -> None:
        if rank != self._n:
            raise ValueError(f"node {rank} is not the next one after those that there are, 0 to {self._n - 1}")
        self._n += 1

    def readmit(self, rank: int, key: str) -> None:
        self.cut(rank)
        with self._lock:
            former = self._spokes.pop(rank, None)
            self._connected.discard(rank)
            self._gone = [gone for gone in self._gone if gone != rank]
            if former is not None:
                former.replaced = True
                left = [each for each in self._inbox if each[0] != rank]
                if self._inbox and not left:
                    os.eventfd_read(self._event)
                self._inbox = deque(left)

    def cut(self, rank: int) -> None:
        spoke = self._spokes.get(rank)
        if spoke is not None:
            spoke.close()

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._inbox.clear()
            os.close(self._event)
        for spoke in self._spokes.values():
            spoke.put(None)

    def forked(self) -> None:
        """Closes the hub in a forked child: every call raises ClosedError from now on."""
        if not self._closed:
            self._closed = True
            os.close(self._event)

    def _arrive(self, spoke: InprocSpoke, message: bytes | None) -> bool:
        """Queues a spoke's message; returns False when the hub is closed."""
        with self._lock:
            if self._closed:
                return False
            if spoke.replaced:
                return True
            self._inbox.append((spoke.rank, message))
            os.eventfd_write(self._event, 1)
            return True


class InprocSpoke(Spoke):
    """A node's end; made by ``InprocHub.spoke``."""

    def __init__(self, hub: InprocHub, rank: int) -> None:
        self._hub, self.rank = hub, rank
        self.replaced = False  #: whether another worker has come in its place, so that nothing of it counts
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: one of the two ends was closed
        self._master_gone = False
        self.closed = False

    def __repr__(self) -> str:
        return f"<InprocSpoke node={self.rank}{' closed' if self.closed else ''}>"

    def recv(self, timeout: float | None = None) -> bytes | None:
        if self.closed:
            raise ClosedError(f"node {self.rank} cannot receive: its own end is closed")
        if self._master_gone:
            raise ClosedError(f"node {self.rank} cannot receive: the master is gone")
        try:
            message = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            self._master_gone = not self.closed
            return self.recv()  # raises
        return message

    def send(self, message: bytes) -> None:
        if self.closed:
            raise ClosedError(f"node {self.rank} cannot send: its own end is closed")
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes; at most {MAX_MESSAGE} fit: split it")
        if not self._hub._arrive(self, message):
            raise ClosedError(f"node {self.rank} cannot send: the master is gone")

    def put(self, message: bytes | None) -> None:
        """Queues a message of the hub."""
        self._inbox.put(message)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._hub._arrive(self, None)
            self._inbox.put(None)
