"""Waits for nodes. There is no receiving thread: a thread that waits polls the hub's descriptor without the lock, and
takes in what arrives. It wakes the others whose answers it took."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from functools import partial

from ..process.flight import WAITED
from ..process.observing import WaitEnded
from ..process.signals import uninterrupted
from ..protocol import commands as c
from .command_queue import CommandQueue
from .failures import Site
from .link_state import LinkState
from .losses import Losses
from .patience import Patience
from .replies import Replies
from .requests import Request, Requests, Waker

#: Seconds between two checks of a node that neither dies nor answers, while a thread waits for it.
TICK = 0.5
#: Seconds from which on a wait is in the flight record. A loop of ``.item()`` would have one for each message.
RECORDED = 1e-3


class Waiting:
    """The threads that wait for nodes, and what they poll with."""

    __slots__ = (
        "_breakpoints",
        "_clock",
        "_hub_fd",
        "_interrupts",
        "_local",
        "_losses",
        "_nodes",
        "_replies",
        "_requests",
        "_state",
        "_waited",
        "on_long_wait",
        "on_value",
        "on_waited",
        "under_way",
    )

    def __init__(self, state: LinkState, requests: Requests, losses: Losses, replies: Replies) -> None:
        self._state, self._requests, self._losses, self._replies = state, requests, losses, replies
        self._clock, self._breakpoints = state.clock, state.breakpoints
        self._nodes, self._interrupts, self._hub_fd = state.nodes, state.interrupts, state.hub.fileno()
        self._waited = state.seam.waited
        self._local = threading.local()
        #: the requests for which threads wait: the thread's identifier, and when it began
        self.under_way: dict[Request, tuple[int, float]] = {}
        #: is told, in the thread that has waited, of the seconds of each wait for a value, with the line that asks
        self.on_value: Callable[[Site, float], object] = lambda site, seconds: None
        #: is told of those of each other wait that nobody else counts
        self.on_waited: Callable[[float], object] = lambda seconds: None
        #: is called, in the thread that has waited, after a wait of a TICK and more
        self.on_long_wait: Callable[[], object] = lambda: None

    def wait(
        self,
        request: Request,
        timeout: float | None = None,
        until: Callable[[], bool] | None = None,
        explain: bool = True,
    ) -> c.Reply | None:
        """Waits until the request is resolved (or ``until()`` holds); returns its reply. ``explain``: say why it takes
        long.

        Interruptible. Raises NodeLost when the node is lost, TimeoutError after ``timeout`` seconds.
        """
        queue = self._nodes[request.node].outbox if request.queue is None else request.queue
        poller, waker = self._poller()
        request.waker = waker
        deadline = None if timeout is None else self._clock.now() + timeout
        began = self._clock.now()
        patience, turns = None, 0
        try:
            self.under_way[request] = threading.get_ident(), began
            while not request.done and not (until is not None and until()):
                if queue.over:
                    self._state.check(queue)
                left = TICK if deadline is None else min(TICK, deadline - self._clock.now())
                if left <= 0:
                    at = self._nodes[request.node].connection.at_breakpoint
                    why = f": {at}" if at else ""
                    raise TimeoutError(f"node {request.node} has not answered within {timeout} s{why}")
                if self._breakpoints.wanted and self._breakpoints.serve(partial(_is_over, request, queue, until)):
                    patience = None
                    continue
                ready, turns = self._poll(poller, waker, left), turns + 1
                if self._interrupts.pending:
                    self._interrupts.check()
                if self._losses.unexplained:
                    self._losses.explain()
                if patience is not None:
                    patience.look(self._nodes[request.node], self._state.there(), self._losses.look)
                elif explain and (not ready or turns > 100):  # a wait that takes long
                    patience = Patience(self._clock)
        finally:
            request.waker = None
            if not self._local.idle:
                self._local.idle.append((poller, waker))
            self._requests.withdraw(request)
            self.under_way.pop(request, None)  # of two threads that wait for one request the first takes it out
            now = self._clock.now()
            waited = now - began
            if waited >= RECORDED:
                trail = self._nodes[request.node].outbox.trail
                trail.write(trail.slot(), began, request.id, 0, waited, 0, WAITED)
                if waited >= TICK:
                    self.on_long_wait()
            if request.site is not None:
                self.on_value(request.site, waited)
            elif turns and not request.counted:
                self.on_waited(waited)
            if self._waited.listeners:
                self._waited.notify(WaitEnded(now, began, request.node, request.observed or request.id))
        if until is None and request.reply is None:  # ended without a reply: by a loss, or by `close`
            self._state.check(queue)
        queue.restart()
        return request.reply

    def pause(self, seconds: float) -> None:
        """Sleeps until something may have arrived, and takes it in."""
        poller, waker = self._poller()
        try:
            self._poll(poller, waker, seconds)
            if self._losses.unexplained:
                self._losses.explain()
        finally:
            if not self._local.idle:
                self._local.idle.append((poller, waker))

    def _poller(self) -> tuple[select.poll, Waker]:
        """Returns a poll object for this thread and its waker. The caller puts both back, unless some are there:
        those of a wait within its own, which would keep a descriptor for as long as the thread lives.
        """
        try:
            return self._local.idle.pop()  # type: ignore[no-any-return]
        except (AttributeError, IndexError):  # the thread's first wait, or a signal handler's in the middle of another
            poller, waker = select.poll(), Waker()
            for fd in (self._hub_fd, waker.fd):
                poller.register(fd, select.POLLIN)
            self._watch_launcher(poller, waker, True)
            self._local.__dict__.setdefault("idle", [])
            return poller, waker

    def _poll(self, poller: select.poll, waker: Waker, seconds: float) -> bool:
        """Waits until something may have arrived, and takes it in; returns False if nothing has."""
        waker.polling = True
        ready = self._clock.poll(poller, seconds)
        waker.polling = False
        asked = self._readable(ready, waker)
        if not asked or (waker.launcher < 0 and self._losses.launcher is not None):
            self._watch_launcher(poller, waker, asked)
        return bool(ready)

    def _watch_launcher(self, poller: select.poll, waker: Waker, on: bool) -> None:
        """Has a thread's next polls end when the launcher has something to report, or not."""
        if not on and waker.launcher >= 0:
            poller.unregister(waker.launcher)
            waker.launcher = -1
        elif on and waker.launcher < 0:
            with self._state.lock:  # so that the launcher is not stopped meanwhile
                if self._losses.launcher is not None:
                    waker.launcher = self._losses.launcher.fileno()
                    poller.register(waker.launcher, select.POLLIN)

    @uninterrupted
    def _readable(self, ready: list[tuple[int, int]], waker: Waker) -> bool:
        """Takes in what a poll has found. After a poll that found nothing it asks the launcher, too.

        Returns False where the launcher has something to report that this thread could not take: another one does, or
        there is no launcher any more. A poll would only find that again.
        """
        ask = not ready
        for fd, _ in ready:
            if fd == waker.fd:
                os.eventfd_read(fd)
            elif fd != self._hub_fd:
                ask = True
        asked = not ask or (self._losses.ask_launcher() and (self._losses.launcher is not None or not ready))
        with self._state.lock:
            self._replies.take_in()
        return asked


def _is_over(request: Request, queue: CommandQueue, until: Callable[[], bool] | None) -> bool:
    """Returns whether a wait need not go on."""
    return request.done or queue.over or (until is not None and until())
