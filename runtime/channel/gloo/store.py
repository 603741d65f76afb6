"""The rendezvous of a gloo group: a store over the data channel's authenticated connections.

It replaces torch's TCPStore, which anybody may read and write. A value that one process sets it sends to the others,
each on its own connection; a value that one gets has been sent to it. A name is used once.
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

from ..library_groups import Mailbox


class MailboxStore(Store):
    """The part of a torch Store that gloo and NCCL use, for one group. ``tell(key, value)`` sends a value to others."""

    def __init__(
        self,
        name: str,
        mailbox: Mailbox,
        tell: Callable[[str, bytes], None],
        over: Callable[[], Exception | None],
    ) -> None:
        super().__init__()
        self._name, self._mailbox, self._tell, self._over = name, mailbox, tell, over
        self.told: list[bytes] = []  #: the values that were set
        self.heard: list[bytes] = []  #: the values that were got

    def set(self, key: str, value: str | bytes) -> None:
        blob = value.encode() if isinstance(value, str) else bytes(value)
        self.told.append(blob)
        self._mailbox.put(f"{self._name}/{key}", blob)
        self._tell(f"{self._name}/{key}", blob)

    def get(self, key: str) -> bytes:
        blob = self._mailbox.get(f"{self._name}/{key}", self._over)
        self.heard.append(blob)
        return blob

    def check(self, keys: list[str]) -> bool:
        """Returns whether there are values for all of these keys. NCCL's watchdog asks each second."""
        return all(self._mailbox.has(f"{self._name}/{key}") for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._mailbox.get(f"{self._name}/{key}", self._over)


def addresses_in(blobs: Sequence[bytes], hosts: Sequence[str]) -> set[tuple[str, int]]:
    """Returns (IP address, port) of every socket address of one of ``hosts`` (IP addresses) in the values of gloo."""
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
    """Ends the connections that came to this group's listeners or go to theirs; returns their number.

    Not the other ends of these, which may be in this process: data on its way to them is to arrive. Gloo cannot be told
    to give up what it waits for (its abort does nothing), but it does when it reads that a connection has ended, and
    then closes it. Only its reads: where a write fails first, gloo forgets who waits for that write, until the time
    limit (6 of 100 loops of small all_reduces, and none of 240 when reads end).
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            twin = os.dup(int(name))
            try:
                sock = socket.socket(fileno=twin)
            except OSError:  # by now the number is another descriptor's, which is not a socket
                os.close(twin)
                continue
            with sock:
                here, there = sock.getsockname()[:2], sock.getpeername()[:2]  # a listener has no peer, and stays
                if here in ours or there in theirs:
                    sock.shutdown(socket.SHUT_RD)
                    count += 1
    return count
