"""Helpers of the transport tests: waiting for a hub, counting what leaks, and a TCP proxy that misbehaves on order."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

from limits import HANG

from disttensor.runtime.protocol.keys import curve_pair
from disttensor.runtime.transport.inproc import InprocHub, InprocSpoke
from disttensor.runtime.transport.zmq import ZmqHub, ZmqSpoke

LIMIT = HANG


def check(got: object, wanted: object) -> None:
    """An assert that `python -O` leaves alone; pytest rewrites those of test modules only."""
    if got != wanted:
        raise AssertionError(f"{got!r} instead of {wanted!r}")


class World:
    """A hub and what its nodes need; closes all that it made."""

    def __init__(self, kind: str = "curve", nodes: int = 3, **options: object) -> None:
        self.kind = kind
        self.server = curve_pair() if kind == "curve" else ("", "")
        self.keys = [curve_pair() if kind == "curve" else ("", "") for _ in range(nodes)]
        public = {rank: pair[0] for rank, pair in enumerate(self.keys)}
        self.hub: ZmqHub | InprocHub
        if kind == "inproc":
            self.hub = InprocHub(nodes)
        else:
            self.hub = ZmqHub(server_keys=self.server if kind == "curve" else None, node_keys=public, **options)
        self.spokes: list[ZmqSpoke | InprocSpoke] = []

    def spoke(self, rank: int, **options: object) -> ZmqSpoke | InprocSpoke:
        """Node ``rank``'s end, connected but not yet heard from."""
        if self.kind == "inproc":
            spoke = self.hub.spoke(rank)
        else:
            address = options.pop("address", self.hub.address)
            keys = options.pop("keys", self.keys[rank])
            spoke = ZmqSpoke(address, self.server[0], *keys, rank, **options)
        self.spokes.append(spoke)
        return spoke

    def join(self, rank: int, **options: object) -> ZmqSpoke | InprocSpoke:
        """Node ``rank``'s end, connected and registered."""
        spoke = self.spoke(rank, **options)
        spoke.send(b"hello")
        check(self.take(1), [(rank, b"hello")])
        return spoke

    def ready(self, timeout: float = LIMIT) -> bool:
        """Waits until the hub's descriptor is readable."""
        return bool(select.select([self.hub.fileno()], [], [], timeout)[0])

    def take(self, count: int) -> list[tuple[int, bytes]]:
        """The next ``count`` messages."""
        out = self.hub.drain()
        while len(out) < count:
            if not self.ready():
                raise AssertionError(f"{len(out)} of {count} messages after {LIMIT} s")
            out += self.hub.drain()
        return out

    def lost(self) -> tuple[list[tuple[int, bytes]], list[int]]:
        """Waits until a node is gone: (what was received before, the nodes)."""
        out = self.hub.drain()
        while not (gone := self.hub.gone()):
            if not self.ready():
                raise AssertionError(f"no node was lost within {LIMIT} s")
            out += self.hub.drain()
        return out, gone

    def echo(self, rank: int, spoke: ZmqSpoke | InprocSpoke) -> None:
        """Proves that node ``rank`` works in both directions."""
        token = os.urandom(8)
        self.hub.send(rank, token)
        check(spoke.recv(LIMIT), token)
        spoke.send(token)
        check(self.take(1), [(rank, token)])

    def close(self) -> None:
        for spoke in self.spokes:
            spoke.close()
        self.hub.close()
        self.spokes.clear()


def usage() -> tuple[int, int]:
    """(open descriptors, threads of any language) of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def nothing_leaks() -> Iterator[None]:
    """Fails when the body leaves a descriptor or a thread behind."""
    before = usage()
    yield
    deadline = time.monotonic() + LIMIT
    # A thread that was joined may stay in /proc for a moment, at the start of a test too.
    while any(now > then for now, then in zip(usage(), before, strict=True)):
        if time.monotonic() > deadline:
            raise AssertionError(f"(descriptors, threads) were {before} and are {usage()}")
        gc.collect()


class Proxy:
    """Forwards TCP connections to ``address`` (tcp://host:port), until told to do something worse."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stop, self._stopped = socket.socketpair()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.recorded = b""  #: what clients sent
        self.frozen = False  #: forward nothing any more, in silence
        self.flip = False  #: damage the next piece that a client sends
        self.drop = 0  #: hang up on so many connections first
        self._reset = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        """Hangs up on both ends of every connection."""
        for end in list(self._pairs):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Has the kernel answer both ends of every connection that there is by now that there is none (RST)."""
        self._reset = True

    def close(self) -> None:
        self._stop.close()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            stack.enter_context(self._stopped)
            while True:
                ends = [] if self.frozen else list(self._pairs)
                ready = select.select([self._listener, self._stopped, *ends], [], [], 0.05)[0]
                if self._stopped in ready:
                    break
                if self._reset:
                    self._reset = False
                    for end in list(self._pairs):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        end.close()
                    self._pairs.clear()
                    continue
                if self._listener in ready:
                    client = self._listener.accept()[0]
                    if self.drop:
                        self.drop -= 1
                        client.close()
                        continue
                    try:
                        server = socket.create_connection(self._target)
                    except ConnectionError:  # it has closed: the caller hears that from here
                        client.close()
                        continue
                    self._clients.add(client)
                    self._pairs[client], self._pairs[server] = server, client
                for end in ready:
                    if end in self._pairs:
                        self._forward(end)
            for end in self._pairs:
                end.close()

    def _forward(self, end: socket.socket) -> None:
        try:
            data = end.recv(65536)
            if end in self._clients and data:
                self.recorded += data
                if self.flip:
                    self.flip = False
                    data = data[:-1] + bytes([data[-1] ^ 1])
            self._pairs[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            other = self._pairs.pop(end)
            self._pairs.pop(other)
            end.close()
            other.close()
