"""The master's end of the side channels: what nodes are told whatever they are at, until each has been told."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from ..process.clock import CLOCK, Clock
from ..protocol import side
from ..protocol.errors import BrokenError
from ..transport.base import Hub
from .node import Node
from .patience import Cancelled


class SideChannels:
    """The side channels of all nodes. The caller of each method holds the link's lock."""

    __slots__ = ("_clock", "_losses", "_lost", "_untold", "cancelled", "hub", "keys", "said_deaf")

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self.hub: Hub | None = None  #: None where there are none: nodes that are threads
        self.said_deaf = False  #: whether it was said that functions can't be interrupted without them
        self.cancelled: dict[int, Cancelled] = {}  #: functions that are to end and have not, by request
        self.keys: dict[int, str] = {}  #: by rank: the public key of a node's connections beside the first one
        self._losses: list[bytes] = []
        self._lost: set[int] = set()  #: ranks
        self._untold: dict[int, deque[bytes]] = {}  #: by rank: the words that it has not been sent

    def __repr__(self) -> str:
        untold = {rank: len(words) for rank, words in self._untold.items() if words}
        return f"<SideChannels hub={self.hub} untold={untold}>"

    def admit(self, rank: int, key: str) -> None:
        """Lets in one more node, which is to hear of all losses."""
        if self.hub is not None:
            self.hub.admit(rank, key)
            self.keys[rank] = key
            self._untold[rank] = deque(self._losses)

    def lost(self, rank: int, cause: str, others: Iterable[Node]) -> None:
        """Tells all other nodes of a loss."""
        if self.hub is not None:
            self._lost.add(rank)
            self._losses.append(side.encode(side.Gone(rank, cause)))
            self._untold.pop(rank, None)
            for node in others:
                self._untold.setdefault(node.rank, deque()).append(self._losses[-1])
            self.tell(others)

    def cancel(self, node: Node, request: int) -> None:
        """Tells a node that nobody waits for the function of a request any more."""
        if self.hub is not None:
            self.cancelled[request] = Cancelled(node, request, self._clock)
            self._untold.setdefault(node.rank, deque()).append(side.encode(side.Cancel(request)))
            self.tell([node])

    def tell(self, nodes: Iterable[Node]) -> None:
        """Sends nodes what they have not been told. A node whose side channel comes late is told at a later call."""
        if self.hub is None:
            return
        self._hear(self.hub)
        for node in nodes:
            words = self._untold.get(node.rank)
            with suppress(BrokenError):  # it has no side channel yet, or none any more
                while words:
                    self.hub.send(node.rank, words[0])
                    words.popleft()

    def cut_endless(self) -> None:
        """Takes what nodes have said, which is nobody's concern, and breaks the connections on which a message comes
        that never ends: what was given out can be told from it only when all of it was taken."""
        if self.hub is not None:
            self._hear(self.hub)
            self.hub.cut_endless()

    def _hear(self, hub: Hub) -> None:
        """Takes nodes' first messages, by which connections are known; a node says nothing else here.

        One whose connection has ended makes another one, and is told all again: nobody knows what has arrived.
        """
        hub.drain()
        for rank in hub.gone():
            if rank not in self._lost:
                cancels = [side.encode(side.Cancel(request)) for request in self._cancels_of(rank)]
                self._untold[rank] = deque([*self._losses, *cancels])

    def _cancels_of(self, rank: int) -> list[int]:
        return [request for request, cancelled in self.cancelled.items() if cancelled.node.rank == rank]

    @property
    def behind(self) -> bool:
        """Returns whether some node has not been told something."""
        return any(self._untold.values())

    def forked(self) -> None:
        """Closes a forked child's copy of the connections."""
        if self.hub is not None:
            self.hub.forked()

    def close(self) -> None:
        """Closes the connections."""
        if self.hub is not None:
            self.hub.close()
