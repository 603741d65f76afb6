"""The events of a node, and answers to the master's questions about them."""

from __future__ import annotations

import torch

from ...channel.base import Transfer
from ...protocol import commands as c
from ...protocol.errors import ProtocolError
from ...protocol.failure_ids import Poison
from ..state import NodeState, PoisonRead
from .cuda_lane import CudaMark
from .lane import Mark, when_all


class Events:
    """The events of one node."""

    def __init__(self, node: NodeState) -> None:
        self._node = node

    def do(self, command: c.Record | c.Query | c.Elapsed) -> None:
        """Does a command of the default stream, or of no stream."""
        match command:
            case c.Record():
                mark = self.new(command)
                when_all([p.transfer for p in self._node.store.pending.values()], mark.reach)
            case c.Query():
                self._node.emit(c.Answer(command.request, self[command.ref].is_completed()))
            case c.Elapsed():
                first, second = self[command.first], self[command.second]
                both = first.is_completed() and second.is_completed()
                self._node.emit(c.Answer(command.request, second.since(first) if both else None))

    def new(self, command: c.Record) -> Mark:
        """Makes the event of ``command``; the caller has it reached."""
        device = self._node.device(command.device)
        mark = CudaMark(device, command.timing) if device.type == "cuda" else Mark()
        self._node.store.entries[command.ref] = mark
        return mark

    def __getitem__(self, ref: int) -> Mark:
        """Returns the event under ``ref``. Raises KeyError, PoisonRead for one that is gone with a loss, ProtocolError
        for an entry that is not an event."""
        mark = self._node.present(ref)
        if isinstance(mark, Poison):
            raise PoisonRead(mark)
        if not isinstance(mark, Mark):
            raise ProtocolError(f"ref {ref} is no event")
        return mark

    def arrival(self, command: c.Await) -> Transfer:
        """Returns the transfer that a peer's Signal ends."""
        return self._node.channel.irecv(torch.empty(0, dtype=torch.uint8), command.peer, command.transfer)
