"""The kernel's account of a TCP connection; and how often it tries again."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

#: Where struct tcp_info has the bytes that the peer's kernel has acknowledged (tcpi_bytes_acked), after them those that
#: have arrived (tcpi_bytes_received), both u64; and how long it is up to there.
_BYTES, _LENGTH = 120, 136
#: The most seconds between two looks that count: in more, it was this process that did not run.
_GAP = 3.0


#: The option TCP_RTO_MAX_MS, of Linux 6.15 and later; the least and the most milliseconds that it takes; and those
#: before the first try.
_MOST_BETWEEN_TRIES, _LEAST, _MOST, _FIRST = 44, 1000, 120_000, 200
#: How many times the kernel tries again before it ends a connection, where no file says so.
_TRIES = 15
#: Seconds for which it is to go on beyond a limit: by so much whoever counts the silence is too late at most.
LATE = 2 * _GAP


def try_often(connection: socket.socket, silence: float) -> None:
    """Has the kernel send what was not answered again each second, or as often as it can and still go on for longer
    than ``silence`` seconds, where it has the option.

    Else the time between two tries doubles: a link that is back after 13 s is found out after 25, when its host was
    given up. But its tries are counted, and by one each second they are used up in 15 s: it would end a connection
    before whoever counts the silence has said why, and however long that is to last.
    """
    with suppress(OSError):
        most = most_between_tries(silence + LATE, _tries())
        connection.setsockopt(socket.IPPROTO_TCP, _MOST_BETWEEN_TRIES, most)


def most_between_tries(seconds: float, tries: int) -> int:
    """Returns the milliseconds between two tries at most, in whole seconds, with which so many tries last for longer
    than ``seconds``; the kernel's own two minutes where nothing less does."""
    return next((most for most in range(_LEAST, _MOST, _LEAST) if lasting(most, tries) > seconds), _MOST)


def lasting(most: int, tries: int) -> float:
    """Returns for how many seconds the kernel tries again, if ``most`` milliseconds lie between two tries: at first
    200, and twice as many each time until these are reached (tcp_model_timeout)."""
    doubled = min((most // _FIRST).bit_length() - 1, tries)
    return (((2 << doubled) - 1) * _FIRST + (tries - doubled) * most) / 1000


def _tries() -> int:
    with suppress(OSError, ValueError), open("/proc/sys/net/ipv4/tcp_retries2") as file:
        return int(file.read())
    return _TRIES


def bytes_received(connection: socket.socket) -> int:
    """Returns how many bytes have arrived on a connection, also those that nobody has read yet. Raises OSError for a
    socket that is closed, or none of TCP's."""
    return int(struct.unpack_from("=QQ", _read(connection), _BYTES)[1])


def _read(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)


class Unanswered:
    """For how long a connection's peer has not answered, to one who looks every second or two.

    That is the time in which its kernel has acknowledged nothing, though it was sent bytes again, or probed: its host
    is gone, or the network to it, in either direction. The kernel of a process that is stopped, or reads nothing,
    answers. (By itself this kernel would go on for a quarter of an hour while bytes are under way.) A number of tries
    would be no measure: the time between two doubles. Nor would be when anything was heard last: one who is not
    answered itself goes on to talk.
    """

    __slots__ = ("_acknowledged", "_looked", "_tries", "seconds")

    def __init__(self) -> None:
        self._tries, self._acknowledged, self._looked = False, -1, 0.0
        self.seconds = 0.0

    def lasts(self, connection: socket.socket, seconds: float) -> bool:
        """Looks; returns whether it has lasted for so long.

        Never too early: nodes pause before they are given up. So it is late by up to twice the time between two looks.
        Counts only time in which this process ran. Raises OSError for a socket that is closed, or none of TCP's.
        """
        now = time.monotonic()
        gap = min(now - self._looked, _GAP)
        info = _read(connection)
        _, _, retransmits, probes = info[:4]
        acknowledged, _ = struct.unpack_from("=QQ", info, _BYTES)
        tries = retransmits > 0 or probes > 1  # one probe says nothing: who has no room for more answers not each
        lasted = tries and self._tries and acknowledged == self._acknowledged
        self.seconds = self.seconds + gap if lasted else 0.0
        self._tries, self._acknowledged, self._looked = tries, acknowledged, now
        return self.seconds > seconds
