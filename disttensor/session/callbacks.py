"""Calls the user's done callbacks one after the other in a thread of their own, as a channel's thread must not
block."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from ..runtime.process.signals import uninterrupted
from ..runtime.process.torch_threads import compute_as_told

_log = logging.getLogger("disttensor")


class Callbacks:
    """The callbacks of one session and their thread, which is started when it is first needed."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # reentrant: the collector may end a transfer, and so call `put`, under it
        self._closed = False

    @uninterrupted
    def start(self) -> None:
        """Starts the thread, if it does not run; called before the first ``put``. After ``close`` it does nothing:
        callbacks run in the caller's thread then."""
        with self._lock:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name="disttensor-callbacks", daemon=True)
                thread.start()  # raises where the system has none for it: the next one tries again
                self._thread = thread

    def put(self, fn: Callable[[], object]) -> None:
        """Has ``fn`` called. Does not block, whichever thread calls it."""
        with self._lock:  # otherwise it could be put behind the end of the queue
            if not self._closed:
                self._queue.put(fn)
                return
        _call(fn)

    def close(self) -> None:
        """Waits at most two seconds for callbacks that are due. Called after the end of all transfers."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def forked(self) -> None:
        """Replaces the lock in a forked child: the thread does not exist there, and may have held the lock."""
        self._lock = threading.RLock()

    def _run(self) -> None:
        compute_as_told()
        while (fn := self._queue.get()) is not None:
            _call(fn)
            del fn  # it keeps a tensor alive


def _call(fn: Callable[[], object]) -> None:
    try:
        fn()
    except Exception:
        _log.exception("a done callback failed")
