"""The losses of nodes: which connections have ended, why, as the launcher says, and who is told of that.

The end of a connection tells that a node is gone, not why: the launcher knows that, perhaps only after a while. The
launcher is asked with no lock held, by one thread at a time, so that all others go on with the nodes that are left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..host import descriptors
from ..host.launcher import Exited, Launcher, Sight, Started
from ..process.flight import LOST
from ..process.observing import NodeGone
from ..process.page import FUNCTION
from ..process.signals import uninterrupted
from ..protocol import commands as c
from ..protocol.errors import NodeLost, StartError
from .connection import Life
from .link_state import LinkState
from .node import Node
from .requests import Requests
from .side_channels import SideChannels

#: Seconds to wait for the launcher to report why a node whose connection ended is gone.
EXIT_CAUSE_TIMEOUT = 2.0
#: Seconds more for another thread that asks the launcher to say what it has heard.
HEARD = 1.0
#: Seconds of one wait for the launcher: ``close`` and a Ctrl-C have to wait for its end.
_LISTEN = 0.05

#: States of a process, as in /proc, whose main thread has ended.
_ENDED = frozenset("ZXx")


class Losses:
    """The nodes that are lost, and the launcher, which says why."""

    __slots__ = (
        "_asker",
        "_asking",
        "_clock",
        "_on_lost",
        "_requests",
        "_side",
        "_state",
        "_to_end",
        "_to_glance",
        "_to_look",
        "_to_recall",
        "errors",
        "launcher",
        "launcher_died",
        "unexplained",
    )

    def __init__(
        self,
        state: LinkState,
        requests: Requests,
        side: SideChannels,
        launcher: Launcher | None,
        on_lost: Callable[[NodeLost], None],
    ) -> None:
        self._state, self._requests, self._side, self._on_lost = state, requests, side, on_lost
        self._clock = state.clock
        self.errors: list[NodeLost] = []  #: the first one most likely explains the others
        self.launcher = launcher  #: None where nodes are threads, and when the launcher or the session has ended
        self.launcher_died = ""  #: why there is no launcher any more, if it died
        #: of the nodes that are ``Life.UNEXPLAINED``: (cause so far, deadline)
        self.unexplained: dict[int, tuple[str, float]] = {}
        self._to_end: deque[int] = deque()  #: lost nodes that the launcher is to end
        self._to_look: deque[int] = deque()  #: nodes that the launcher is to look at
        self._to_glance: deque[int] = deque()  #: those whose stacks nobody wants
        self._to_recall: deque[int] = deque()  #: those whose flight records are wanted
        self._asker = 0  #: the thread that asks the launcher
        self._asking = threading.Lock()  #: held by the thread that asks the launcher; only ``close`` waits for it

    def lose(
        self,
        rank: int,
        cause: str,
        tail: tuple[str, ...] = (),
        host: str = "",
        running: int = -1,
        beside: Sequence[int] = (),
    ) -> None:
        """Marks a node as lost; ends all waiting for it and tells the nodes that know it. A second call does nothing.

        ``host`` is the host where it was to run, for a node that has not said hello. ``running``: the number of the
        command whose function it was running; ``beside``: those of the functions on its streams.
        """
        state = self._state
        with state.lock:
            node = state.nodes[rank]
            if node.life is Life.LOST or state.closing:
                return
            hello = node.said_hello
            where = (hello.host, hello.pid) if hello else (host or "?", 0)
            self.unexplained.pop(rank, None)
            doing, last = node.last_words(running, beside)
            lost = NodeLost(rank, *where, cause + doing, tail, last, node.connection.number)
            for fan_out in node.outbox.overlaps:
                fan_out.pack()  # the other members have what was issued before
                fan_out.lose(lost)
                state.rouse(fan_out)
            node.lose(lost)
            self.errors.append(lost)
            self._requests.lose(rank)
            if self.launcher is not None:
                # the process may be stopped or cut off, and nodes that wait for its tensors learn from its end
                self._to_end.append(rank)
                state.wake.set()
            knowing = [state.nodes[other] for other in node.connection.knowing]
            knowing = [other for other in knowing if other.life is not Life.LOST]
            for other in knowing:
                other.outbox.add(c.Lost(rank, cause))
            if not state.closed:
                self._side.lost(rank, cause, node.connection.number, knowing)
            self._on_lost(lost)
            now, trail = self._clock.now(), node.outbox.trail
            trail.write(trail.slot(), now, node.outbox.done, 0, 0.0, 0, LOST)
            if state.seam.lost.listeners:
                state.seam.lost.notify(NodeGone(now, rank, lost))

    def kill(self, rank: int, cause: str) -> None:
        """Ends a node and marks it as lost, whatever it is at: a loss of which the script knows. Raises as ``check``
        for one that is lost already."""
        self._state.check(self._state.nodes[rank].outbox)
        self.lose(rank, cause)
        self._state.told_losses.add(rank)
        with self._state.lock:
            self._state.hub.cut(rank)
        self.ask_launcher()

    @uninterrupted
    def disconnected(self, rank: int, cause: str, incarnation: int) -> None:
        """Notes that another connection of a node has ended than the one for commands: it is lost.

        Callable by any thread. ``incarnation``: that of the worker whose connection it was; where another one is in its
        place by now, nothing is lost.
        """
        with self._state.lock:
            current = self._state.nodes[rank].connection.number == incarnation
            if current and not (self._state.closed or self._state.is_forked):
                self.connection_ended(rank, cause)
        self._state.wake.set()

    def connection_ended(self, rank: int, cause: str) -> None:
        """Notes that a connection has ended.

        If the process has ended, the launcher knows why. It is asked later, because the caller holds the lock.
        """
        node = self._state.nodes[rank]
        if node.life is not Life.LOST and not self._state.closing:
            if self.launcher is None:
                self.lose(rank, cause)
            else:
                node.connection.become(Life.UNEXPLAINED)
                self.unexplained.setdefault(rank, (cause, self._clock.now() + EXIT_CAUSE_TIMEOUT))

    def explain(self) -> None:
        """Waits until the launcher has told why nodes are gone, for EXIT_CAUSE_TIMEOUT at most. They are lost then.

        The caller holds no lock. Interruptible: the flushing thread goes on with it.
        """
        while self.unexplained:
            if not self.ask_launcher(_LISTEN):
                if self._asker != threading.get_ident():  # another thread asks it
                    self.give_up_late(HEARD)
                    return
                # a finalizer that the collector runs while this very thread asks: all it can do is wait
                self.give_up_late()
                self._clock.sleep(_LISTEN)
            if self._state.interrupts.pending:
                self._state.interrupts.check()

    def give_up_late(self, grace: float = 0.0) -> None:
        """Marks the nodes as lost whose end the launcher has not explained in time."""
        now = self._clock.now()
        with self._state.lock:
            for rank, (cause, deadline) in list(self.unexplained.items()):
                if now >= deadline + grace or self._state.closing:
                    self.lose(rank, cause, running=_function_of(self._state.nodes[rank].connection.seen))
                    self.unexplained.pop(rank, None)

    @uninterrupted
    def ask_launcher(self, timeout: float = 0.0) -> bool:
        """Takes in the launcher's events, waiting for up to ``timeout`` seconds; returns False if another thread does
        so.

        No lock is held meanwhile that a thread could need which issues operations or waits for nodes.
        """
        if not self._asking.acquire(blocking=False):
            return False
        self._asker = threading.get_ident()
        launcher, died = self.launcher, ""
        events: Sequence[Any] = ()
        try:
            if launcher is not None:
                while self._to_end:
                    launcher.end_worker(self._to_end.popleft())
                while self._to_look:
                    launcher.look(self._to_look.popleft())
                while self._to_glance:
                    launcher.glance(self._to_glance.popleft())
                while self._to_recall:
                    launcher.recall(self._to_recall.popleft())
                if timeout:
                    descriptors.wait_readable([launcher], timeout, self._clock)
                try:
                    events = launcher.events()
                except StartError as e:  # the launcher died, and its nodes with it
                    died = str(e)
            with self._state.lock:
                for event in events:
                    if isinstance(event, Started):
                        if launcher is not None and launcher.starts_children:
                            self._state.nodes[event.rank].connection.process = event.pid
                    elif isinstance(event, Exited):
                        self._state.nodes[event.rank].connection.note_end(event.flight, self._clock.now())
                        self.lose(event.rank, event.cause, event.tail, event.host, event.running, event.beside)
                    elif isinstance(event, Sight):
                        self._state.nodes[event.rank].connection.see(event, self._clock.now())
                        if event.state in _ENDED:  # it takes no command any more, though its other threads may run
                            self.connection_ended(event.rank, "the main thread of its process has ended (pthread_exit)")
                if died:
                    self.launcher, self.launcher_died = None, died
                    for node in self._state.nodes:
                        self.lose(node.rank, died)
        finally:
            self._asker = 0
            self._asking.release()
        self.give_up_late()
        return True

    def wait_for_end(self, node: Node, timeout: float) -> None:
        """Waits until the launcher has told of the end of a lost node's process: whatever it says of the rank from then
        on is about another one. Raises TimeoutError."""
        deadline = self._clock.now() + timeout
        while self.launcher is not None:
            # first the look: an order to end the rank that is left would end the next one
            ended = node.connection.ended
            asked = self.ask_launcher(_LISTEN)
            if ended and asked:
                return
            if self._clock.now() > deadline:
                raise TimeoutError(f"the launcher has not told of the end of node {node.rank} within {timeout:g} s")
            if not asked:
                self._clock.sleep(_LISTEN)
            if self._state.interrupts.pending:
                self._state.interrupts.check()

    def forget_loss(self, rank: int) -> None:
        """Forgets the loss of a node in whose place another worker is: the script knows of it. The caller holds the
        link's lock."""
        state = self._state
        state.told_losses.discard(rank)
        for failure in state.failures.values():
            failure.observed = failure.observed or failure.told.lost == rank

    def look(self, node: Node) -> None:
        """Asks for a look at a node's process, from outside."""
        if self.launcher is not None:
            self._to_look.append(node.rank)
            self._state.wake.set()

    def glance(self, node: Node) -> None:
        """Asks for a look at a node's process without the stacks of its threads."""
        if self.launcher is not None:
            self._to_glance.append(node.rank)
            self._state.wake.set()

    def recall(self, node: Node) -> None:
        """Asks for the flight record of a node, from outside."""
        if self.launcher is not None:
            self._to_recall.append(node.rank)
            self._state.wake.set()

    @property
    def sees(self) -> bool:
        """Returns whether the launcher can look at nodes."""
        launcher = self.launcher
        return launcher is not None and (
            type(launcher).look is not Launcher.look or type(launcher).glance is not Launcher.glance
        )

    def forked(self) -> None:
        """Lets go of the launcher in a forked child: nothing of it is to be asked there, nor touched."""
        self._asking = threading.Lock()
        self.unexplained.clear()
        self._to_end.clear()
        self._to_look.clear()
        self._to_glance.clear()
        self._to_recall.clear()
        self.launcher = None

    def wait_for_asker(self) -> None:
        """Waits until no thread asks the launcher any more: it may be stopped then."""
        if self._asker != threading.get_ident():  # else a finalizer, or a handler, closes in the middle of it
            with self._asking:
                pass


def _function_of(seen: Sight | None) -> int:
    """Returns the number of the command whose function has ended the main thread of its node; -1: none has."""
    return seen.seq if seen is not None and seen.state in _ENDED and seen.kind == FUNCTION else -1
