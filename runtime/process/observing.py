"""The seam: the points at which observers look in at what an end of a session does, while it does it.

    script  issued      master/command_queue.py  a command has been issued: it is in the queue of its nodes
            sent        master/sender.py         a message of commands has been handed to the hub
            reported    master/replies.py        a node's report has come; told before an answer in it wakes its waiter
            waited      master/waiting.py        a thread has waited for a node
            lost        master/losses.py         a node is gone
    node    applied     node/worker.py           the commands of a message have been applied, or given to streams
            commands    node/worker.py           a command begins, and has been applied, or given to a stream
                        node/streams/lanes.py    the same of what a stream does for it
            timed       node/worker.py           the commands of a message begin; when each does is noted in a list
                        node/streams/lanes.py    what a stream does for a command begins, and has been done
            collective  node/collectives.py      the node has done its part of a collective
            function    node/executor.py         a function of the user's has ended
                        node/streams/scheduler.py  the same on a stream
            graph       node/graphs/graphs.py    a graph has been replayed
    both    transferred channel/counted.py       a transfer has ended

The code at a point looks whether the point has listeners, and makes the event only then. A look is three or four
opcodes, per message, transfer or function, and never per command: tests/transport/test_opcodes.py counts them, and what
a listener costs. The two points that are told of each command are switched: while somebody listens to ``commands`` a
node applies each as a batch of its own, and while somebody listens to ``issued`` the queues that issuing threads append
to are others, which tell of it.

A timeline takes neither, as an event for each command costs as much as the command. What it wants of each is the time,
at either end: while somebody listens to ``timed`` the node's loop is another one, which appends the time to a list
before each command, and while there are ``notes`` an issuing thread that comes to a queue's limit, at every sixteenth
command or earlier, appends the time and the line to a list of its own. Once there are several of them the queues are
others, which do so for each command. All else is in the messages (seeing/timed_commands.py).

A listener is a function of the event, called in the thread that comes to the point: of ``sent``, ``reported`` and
``lost`` with the link's lock held, of ``transferred`` perhaps in the channel's own thread, which no transfer passes
meanwhile. It must neither wait nor use tensors. Listeners come and go at any time; who adds or removes one with that
lock held gets no event of before, misses none, and gets none of after. ``listeners`` is replaced, never changed, so
that a look takes no lock.

The times of an event are those of its own end's clock. On a CUDA device a command, a collective and a graph have ended
when their work is the device's, which may go on with it.

A listener that raises is removed, and a warning names it: what it observes goes on.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Generic, NamedTuple, TypeVar

from .clock import CLOCK, Clock

_log = logging.getLogger("disttensor")

E = TypeVar("E")
T = TypeVar("T")


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
    request: (
        int  #: the request's number, which its command has as well; below -1 a transfer's, negated; else something else
    )


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


class MessageBegun(NamedTuple):
    """The commands of a message that a node begins with, and the times that it notes while it goes through them."""

    node: int
    number: int  #: of the first command
    commands: int  #: how many there are
    moments: array[float]  #: when it began with each, so far; at the end when that was


class CommandIssued(NamedTuple):
    """A command that a line of the script has issued. It has its number when it leaves (``MessageSent``)."""

    at: float
    nodes: tuple[int, ...]  #: those that are to apply it
    stream: str  #: "" is the default one
    command: Any
    site: tuple[CodeType, int] | None  #: where it was issued


class CommandBegun(NamedTuple):
    """A command that a node, or one of its streams, begins with."""

    at: float
    node: int
    stream: str  #: "" is the thread that receives, which gives a stream what it has to do
    number: int
    what: str  #: such as the operator's name
    command: Any  #: such as a Call of an operator; None on a stream


class CommandDone(NamedTuple):
    """A command that a node has applied, has given to a stream, or that a stream has done."""

    at: float
    began: float
    node: int
    stream: str
    number: int
    what: str
    command: Any


class CollectiveDone(NamedTuple):
    """The part of a node in a collective, which has ended, well or not."""

    at: float
    began: float
    node: int
    stream: str
    number: int
    what: str  #: its kind, such as "all_reduce"
    algorithm: str  #: "" where none was named
    ranks: tuple[int, ...]
    bytes: int  #: of the node's inputs and outputs
    failed: bool


class FunctionDone(NamedTuple):
    """A function of the user's that has ended on a node, well or not."""

    at: float
    began: float
    node: int
    stream: str
    number: int
    what: str  #: its name
    request: int
    failed: bool


class GraphReplayed(NamedTuple):
    """A replay of a graph that has ended on a node, well or not."""

    at: float
    began: float
    node: int
    stream: str
    number: int
    graph: int
    steps: int  #: segments of operators, transfers and the like
    failed: bool


class TransferDone(NamedTuple):
    """A transfer of this end's that has ended, well or not."""

    at: float
    began: float
    node: int  #: -1 is the script
    peer: int  #: -1 is the script, -2 the group of a collective that the channel does itself
    sent: bool  #: or received
    transfer: int  #: its number
    bytes: int
    channel: str  #: the channel's name
    use: str  #: "transfers" or "collectives"


class IssueNotes:
    """The notes of when lines have issued commands.

    While one thread issues, they have a line now and then; once there are several, each line (``complete``): nothing
    else shows of which thread a command is.
    """

    def __init__(self, room: int) -> None:
        """``room``: how many notes are kept in each list, at least."""
        self.lines: list[Any] = []  #: (time, [site] or nothing, nodes, thread, time, ...)
        self.noted: dict[tuple[tuple[int, ...], int], list[Any]] = {}  #: (time, site, time, ...), by nodes and thread
        self.complete = False
        self.thread = threading.main_thread().ident or 0  #: the one that issues, if another one is not found to
        self._room = room

    def of(self, nodes: tuple[int, ...], thread: int) -> list[Any]:
        """Returns the list of a thread for what goes to these nodes. It adds a line's two at once."""
        return self.noted.setdefault((nodes, thread), [])

    def drop_oldest(self) -> None:
        """Forgets the oldest notes of lists that have more than they are to keep."""
        for noted, each in [(self.lines, 4)] + [(noted, 2) for noted in list(self.noted.values())]:
            over = len(noted) // each - self._room
            if over > 0:
                del noted[: each * over]


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

    def notify(self, event: E) -> None:
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


class SwitchedPoint(Point[E]):
    """A point of which the code knows whether it has listeners: it calls ``switch`` whenever that may have changed."""

    __slots__ = ("switch",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.switch: Callable[[], object] = _nothing

    def add(self, listener: Callable[[E], object]) -> None:
        super().add(listener)
        self.switch()  # past the lock of the point: it may take the link's

    def remove(self, listener: Callable[[E], object]) -> None:
        super().remove(listener)
        self.switch()


def _nothing() -> None:
    """Does nothing: nobody has to know."""


class Seam:
    """The points that both ends have."""

    __slots__ = ("clock", "node", "transferred")

    def __init__(self, node: int = -1, clock: Clock = CLOCK) -> None:
        self.node = node  #: this end's number; the script is -1
        self.clock = clock
        self.transferred = Point[TransferDone]("transferred")

    def points(self) -> dict[str, Point[Any]]:
        """Returns the points by name."""
        names = (name for kind in type(self).__mro__ for name in getattr(kind, "__slots__", ()))
        found = {name: getattr(self, name) for name in names}
        return {name: found[name] for name in sorted(found) if isinstance(found[name], Point)}

    def forked(self) -> None:
        """Forgets all listeners, in a forked child."""
        for point in self.points().values():
            point.forked()

    def notify_end_of(self, point: Point[E], event: Callable[..., E], call: Callable[[], T], *fields: object) -> T:
        """Returns what ``call()`` returns, and tells the listeners of its end. Raises what it raises.

        The fields are those between the event's node and whether it has failed.
        """
        began, failed = self.clock.now(), True
        try:
            result = call()
            failed = False
        finally:
            point.notify(event(self.clock.now(), began, self.node, *fields, failed))
        return result


class ScriptSeam(Seam):
    """The points of the script's end."""

    __slots__ = ("issued", "lost", "notes", "reported", "sent", "waited")

    def __init__(self, clock: Clock = CLOCK) -> None:
        super().__init__(clock=clock)
        self.notes: IssueNotes | None = None  #: where it is noted what is issued; None: nowhere
        self.issued = SwitchedPoint[CommandIssued]("issued")
        self.sent = Point[MessageSent]("sent")
        self.reported = Point[ReportTaken]("reported")
        self.waited = Point[WaitEnded]("waited")
        self.lost = Point[NodeGone]("lost")

    def forked(self) -> None:
        super().forked()
        self.notes = None


class NodeSeam(Seam):
    """The points of a node's end."""

    __slots__ = ("applied", "collective", "commands", "function", "graph", "observed", "timed")

    def __init__(self, node: int, clock: Clock = CLOCK) -> None:
        super().__init__(node, clock)
        self.applied = SwitchedPoint[BatchApplied]("applied")
        self.commands = SwitchedPoint[CommandBegun | CommandDone]("commands")
        self.collective = Point[CollectiveDone]("collective")
        self.function = Point[FunctionDone]("function")
        self.graph = Point[GraphReplayed]("graph")
        self.timed = SwitchedPoint[MessageBegun | CommandBegun | CommandDone]("timed")
        #: whether somebody listens to what happens at each message or command: one look for all of these points
        self.observed = False
        for point in (self.applied, self.commands, self.timed):
            point.switch = self._note_listeners

    def forked(self) -> None:
        super().forked()
        self.observed = False

    def _note_listeners(self) -> None:
        self.observed = bool(self.applied.listeners or self.commands.listeners or self.timed.listeners)
