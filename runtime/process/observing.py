"""The seam: the points at which observers look in at what an end of a session does, while it does it.

    script  sent      master/sender.py    a message of commands has been handed to the hub
            reported  master/replies.py   a node's report has come; told before an answer in it wakes its waiter
            waited    master/waiting.py   a thread has waited for a node
            lost      master/losses.py    a node is gone
    node    applied   node/worker.py      the commands of a message have been applied, or given to streams
            commands  node/worker.py      the same of a single command

The code at a point looks whether the point has listeners, and makes the event only then. A look is three or four
opcodes, per message and never per command: tests/transport/test_opcodes.py counts them, and what a listener costs.
While somebody listens to ``commands``, a node applies each as a batch of its own.

A listener is a function of the event, called in the thread that comes to the point: of ``sent``, ``reported`` and
``lost`` with the link's lock held. It must neither wait nor use tensors. Listeners come and go at any time; who adds or
removes one with that lock held gets no event of before, misses none, and gets none of after. ``listeners`` is
replaced, never changed, so that a look takes no lock.

A listener that raises is removed, and a warning names it: what it observes goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Generic, NamedTuple, TypeVar

from .clock import CLOCK, Clock

_log = logging.getLogger("disttensor")

E = TypeVar("E")


class MessageSent(NamedTuple):
    """A message of commands that has left for a node."""

    at: float  #: the moment, by the clock of the seam
    node: int
    number: int  #: of its first command
    sites: Sequence[tuple[CodeType, int] | None]  #: where its commands were issued
    message: bytes  #: the encoded Batch


class ReportTaken(NamedTuple):
    """A report of a node that has come."""

    at: float
    node: int
    done: int  #: the number of commands that the node has done
    busy: float  #: the seconds for which it has worked, by its own clock
    message: bytes  #: the encoded Report


class WaitEnded(NamedTuple):
    """A thread's wait for a node that has ended, by the answer or by an error."""

    at: float
    began: float
    node: int
    request: int  #: the request's number, which its command has as well; 0 and less: it waited for something else


class NodeGone(NamedTuple):
    """The loss of a node."""

    at: float
    node: int
    error: Exception


class BatchApplied(NamedTuple):
    """The commands of a message that a node has gone through; those of streams may go on."""

    at: float
    began: float
    node: int
    number: int  #: of its first command
    commands: int  #: how many it has
    bytes: int  #: of the message


class CommandApplied(NamedTuple):
    """A command that a node has applied, or has given to a stream."""

    at: float
    began: float
    node: int
    number: int
    command: Any  #: such as a Call of an operator, the Run of a function, a Collective, a graph's Replay


class Point(Generic[E]):
    """A point of a seam, with those who listen to its events."""

    __slots__ = ("_changing", "_name", "listeners")

    def __init__(self, name: str) -> None:
        self._name = name
        self.forked()

    def __repr__(self) -> str:
        return f"<Point {self._name} listeners={len(self.listeners)}>"

    def forked(self) -> None:
        """Forgets the listeners, which are the parent's."""
        self.listeners: tuple[Callable[[E], object], ...] = ()
        self._changing = threading.Lock()

    def add(self, listener: Callable[[E], object]) -> None:
        """Has a listener called for each event from now on."""
        with self._changing:
            self.listeners = (*self.listeners, listener)

    def remove(self, listener: Callable[[E], object]) -> None:
        """Has a listener called no more. Does nothing for one that is not there."""
        with self._changing:
            left = list(self.listeners)
            if listener in left:
                left.remove(listener)
                self.listeners = tuple(left)

    @contextmanager
    def heard_by(self, listener: Callable[[E], object]) -> Iterator[None]:
        """Has a listener called inside of a ``with`` block."""
        self.add(listener)
        try:
            yield
        finally:
            self.remove(listener)

    def tell(self, event: E) -> None:
        """Calls the listeners. Raises nothing of theirs."""
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                self.remove(listener)
                name: Any = getattr(listener, "__qualname__", listener)
                _log.warning(
                    "the observer %s of %r failed, and is told of no more events", name, self._name, exc_info=True
                )


class ScriptSeam:
    """The points of the script's end."""

    __slots__ = ("clock", "lost", "reported", "sent", "waited")

    def __init__(self, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self.sent = Point[MessageSent]("sent")
        self.reported = Point[ReportTaken]("reported")
        self.waited = Point[WaitEnded]("waited")
        self.lost = Point[NodeGone]("lost")

    def forked(self) -> None:
        """Forgets all listeners, in a forked child."""
        for point in (self.sent, self.reported, self.waited, self.lost):
            point.forked()


class NodeSeam:
    """The points of a node's end."""

    __slots__ = ("applied", "clock", "commands")

    def __init__(self, clock: Clock = CLOCK) -> None:
        self.clock = clock
        self.applied = Point[BatchApplied]("applied")
        self.commands = Point[CommandApplied]("commands")
