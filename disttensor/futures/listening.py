"""The ends of what nodes answer for, and callbacks for them: answers come in where a thread waits for one.

Listened   ends with answers; has a thread wait for them where a callback is added
GroupEnd   the end of what several nodes do, each of which answers
EndOfAll   that of several of these
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..runtime.channel.base import Transfer
from ..runtime.channel.ticket import Ticket
from ..runtime.master.requests import GroupRequest, Request
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import BrokenError, DisttensorError, PoisonedError
from ..session.session import Session


class Heard(Transfer):
    """Something that ends with answers of nodes. Whoever adds a callback need not wait for it: a thread listens for
    answers meanwhile."""

    session: Session

    @property
    @abstractmethod
    def node(self) -> int:
        """The node whose answer is due, or one of those."""

    @abstractmethod
    def call_at_end(self, fn: Callable[[], None]) -> None:
        """Adds a callback for one who waits, and so takes in answers."""

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self.call_at_end(fn)
        if not self.is_completed():
            self.session.part(AnswerListener).listen(self)

    def add_background_callback(self, fn: Callable[[], None]) -> None:
        self.add_done_callback(fn)

    def has_ended(self) -> bool:
        """Returns whether the answers are there, or none will come, to a forked child. Takes in what has arrived, and
        does not wait."""
        if not self.is_completed():
            self.session.link.replies.drain()
        return self.is_completed() or self.session.link.is_forked


class Listened(Heard, Ticket):
    """The end of something that nodes tell by answers: whoever takes these in ends it."""

    def __init__(self, session: Session, node: int) -> None:
        super().__init__()
        self.session, self._node = session, node

    @property
    def node(self) -> int:
        return self._node

    def call_at_end(self, fn: Callable[[], None]) -> None:
        Ticket.add_done_callback(self, fn)


class GroupEnd(Heard):
    """The end of what several nodes do, each of which answers one request. ``wait`` raises the ChannelError of the
    first node, in their order, that has failed."""

    def __init__(self, session: Session, nodes: Sequence[int]) -> None:
        """Raises NodeLost, DisttensorError after the session's end."""
        self.session, self.nodes = session, nodes
        self.request: GroupRequest = session.link.requests.new_of_group(nodes)

    @property
    def node(self) -> int:
        return self.request.node

    def is_completed(self) -> bool:
        return self.request.done

    def call_at_end(self, fn: Callable[[], None]) -> None:
        self.request.call_at_end(fn)

    def wait(self, timeout: float | None = None) -> None:
        self.wait_for_all(timeout)
        request = self.request
        for node in self.nodes if request.failed or request.waiting else ():
            if (cause := request.causes.get(node)) is not None:
                raise PoisonedError(cause.rank, cause.seq)
            if node in request.gone or node in request.waiting:
                raise BrokenError(f"node {node} has not told of its end")

    def wait_for_all(self, timeout: float | None) -> None:
        """Waits until no answer is due any more. Raises as ``_wait``."""
        if not self.request.done:
            self._wait(self.is_completed, timeout)

    def wait_for_each(self, timeout: float | None) -> c.Poisoned | None:
        """Waits until all nodes have answered, or one that has failed and those before it have; returns its answer.

        Raises NodeLost for a node that is lost, DisttensorError after the session's end, TimeoutError after ``timeout``
        seconds, BrokenError where another worker has come in the place of a lost node.
        """
        request = self.request
        deadline = None if timeout is None else time.monotonic() + timeout
        if not request.done:
            self._wait(request.is_decided, timeout)
        if request.well:
            return None
        for node in self.nodes:
            if not request.is_answered(node):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._wait(partial(request.is_answered, node), left, node)
            if (cause := request.causes.get(node)) is not None:
                return cause
            if node in request.gone or node in request.waiting:
                self.session.link.check(self.session.link.nodes[node].outbox)
                if node in request.gone:
                    raise BrokenError(f"node {node} was lost, in whose place another worker is now")
                raise DisttensorError("the session was shut down before the collective had ended")
        return None

    def _wait(self, over: Callable[[], bool], timeout: float | None, node: int | None = None) -> None:
        """Waits until ``over()``, which an answer makes true: that of ``node``, by default of any that is due. Raises
        NodeLost where that node is lost before, TimeoutError after ``timeout`` seconds."""
        link, due = self.session.link, self.request
        request = Request(-1, due.node if node is None else node)

        def until() -> bool:
            if node is None:
                request.node = due.node  # of which is said that it does not answer
            return over()

        link.sender.flush_all()
        due.call_at_end(request.resolve)
        link.waiting.wait(request, timeout, until=until)


class EndOfAll(Listened):
    """The end of several: it comes with that of the last one, however they end."""

    def __init__(self, session: Session, node: int, ends: Sequence[Heard]) -> None:
        super().__init__(session, node)
        self._ends, self._left = ends, itertools.count(len(ends) - 1, -1)  # whose next() is atomic
        for end in ends:
            end.call_at_end(self._count)
        if not ends:
            self.finish()

    @property
    def node(self) -> int:
        return next((end.node for end in self._ends if not end.is_completed()), self._node)

    def _count(self) -> None:
        if next(self._left) == 0:
            self.finish()


class AnswerListener:
    """Takes in the answers of nodes while there are callbacks for them and perhaps nobody waits."""

    def __init__(self) -> None:
        self._due = deque[Heard]()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def forked(self) -> None:
        """Makes a new lock in a forked child: the thread that held the other one is not there."""
        self._lock, self._thread = threading.RLock(), None

    def listen(self, ticket: Heard) -> None:
        """Has answers taken in until a ticket has ended."""
        with self._lock:
            self._due.append(ticket)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="disttensor-listen", daemon=True)
                thread.start()  # raises where the system has none for it: the next one tries again
                self._thread = thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                ticket = self._due.popleft()
            at = -1
            while ticket.node != at:  # another one's answer is due, after the loss of a node
                at = ticket.node
                wait_for_answer(ticket.session, at, ticket, None, explain=False)
            del ticket


def wait_for_answer(session: Session, node: int, ticket: Transfer, timeout: float | None, explain: bool = True) -> None:
    """Waits for a ticket that ends with an answer of a node, with its loss, or with the session."""
    if ticket.is_completed():
        return
    session.link.sender.flush_all()
    request = Request(-1, node)
    (ticket.call_at_end if isinstance(ticket, Heard) else ticket.add_done_callback)(request.resolve)
    with contextlib.suppress(DisttensorError), session.link.unheard():  # a loss, or the end: the outcome says it
        session.link.waiting.wait(request, timeout, until=ticket.is_completed, explain=explain)
