"""A terminal that a test can look at."""

from __future__ import annotations

import os
import pty
import select
import termios

import pyte
from limits import HANG

from disttensor.runtime.launch.output.printer import Printer


class Screen:
    """A terminal of 8 rows, and what is on it."""

    def __init__(self, columns: int = 40) -> None:
        self.printers: list[Printer] = []
        self._ours, self.fd = pty.openpty()
        termios.tcsetwinsize(self.fd, (8, columns))
        self.columns = columns
        self.screen = pyte.HistoryScreen(columns, 8, history=100)
        self._stream = pyte.ByteStream(self.screen)

    def script(self, text: str) -> None:
        """What the user's own process writes."""
        os.write(self.fd, text.encode())
        self.look()

    def await_more(self) -> bool:
        """Waits until something more has been written; returns False where nothing is."""
        return bool(select.select([self._ours], [], [], HANG)[0])

    def look(self) -> list[str]:
        """All lines, those that have scrolled away included, without the empty ones at the end."""
        os.set_blocking(self._ours, False)
        try:
            while True:
                self._stream.feed(os.read(self._ours, 1 << 16))
        except BlockingIOError:
            pass
        above = ["".join(row[x].data for x in range(self.columns)).rstrip() for row in self.screen.history.top]
        lines = [*above, *(line.rstrip() for line in self.screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def close(self) -> None:
        for printer in self.printers:
            printer.close()
        os.close(self._ours)
        os.close(self.fd)
