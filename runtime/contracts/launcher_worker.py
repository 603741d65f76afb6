"""The worker of the launchers' checks: it needs no torch, and obeys the checker over a connection.

    checker <--TCP, a line of JSON each: who it is; orders; answers--> worker

The checker listens where a master would (``Bundle.address``). The connection ends with the process, on whatever host
that is, and not before a child of it that lives on: by this the checker sees which processes are left.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..host.addresses import first_to_answer, split
from ..protocol.bundle import Bundle, read_bundle

#: Its exit code when its master is gone, like that of real workers.
EX_MASTER_GONE = 75
#: Seconds within which one of several addresses of the checker has to answer.
REACH = 20.0


def main(lifeline: int) -> int:
    """Serves until the end of the life-line, or of the connection with the checker."""
    bundle = read_bundle(lifeline)
    return _Worker(bundle, lifeline).serve()


def digest(secret: str) -> str:
    """Returns a digest by which a secret is known without being told."""
    return hashlib.sha256(secret.encode()).hexdigest()


def in_sight(secrets: list[str]) -> list[str]:
    """Returns the files of this host's /proc that show one of these secrets to anybody, or to this user as they are."""
    wanted = [secret.encode() for secret in secrets if secret]
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if any(secret in (process / name).read_bytes() for secret in wanted):
                    found.append(f"{process}/{name}")
    return found


class _Worker:
    def __init__(self, bundle: Bundle, lifeline: int) -> None:
        self._bundle = bundle
        self._lifeline = lifeline
        addresses = (bundle.address, *bundle.addresses)
        self._sock = socket.create_connection(split(first_to_answer(addresses, REACH)), REACH)
        self._sock.settimeout(None)
        self._poller = select.poll()
        self._poller.register(lifeline, select.POLLIN)
        self._poller.register(self._sock, select.POLLIN)

    def serve(self) -> int:
        told = msgspec.structs.asdict(self._bundle) | {"secret_key": digest(self._bundle.secret_key)}
        self._send_line({"job": self._bundle.job, "rank": self._bundle.rank, "pid": os.getpid(), "bundle": told})
        for line in self._lines():
            order, *arguments = json.loads(line)
            self._send_line({"answer": getattr(self, order)(*arguments)})
        return EX_MASTER_GONE

    def _lines(self) -> Iterator[bytes]:
        """Yields the checker's lines, until it is gone, or the master is."""
        rest = b""
        while True:
            ready = dict(self._poller.poll())
            if self._lifeline in ready and not os.read(self._lifeline, 1):
                return
            if self._sock.fileno() in ready:
                if not (piece := self._sock.recv(1 << 16)):
                    return
                *lines, rest = (rest + piece).split(b"\n")
                yield from lines

    def _send_line(self, what: dict[str, Any]) -> None:
        self._sock.sendall(json.dumps(what).encode() + b"\n")

    # ---- orders: an exception ends the process ---------------------------------------------------------------------

    def show(self, stream: str, text: str) -> None:
        print(text, end="", file=getattr(sys, stream), flush=True)

    def exit(self, code: int | str, after: float = 0.0) -> None:
        """Exits ``after`` so many seconds, with a last message."""
        time.sleep(after)
        self._send_line({"answer": "bye"})
        raise SystemExit(code)

    def fail(self, text: str) -> None:
        raise RuntimeError(text)

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def crash(self) -> None:
        ctypes.string_at(0)

    def quiet(self) -> None:
        """Closes its output."""
        os.close(1)
        os.close(2)

    def stubborn(self, with_child: bool) -> None:
        """Makes it end by SIGKILL only, and so a child of its process group, which holds the connection as well."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._poller.unregister(self._lifeline)
        if with_child and os.fork() == 0:
            while True:
                signal.pause()

    def sight(self) -> list[str]:
        return in_sight([self._bundle.secret_key])
