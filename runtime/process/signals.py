"""Runs Python signal handlers at safe points only.

Python runs a handler in the main thread between any two of its instructions. A handler that raises (Ctrl-C, a time
limit by SIGALRM) would split steps that belong together, such as commands taken from a queue and sent. A handler that
uses tensors would find things half done. And in a ``__del__`` the interpreter swallows what a handler raises. So the
functions concerned are marked ``@uninterrupted``, and each handler that the user sets is wrapped: a signal that arrives
inside such a function is noted, and its handler runs when that function has returned.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found]  # the public one takes a microsecond: it makes enums
from collections.abc import Callable
from operator import is_
from types import CodeType, FrameType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_ident = threading.get_ident
_MAIN = threading.main_thread().ident

#: The signals for which scripts and libraries write handlers in Python.
SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGALRM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
)

#: Seconds after which a signal whose exception was swallowed arrives again.
_AGAIN = 0.02
#: Seconds that a user's thread waits in the kernel at a time. A signal that comes between Python's last look for
#: signals and the kernel's wait is noted, and does not end that wait; a thread other than the main one gets an
#: interrupt between two of the interpreter's instructions, and none runs while it waits.
LOOK = 0.05

#: Invariant 11: no handler of a signal runs in a function whose code is in here, or in what it calls.
_uninterrupted: set[CodeType] = set()

#: True while C++ makes a call that no exception may leave; the call's frame is that of whoever called C++.
held = [False]


def uninterrupted(function: _F) -> _F:
    """Marks a function: no signal handler runs in it, nor in what it calls."""
    _uninterrupted.add(function.__code__)
    return function


def _inside(frame: FrameType | None) -> bool:
    """Returns whether ``frame`` is in a marked function, or in something that one called."""
    while frame is not None:
        if frame.f_code in _uninterrupted:
            return True
        frame = frame.f_back
    return False


def is_safe(frame: FrameType | None) -> bool:
    """Returns whether a handler of a signal may run there."""
    return not held[0] and not _inside(frame)


def wait_in_looks(wait: Callable[[float], object], over: Callable[[], bool], timeout: float | None = None) -> bool:
    """Waits in steps that an interrupt can end, until something is ``over``, or for ``timeout`` seconds.

    ``wait`` waits for it, so many seconds at most. Returns whether it is over.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    while not over():
        left = LOOK if deadline is None else min(LOOK, deadline - time.monotonic())
        if left <= 0:
            return over()
        wait(left)
    return True


class Interrupts:
    """A session's wrappers around signal handlers. Only the main thread is ever interrupted."""

    def __init__(self) -> None:
        #: signals that arrived in a marked function: (signal, handler)
        self.pending: list[tuple[int, Callable[..., Any]]] = []
        self._seen: dict[int, Any] = dict.fromkeys(map(int, SIGNALS))  #: the handlers at the last look
        self._over = False
        self._unraisable: Callable[[Any], Any] | None = None  #: the user's hook, while ``_swallowed`` replaces it

    def look(self) -> None:
        """Wraps the handlers that the user has set since the last look. Called before uninterrupted work."""
        # in one expression, without a loop of bytecodes: every message that leaves pays for this
        if _ident() == _MAIN and not all(map(is_, map(getsignal, self._seen), self._seen.values())):
            for number, seen in self._seen.items():
                if getsignal(number) is not seen:
                    self._wrap(number)

    def _wrap(self, number: int) -> None:
        if self._unraisable is None and not self._over:
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._swallowed
        handler = getsignal(number)
        if callable(handler) and not self._over and not (type(handler) is _Handler and handler.owner is self):
            handler = _Handler(self, handler)
            signal.signal(number, handler)
        self._seen[number] = handler

    def check(self) -> None:
        """Runs the handlers of the noted signals, unless a marked function is among the callers: a safe point."""
        frame = sys._getframe(1)
        while self.pending and _ident() == _MAIN and not _inside(frame):
            noted = self._take_signal()
            if noted is not None:
                number, handler = noted
                handler(number, frame)

    def remind(self) -> None:
        """Has a noted signal arrive again, in case no safe point follows. Called by another thread now and then."""
        noted = self._take_signal()
        if noted is not None and callable(getsignal(noted[0])) and _MAIN is not None:
            signal.pthread_kill(_MAIN, noted[0])

    def _take_signal(self) -> tuple[int, Callable[..., Any]] | None:
        """Takes the first noted signal with its handler; None where another thread has taken the last one."""
        try:
            return self.pending.pop(0)
        except IndexError:
            return None

    def _soon(self) -> None:
        time.sleep(_AGAIN)
        self.remind()

    def _swallowed(self, what: Any) -> None:
        """Replaces ``sys.unraisablehook``: notes again a signal whose handler raised where Python swallows exceptions.

        That is in a ``__del__`` or a weak reference's callback.
        """
        raised = getattr(what.exc_value, "_disttensor_signal", None)
        if raised is not None and not self._over:
            self.pending.append(raised)
            with contextlib.suppress(RuntimeError):  # the interpreter ends: there are no more threads
                # not a threading.Thread, whose locks the main thread may hold just here
                _thread.start_new_thread(self._soon, ())
        elif self._unraisable is not None:
            self._unraisable(what)

    def restore(self) -> None:
        """Gives the user's handlers back, for good. In a thread other than the main one they stay wrapped, and work."""
        self._over = True
        if self._unraisable is not None and sys.unraisablehook == self._swallowed:
            sys.unraisablehook = self._unraisable
        if _ident() != _MAIN:
            return
        for number in SIGNALS:
            handler = getsignal(number)
            if type(handler) is _Handler and handler.owner is self:
                signal.signal(number, handler.user)
        self.check()


class _Handler:
    """A user's handler, held back in marked functions. One per handler: the user's may call each other in turn."""

    __slots__ = ("owner", "user")

    def __init__(self, owner: Interrupts, user: Callable[..., Any]) -> None:
        self.owner = owner
        self.user = user

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if is_safe(frame):
            try:
                self.user(number, frame)
            except BaseException as e:
                e._disttensor_signal = (number, self.user)  # type: ignore[attr-defined]  # see _swallowed
                raise
        elif (number, self.user) not in self.owner.pending:
            self.owner.pending.append((number, self.user))
