"""Ports to listen at."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

#: Of ports that the kernel gives nobody.
_FIRST, _EACH, _BLOCKS = 20_000, 100, 120


def _block() -> tuple[int, int]:
    """The first port of a block that no other process of tests has, of this run or another; and what keeps it ours."""
    folder = Path(tempfile.gettempdir(), f"ports-of-tests-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    for first in range(_FIRST, _FIRST + _BLOCKS * _EACH, _EACH):
        lock = os.open(folder / str(first), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return first, lock
        os.close(lock)
    raise OSError(f"{_BLOCKS} processes of tests have all ports: {folder}")


_first, _lock = _block()


def free_port() -> int:
    """A port for somebody to listen at later."""
    for number in random.SystemRandom().sample(range(_first, _first + _EACH), _EACH):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    raise OSError(f"no port from {_first} on is free")
