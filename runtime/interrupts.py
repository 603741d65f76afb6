"""L4: Ctrl-C at safe points only.

A KeyboardInterrupt may not split what belongs together (commands taken from a queue and sent) and is swallowed by the
interpreter inside a ``__del__``. So a handler of our own notes it there and raises it at the next safe point; anywhere
else it calls the handler that the user had.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_ident = threading.get_ident
_MAIN = threading.main_thread().ident


class Interrupts:
    """``with interrupts.deferred:`` marks what must not be split. Only the main thread is ever interrupted."""

    def __init__(self) -> None:
        self.deferred = _Deferred(self)
        #: code objects (finalizers) in which the interpreter would swallow the exception
        self.unsafe: set[CodeType] = set()
        self._depth = 0
        self._pending = False
        self._previous: Any = None

    def install(self) -> None:
        """Takes SIGINT over, in the main thread only; a handler that ignores the signal is left alone."""
        if _ident() != _MAIN:
            return
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._handle)

    def restore(self) -> None:
        """Gives the user's handler back."""
        if self._previous is None or _ident() != _MAIN:
            return
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._previous)
        self._previous = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth or (frame is not None and frame.f_code in self.unsafe):
            self._pending = True
            return
        previous: Callable[[int, FrameType | None], Any] = self._previous
        previous(number, frame)

    def check(self) -> None:
        """A safe point."""
        if self._pending and _ident() == _MAIN:
            self._pending = False
            self._previous(signal.SIGINT, None)


class _Deferred:
    """Re-entrant. Other threads pass through: signals arrive in the main thread."""

    def __init__(self, owner: Interrupts) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        if _ident() == _MAIN:
            self._owner._depth += 1

    def __exit__(self, *exc: object) -> None:
        owner = self._owner
        if _ident() == _MAIN:
            owner._depth -= 1
            if owner._pending and not owner._depth and exc[0] is None:
                owner.check()
