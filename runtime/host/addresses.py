"""Addresses of this host, and the routes from one host to another."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"

#: Seconds after which a second address is tried when the first has not answered, as in RFC 8305.
_HEAD_START = 0.25


def split(address: str) -> tuple[str, int]:
    """Splits ``tcp://10.0.0.1:41233`` into host and port. Raises ValueError for another form."""
    parts = urlsplit(address)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None:
        raise ValueError(f"{address!r} is no address such as tcp://10.0.0.1:41233")
    return parts.hostname, parts.port


def own_address(text: str) -> tuple[str, int]:
    """Splits an address at which nobody but this machine gets to, such as 127.0.0.1:9400 or [::1]:9400, into host and
    port. Raises ValueError for any other."""
    host, _, number = text.rpartition(":")
    host = LOOPBACK if host == "localhost" else host.removeprefix("[").removesuffix("]")
    port = int(number) if number.isdecimal() and len(number) <= 5 else 0
    if not host or not 0 < port < 1 << 16:
        raise ValueError(f"{text!r} is no address such as {LOOPBACK}:9400")
    try:
        is_own_alone = ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        is_own_alone = False
    if not is_own_alone:
        raise ValueError(
            f"{host} is not this machine's alone, and whoever asks there would be answered: name {LOOPBACK}:{port}, or "
            "serve dt.seeing.collector() yourself, with what asks who it is"
        )
    return host, port


def way_to(host: str) -> str:
    """Returns the address of this host by which it reaches ``host`` (a name or an address). Nothing is sent.

    Raises OSError when the name does not resolve, or there is no route.
    """
    family, _, _, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def interfaces_for(address: str, addresses: Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses on which a node listens for others, if it has reached the master at ``address``.

    That is the interface of its connection with the master: the others reach it there, too. A node of the master's own
    host, for which any address of that will do, listens on all of those (``addresses``), as the master does: others may
    reach but one.
    """
    host = split(address)[0]
    if not is_own(host):
        return (way_to(host),)
    return tuple(dict.fromkeys([host, *(split(other)[0] for other in addresses)]))


def is_own(host: str) -> bool:
    """Returns whether it is an address of this host."""
    family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(where)
        except OSError:
            return False
    return True


def first_to_answer(addresses: Sequence[str], timeout: float) -> str:
    """Returns the address that accepts a connection, earlier ones preferred; the first when none does in time."""
    if len(addresses) == 1:
        return addresses[0]
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        found = _race(addresses, min(left, 5.0))
        if found is not None:
            return found
        time.sleep(min(0.1, left))
    return addresses[0]


def _race(addresses: Sequence[str], timeout: float) -> str | None:
    poller, running, waiting = select.poll(), dict[int, tuple[socket.socket, str]](), list(addresses)
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        while (running or waiting) and time.monotonic() < deadline:
            if waiting:
                address = waiting.pop(0)
                with contextlib.suppress(OSError):
                    host, port = split(address)
                    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                    sock = stack.enter_context(socket.socket(family, kind))
                    sock.setblocking(False)
                    if sock.connect_ex(where) in (0, errno.EINPROGRESS):
                        running[sock.fileno()] = sock, address
                        poller.register(sock, select.POLLOUT)
            patience = _HEAD_START if waiting else max(0.0, deadline - time.monotonic())
            for fd, _ in poller.poll(patience * 1000):
                sock, address = running.pop(fd)
                poller.unregister(fd)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    return address
    return None
