"""The kernel's account of a TCP connection."""

from __future__ import annotations

import socket
import struct

#: Where struct tcp_info has the bytes that have arrived (tcpi_bytes_received, a u64), and how long it is up to there.
_RECEIVED, _LENGTH = 128, 136


def is_deaf(connection: socket.socket, tries: int) -> bool:
    """Returns whether the kernel has sent the same bytes, or asked the peer's kernel, ``tries`` times in vain.

    The peer's host is gone then, or the network to it: the kernel of a process that is stopped or reads nothing
    answers. (By itself this kernel would go on for a quarter of an hour while bytes are under way.) Raises OSError for
    a socket that is closed.
    """
    _, _, retransmits, probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)  # of struct tcp_info
    return max(retransmits, probes) >= tries


def bytes_received(connection: socket.socket) -> int:
    """Returns how many bytes have arrived on a connection, also those that nobody has read yet. Raises OSError for a
    socket that is closed, or none of TCP's."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
    return int(struct.unpack_from("=Q", info, _RECEIVED)[0])
