"""The side channels of the session that a module's fixture has made."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from typing import Any

from limits import HANG

from disttensor.runtime.protocol.errors import BrokenError, DisttensorError
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
        with link.lock:
            hub.drain()
            if {node.rank for node in link.there()} <= hub.connected:
                return
        select.select([hub], [], [], 0.1)  # what is waited for may be an answer of ZeroMQ's handshake: look again


@contextlib.contextmanager
def not_yet_connected() -> Iterator[None]:
    """Has the script know no node's side channel, as long as they have not been opened."""
    hub: Any = current.session().link.side.hub
    send = hub.send

    def refuse(rank: int, *_: object) -> None:
        raise BrokenError(f"node {rank} is not connected")

    hub.send = refuse
    try:
        yield
    finally:
        hub.send = send
