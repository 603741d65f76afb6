"""The place of whoever has nodes note each of their commands: one at a time, as a node has one list of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..runtime.protocol.errors import DisttensorError


class WatchPlace:
    """The place of one session. A profile takes it; the watch for slow nodes borrows it for a second, and gives it back
    as soon as a profile wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._begun = ""
        self._borrowed: tuple[threading.Event, threading.Event] | None = None  #: a profile wants it; it is given back

    def enter(self, begun: str) -> None:
        """Takes the place for a profile, and waits until it is given back if it is borrowed. ``begun``: where, such as
        "at train.py:12". Raises DisttensorError where it is taken."""
        with self._lock:
            if self._is_taken:
                raise DisttensorError(
                    f"a profile is recorded already, begun {self._begun}: a session records one at a time, so leave "
                    "the inner dt.seeing.profile out"
                )
            self._is_taken, self._begun, borrowed = True, begun, self._borrowed
        if borrowed is not None:
            wanted, returned = borrowed
            wanted.set()
            try:
                returned.wait()
            except BaseException:  # Ctrl-C
                self.leave()
                raise

    def leave(self) -> None:
        """Frees the place."""
        with self._lock:
            self._is_taken = False

    @contextmanager
    def borrow(self) -> Iterator[threading.Event | None]:
        """Borrows the place inside of a ``with`` block; yields an event that is set when a profile wants it, None where
        it is not free."""
        wanted, returned = threading.Event(), threading.Event()
        with self._lock:
            is_free = not self._is_taken and self._borrowed is None
            if is_free:
                self._borrowed = wanted, returned
        if not is_free:
            yield None
            return
        try:
            yield wanted
        finally:
            with self._lock:
                self._borrowed = None
            returned.set()

    def forked(self) -> None:
        """Frees the place in a forked child, whose parent records."""
        self._lock, self._is_taken, self._borrowed = threading.Lock(), False, None
