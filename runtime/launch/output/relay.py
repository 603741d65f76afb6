"""Relays a worker's output from its pipe to the function that shows and stores it."""

from __future__ import annotations

import os
from collections.abc import Callable

from .lines import LONG


class Source:
    """The read end of one worker's stdout (1) or stderr (2). ``then`` gets the stream and each piece. Closes ``fd``."""

    def __init__(self, fd: int, stream: int, then: Callable[[int, bytes], object]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False  #: nobody has the write end any more
        self._stream = stream
        self._then = then

    def read(self) -> bool:
        """Takes one piece; returns False when there was none (now or, with ``ended``, for ever)."""
        try:
            piece = os.read(self.fd, LONG)
        except BlockingIOError:
            return False
        if piece:
            self._then(self._stream, piece)
        self.ended = not piece
        return not self.ended

    def close(self) -> None:
        """Takes the remaining output; not for ever, as an escaped grandchild may go on writing."""
        for _ in range(64):
            if not self.read():
                break
        os.close(self.fd)
