"""The kernel's account of a TCP connection."""

from __future__ import annotations

import socket


def is_deaf(connection: socket.socket, tries: int) -> bool:
    """Returns whether the kernel has sent the same bytes, or asked the peer's kernel, ``tries`` times in vain.

    The peer's host is gone then, or the network to it: the kernel of a process that is stopped or reads nothing
    answers. (By itself this kernel would go on for a quarter of an hour while bytes are under way.) Raises OSError for
    a socket that is closed.
    """
    _, _, retransmits, probes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)  # of struct tcp_info
    return max(retransmits, probes) >= tries
