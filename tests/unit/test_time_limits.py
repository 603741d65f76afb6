"""Time limits: their order, and a row of docs/dev/time-limits.md for each that stands in the code."""

from __future__ import annotations

import math
import socket

import pytest

from disttensor.runtime.channel.base import ChannelContext
from disttensor.runtime.channel.tcp.dial import tune_after
from disttensor.runtime.channel.tcp.peer import Limits
from disttensor.runtime.host.silence import ABOVE, Silence
from disttensor.runtime.host.tcp_info import _GAP
from disttensor.runtime.protocol import bundle
from disttensor.runtime.transport import sockets

SETTINGS = [Silence(), Silence(2, 4, 8), Silence(10, 200, 300), Silence(0.1, 0.2, 0.3)]


@pytest.mark.parametrize("silence", SETTINGS, ids=str)
def test_who_says_why_is_heard_before_others_give_up(silence: Silence) -> None:
    """A node is paused, then lost, and only then anything of its end gives up: its data connections, and itself."""
    late = 2 * _GAP  # by which a look at a connection is too late at most
    assert silence.beat < silence.pause < silence.lost < silence.lease
    assert silence.lost + late < silence.data
    assert silence.lease + late < silence.of_nodes(True)
    assert silence.lost + late < silence.of_nodes(False)


@pytest.mark.parametrize("silence", SETTINGS, ids=str)
def test_the_kernel_gives_no_data_connection_up_before_its_node(silence: Silence) -> None:
    with socket.socket() as connection:
        tune_after(connection, silence.data)
        idle, interval, asked = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * asked >= min(silence.data, 127 * interval)
        assert idle + interval * asked < silence.data + idle + interval
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_defaults_that_stand_elsewhere_are_those_of_the_table() -> None:
    default = Silence()
    assert bundle.Bundle("job", 0, "tcp://127.0.0.1:1").silence == sockets.SILENCE == default.lost
    assert bundle.Bundle("job", 0, "tcp://127.0.0.1:1").data_silence == default.data
    assert ChannelContext(0, "job", "127.0.0.1").silence == Limits().silent == default.data
    assert math.isclose(ABOVE, default.data - default.lost)
