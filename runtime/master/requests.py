"""Requests: answers that threads wait for (waiting.py), the wakers of these threads, and the table of what is due."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType

from ..process.callbacks import call_callbacks
from ..protocol import commands as c
from ..protocol.arguments import Message
from ..protocol.errors import ProtocolError
from .command_queue import CommandQueue
from .connection import Life
from .failures import Site
from .link_state import LinkState
from .node import Node


class Waker:
    """Wakes a thread that polls. Its holder may do so even after the thread has ended."""

    __slots__ = ("_thread", "fd", "launcher", "polling")

    def __init__(self) -> None:
        self.fd = -1  # of one that can't be made
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

    __slots__ = ("counted", "done", "due", "id", "kind", "node", "queue", "reply", "site", "waker")

    #: the request of which observers are told that a thread has waited for it; 0: this one
    observed = 0

    def __init__(self, id: int, node: int, kind: type[Message] = c.Done, due: int = 0) -> None:
        self.id = id
        self.node = node  #: the node that answers; of several, one of those that have not yet
        self.kind = kind  #: the reply's type, if nothing has failed
        self.due = due  #: of reasons (Unusable): how many there have to be
        self.reply: c.Reply | None = None
        self.done = False
        self.counted = False  #: whether its caller counts the wait for it
        self.site: Site | None = None  #: the line that has asked for a value, of which the wait for it is counted
        self.waker: Waker | None = None  #: wakes the thread that waits
        self.queue: CommandQueue | None = None  #: for several nodes: their queue

    def asks(self, rank: int) -> bool:
        """Returns whether a node's answer is due."""
        return self.node == rank

    @property
    def ranks(self) -> list[int]:
        """The nodes whose answers are due."""
        return [self.node]

    def add_reply(self, rank: int, reply: c.Reply) -> bool:
        """Takes a node's reply; returns whether it was the last one that was due."""
        return True

    def is_over_without(self, rank: int) -> bool:
        """Takes it that a node, whose answer is due, is lost; returns whether that ends the wait."""
        return True

    def resolve(self, reply: c.Reply | None = None) -> None:
        """Ends the wait. Called by any thread."""
        self.reply = reply
        self.done = True
        waker = self.waker  # read once: the thread may stop waiting, and even end, while this one is here
        if waker is not None:
            waker.wake()


class CallbackRequest(Request):
    """An answer whose arrival is told to ``then``, in whichever thread takes it; that must not block."""

    __slots__ = ("then",)

    def __init__(self, id: int, node: int, kind: type[Message], then: Callable[[], object]) -> None:
        super().__init__(id, node, kind)
        self.then = then

    def resolve(self, reply: c.Reply | None = None) -> None:
        super().resolve(reply)
        self.then()


class ReplyRequest(Request):
    """An answer that is given to ``then``, in whichever thread takes it; None where none will come. That must not
    block."""

    __slots__ = ("then",)

    def __init__(self, id: int, node: int, kind: type[Message], then: Callable[[c.Reply | None], object]) -> None:
        super().__init__(id, node, kind)
        self.then = then

    def resolve(self, reply: c.Reply | None = None) -> None:
        super().resolve(reply)
        self.then(reply)


class EndRequest(Request):
    """The end of another request, for which any number of threads may wait. Observers are told of that one's."""

    __slots__ = ("observed",)

    def __init__(self, of: int, node: int) -> None:
        super().__init__(-1, node)
        self.observed = of


class ItemsRequest(CallbackRequest):
    """An answer to a Run of several items. What the node tells of the others comes before it, and is told as well."""

    __slots__ = ("left", "told")

    def __init__(self, id: int, node: int, items: int, then: Callable[[], object]) -> None:
        super().__init__(id, node, c.Result, then)
        self.left = set(range(items))  #: the items of which the node has not told
        self.told = deque[c.Mapped]()  #: what it has told, until somebody takes it

    def take_items(self, told: c.Mapped) -> None:
        """Takes what a node tells of some items. Raises ProtocolError for such as it has told of, or that are none."""
        items = {*told.done, *told.back}
        if len(items) < len(told.done) + len(told.back) or not items <= self.left:
            raise ProtocolError(f"items {sorted(items)!s:.200} were told of, and {sorted(self.left)!s:.200} are due")
        self.left -= items
        self.told.append(told)
        self.then()

    def resolve(self, reply: c.Reply | None = None) -> None:
        if isinstance(reply, c.Result) and len(self.left) != 1:
            super().resolve()  # as the loss does that follows
            raise ProtocolError(f"one result, and {len(self.left)} items are due")
        super().resolve(reply)


class _OfSeveral(Request):
    """An answer of each of several nodes."""

    __slots__ = ("waiting",)

    def __init__(self, id: int, ranks: Sequence[int], kind: type[Message], due: int = 0) -> None:
        super().__init__(id, ranks[0], kind, due)
        self.waiting = set(ranks)  #: those that have not answered

    def asks(self, rank: int) -> bool:
        return rank in self.waiting

    @property
    def ranks(self) -> list[int]:
        return list(self.waiting)


class MeshRequest(_OfSeveral):
    """An answer of each of several nodes, which are asked by one command."""

    __slots__ = ("replies",)

    def __init__(self, id: int, queue: CommandQueue, kind: type[Message], due: int) -> None:
        super().__init__(id, queue.ranks, kind, due)
        self.queue = queue
        self.replies: dict[int, c.Reply] = {}

    def add_reply(self, rank: int, reply: c.Reply) -> bool:
        self.replies[rank] = reply
        waiting = self.waiting
        waiting.discard(rank)
        if self.node == rank and waiting:
            self.node = next(iter(waiting))
        return not waiting


class GroupRequest(_OfSeveral):
    """An answer of each node of a group, for which no thread has to wait. The loss of a node ends that node's part
    only."""

    # fields are the class's until they change, and without slots: each asynchronous collective makes a request
    kind, due, counted, site, waker, queue = c.TookPart, 0, False, None, None, None
    reply: c.Reply | None = None
    done = False
    failed = False  #: whether a node's part has failed, or a node was lost
    well = False  #: whether all nodes have answered, and no part has failed; set before ``done``
    causes: Mapping[int, c.Poisoned] = MappingProxyType({})  #: why parts have failed, by node
    gone = frozenset[int]()  #: the nodes that were lost before they have answered

    def __init__(self, id: int, ranks: Sequence[int]) -> None:
        self.id, self._ranks = id, ranks
        self.waiting = set(ranks)
        self._then: deque[Callable[[], object]] = deque()

    @property
    def node(self) -> int:  # type: ignore[override]
        return min(self.waiting, default=self._ranks[0])

    def call_at_end(self, fn: Callable[[], object]) -> None:
        """Has ``fn`` called once no answer is due any more, in whichever thread takes the last one, or now: it must not
        block."""
        self._then.append(fn)
        if self.done:
            call_callbacks(self._then)

    def is_answered(self, rank: int) -> bool:
        """Returns whether no answer of a node will come any more."""
        return self.done or rank not in self.waiting

    def is_decided(self) -> bool:
        """Returns whether all nodes have answered, or one has failed."""
        return self.done or self.failed

    def add_reply(self, rank: int, reply: c.Reply) -> bool:
        if type(reply) is c.Poisoned:
            self.causes, self.failed = {**self.causes, rank: reply}, True
        self.waiting.discard(rank)
        return not self.waiting

    def is_over_without(self, rank: int) -> bool:
        self.gone |= {rank}
        self.failed = True
        self.waiting.discard(rank)
        return not self.waiting

    def resolve(self, reply: c.Reply | None = None) -> None:
        # it has no waker: who waits for it does so with another request, and has this one call it
        self.well = not self.failed and not self.waiting
        self.reply, self.done = reply, True
        if self._then:
            call_callbacks(self._then)


class Requests:
    """The requests whose answers are due, by number. None of its methods needs the lock."""

    __slots__ = ("_due", "_ids", "_state", "get")

    def __init__(self, state: LinkState) -> None:
        self._state = state
        self._due: dict[int, Request] = {}
        self._ids = count(1)
        #: returns the request of a number; None if nobody waits for its answer
        self.get: Callable[[int], Request | None] = self._due.get

    def __len__(self) -> int:
        return len(self._due)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._due.values()))  # one step: threads take theirs out without the lock

    def new(self, node: int, kind: type[Message] = c.Done, due: int = 0) -> Request:
        """Returns a new request to ``node``, whose id goes into a command. ``due``: of reasons, how many are asked for.

        Raises as ``check``: nobody would answer it.
        """
        outbox = self._state.nodes[node].outbox
        if outbox.over:
            self._state.check(outbox)
        request = Request(next(self._ids), node, kind, due)
        self._due[request.id] = request
        return request

    def new_told(self, node: int, kind: type[Message], then: Callable[[], object]) -> CallbackRequest:
        """Returns a new request to ``node``, at whose end ``then`` is called: by the answer, a loss, or ``close``. Any
        thread may take the answer, and none has to wait. Raises as ``check``."""
        self._state.check(self._state.nodes[node].outbox)
        request = CallbackRequest(next(self._ids), node, kind, then)
        self._due[request.id] = request
        return request

    def new_given(self, node: int, kind: type[Message], then: Callable[[c.Reply | None], object]) -> ReplyRequest:
        """Returns a new request to ``node``, whose answer is given to ``then``, or None at a loss or by ``close``. Any
        thread may take the answer, and none has to wait. Raises as ``check``."""
        outbox = self._state.nodes[node].outbox
        if outbox.over:
            self._state.check(outbox)
        request = ReplyRequest(next(self._ids), node, kind, then)
        self._due[request.id] = request
        return request

    def new_items(self, node: int, items: int, then: Callable[[], object]) -> ItemsRequest:
        """Returns a new request to ``node`` for the results of so many items. ``then`` is called as by ``new_told``,
        and whenever the node has told of some. Raises as ``check``."""
        self._state.check(self._state.nodes[node].outbox)
        request = ItemsRequest(next(self._ids), node, items, then)
        self._due[request.id] = request
        return request

    def new_to_all(self, queue: CommandQueue, kind: type[Message] = c.Done, due: int = 0) -> MeshRequest:
        """Returns a new request to all nodes of a queue, which one command asks. Its ``replies`` are by rank.

        Raises as ``check``.
        """
        self._state.check(queue)
        request = MeshRequest(next(self._ids), queue, kind, due)
        self._due[request.id] = request
        return request

    def new_of_group(self, ranks: Sequence[int]) -> GroupRequest:
        """Returns a new request to nodes, each of which gets its id with a command. Raises as ``check``."""
        nodes, number = self._state.nodes, next(self._ids)
        for rank in ranks:
            if nodes[rank].outbox.over:
                self._state.check(nodes[rank].outbox)
        request = self._due[number] = GroupRequest(number, ranks)
        return request

    def withdraw(self, request: Request) -> None:
        """Forgets a request for which nobody waits any more; the reply that may still come is passed over.

        Twice is fine.
        """
        if request.done or request.id <= 0:
            return
        late = [self._state.nodes[rank].connection.unawaited for rank in request.ranks]
        late = [unawaited for unawaited in late if request.id not in unawaited]
        for unawaited in late:
            unawaited.add(request.id)  # first: the reply may come in another thread at any moment
        if late and self._due.pop(request.id, None) is None:
            for unawaited in late:
                unawaited.discard(request.id)

    def waited_for(self, rank: int, kind: type[Message]) -> list[int]:
        """Returns the requests for which threads wait that a node answers by such a reply."""
        return [each.id for each in self if each.node == rank and each.kind is kind]

    def is_under_way(self, node: Node, request: int) -> bool:
        """Returns whether the node has not answered a request, whether anybody waits for that or not."""
        return node.life is not Life.LOST and (request in node.connection.unawaited or request in self._due)

    def answer(self, request: Request, rank: int, reply: c.Reply) -> None:
        """Takes a node's answer, and ends the wait if it is the last one that is due."""
        if request.add_reply(rank, reply):
            self._due.pop(request.id, None)
            request.resolve(reply)

    def take_parts(self, rank: int, numbers: Sequence[int]) -> Iterator[int]:
        """Takes it that a node has done its part in what these requests of groups are about, and ends the waits for
        which that was the last answer due. Yields the numbers of those that are no such requests, or not due of it."""
        get = self._due.get
        for number in numbers:
            request = get(number)
            if type(request) is not GroupRequest or rank not in (waiting := request.waiting):
                yield number
                continue
            waiting.discard(rank)  # as ``answer``, in one function: each node tells so of each asynchronous collective
            if not waiting:
                self._due.pop(number, None)
                request.resolve()

    def lose(self, rank: int) -> None:
        """Ends the waits for a node that is lost."""
        for request in self:
            if request.asks(rank) and request.is_over_without(rank) and self._due.pop(request.id, None) is not None:
                for late in request.ranks:
                    if late != rank:
                        self._state.nodes[late].connection.unawaited.add(request.id)  # its answer may still come
                request.resolve()

    def end(self) -> None:
        """Ends all waits: the session is over."""
        for request in self:
            request.resolve()
