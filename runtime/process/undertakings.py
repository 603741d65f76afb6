"""Undertakings of this process that may take long, such as a start of nodes: a status shows them meanwhile.

Each is noted while it lasts, and says by itself how far it has come, when somebody asks. A wait for what tasks share is
one, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .clock import CLOCK, Clock
from .signals import uninterrupted


class Undertaking:
    """Something that a thread is at, or that goes on beside it."""

    __slots__ = ("_words", "began", "holds", "is_wait", "line", "thread")

    def __init__(self, words: Callable[[], str], line: str, holds: bool, began: float, is_wait: bool = False) -> None:
        self._words = words
        self.is_wait = is_wait  #: whether it is nothing but a wait
        self.line = line  #: the line that has begun it, such as "train.py:12"; "" where that isn't known
        self.holds = holds  #: whether its thread does nothing else until its end
        self.began = began
        self.thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<Undertaking {self.words()!r}>"

    def words(self) -> str:
        """Returns what it is, and how far it has come; of a wait, what it is for."""
        return self._words()


class Undertakings:
    """The undertakings of a process that have not ended."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._under_way: tuple[Undertaking, ...] = ()
        #: re-entrant: a signal's handler that saves may come while it is held, where no session wraps it
        self._changing = threading.RLock()
        #: is called, in its thread, at the end of each that has held its thread
        self.on_end: Callable[[], object] = lambda: None

    def under_way(self) -> tuple[Undertaking, ...]:
        """Returns them, the one that began first comes first."""
        return self._under_way

    @contextmanager
    def during(
        self, words: Callable[[], str], line: str = "", holds: bool = True, is_wait: bool = False
    ) -> Iterator[Undertaking]:
        """Notes an undertaking of this thread inside of a ``with`` block. ``words`` is called in any thread, and
        returns at once."""
        it = Undertaking(words, line, holds, self._clock.now(), is_wait)
        try:
            self._add(it)
            yield it
        finally:
            self._remove(it)
            if holds:
                self.on_end()

    @uninterrupted
    def _add(self, it: Undertaking) -> None:
        with self._changing:
            self._under_way = (*self._under_way, it)

    @uninterrupted
    def _remove(self, it: Undertaking) -> None:
        with self._changing:
            self._under_way = tuple(each for each in self._under_way if each is not it)

    def forked(self) -> None:
        """Forgets them, in a forked child: they are the parent's."""
        self._under_way, self._changing = (), threading.RLock()
        self.on_end = lambda: None


#: Those of this process.
mine = Undertakings()
