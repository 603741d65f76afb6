"""The master's end of the side channels: what nodes are told whatever they are at, until each has been told, and what
they answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from ..process.clock import CLOCK, Clock
from ..protocol import side
from ..protocol.errors import BrokenError, ProtocolError
from ..transport.base import Hub
from .node import Node
from .patience import Cancelled


class Answered(NamedTuple):
    """The answer of a node to a Gather."""

    message: side.Gathered
    asked: float  #: when it was asked
    came: float  #: when the answer was taken in


class Asked(NamedTuple):
    """A question that a node has not answered."""

    rank: int
    at: float
    word: bytes


class SideChannels:
    """The side channels of all nodes. The caller of each method holds the link's lock."""

    __slots__ = (
        "_answers",
        "_asked",
        "_clock",
        "_describing",
        "_last",
        "_lines",
        "_losses",
        "_lost",
        "_untold",
        "_watches",
        "cancelled",
        "hub",
        "keys",
        "on_described",
        "said_deaf",
    )

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self.hub: Hub | None = None  #: None where there are none: nodes that are threads
        self.said_deaf = False  #: whether it was said that functions can't be interrupted without them
        self.cancelled: dict[int, Cancelled] = {}  #: functions that are to end and have not, by request
        self.keys: dict[int, str] = {}  #: by rank: the public key of a node's connections beside the first one
        self._losses: dict[int, dict[int, bytes]] = {}  #: by rank: the words of losses that a node is to hear, by rank
        self._lost: set[int] = set()  #: ranks
        self._untold: dict[int, deque[bytes]] = {}  #: by rank: the words that it has not been sent
        self._watches: dict[int, bytes] = {}  #: by rank: the last Watch
        self._lines: dict[tuple[int, int], bytes] = {}  #: by rank and debugger: the last DebuggerLine
        self._last = 0  #: the number of the last question
        self._asked: dict[int, Asked] = {}  #: by request: questions that are not answered
        self._answers: dict[int, Answered] = {}  #: by request: answers that nobody has taken
        self._describing: dict[int, int] = {}  #: by rank: the Describe that it has not answered
        #: is told the rank and the description of a node, and when that came
        self.on_described: Callable[[int, side.Described, float], object] = lambda rank, described, at: None

    def __repr__(self) -> str:
        untold = {rank: len(words) for rank, words in self._untold.items() if words}
        return f"<SideChannels hub={self.hub} untold={untold}>"

    def admit(self, rank: int, key: str) -> None:
        """Lets in one more node."""
        if self.hub is not None:
            self.hub.admit(rank, key)
            self.keys[rank] = key

    def readmit(self, rank: int, key: str) -> None:
        """Lets in another worker in the place of a lost one, by its key: nobody is told of that loss any more, and it
        is to hear of none, as it knows nobody."""
        self._lost.discard(rank)
        for words in self._losses.values():
            words.pop(rank, None)
        if self.hub is not None:
            self.hub.readmit(rank, key)
            self.keys[rank] = key
            if rank in self._watches:
                self._untold[rank] = deque([self._watches[rank]])

    def lost(self, rank: int, cause: str, incarnation: int, others: Iterable[Node]) -> None:
        """Tells other nodes of a loss."""
        if self.hub is not None:
            self._lost.add(rank)
            word = side.encode(side.Gone(rank, cause, incarnation))
            self._untold.pop(rank, None)
            self._losses.pop(rank, None)
            self._asked.pop(self._describing.pop(rank, 0), None)
            self._lines = {key: word for key, word in self._lines.items() if key[0] != rank}
            for node in others:
                self._untold.setdefault(node.rank, deque()).append(word)
                self._losses.setdefault(node.rank, {})[rank] = word
            self.send_untold(others)

    def cancel(self, node: Node, request: int) -> None:
        """Tells a node that nobody waits for the function of a request any more."""
        if self.hub is not None:
            self.cancelled[request] = Cancelled(node, request, self._clock)
            self._queue_word(node, side.encode(side.Cancel(request)))

    def watch(self, node: Node, points: tuple[side.Point, ...], room: int, commands: int = 0) -> None:
        """Has a node's observers note what happens at these points, and keep the last ``room`` events, and the times of
        the last ``commands``."""
        self._watches[node.rank] = side.encode(side.Watch(points, room, commands))
        self._queue_word(node, self._watches[node.rank])

    def ask(self, node: Node, first: int) -> int:
        """Asks a node for what was noted from event ``first`` on. Returns the number by which ``answer`` knows it."""
        self._last += 1
        word = side.encode(side.Gather(self._last, first))
        self._asked[self._last] = Asked(node.rank, self._clock.now(), word)
        self._queue_word(node, word)
        return self._last

    def describe(self, node: Node) -> None:
        """Asks a node to describe itself, unless it has not answered the last such question: one that can't answer is
        asked once."""
        if node.rank not in self._describing:
            self._last += 1
            self._describing[node.rank] = self._last
            word = side.encode(side.Describe(self._last))
            self._asked[self._last] = Asked(node.rank, self._clock.now(), word)
            self._queue_word(node, word)

    def answer(self, request: int) -> Answered | None:
        """Takes the answer to a question, if it has come."""
        return self._answers.pop(request, None)

    def withdraw(self, request: int) -> None:
        """Forgets a question, whose answer nobody takes."""
        self._asked.pop(request, None)
        self._answers.pop(request, None)

    def answer_debugger(self, node: Node, line: side.DebuggerLine) -> None:
        """Tells a debugger of a function on a node what its user has typed."""
        word = side.encode(line)
        self._lines[node.rank, line.stop] = word
        self._queue_word(node, word)

    def end_debugger(self, rank: int, stop: int) -> None:
        """Forgets what was said to a debugger that has ended."""
        self._lines.pop((rank, stop), None)

    def _queue_word(self, node: Node, word: bytes) -> None:
        self._untold.setdefault(node.rank, deque()).append(word)
        self.send_untold([node])

    def send_untold(self, nodes: Iterable[Node]) -> None:
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
        """Takes what nodes have said, and breaks the connections on which a message comes that
        never ends: what was given out can be told from it only when all of it was taken."""
        if self.hub is not None:
            self._hear(self.hub)
            self.hub.cut_endless()

    def _hear(self, hub: Hub) -> None:
        """Takes nodes' first messages, by which connections are known, and their answers.

        One whose connection has ended makes another one, and is told all again: nobody knows what has arrived.
        """
        for rank, message in hub.drain():
            if message:
                self._take_answer(rank, message)
        for rank in hub.gone():
            if rank not in self._lost:
                cancels = [side.encode(side.Cancel(request)) for request in self._cancels_of(rank)]
                asked = [each.word for each in self._asked.values() if each.rank == rank]
                watch = [self._watches[rank]] if rank in self._watches else []
                lines = [word for (node, _), word in self._lines.items() if node == rank]
                self._untold[rank] = deque([*self._losses.get(rank, {}).values(), *cancels, *watch, *asked, *lines])

    def _take_answer(self, rank: int, message: bytes) -> None:
        """Takes the answer to a question, which may come twice, or after it was withdrawn. Any other message
        is dropped: nothing that counts depends on these connections."""
        try:
            answer = side.decode_answer(message)
        except ProtocolError:
            return
        asked = self._asked.get(answer.request)
        if asked is not None and asked.rank == rank:
            is_described = self._describing.get(rank) == answer.request
            if is_described is not isinstance(answer, side.Described):
                return  # what answers another question
            del self._asked[answer.request]
            now = self._clock.now()
            if isinstance(answer, side.Described):
                del self._describing[rank]
                self.on_described(rank, answer, now)
            else:
                self._answers[answer.request] = Answered(answer, asked.at, now)

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
