"""A function on a node waits at a door until the test opens it."""

from __future__ import annotations

import socket

from limits import HANG


def until(port: int) -> str:
    """Waits at the door of this port; returns what is said there."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as told:
        return told.recv(1).decode()


class Door:
    """A port at which a function waits until ``open``."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(HANG)
        self.port: int = self._socket.getsockname()[1]
        self._there: list[socket.socket] = []

    def wait(self) -> None:
        """Waits until one more function is at the door."""
        self._there.append(self._socket.accept()[0])

    def open(self) -> None:
        """Lets one function go on."""
        if not self._there:
            self.wait()
        there = self._there.pop(0)
        there.sendall(b"!")
        there.close()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        for there in self._there:
            there.close()
        self._socket.close()
