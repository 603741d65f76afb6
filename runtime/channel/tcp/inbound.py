"""The bytes that arrive on one connection: few system calls for small frames, no copy for large payloads."""

from __future__ import annotations

import socket

from ..ticket import Passing

#: The buffer's size: a small frame and its payload come with one system call; of a large payload at most this much is
#: copied once more.
_BUFFER = 16 << 10
#: The bytes after which those of a payload that is counted are counted again.
PIECE = 4 << 20


class Inbound:
    """Reads a blocking socket. Used by one thread. Both methods raise EOFError when the bytes end early."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray(_BUFFER)
        self._view = memoryview(self._data)
        self.passing: Passing | None = None  #: counts the payload that is read now
        self._start = self._end = 0  #: bytes that were read and not yet taken are _data[_start:_end]

    def next_bytes(self, n: int) -> bytes:
        """Returns the next ``n`` bytes, at most 16 KiB."""
        while self._end - self._start < n:
            if self._start:
                rest = self._data[self._start : self._end]
                self._start, self._end = 0, len(rest)
                self._data[: len(rest)] = rest
            got = self._sock.recv_into(self._view[self._end :])
            if not got:
                raise EOFError(f"the connection ended after {self._end - self._start} of {n} bytes of a header")
            self._end += got
        start = self._start
        self._start = start + n
        return bytes(self._view[start : start + n])

    def at_boundary(self) -> bool:
        """Returns whether all bytes that were read have been taken."""
        return self._start == self._end

    def read_into(self, out: memoryview) -> None:
        """Fills ``out`` with the next bytes."""
        total, passing = len(out), self.passing
        most = total if passing is None else PIECE
        done = min(self._end - self._start, total)
        if done:
            out[:done] = self._view[self._start : self._start + done]
            self._start += done
            if passing is not None:
                passing.bytes += done
        while done < total:
            # With MSG_WAITALL one call normally fills the rest, without the interpreter in between.
            got = self._sock.recv_into(out[done : done + most], 0, socket.MSG_WAITALL)
            if not got:
                raise EOFError(f"the connection ended after {done} of {total} bytes of the payload")
            done += got
            if passing is not None:
                passing.bytes += got

    def skip(self, n: int) -> None:
        """Drops the next ``n`` bytes."""
        scratch = memoryview(bytearray(min(n, 1 << 20)))
        while n:
            piece = scratch[: min(n, len(scratch))]
            self.read_into(piece)
            n -= len(piece)
