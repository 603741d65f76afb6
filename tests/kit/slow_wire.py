"""Wires between hosts that are far from each other: TCP connections with a delay, a rate, and slices of some bytes.

They are threads of a process of their own, as a test's own threads would have the GIL in turns with what they carry.
"""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType


@dataclass(frozen=True)
class Wire:
    """What becomes of bytes, in either direction."""

    delay: float = 0.0  #: seconds
    back: float | None = None  #: those of what comes back, where they are others
    slices: int = 1 << 16  #: bytes that are sent at once
    rate: float = 0.0  #: bytes a second; 0: as many as there are


class Wires:
    """Wires to addresses, by names under which what has passed is counted."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([sys.executable, "-S", __file__], stdin=pipe, stdout=pipe, text=True)

    def to(self, name: str, address: str) -> str:
        """An address, as "host:port" or "tcp://host:port", from which one comes to ``address`` by a wire."""
        scheme, mark, place = address.rpartition("://")
        host, _, port = place.rpartition(":")
        return f"{scheme}{mark}127.0.0.1:{self._ask(name, host, int(port), asdict(self._wire))}"

    def passed(self, name: str) -> int:
        """How many bytes have crossed all wires of this name."""
        return self._ask(name)

    def _ask(self, *question: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __enter__(self) -> Wires:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()


# ---- the process -----------------------------------------------------------------------------------------------------

_passed: dict[str, int] = {}


def _listen(name: str, target: tuple[str, int], wire: Wire) -> int:
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            near = listener.accept()[0]
            try:
                far = socket.create_connection(target)
            except ConnectionError:  # it has closed: the caller hears that from here
                near.close()
                continue
            back = wire if wire.back is None else replace(wire, delay=wire.back)
            for source, sink, way in ((near, far, wire), (far, near, back)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_carry, args=(name, source, sink, way), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def _carry(name: str, source: socket.socket, sink: socket.socket, wire: Wire) -> None:
    """What comes waits for its time in a queue, so that a delay does not limit the rate."""
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def receive() -> None:
        data = b"."
        while data:
            data = b""
            with suppress(OSError):
                data = source.recv(1 << 16)
            under_way.put((time.monotonic() + wire.delay, data))

    threading.Thread(target=receive, daemon=True).start()
    free = time.monotonic()
    with suppress(OSError):
        while True:
            due, data = under_way.get()
            time.sleep(max(0.0, max(due, free) - time.monotonic()))
            if not data:
                break
            for at in range(0, len(data), wire.slices):
                sink.sendall(data[at : at + wire.slices])
            _passed[name] = _passed.get(name, 0) + len(data)
            if wire.rate:
                free = max(free, time.monotonic()) + len(data) / wire.rate
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _serve() -> None:
    for line in sys.stdin:
        name, *rest = json.loads(line)
        if rest:
            host, port, wire = rest
            print(_listen(name, (host, port), Wire(**wire)), flush=True)
        else:
            print(_passed.get(name, 0), flush=True)


if __name__ == "__main__":
    _serve()
