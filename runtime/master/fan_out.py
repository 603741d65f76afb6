"""The queue of several nodes: each command is queued once, encoded once, and goes to all of them."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol import commands as c
from ..protocol.errors import NodeLost
from .command_queue import MAX_BATCH, CommandQueue
from .failures import Site
from .outbox import Joints, Outbox, in_pieces

#: The most times MAX_BATCH commands that a message to many nodes takes: what it costs, each of them costs.
WIDEST = 4


class FanOut(CommandQueue):
    """The queue of a mesh's nodes. What it packs goes into their outboxes, behind what these have packed before."""

    __slots__ = ("_outboxes", "most")

    def __init__(self, members: Sequence[Outbox]) -> None:
        super().__init__(tuple(member.rank for member in members), members[0].blocking)
        self._outboxes = members
        self.most = MAX_BATCH * min(WIDEST, 1 + len(members) // 4)
        self.lost = next((member.lost for member in members if member.lost is not None), None)

    @property
    def members(self) -> Sequence[Outbox]:
        return self._outboxes

    def _deliver(self, commands: list[c.Command], sites: list[Site | None]) -> None:
        pieces, self.unsendable = in_pieces(commands, sites, self.unsendable)
        count = len(commands)
        for member in self._outboxes:
            if member.lost is None:
                member.add_pieces(pieces, count)

    def lose(self, error: NodeLost) -> None:
        """Notes that a member is lost: the others have what was issued before, and nothing is issued any more."""
        if self.lost is None:
            self.lost = error
        self.end()

    def reopen(self) -> None:
        """Has commands leave again, if each member has a connection; else another member's loss is the queue's."""
        self.lost = next((member.lost for member in self._outboxes if member.lost is not None), None)
        if self.lost is None:
            super().reopen()

    def discard(self) -> None:
        """Forgets what was queued behind the loss. The definitions of templates stay, as plans know their numbers; and
        what is dead is still freed on the nodes that are left."""
        queued = self.queue[:]  # at once: a thread may append meanwhile
        pairs = zip(queued[::2], queued[1::2], strict=True)
        self.queue[:] = [each for pair in pairs if type(pair[0]) is c.Define for each in pair]
        if not self.there:
            self.dead.clear()

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"queued={len(self.queue) // 2}"
        return f"<FanOut nodes={self.ranks} {state} dead={len(self.dead)}>"


class FanOuts(dict[tuple[int, ...], FanOut]):
    """The queues of several nodes, by the nodes' ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.joints = Joints()
