"""The interface of control transports. One carries complete messages, in order, between the master and nodes.

    master: Hub  -- send(rank, message) -->  node: Spoke.recv()
                 <-- send(message) --------

The hub takes the rank of a sender from the authenticated connection, never from the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

#: The most messages that one ``Hub.drain`` takes. A node that sends without pause must not keep the link's lock held.
TURN = 256


class Hub(ABC):
    """The master's end. No method is thread-safe: the link holds its lock around each call."""

    @abstractmethod
    def send(self, rank: int, message: bytes) -> None:
        """Queues ``message`` for node ``rank``; returns at once.

        Raises BrokenError when the node is not (or no longer) connected, ClosedError after ``close``.
        """

    @abstractmethod
    def drain(self) -> list[tuple[int, bytes]]:
        """Takes messages that have arrived, oldest first, as (rank, message): at most TURN of them; never blocks.

        After it returned, ``fileno()`` is readable if it has left any, and becomes so for anything that arrives later.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when ``drain`` may have something. Poll it without the lock."""

    @abstractmethod
    def gone(self) -> list[int]:
        """Returns the nodes whose connections ended since the last call, each once.

        ``drain`` has given out all that they sent.
        """

    @abstractmethod
    def admit(self, rank: int, key: str) -> None:
        """Lets in one more node, the one with this public key (Z85; without meaning where nothing is encrypted)."""

    @abstractmethod
    def readmit(self, rank: int, key: str) -> None:
        """Lets in another worker in the place of node ``rank``, whose connection has ended, or ends now: nothing more
        of it is given out, neither messages nor its end, and its key is good for nothing any more."""

    @abstractmethod
    def cut(self, rank: int) -> None:
        """Breaks the connection with node ``rank`` as a failing network does; for tests.

        Both ends find out by themselves. Without a connection it does nothing.
        """

    def cut_deaf(self) -> list[int]:
        """Breaks the connections whose other end's kernel does not answer: what is under way never arrives there.

        Returns the nodes. To be called about every second, by any thread.
        """
        return []  # without a network nobody is deaf

    def cut_endless(self) -> list[int]:
        """Breaks the connections on which far more has arrived than there were messages: one that never ends, which
        would fill this process's memory.

        Returns the nodes. To be called about every second, by one thread; ``drain`` has to be called meanwhile.
        """
        return []  # messages of a queue are whole

    @abstractmethod
    def forked(self) -> None:
        """Releases a forked child's copies of the connections, without telling the nodes."""

    @abstractmethod
    def close(self) -> None:
        """Sends queued messages within a short bound and releases all resources. Closing twice is fine."""


class Spoke(ABC):
    """A node's end. Used by the worker's one receiving thread; ``send`` may be called by any thread."""

    @abstractmethod
    def recv(self, timeout: float | None = None) -> bytes | None:
        """Returns the next message, or None after ``timeout`` seconds (None: waits without end).

        Raises ClosedError once the master's end is gone or this end was closed.
        """

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Queues ``message`` for the master. Raises ClosedError once this end was closed."""

    @abstractmethod
    def close(self) -> None:
        """Sends queued messages within a short bound and releases all resources. Closing twice is fine."""
