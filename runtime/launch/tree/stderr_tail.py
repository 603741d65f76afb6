"""The output of a program that the root has started, such as ssh or srun; its last lines explain a failure."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from ..output.lines import LONG, TAIL_LINES, shown_in_tail
from .loop import EventLoop


class StderrTail:
    """Reads ``fd``, which it closes, in the turns of a loop; ``then`` gets the lines that have arrived, each once."""

    def __init__(self, loop: EventLoop, fd: int, then: Callable[[list[bytes]], object]) -> None:
        os.set_blocking(fd, False)
        self._loop, self._fd, self._then = loop, fd, then
        self._last: deque[str] = deque(maxlen=TAIL_LINES)
        self._rest = b""
        loop.watch(fd, self.read)

    @property
    def lines(self) -> list[str]:
        """The last lines, with the unfinished one."""
        return [*self._last, *([shown_in_tail(self._rest)] if self._rest else [])][-TAIL_LINES:]

    def read(self) -> None:
        """Reads what is there now; for a caller that knows that the program has ended, before the loop's turn comes."""
        try:
            piece = os.read(self._fd, 1 << 16) if self._fd >= 0 else b""
        except BlockingIOError:
            return
        if not piece:
            self._loop.unwatch(self._fd)
        *lines, rest = (self._rest + piece).split(b"\n")
        self._rest = rest[-LONG:]
        self._last.extend(map(shown_in_tail, lines))
        if lines:
            self._then(lines)

    def close(self) -> None:
        """Closes the descriptor. Closing twice is fine."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
