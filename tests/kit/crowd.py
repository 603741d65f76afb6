"""A crowd of strangers in a process of its own, so that what they cost the job is not what they cost themselves; and
what they cost whoever listens at all, in another one."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import zmq
from limits import HANG

#: Connections of a crowd, of which so many come in a second.
CROWD, A_SECOND = 1000, 1000
#: What each of them says, by kind. ZeroMQ's greeting, and the beginning of a hello of 1 GiB.
_HELLO = (
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31) + b"\x06\0\0\0\0\x40\0\0\0"
)
WORDS = {"silence": b"", "a hello of 1 GiB": _HELLO + bytes(4000)}


class Crowd:
    """The other process, which sends one crowd after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def visit(self, port: int, kind: str) -> None:
        """Has a crowd come to a port; returns when each of them has been hung up on. Raises AssertionError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{port} {kind}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if said != f"{CROWD}\n":
            raise AssertionError(f"{said!r} of {CROWD} strangers were hung up on: see the output of their process")


@contextlib.contextmanager
def crowd() -> Iterator[Crowd]:
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Crowd(process)
        assert process.stdin is not None
        process.stdin.close()


class Bare:
    """A process that only listens, with nothing of ours: a ROUTER with CURVE, and a socket whose connections it greets,
    hears once and closes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        assert process.stdout is not None
        self.router, self.socket = map(int, process.stdout.readline().split())


@contextlib.contextmanager
def bare() -> Iterator[Bare]:
    command = [sys.executable, __file__, "bare"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Bare(process)
        assert process.stdin is not None
        process.stdin.close()


def _listen() -> None:
    """Listens until its standard input ends."""
    ctx = zmq.Context()
    router = ctx.socket(zmq.ROUTER)
    router.curve_server, (router.curve_publickey, router.curve_secretkey) = True, zmq.curve_keypair()
    router.handshake_ivl, router.maxmsgsize = 2000, 1 << 20
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        print(router.bind_to_random_port("tcp://127.0.0.1"), server.getsockname()[1], flush=True)
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
        sys.stdin.read()
        ctx.destroy(linger=0)


def _greet(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        connection.setblocking(False)
        with connection, contextlib.suppress(OSError):
            connection.send(bytes(32))
            connection.recv(100)


@contextlib.contextmanager
def room_for_a_crowd() -> Iterator[None]:
    """Has this process, and those that it starts, have descriptors enough for one end of a crowd."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(before[0], 8 * CROWD), before[1]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _come(port: int, words: bytes) -> int:
    """Connects so many times, each a thousandth of a second after the other; returns how many were hung up on."""
    waiting, poll, begun = dict[int, socket.socket](), select.poll(), time.monotonic()
    for number in range(CROWD):
        stranger = socket.create_connection(("127.0.0.1", port), HANG)
        with contextlib.suppress(ConnectionError):
            stranger.send(words)
        waiting[stranger.fileno()] = stranger
        poll.register(stranger, select.POLLIN)
        time.sleep(max(0.0, begun + number / A_SECOND - time.monotonic()))
    deadline = time.monotonic() + HANG
    while waiting and time.monotonic() < deadline:
        for descriptor, _ in poll.poll(1000):
            try:
                said = waiting[descriptor].recv(4096)
            except ConnectionError:
                said = b""
            if not said:
                poll.unregister(descriptor)
                waiting.pop(descriptor).close()
    for stranger in waiting.values():
        stranger.close()
    return CROWD - len(waiting)


def main() -> None:
    for line in sys.stdin:
        port, _, kind = line.strip().partition(" ")
        print(_come(int(port), WORDS[kind]), flush=True)


if __name__ == "__main__":
    _listen() if sys.argv[1:] == ["bare"] else main()
