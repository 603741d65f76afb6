"""Callbacks for an end to which any thread may come, even by a finalizer: without a lock, as append and popleft are
atomic."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("disttensor")


def call_callbacks(callbacks: deque[Callable[[], object]]) -> None:
    """Calls the callbacks of an end that has come, each once, however many threads do so.

    Logs what one raises: its mistake must not end the thread, nor what others wait for.
    """
    while callbacks:
        try:
            fn = callbacks.popleft()
        except IndexError:  # another thread was faster
            return
        try:
            fn()
        except Exception:
            _log.exception("a done callback failed")
