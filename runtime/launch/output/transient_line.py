"""A line of the script's that comes and goes, and leaves no trace: what it waits for.

    step 4:  40%|####      | 4/10       the cursor stays here, behind a bar, a prompt, or what print(end="") has left
    waiting 14 s at train.py:41 ...     the line, on the row below

Nobody can ask a terminal where its cursor is without taking the user's input. So the line is written below the row of
the cursor, which goes back to its place: whatever stands there stays whole. What the script prints meanwhile, in any
thread, is written as if there were no line: ``write`` of its streams takes the line away first. Nodes' lines are put
above the row of the cursor (output_fd.py), and push this one down with it, or off the screen.

A cell of a notebook has one row per stream, on which the line is written over by itself and erased.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from .lines import plain
from .printer import is_terminal

#: The most characters of a line in a cell, which has no width that could be asked for.
WIDE = 120


class TransientLine(ABC):
    """A line that is shown at times. Any thread may show or erase it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal's handler that prints may come while it is held
        self._pid = os.getpid()
        self._shown = ""
        self._begun = False  #: whether a line is shown, or is about to be: who erases waits for the latter
        self._guarded: list[tuple[Any, Any, Any]] = []  #: streams, their guards, and what stood in these' place

    def show(self, text: str, holds: Callable[[], bool] = lambda: True) -> None:
        """Shows a text in place of the one before, if it still ``holds`` and there is a place for it."""
        with self._lock:
            self._begun = True  # before the question: a wait that ends meanwhile is met by the one or the other
            if not holds() or not self._has_place():
                self.erase()
                return
            self._guard()
            if self._write(text):
                self._shown = text
            elif not self._shown:
                self.erase()

    def erase(self) -> None:
        """Takes the line away. Does nothing where none is shown."""
        if os.getpid() != self._pid:  # a forked child's copy: the line is the parent's, and the lock perhaps held
            self._unguard()
            return
        if self._begun:
            with self._lock:
                self._unguard()
                if self._shown:
                    self._write("")
                    self._shown = ""
                self._begun = False

    @abstractmethod
    def _streams(self) -> list[Any]:
        """Returns the streams of Python's that write to where the line is."""

    @abstractmethod
    def _has_place(self) -> bool:
        """Returns whether the line would break nothing now."""

    @abstractmethod
    def _write(self, text: str) -> bool:
        """Writes a text, or with "" what takes it away. Returns False, and writes nothing, where that would wait."""

    def _guard(self) -> None:
        """Has what is written to the streams take the line away first."""
        if self._guarded:
            return
        for stream in self._streams():
            if not any(stream is other for other, _, _ in self._guarded) and hasattr(stream, "__dict__"):
                guard = self._guard_of(stream)
                self._guarded.append((stream, guard, vars(stream).get("write")))
                vars(stream)["write"] = guard  # not by an assignment, which wrappers of streams pass on

    def _guard_of(self, stream: Any) -> Callable[[Any], Any]:
        def write(text: Any) -> Any:
            self.erase()
            return stream.write(text)

        return write

    def _unguard(self) -> None:
        guarded, self._guarded = self._guarded, []
        for stream, guard, before in guarded:
            if vars(stream).get("write") is guard:
                del vars(stream)["write"]
                if before is not None:
                    vars(stream)["write"] = before


class TerminalLine(TransientLine):
    """The line on a terminal."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd

    def _streams(self) -> list[Any]:
        bars = [getattr(bar, "fp", None) for bar in _bars()]  # each has taken the stream's ``write`` for good
        streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *bars)
        return [stream for stream in streams if _writes_to_terminal(stream)]

    def _has_place(self) -> bool:
        try:
            if os.tcgetpgrp(self._fd) != os.getpgrp():
                return False  # the script runs in the background
        except OSError:  # it is not the terminal that controls this process
            pass
        return not any(getattr(bar, "pos", 0) for bar in _bars())  # further bars of tqdm's stand below the cursor

    def _write(self, text: str) -> bool:
        try:
            # opened anew: it may not block, and that must be so for nobody else
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            poller = select.poll()
            poller.register(fd, select.POLLOUT)
            if not poller.poll(0):  # it is stopped, by Ctrl-S
                return False
            columns = os.get_terminal_size(fd).columns
            shown = _cut(plain(text, 4 * columns), columns - 1).encode(errors="replace")
            # a row below, which scrolls at the bottom; back; and there and back again with the cursor's place kept
            os.write(fd, b"\x1bD\x1b[A\x1b7\x1b[B\r\x1b[2K" + shown + b"\x1b8")
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


class CellLine(TransientLine):
    """The line in a cell of a notebook, which a stream of ipykernel's writes to."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream

    def _streams(self) -> list[Any]:
        return [self._stream]

    def _has_place(self) -> bool:
        return not _bars()  # which would stand on the same row

    def _write(self, text: str) -> bool:
        shown = _cut(plain(text, WIDE), WIDE)
        blank = " " * max(0, len(_cut(self._shown, WIDE)) - len(shown))
        self._unguard()
        self._stream.write(f"\r{shown}{blank}" if shown else f"\r{blank}\r")
        if shown:
            self._guard()
        return True


def transient_line(environment: Mapping[str, str] = os.environ, fd: int = 2) -> TransientLine | None:
    """Returns the line of this process; None where there is no place for one, or the user wants none."""
    if environment.get("DISTTENSOR_PROGRESS") == "0":
        return None
    if type(sys.stderr).__module__.startswith("ipykernel."):
        return CellLine(sys.stderr)
    return TerminalLine(fd) if is_terminal(fd, environment) else None


def _writes_to_terminal(stream: Any) -> bool:
    with contextlib.suppress(Exception):  # None, closed, or of a class without such a method
        return bool(stream.isatty())
    return False


def _bars() -> list[Any]:
    """Returns the bars of tqdm's that there are."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return list(getattr(tqdm, "_instances", ()))


def _cut(text: str, columns: int) -> str:
    """Returns as much of a text as has room in so many columns."""
    width = 0
    for n, char in enumerate(text):
        width += 0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if width > columns:
            return text[:n]
    return text
