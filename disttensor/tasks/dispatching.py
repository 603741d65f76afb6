"""The calls of an Executor: those that wait for a node that is free, and those that run.

Who submits puts an event, and so does the end of a call. One thread takes the events, gives nodes what is due, and
takes in the answers of nodes meanwhile: it needs no further thread, as none can be started once the interpreter ends.

No call is lost in silence. At the interpreter's end, and in ``dt.shutdown()``, what is due is finished first, as
concurrent.futures does it. Where a session ends without that (an error in its ``with`` block, Ctrl-C, a fork), the
futures are told, and the log says how many.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..runtime.master.failures import Site, line_of
from ..runtime.master.requests import Request
from ..runtime.process.signals import wait_in_looks
from ..runtime.protocol.errors import CancelledError, DisttensorError, ForkError, NodeLost
from ..session.session import Session
from .mapping import Slots, advise_retries
from .submitted import Submitted

_log = logging.getLogger("disttensor")

#: Seconds for which the end of a session waits until those who wait for calls that it has cut off have been told.
_TOLD = 2.0
#: The dispatchers of this process.
_all: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
#: Whether the interpreter ends.
_over = False


class DueCall:
    """A call that is due: its future, what begins it, what it is in words, and how often it may be given again to
    another node."""

    def __init__(self, call: Callable[..., Submitted[Any]], what: str, site: Site | None, retries: int) -> None:
        self.future: Future[Any] = Future()
        self.call, self.what, self.site, self.retries = call, what, site, retries

    def __str__(self) -> str:
        return f"{self.what}, issued at {line_of(self.site)}"


class Dispatcher:
    """Gives items to nodes that are free, in a thread of its own, which knows nothing of the Executor: that may be
    dropped."""

    def __init__(self, session: Session, slots: Slots) -> None:
        self._session, self._slots = session, slots
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waiting: Request | None = None
        self._pending = deque[DueCall]()
        self._running: dict[Submitted[Any], tuple[int, DueCall]] = {}  #: with the nodes
        self._left: dict[DueCall, None] = {}  #: all whose futures have not ended
        self._settled: list[threading.Event] = []  #: set when there is nothing to do
        self._closing = threading.Lock()
        self._closed = False
        self._ending = self._over = False
        self.cut: list[DueCall] = []  #: what the session's end has cut off
        self._thread = threading.Thread(target=self._run, name="disttensor-executor", daemon=True)
        _register_once()
        others = session.part(Dispatchers).of(session)
        self._thread.start()
        others.add(self)
        _all.add(self)

    def add(self, item: DueCall) -> None:
        """Has an item run. Raises RuntimeError after ``close`` and at the interpreter's end, ForkError, DisttensorError
        after the session's end."""
        link = self._session.link
        with self._closing:
            if self._closed or _over:
                after = "interpreter shutdown" if _over else "shutdown"
                raise RuntimeError(f"cannot schedule new futures after {after}")
            if link.is_forked or link.closed:
                link.check(self._session.nodes[0].outbox)
            self._left[item] = None
            self._put(partial(self._pending.append, item))

    def close(self, cancel: bool, wait: bool) -> None:
        """Takes no more items. ``cancel``: has those that have not begun cancelled; ``wait``: until all have ended."""
        with self._closing:
            self._closed = True
        self.end_thread(cancel)
        if wait:
            wait_in_looks(self._thread.join, lambda: not self._thread.is_alive())

    def end_thread(self, cancel: bool) -> None:
        """Has the thread end when all is done, or has been cancelled. Takes no lock: a finalizer may call it."""
        self._put(partial(self._start_ending, cancel))

    def wait_until_idle(self, deadline: float | None) -> bool:
        """Waits until there is nothing to do, or until a time of time.monotonic; returns whether it is so."""
        if threading.current_thread() is self._thread:  # a future's callback, which the rest waits for
            return False
        settled = threading.Event()
        self._put(partial(self._settled.append, settled))
        if self._over:  # the thread may have ended before it could take the event
            settled.set()
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        return wait_in_looks(settled.wait, settled.is_set, left)

    def give_up(self) -> int:
        """Has the items that wait cancelled, and those that run interrupted; returns the number of all of them."""
        left = len(self._left)
        self._put(partial(self._start_ending, True))
        for work in list(self._running):
            work.cancel()
        return left

    def forked(self) -> None:
        """Ends the futures in a forked child, where nothing else would end them."""
        self._closing, self._waiting = threading.Lock(), None
        for item in self._left:
            item.future._condition = threading.Condition()  # a thread of the parent may have held the other one
            with suppress(InvalidStateError):
                item.future.set_exception(
                    ForkError(f"this process was forked from the master; only that learns of {item}")
                )

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _put(self, event: Callable[[], None]) -> None:
        self._events.put(event)
        if (waiting := self._waiting) is not None:
            waiting.resolve()

    def _run(self) -> None:
        while not (self._ending and not self._pending and not self._running):
            self._wait()
            try:
                self._events.get()()
                self._fill()
            except BaseException:  # SystemExit, of a future's callback: others are logged by the future
                _log.critical("a callback of an Executor's future has raised what ends a thread", exc_info=True)
                self._put(self._fill)
            self._tell_settled()
        self._over = True
        while not self._events.empty():
            self._events.get()()
        self._tell_settled()

    def _wait(self) -> None:
        """Takes in answers of nodes until there is an event."""
        link = self._session.link
        for node, _ in list(self._running.values()):
            self._waiting = Request(-1, node)
            # a loss; or the session's end, which is an event for all that run
            with suppress(DisttensorError), link.unheard():
                link.waiting.wait(self._waiting, until=lambda: not self._events.empty(), explain=False)
                break
        self._waiting = None

    def _tell_settled(self) -> None:
        while self._settled and not self._pending and not self._running:
            self._settled.pop().set()

    def _start_ending(self, cancel: bool) -> None:
        self._ending = True
        while cancel and self._pending:
            item = self._pending.popleft()
            item.future.cancel()
            item.future.set_running_or_notify_cancel()  # tells those who wait
            self._left.pop(item, None)

    def _fill(self) -> None:
        while self._pending:
            try:
                node = self._slots.take_slot(self._session)
            except Exception as error:  # no node is left, or the session has ended
                self._fail_all(error)
                return
            if node is None:
                return
            item = self._pending.popleft()
            if not item.future.running() and not item.future.set_running_or_notify_cancel():
                self._left.pop(item, None)
                self._slots.give_back(node)
                continue
            try:
                work = item.call(node=node, beside=self._slots.beside)
            except Exception as error:
                self._slots.give_back(node)
                self._failed(item, error)
                continue
            self._running[work] = node, item
            work.call_at_end(partial(self._put, partial(self._finish_item, work)))

    def _finish_item(self, work: Submitted[Any]) -> None:
        node, item = self._running.pop(work)
        self._slots.give_back(node)
        error = work.exception()
        if error is None:
            self._left.pop(item, None)
            item.future.set_result(work.result())
        else:
            self._failed(item, error)

    def _failed(self, item: DueCall, error: Exception) -> None:
        if isinstance(error, NodeLost):
            if item.retries > 0:
                item.retries -= 1
                self._pending.appendleft(item)
                return
            advise_retries(error, "Executor")
        elif self._session.link.closed and isinstance(error, DisttensorError):
            self.cut.append(item)
        self._left.pop(item, None)
        item.future.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        while self._pending:
            item = self._pending.popleft()
            self._left.pop(item, None)
            if item.future.running() or item.future.set_running_or_notify_cancel():
                if self._session.link.closed:
                    self.cut.append(item)
                    error = DisttensorError(f"the session was shut down before this call had begun: {item}")
                item.future.set_exception(error)


class Dispatchers:
    """The dispatchers of one session, in whose name they wait at its end."""

    def __init__(self) -> None:
        self._living: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
        self._told = False

    def of(self, session: Session) -> weakref.WeakSet[Dispatcher]:
        """Returns the dispatchers, of which the session's end is told."""
        if not self._told:
            self._told = True
            session.changes.callback(self._say_what_was_cut)
        return self._living

    def finish(self, deadline: float | None) -> list[Exception]:
        """Waits until all that was submitted is done, or until a time of time.monotonic. Returns what Ctrl-C has
        cancelled at the interpreter's end."""
        for each in list(self._living):
            each.wait_until_idle(deadline)
        errors, _given_up[:] = list(_given_up), []
        return errors

    def forked(self) -> None:
        """Ends the futures of a forked child."""
        for each in list(self._living):
            each.forked()

    def _say_what_was_cut(self) -> None:
        cut: list[DueCall] = []
        for each in list(self._living):
            each.wait_until_idle(time.monotonic() + _TOLD)
            cut += each.cut
        if cut:
            _log.warning(
                "the session was shut down before %d calls of an Executor had ended; their futures have an error. The "
                "first: %s",
                len(cut),
                cut[0],
            )


#: What Ctrl-C has ended at the interpreter's end.
_given_up: list[Exception] = []
_registered = False


def _register_once() -> None:
    global _registered
    if not _registered:
        _registered = True
        # as concurrent.futures does: before what is registered with atexit, the session's end among it
        threading._register_atexit(_at_exit)  # type: ignore[attr-defined]


def _at_exit() -> None:
    """Finishes what is due at the interpreter's end. Ctrl-C ends that: then the rest is cancelled, and said."""
    global _over
    living = list(_all)
    try:
        _over = True
        for each in living:
            each.close(cancel=False, wait=True)
    except BaseException as error:
        if left := sum(each.give_up() for each in living):
            _given_up.append(
                CancelledError(f"Ctrl-C at the end of the script has cancelled {left} calls of an Executor")
            )
        if not isinstance(error, KeyboardInterrupt):
            raise
