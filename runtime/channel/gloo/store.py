"""How the processes of a gloo group find each other: a store that lives on the connections of the data channel, which
are authenticated, in place of torch's TCPStore, which anybody may read and write.

What one sets it tells the others, each on its own connection; what one gets has been told. A name is used once.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from ..library_groups import Board


class MailboxStore(Store):
    """The part of a store that gloo uses, for one group. ``tell(key, value)`` tells the others."""

    def __init__(
        self,
        name: str,
        board: Board,
        tell: Callable[[str, bytes], None],
        over: Callable[[], Exception | None],
    ) -> None:
        super().__init__()
        self._name, self._board, self._tell, self._over = name, board, tell, over
        self.told: list[bytes] = []  #: what was set
        self.heard: list[bytes] = []  #: and got

    def set(self, key: str, value: str | bytes) -> None:
        blob = value.encode() if isinstance(value, str) else bytes(value)
        self.told.append(blob)
        self._board.put(f"{self._name}/{key}", blob)
        self._tell(f"{self._name}/{key}", blob)

    def get(self, key: str) -> bytes:
        blob = self._board.get(f"{self._name}/{key}", self._over)
        self.heard.append(blob)
        return blob

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._board.get(f"{self._name}/{key}", self._over)


def addresses_in(blobs: Sequence[bytes], hosts: Sequence[str]) -> set[tuple[str, int]]:
    """(IP address, port) of every socket address of one of ``hosts`` (IP addresses) in what gloo has told."""
    found = set()
    for host in hosts:
        for family, gap in ((socket.AF_INET, 0), (socket.AF_INET6, 4)):  # IPv6 has a flow label between
            with suppress(OSError):
                start = family.to_bytes(2, "little")
                pattern = re.escape(start) + b"(..)" + b"." * gap + re.escape(socket.inet_pton(family, host))
                for blob in blobs:
                    found |= {(host, int.from_bytes(m[1], "big")) for m in re.finditer(pattern, blob, re.DOTALL)}
    return found


def cut(ours: set[tuple[str, int]], theirs: set[tuple[str, int]]) -> int:
    """Shuts down the connections that came to our listeners or go to theirs, and says how many there were. Not the
    other ends of these, which may be in this process: what is on its way to them is to arrive.

    Gloo cannot be told to give up what it waits for (its abort does nothing), but it does when a connection ends.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            twin = os.dup(int(name))
            try:
                sock = socket.socket(fileno=twin)
            except OSError:  # by now the number is another's, who has no socket
                os.close(twin)
                continue
            with sock:
                here, there = sock.getsockname()[:2], sock.getpeername()[:2]  # a listener has no peer, and stays
                if here in ours or there in theirs:
                    sock.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count
