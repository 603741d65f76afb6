"""Holders of what others wait for: the function of the user's that a thread runs, or else the thread itself.

    function  during(what) ...  its end: whatever it still has is freed, and who must know is told what it has raised
    thread    current() ...     its end: the same, with None

So a function, or a thread, that ends with a lock in its hands (runtime/shared) does not hold others up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import count

from . import where

_numbers = count()

End = Callable[[BaseException | None], None]


class Holder:
    """A function that runs, or a thread."""

    def __init__(self, what: str, is_function: bool) -> None:
        self.number, self.what, self.is_function = next(_numbers), what, is_function
        self._ends: dict[Hashable, End] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._ends

    def at_end(self, key: Hashable, end: End) -> None:
        """Has ``end`` be called at the end, with what the function has raised; once for each key. It raises nothing."""
        self._ends[key] = end

    def cancel_at_end(self, key: Hashable) -> None:
        """Takes back ``at_end``."""
        self._ends.pop(key, None)

    def run_at_end(self, error: BaseException | None = None) -> None:
        """Tells all that wanted to be told."""
        while self._ends:
            self._ends.popitem()[1](error)


class _Now(threading.local):
    holder: Holder | None = None
    anchor: _Anchor | None = None  #: which ends with its thread


class _Anchor:
    """An object that ends with its thread."""


_now = _Now()


@contextmanager
def during(what: str) -> Iterator[None]:
    """Makes a function that this thread is about to run the holder."""
    before, holder = _now.holder, Holder(what, True)
    _now.holder = holder
    error: BaseException | None = None
    try:
        yield
    except BaseException as e:
        error = e
        raise
    finally:
        _now.holder = before
        holder.run_at_end(error)
        del error  # or it would be in a circle with this frame


def current() -> Holder:
    """Returns the holder: the function that this thread runs, or the thread."""
    if _now.holder is None:
        found, name = where.found(), threading.current_thread().name
        made = Holder(f"the thread {name}" if found is not None else f"the script's thread {name}", False)
        _now.anchor = _Anchor()
        weakref.finalize(_now.anchor, made.run_at_end).atexit = False
        _now.holder = made
    return _now.holder
