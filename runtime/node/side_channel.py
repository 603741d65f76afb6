"""The node's end of the side channel: a thread that takes the master's words, whatever the node is at.

master: Link.lose   --Gone-->   this thread --> DataChannel.expire: a receive that waits for a lost peer ends
        Link.cancel --Cancel--> this thread --> Functions.cancel: a function is interrupted
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from ..channel.opened import Channels
from ..protocol import side
from ..protocol.errors import ChannelError, ProtocolError
from ..transport.base import Spoke


class SideChannel:
    """The thread, which connects by itself: nothing waits for it. Without this connection a node works as well."""

    def __init__(self, connect: Callable[[], Spoke], channels: Channels, cancel: Callable[[int], None]) -> None:
        """``connect`` makes the connection, and may wait for it; ``cancel`` interrupts the function of a request."""
        self._connect, self._channels, self._cancel = connect, channels, cancel
        self._spoke: Spoke | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="disttensor-side", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._closed = True
        if self._spoke is not None:
            self._spoke.close()

    def _serve(self) -> None:
        try:
            spoke = self._connect()
            with self._lock:
                self._spoke = spoke
                closed = self._closed
            if closed:
                spoke.close()
                return
            spoke.send(b"")  # from its first message on the master knows the connection
            while True:
                message = spoke.recv()
                if message is not None:
                    self._take(side.decode(message))
        except (ChannelError, ProtocolError) as e:
            with suppress(OSError):
                if not self._closed and isinstance(e, ProtocolError):
                    print(f"disttensor: the side channel is given up: {e}", file=sys.stderr)

    def _take(self, word: side.Word) -> None:
        match word:
            case side.Gone():
                for channel in self._channels:
                    channel.expire(word.rank, word.why)
            case side.Cancel():
                self._cancel(word.request)
