"""Networks that are cut in one direction, on one machine: a filter of the kernel's drops what arrives at a socket.

What is dropped is not acknowledged either, as on a cable that is cut; no connection ends. Needs no rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

#: Of asm-generic/socket.h, and the program: return 0, which is to drop.
_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


def deafen(connection: socket.socket) -> None:
    """Has a connection's end hear nothing any more; what it sends goes on its way."""
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


def connections(port: int) -> Iterator[tuple[bool, socket.socket]]:
    """Copies of this process's connections with this port at either end, and whether it is that of this one."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                connection = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    here, there = connection.getsockname()[1], connection.getpeername()[1]
                    if port in (here, there):
                        yield port == here, connection


def deafen_ends(port: int, at: bool) -> int:
    """Has this process's ends of the connections with this port hear nothing: those that are at it, or the others.
    Returns how many connections that are."""
    found = set()
    for here, connection in connections(port):
        if here == at:
            deafen(connection)
            found.add((connection.getsockname(), connection.getpeername()))
    return len(found)
