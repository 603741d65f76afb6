"""Calls a peer: TCP connection and handshake, within a time limit, with errors that name the address.

Also tunes sockets.
"""

from __future__ import annotations

import errno
import fcntl
import math
import socket
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress

from ...host import descriptors
from ...host.addresses import first_to_answer
from ...host.interfaces import is_loopback
from ...host.tcp_info import try_often
from ...protocol.errors import BrokenError
from ..base import PeerInfo, Protection
from ..cipher import no_cipher
from .handshake import CROSSED, UNFIT, WELCOME, Secrets, Standing, call
from .shield import ENCRYPT, unprotected, wishes

#: On loopback a socket buffer that stays in the CPU's cache beats a large one by a third; between hosts the kernel's
#: own tuning knows better, since there the buffer has to hold a round trip's worth of bytes.
_LOOPBACK_BUFFER = 256 << 10
#: Keepalive: with nothing under way the peer's kernel is asked after so many seconds, then at this interval.
_IDLE, _INTERVAL = 5, 2
#: The most questions of keepalive that the kernel takes.
_MOST_ASKED = 127
#: The most addresses of a peer: each of them is tried at once, with a socket.
MOST_ADDRESSES = 32
#: The number of attempts to connect: a hang-up before the verdict may be a flood of strangers on the peer's side, or
#: news of this rank that has not reached the peer yet.
_ATTEMPTS = 3
#: Errors of a network that is down just now: what the kernel says at once, where packets that are lost take the limit.
_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
#: Seconds between two calls then.
_PAUSE = 0.2
#: Seconds after which a hang-up says that the peer has not been told of this rank yet (or that one of the two got no
#: core): its listener has kept the call for ``Limits.handshake``. Such an attempt does not count.
_LATE = 1.0


class DeniedError(BrokenError):
    """The reason why no call can succeed: the peer does not want this connection, or any other one."""


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port`` or ``[v6]:port``; the first of several. Raises ValueError."""
    host, _, port = address.partition(",")[0].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is no address of a tcp channel; it has to be host:port")
    return host.strip("[]"), int(port)


def _reached(address: str, deadline: float) -> str:
    """Returns one of several addresses that answers; the first if none does. Raises BrokenError for too many."""
    if "," not in address:
        return address
    several = address.split(",")
    if len(several) > MOST_ADDRESSES:
        raise BrokenError(f"a peer has {MOST_ADDRESSES} addresses at most, not {len(several)}: {address:.100} ...")
    found = first_to_answer([f"tcp://{one}" for one in several], (deadline - time.monotonic()) / 2)
    return found.removeprefix("tcp://")


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune_before(sock: socket.socket, ip: str) -> None:
    """Sets options that have to be set before connect or listen; accepted sockets inherit them."""
    if is_loopback(ip):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _LOOPBACK_BUFFER)


def tune_after(sock: socket.socket, silent: float) -> None:
    """Sets the options of a connection in use: blocking, nothing held back. ``silent``: the seconds without an answer
    of the peer's kernel after which its host is gone."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    asked = min(_MOST_ASKED, max(1, math.ceil((silent - _IDLE) / _INTERVAL)))  # never sooner
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE), (socket.TCP_KEEPINTVL, _INTERVAL), (socket.TCP_KEEPCNT, asked)
    ):  # fmt: skip
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    try_often(sock, silent)


def shut_down(sock: socket.socket | None, how: int = socket.SHUT_RDWR) -> None:
    """Shuts ``sock`` down, which wakes threads that block in it."""
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(how)


def unacknowledged(sock: socket.socket) -> int:
    """Returns the number of bytes that the peer's kernel does not have yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)


def dial(
    info: PeerInfo,
    job: str,
    me: int,
    limit: float,
    patience: float,
    watch: Callable[[socket.socket | None], bool],
    reached: Callable[[], bool],
    protection: Protection,
    standing: Standing = Standing(),  # noqa: B008 - immutable
) -> tuple[socket.socket | None, Secrets]:
    """Returns a connection to ``info``'s peer and its secrets.

    The peer's kernel has ``limit`` seconds to answer. Then the peer is there, and may be busy: it has ``patience``
    seconds, from the last of its answers on. One that keeps each call for a while has not been told of this rank, and
    is called until ``watch`` returns False: it may compute for as long as it likes before it takes the command that
    introduces the two.

    The socket is None when the peer calls this one at this moment and its call is the one to use. ``watch`` is given
    each socket before it is used, so that another thread can shut it down, and None before it is closed; ``reached`` is
    called before the first byte is sent. Each returns False to give up. Raises BrokenError; DeniedError where it is in
    vain to call again.
    """
    deadline = time.monotonic() + limit
    hung_up, attempt, waited, began = "", 0, limit, time.monotonic()
    last = began + limit + patience
    while attempt < _ATTEMPTS and time.monotonic() < last:
        if hung_up:
            if not watch(None):
                break
            time.sleep(0.05 * attempt)
        sock = None
        try:
            host, port = split_address(_reached(info.address, deadline))
            family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind, proto)
            tune_before(sock, str(where[0]))
            waited = limit
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if not watch(sock):
                break
            sock.connect(where)
            began = time.monotonic()
            if not reached():
                break
            waited = patience
            sock.settimeout(patience)
            wants, lacks = wishes(protection, sock)
            if wants & ENCRYPT and lacks:
                raise unprotected(me, info.rank, lacks)
            verdict, secrets = call(sock, info.key, job, me, info.rank, wants, standing)
            if verdict == WELCOME:
                if secrets.mode & ENCRYPT and (lacks := no_cipher(load=True)):
                    raise unprotected(me, info.rank, lacks)
                watch(None)
                taken, sock = sock, None
                return taken, secrets
            if verdict == CROSSED:
                return None, secrets
            if verdict == UNFIT:
                raise unprotected(me, info.rank, lacks)
            raise DeniedError(
                f"rank {info.rank} at {info.address} refuses a second connection from rank {me}: it gave up the first "
                "one, as it does when it cannot reach this rank's port, or one side was started anew"
            )
        # ConnectionAbortedError: this host has ended it, as an administrator may by ``ss -K``
        except (EOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError) as error:
            hung_up = str(error) or "it hung up"
            now = time.monotonic()
            if now - began < _LATE:
                attempt += 1
            else:
                last = now + limit + patience
            deadline = now + limit  # it was there
        except TimeoutError as error:
            raise BrokenError(
                f"rank {me} cannot reach rank {info.rank} at {info.address}: no answer within {waited:g} s; "
                "check that the address and port can be reached from here (firewall, interface), and whether its "
                "process has said that it has no file descriptors left"
            ) from error
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NO_WAY and time.monotonic() + _PAUSE < deadline:
                hung_up = str(error)
                time.sleep(_PAUSE)  # the link may be back in time
                continue
            if isinstance(error, ConnectionRefusedError) and hung_up and attempt + 1 < _ATTEMPTS:
                attempt += 1  # it has hung up on all that waited, and is about to listen again
                continue
            if descriptors.is_shortage(error):  # nor could it take the peer's call
                why = f"rank {me} has no file descriptors left to call rank {info.rank}; {descriptors.limit()}"
                raise DeniedError(why) from error
            raise BrokenError(f"rank {me} cannot reach rank {info.rank} at {info.address}: {error}") from error
        finally:
            if sock is not None:
                watch(None)
                sock.close()
    raise BrokenError(
        f"rank {info.rank} at {info.address} refused rank {me} in the handshake ({hung_up or 'gave up'}): it is gone, "
        "has another key for the pair, belongs to another job, or has said that it has no "
        "file descriptors left"
    )
