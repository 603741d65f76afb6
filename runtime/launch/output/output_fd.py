"""The destinations of nodes' output: an inherited descriptor, or a terminal with somebody's unfinished line on it.

A terminal that is stopped (Ctrl-S) or a reader that is slow must not keep the fork server from ending its workers, so
a destination never blocks: it writes when there is room, and sources wait while it holds too much (back-pressure).
"""

from __future__ import annotations

import contextlib
import os
import select
import time
import unicodedata

from .lines import without_escapes

#: Bytes that a pipe takes at once when it is writable at all, and does not mix with others' output (POSIX's PIPE_BUF).
_ATOM = select.PIPE_BUF
#: The same for a terminal: Linux writes that much under one lock.
_TERMINAL_ATOM = 2048


class OutputFd:
    """An inherited descriptor that others write to as well, so its flags (O_NONBLOCK) must not be set here."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._queue = bytearray()
        self._poller = select.poll()
        self._poller.register(fd, select.POLLOUT)

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    @property
    def full(self) -> bool:
        return len(self._queue) > 1 << 18

    @property
    def fds(self) -> list[int]:
        """Descriptors of its own."""
        return []

    def put(self, data: bytes) -> None:
        """Queues complete lines."""
        self._queue += data

    def push(self, patience: float = 0.0) -> None:
        """Writes as much as there is room for; waits ``patience`` seconds in all for more room."""
        deadline = time.monotonic() + patience
        while self.pending and self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            try:
                self._write()
            except BlockingIOError:  # another process made it non-blocking and filled it just now
                return
            except OSError:  # its reader is gone, the disk is full: output is lost, nodes are not
                self._queue.clear()

    def _write(self) -> None:
        end = self._queue.rfind(b"\n", 0, _ATOM) + 1 or _ATOM
        del self._queue[: os.write(self.fd, self._queue[:end])]


class Terminal(OutputFd):
    """Puts lines above the one where the cursor is: a progress bar or a prompt of the script's stays as it is.

    Nobody can ask a terminal where its cursor is without taking the user's input, so this is done always: make room
    below (which scrolls at the bottom), remember the place, insert lines, write, go back to where the place has moved.
    """

    def __init__(self, fd: int) -> None:
        # Opened once more it can be non-blocking for this process alone: one that is writable may still block midway.
        self._own = []
        with contextlib.suppress(OSError):  # another user's, after su
            fd = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            self._own = [fd]
        super().__init__(fd)
        self._begun = bytearray()  #: the rest of a block that has been written in part

    @property
    def fds(self) -> list[int]:
        return self._own

    @property
    def pending(self) -> bool:
        return bool(self._begun or self._queue)

    def _write(self) -> None:
        if not self._begun:
            self._next_block()
        try:
            del self._begun[: os.write(self.fd, self._begun)]
        except OSError as e:
            if not isinstance(e, BlockingIOError):
                self._begun.clear()
            raise

    def _next_block(self) -> None:
        """Takes as many lines as fit into one block."""
        try:
            columns, height = os.get_terminal_size(self.fd)
        except OSError:  # it has hung up, which the next write will tell
            columns, height = 80, 24
        block, rows = bytearray(), 0
        while self._queue:
            end = self._queue.find(b"\n") + 1 or len(self._queue)
            line = bytes(self._queue[:end]).expandtabs()
            more = _rows(line[:-1], columns or 80)
            if block and (rows + more >= (height or 24) or len(block) + len(line) > _TERMINAL_ATOM):
                break
            block += line
            rows += more
            del self._queue[:end]
        if rows < (height or 24):
            above = b"\x1bD" * rows + b"\x1b[%dA\x1b7\r\x1b[%dL" % (rows, rows)
            block = bytearray(above + block[:-1].replace(b"\n", b"\r\n") + b"\x1b8\x1b[%dB" % rows)
        self._begun = block


def _rows(line: bytes, columns: int) -> int:
    """Returns the number of terminal rows that a line takes."""
    text = without_escapes(line).decode(errors="replace")
    if text.isascii():
        width = len(text)
    else:
        width = sum(
            0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
        )
    return max(1, -(-width // columns))
