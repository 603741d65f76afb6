"""The node's end of the side channel: a thread that takes the master's words, whatever the node is at.

master: Losses.lose --Gone-->   this thread --> DataChannel.expire: a receive that waits for a lost peer ends
        Link.cancel --Cancel--> this thread --> Functions.cancel: a function is interrupted
        LookingIn   --Watch-->  this thread --> Gathering.watch: observers note what happens
        LookingIn   --Gather--> this thread --> Gathering.gather --Gathered--> LookingIn
        RollCall  --Describe--> this thread --> Description.answer --Described--> RollCall
        Prompter  --DebuggerLine--> this thread --> Breakpoints.take_word: a debugger has what was typed for it
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress

from ..channel.opened import Channels
from ..protocol import side
from ..protocol.errors import ChannelError, ProtocolError
from ..transport.base import Spoke
from .description import Description
from .gathering import Gathering

#: Seconds until another connection is tried in place of one that has ended. The script looks each second which have,
#: and lets nobody in before.
_AGAIN = 2.0


class SideChannel:
    """The thread, which connects by itself: nothing waits for it. Without this connection a node works as well.

    After a connection that was ended by something between the two it makes another one: all words may be said twice.
    """

    def __init__(
        self,
        connect: Callable[[], Spoke],
        channels: Channels,
        cancel: Callable[[int], None],
        gathering: Gathering,
        description: Description,
        debug: Callable[[side.DebuggerLine], None],
    ) -> None:
        """``connect`` makes the connection, and may wait for it; ``cancel`` interrupts the function of a request;
        ``gathering`` is what observers gather here, ``description`` that of the node; ``debug`` gives a debugger what
        its user has typed."""
        self._connect, self._channels, self._cancel = connect, channels, cancel
        self._gathering, self._description, self._debug = gathering, description, debug
        self._spoke: Spoke | None = None
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="disttensor-side", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        with self._lock:
            self._closed.set()
            spoke = self._spoke
        if spoke is not None:
            spoke.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                with closing(self._connect()) as spoke:
                    self._hear(spoke)
            except ChannelError:
                pass
            except ProtocolError as e:
                with suppress(OSError):
                    if not self._closed.is_set():
                        print(f"disttensor: the side channel is given up: {e}", file=sys.stderr)
                return
            self._closed.wait(_AGAIN)

    def _hear(self, spoke: Spoke) -> None:
        with self._lock:
            self._spoke = spoke
            if self._closed.is_set():
                return
        spoke.send(b"")  # from its first message on the master knows the connection
        while True:
            message = spoke.recv()
            if message is not None:
                self._handle_word(side.decode(message), spoke)

    def _handle_word(self, word: side.Word, spoke: Spoke) -> None:
        match word:
            case side.Gone():
                self._channels.expire(word.rank, word.why, word.incarnation)
            case side.Cancel():
                self._cancel(word.request)
            case side.Watch():
                self._gathering.watch(word.points, word.room, word.commands)
            case side.Gather():
                spoke.send(side.encode(self._gathering.gather(word.request, word.first)))
            case side.Describe():
                spoke.send(side.encode(self._description.answer(word.request)))
            case side.DebuggerLine():
                self._debug(word)
