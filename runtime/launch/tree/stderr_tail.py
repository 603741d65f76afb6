"""What a program has to say that the root has started, such as ssh or srun: lines, the last of which are the reasons if
it fails."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from ..output.lines import LONG, TAIL_LINES, TAIL_WIDTH
from .loop import Loop


class StderrTail:
    """Reads ``fd``, which it closes, in the turns of a loop; ``then`` gets the lines that have come, each once."""

    def __init__(self, loop: Loop, fd: int, then: Callable[[list[bytes]], object]) -> None:
        os.set_blocking(fd, False)
        self._loop, self._fd, self._then = loop, fd, then
        self._last: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = b""
        loop.watch(fd, self.read)

    @property
    def lines(self) -> list[str]:
        """The last ones, with what was not finished."""
        return [*self._last, *([_shown(self._rest)] if self._rest else [])][-TAIL_LINES:]

    def read(self) -> None:
        """Takes what there is now; for who knows that the program has ended, before the loop's turn comes."""
        try:
            piece = os.read(self._fd, 1 << 16) if self._fd >= 0 else b""
        except BlockingIOError:
            return
        if not piece:
            self._loop.forget(self._fd)
        *lines, rest = (self._rest + piece).split(b"\n")
        self._rest = rest[-LONG:]
        self._last.extend(map(_shown, lines))
        if lines:
            self._then(lines)

    def close(self) -> None:
        """Twice is fine."""
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1


def _shown(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()[:TAIL_WIDTH]
