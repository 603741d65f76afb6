"""Begins receives before their turn, in commands that have arrived and are not applied yet.

So bytes come in while the node computes: a Recv that waited for its turn behind a computation would begin only after
that. A Recv writes a ref of its own and nobody can use that before, so it may begin at any time before its turn, if all
receives from a peer keep their order. It passes commands that receive nothing, and no others. A peer that is introduced
on the way is told to the channels at once.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress

from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import ClosedError
from ..protocol.traits import kinds
from ..transport.base import Spoke
from .executor import CommandExecutor
from .store import Pending

#: Bytes that receives before their turn may take, not counting the first one.
AHEAD = 64 << 20

#: The commands that a receive may pass.
_OVERTAKEN = kinds("overtaken")


class Ahead:
    """Gives batches in order. ``look`` begins the receives of batches that have arrived meanwhile."""

    def __init__(self, spoke: Spoke, executor: CommandExecutor) -> None:
        self._spoke = spoke
        self._executor = executor
        self._waiting: deque[tuple[c.Batch, int]] = deque()
        self._batch = 0  #: index of the first waiting batch whose receives have not all begun
        self._command = 0  #: index of the next command in that batch

    def next(self) -> tuple[c.Batch, int]:
        """Returns the next batch and its size in bytes. Raises ClosedError, ProtocolError."""
        if not self._waiting:
            message = None
            while message is None:
                message = self._spoke.recv()
            return codec.decode_batch(message), len(message)
        if self._batch:
            self._batch -= 1
        else:
            self._command = 0
        return self._waiting.popleft()

    #: Invariant 5: a receive that begins early passes nothing that receives.
    def look(self) -> None:
        """Begins receives of waiting batches. To be called after a batch with a Recv was applied."""
        self._executor.received = False
        with suppress(ClosedError):  # raised again, once the waiting batches are done
            while (message := self._spoke.recv(0)) is not None:
                self._waiting.append((codec.decode_batch(message), len(message)))
        while self._batch < len(self._waiting):
            commands = self._waiting[self._batch][0].commands
            while self._command < len(commands):
                if not self._begin_receive(commands[self._command]):
                    return
                self._command += 1
            self._batch += 1
            self._command = 0

    def _begin_receive(self, command: c.Command) -> bool:
        """Begins the command if it is a receive; returns whether the receives after it may begin."""
        if type(command) is c.Peer:  # from which the next receive may be
            self._executor.channels.connect(command.channel, command.rank, command.addresses, command.key)
            return True
        if type(command) is not c.Recv:
            return type(command) in _OVERTAKEN
        executor, early = self._executor, self._executor.early
        try:
            size = codec.dtype_of(command.dtype).itemsize * math.prod(command.shape)
            if early and size + sum(p.nbytes for p in early.values() if isinstance(p, Pending)) > AHEAD:
                return False
            early[command.transfer] = executor.receive(command)
        except Exception as e:  # raised when its turn has come
            early[command.transfer] = e
        return True
