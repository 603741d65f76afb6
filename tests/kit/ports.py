"""Ports to listen at."""

from __future__ import annotations

import contextlib
import os
import random
import socket


def free_port() -> int:
    """A port for somebody to listen at later: none that the kernel gives away, and no other test process's."""
    first = 20_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in random.SystemRandom().sample(range(first, first + 1_000), 1_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", number)):
            return number
    raise OSError(f"no port from {first} on is free")
