"""A function on a node tells the test that it has begun."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from limits import HANG


def tell(port: int) -> None:
    """Tells the test that the function has begun."""
    socket.create_connection(("127.0.0.1", port), timeout=HANG).close()


class Began:
    """A port at which functions say that they have begun; ``times`` of them have to, then ``then()`` is called."""

    def __init__(self, then: Callable[[], object], times: int = 1) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(HANG)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(then, times))
        self._thread.start()

    def _run(self, then: Callable[[], object], times: int) -> None:
        with contextlib.suppress(TimeoutError):
            for _ in range(times):
                self._socket.accept()[0].close()
            then()

    def __enter__(self) -> int:
        return self.port

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()
