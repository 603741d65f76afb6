"""Interrupts a user's function on its node, as Ctrl-C interrupts one of the script's own.

side channel's thread: cancel --signal, or an exception set from outside--> the function's thread: KeyboardInterrupt

A function may end at any moment, and the interrupt that was meant for it must not hit what runs after it: the node's
own code, or the next function. So who wants to interrupt takes the function off the list of those that run, which can
be done once; and a function that does not find itself on the list at its end waits until the interrupt has come.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..protocol.errors import CancelledError, DisttensorError

#: The signal that interrupts a function in the main thread: system calls come back, ``time.sleep`` among them.
INTERRUPT = signal.SIGRTMIN + 7
#: The most cancelled functions that are remembered although they have not begun. Most that are told late have ended.
AHEAD = 1024
#: Seconds that a signal which was sent may take to arrive.
_ARRIVE = 5.0
#: Seconds after which a signal that had no effect is sent again. One that comes between Python's last look for signals
#: and the wait of a system call is noted, and does not end that wait.
_AGAIN = 0.05

_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = [ctypes.c_ulong, ctypes.py_object]
_T = TypeVar("_T")


class Interruption:
    """The functions that run on a node, and those that are not to begin, by the numbers of their requests."""

    # In the function's thread dictionaries only, each of whose steps is one under the GIL: an interrupt that came while
    # it took a lock could leave it locked.

    def __init__(self) -> None:
        self._running: dict[int, int] = {}  #: by request: the thread
        self._ahead: dict[int, None] = {}  #: cancelled, and not found among those that run
        self._struck: dict[int, list[bool]] = {}  #: those that are interrupted: whether the interrupt has been sent
        self._expected = False  #: whether a signal that has been sent to the main thread has not arrived
        self._cancelling = threading.Lock()  #: held by who cancels

    def __repr__(self) -> str:
        return f"<Interruption running={sorted(self._running)} ahead={len(self._ahead)}>"

    def cancel(self, request: int) -> None:
        """Interrupts a function, or has it not begin. Does nothing to one that has ended, or was interrupted before.

        Called by threads in which no function runs.
        """
        with self._cancelling:
            self._cancel(request)

    def _cancel(self, request: int) -> None:
        if request in self._struck:
            return
        self._ahead[request] = None  # first: it may begin at any moment
        self._struck[request] = sent = [False]
        thread = self._running.pop(request, None)
        if thread is None:
            self._struck.pop(request, None)  # it may have ended meanwhile
            while len(self._ahead) > AHEAD:
                self._ahead.pop(next(iter(self._ahead)), None)
            return
        self._ahead.pop(request, None)
        if thread == threading.main_thread().ident:
            self._expected = True
            signal.pthread_kill(thread, INTERRUPT)
            sent[0] = True
            threading.Thread(target=self._repeat, args=(thread,), name="disttensor-cancel", daemon=True).start()
        else:
            _set_exception(thread, KeyboardInterrupt)
            sent[0] = True

    def running_in(self, thread: int) -> tuple[int, ...]:
        """Returns the requests of the functions that a thread runs, and that nobody has cancelled."""
        return tuple(request for request, ident in list(self._running.items()) if ident == thread)

    def may_go_on(self, request: int) -> bool:
        """Returns whether a function runs that nobody has cancelled."""
        return request in self._running

    def run(self, request: int, what: str, function: Callable[[], _T]) -> _T:
        """Calls a function that can be cancelled meanwhile. Raises CancelledError where it was.

        A function that catches the KeyboardInterrupt may return, and raise, what it likes.
        """
        if threading.current_thread() is threading.main_thread() and signal.getsignal(INTERRUPT) != self._arrived:
            signal.signal(INTERRUPT, self._arrived)
        began = False
        try:
            try:
                self._running[request] = threading.get_ident()
                if request in self._ahead:
                    raise KeyboardInterrupt
                began = True
                return function()
            finally:
                if self._running.pop(request, None) is None:
                    self._await(request)
        except BaseException as e:
            struck = self._struck.pop(request, None) is not None or not began
            # as user_functions.py tells it; no name for the error, which has this frame, and the function's tensors
            kind = type(e.__cause__ if type(e) is DisttensorError else e)
            if struck and issubclass(kind, KeyboardInterrupt):
                raise CancelledError(f"{what} was cancelled{'' if began else ' before it began'}") from e
            raise
        finally:
            self._struck.pop(request, None)
            self._ahead.pop(request, None)

    def _await(self, request: int) -> None:
        """Waits until the interrupt that was meant for this function has come, and drops it."""
        try:
            sent = self._struck[request]
            while not sent[0]:
                time.sleep(0)
            until = time.monotonic() + _ARRIVE
            while self._expected and time.monotonic() < until:
                time.sleep(0)
            self._expected = False
        except KeyboardInterrupt:
            pass

    def _repeat(self, thread: int) -> None:
        """Sends the signal again until it has arrived. One too many does nothing (``_arrived``)."""
        time.sleep(_AGAIN)
        while self._expected:
            signal.pthread_kill(thread, INTERRUPT)
            time.sleep(_AGAIN)

    def _arrived(self, *_: object) -> None:
        if self._expected:
            self._expected = False
            raise KeyboardInterrupt
