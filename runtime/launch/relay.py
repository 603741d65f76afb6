"""The way of a worker's output to the user's terminal: whole lines, each with its node's name before it.

    worker's stdout --pipe--> Source --lines, "[node 1] "--> Sink --> the server's stdout

A terminal that is stopped (Ctrl-S) or a reader that is slow must not keep the fork server from ending its workers, so
a sink never blocks: it writes when there is room, and sources wait while it holds too much.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque

TAIL_LINES = 20
TAIL_WIDTH = 500

#: What a pipe takes at once when it is writable at all, and does not mix with what others write (POSIX's PIPE_BUF).
_ATOM = select.PIPE_BUF
#: A line without an end is passed on in pieces of this size.
_LONG = 1 << 16


class Sink:
    """An inherited descriptor that others write to as well, so its flags (O_NONBLOCK) are not ours to set."""

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

    def put(self, data: bytes) -> None:
        self._queue += data

    def push(self, patience: float = 0.0) -> None:
        """Writes what there is room for; waits ``patience`` seconds in all for more."""
        deadline = time.monotonic() + patience
        while self._queue and self._poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            end = self._queue.rfind(b"\n", 0, _ATOM) + 1 or _ATOM
            try:
                del self._queue[: os.write(self.fd, self._queue[:end])]
            except BlockingIOError:  # somebody else made it non-blocking and filled it just now
                return
            except OSError:  # its reader is gone, the disk is full: output is lost, nodes are not
                self._queue.clear()


class Source:
    """The read end of one worker's stdout or stderr. Closes ``fd``."""

    def __init__(self, fd: int, rank: int, sink: Sink, tail: deque[str]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.sink = sink
        self._prefix = f"[node {rank}] ".encode()
        self._tail = tail
        self.ended = False  #: nobody has the write end any more
        self._rest = b""

    def read(self) -> bool:
        """Takes one piece; False when there was none (now or, with ``ended``, for ever)."""
        try:
            piece = os.read(self.fd, _LONG)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) >= _LONG:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._pass_on(line)
        self.ended = not piece
        return not self.ended

    def close(self) -> None:
        """Takes what is left, an unfinished line included; not for ever, as an escaped grandchild may go on writing."""
        for _ in range(64):
            if not self.read():
                break
        if self._rest:
            self._pass_on(self._rest)
            self._rest = b""
        os.close(self.fd)

    def _pass_on(self, line: bytes) -> None:
        self.sink.put(self._prefix + line + b"\n")
        self._tail.append(line[: 4 * TAIL_WIDTH].decode(errors="replace").rstrip()[:TAIL_WIDTH])
