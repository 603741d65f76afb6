"""Turns pieces from a pipe into lines, as a terminal would show them in the end.

A progress bar is a line that is written again and again, with ``\\r`` between. Overwritten states are not shown, but
for one from time to time, and the last one.
"""

from __future__ import annotations

import re
from collections import deque

TAIL_LINES = 20
TAIL_WIDTH = 500
_LOOK = 2 * TAIL_LINES  #: the number of lines from which the last ones are taken, as some are left out

#: A line without an end is passed on in pieces of this size.
LONG = 1 << 16

#: Lines of faulthandler's output that are the same in each crash, and would leave no room for the lines before.
_OURS = re.compile(r'  File ".*runtime/launch/[\w/]+\.py", line \d+ in |Extension modules: ')

_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_TEXT_ESCAPE = re.compile(_ESCAPE.pattern.decode())

#: Control characters but tab and newline, marks that turn the direction of text around, and halves of characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def without_escapes(line: bytes) -> bytes:
    """Removes escape sequences of a terminal."""
    return _ESCAPE.sub(b"", line) if b"\x1b" in line else line


def showable(line: bytes) -> bytes:
    """Returns a line as it looks in the end, colours included; without orders that would move the cursor elsewhere."""
    if b"\r" in line or b"\b" in line:
        states = line.replace(b"\b", b"\r").split(b"\r")
        line = next((state for state in reversed(states) if state.strip()), b"")
    if b"\x1b" in line:
        line = _ESCAPE.sub(lambda m: m[0] if m[0].startswith(b"\x1b[") and m[0].endswith(b"m") else b"", line)
    return line


def plain(text: str, width: int) -> str:
    """Returns text that does nothing to a terminal, of ``width`` characters at most. Newlines and tabs stay."""
    return _CONTROL.sub("\ufffd", _TEXT_ESCAPE.sub("", text[: 4 * width]))[:width]


class Lines:
    """Takes pieces, returns complete lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, rest = (self._rest + piece).split(b"\n")
        if b"\r" in rest:  # keep the state that it shows now, and whether that is to be overwritten
            rest = b"\r" + showable(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        elif len(rest) >= LONG:
            lines.append(rest)
            rest = b""
        self._rest = rest
        return [showable(line) for line in lines]

    @property
    def bar(self) -> bytes:
        """The state that a progress bar shows now; empty if there is none."""
        return showable(self._rest) if self._rest.startswith(b"\r") else b""

    def take_unfinished(self) -> list[bytes]:
        """Returns the unfinished line."""
        rest, self._rest = showable(self._rest), b""
        return [rest] if rest else []


def shown_in_tail(line: bytes) -> str:
    """Returns a line as errors show it: without escape sequences and control characters, and not too long."""
    text = without_escapes(showable(line[-4 * LONG :]))[: 4 * TAIL_WIDTH].decode(errors="replace")
    return plain(text, TAIL_WIDTH).rstrip()


class Tail:
    """The last lines of a node, for the report of its end."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._rests = {1: b"", 2: b""}

    def add(self, stream: int, piece: bytes) -> None:
        # a piece has thousands of lines when a node floods: only its end is looked at
        *lines, rest = (self._rests[stream] + piece).rsplit(b"\n", _LOOK + 1)
        self._rests[stream] = rest[-LONG:]
        for line in lines[-_LOOK:]:
            self._append(line)

    def lines(self) -> tuple[str, ...]:
        """Returns the last lines, with the unfinished ones."""
        for stream, rest in self._rests.items():
            self._rests[stream] = b""
            if rest:
                self._append(rest)
        return tuple(self._lines)

    def last(self) -> str:
        """Returns the last line that is neither empty nor disttensor's own, an unfinished one too: it goes on."""
        unfinished = (shown_in_tail(rest) for rest in reversed(self._rests.values()))
        lines = (*unfinished, *reversed(self._lines))
        return next((text for text in lines if text and not text.startswith("disttensor: ")), "")

    def _append(self, line: bytes) -> None:
        text = shown_in_tail(line)
        if not _OURS.match(text):
            self._lines.append(text)
