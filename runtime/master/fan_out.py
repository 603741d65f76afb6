"""The queue of several nodes: each command is queued once, encoded once, and goes to all of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol import commands as c
from ..protocol.errors import NodeLost
from .command_queue import CommandQueue
from .failures import Site
from .outbox import Outbox, packed


class FanOut(CommandQueue):
    """The queue of a mesh's nodes. What it packs goes into their outboxes, behind what these have packed before."""

    def __init__(self, members: Sequence[Outbox]) -> None:
        super().__init__(tuple(member.rank for member in members), members[0].blocking)
        self.members = self._outboxes = members
        self.lost: NodeLost | None = next((member.lost for member in members if member.lost is not None), None)

    def _deliver(self, commands: list[c.Command], sites: list[Site | None]) -> None:
        there = [member for member in self._outboxes if member.lost is None]
        first = max((member.sent for member in there), default=0)  # the longest number, so that no message grows
        messages, self.unsendable = packed(first, commands, sites, self.unsendable)
        for member in there:
            member.take(messages, first)

    def lose(self, error: NodeLost) -> None:
        """Notes that a member is lost: the others have what was issued before, and nothing is issued any more."""
        if self.lost is None:
            self.lost = error
        self.set_flush_threshold(0)

    def discard(self) -> None:
        """Forgets what was queued behind the loss; what is dead is still freed on the nodes that are left."""
        self.queue.clear()
        if not self.there:
            self.dead.clear()

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"queued={len(self.queue) // 2}"
        return f"<FanOut nodes={self.ranks} {state} dead={len(self.dead)}>"
