"""The tcp channel with the speed of a network between hosts: the kernel sends so many Gbit/s by each connection.

On loopback a transfer is only copying, which takes the cores from whatever computes. Between hosts it is mostly waiting
for the wire; benchmarks of what goes on meanwhile use this channel: ``register_channel("network", Network)``.
"""

from __future__ import annotations

import os
import socket

from disttensor.runtime.channel.base import ChannelContext
from disttensor.runtime.channel.tcp import dial, peer
from disttensor.runtime.channel.tcp.channel import TcpChannel

#: The variable that tells nodes how many Gbit/s.
GBIT = "BENCH_GBIT"

_SO_MAX_PACING_RATE = 47


def _tune(sock: socket.socket, silent: float) -> None:
    dial.tune_after(sock, silent)
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, round(float(os.environ.get(GBIT, "10")) * 125_000_000))


class Network(TcpChannel):
    """For all connections of the process, as it has only one channel."""

    def __init__(self, context: ChannelContext) -> None:
        peer.tune_after = _tune  # type: ignore[attr-defined]
        super().__init__(context)
