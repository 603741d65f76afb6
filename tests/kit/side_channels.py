"""The side channels of the session that a module's fixture has made."""

from __future__ import annotations

import select
import time

from limits import HANG

from disttensor.runtime.protocol.errors import DisttensorError
from disttensor.session import current


def await_side_channels(limit: float = HANG / 4) -> None:
    """Waits until each node that is there has opened its side channel, which no node waits for at its start: one that
    came in the middle of a test would be taken for what the test has left."""
    try:
        link = current.session().link
    except DisttensorError:
        return
    deadline = time.monotonic() + limit
    while (hub := link.side.hub) is not None and time.monotonic() < deadline:
        with link._lock:
            hub.drain()
            if {node.rank for node in link.there()} <= hub.connected:
                return
        select.select([hub], [], [], 0.1)  # what is waited for may be an answer of ZeroMQ's handshake: look again
