"""The roll call: all nodes are asked at once how they are, whatever they are at. Each one's connection keeps what came.

    refresh --glance-->   launcher: a node's process from outside, stopped or not      --> connection.seen, seen_at
            --Describe--> the node's thread of the side channel: what only it knows    --> connection.described, ..._at

Neither waits for a command. Who holds the GIL, or is stopped, does not describe itself; what it last said of itself
stays, and how long ago that was.
"""

from __future__ import annotations

import select
from collections.abc import Collection, Sequence

from ..host.sights import hindrance
from ..process.signals import uninterrupted
from ..protocol import side
from .connection import Life
from .link_state import LinkState
from .losses import Losses
from .node import Node
from .side_channels import SideChannels

#: Seconds between two looks for what another thread may have taken.
LOOK = 0.02
#: What keeps a node from answering for longer than a moment.
STANDS_STILL = frozenset({"paused", "stopped", "deaf"})
#: Seconds between two sights of a node that has not described itself.
AGAIN = 0.5


class RollCall:
    """The script's end of the questions to all nodes."""

    __slots__ = ("_losses", "_side", "_state")

    def __init__(self, state: LinkState, losses: Losses, side_channels: SideChannels) -> None:
        self._state, self._losses, self._side = state, losses, side_channels
        side_channels.on_described = self._note_description

    def refresh(self, nodes: Sequence[Node], timeout: float) -> None:
        """Asks these nodes how they are, and waits until all that can answer have, ``timeout`` seconds at most."""
        clock = self._state.clock
        asked = clock.now()
        again = asked + AGAIN
        self.ask(nodes)
        poller = select.poll()
        if self._side.hub is not None:
            poller.register(self._side.hub.fileno(), select.POLLIN)
        while (left := asked + timeout - clock.now()) > 0:
            unseen = any(self._is_unseen(node, asked) for node in nodes)
            undescribed = [node for node in nodes if self._is_undescribed(node, asked)]
            if not unseen and not undescribed:
                return
            if clock.now() >= again:
                again += AGAIN
                for node in undescribed:  # its sight may say by now why it does not answer
                    self._losses.glance(node)
            left = min(LOOK, left)
            if not (unseen and self._losses.ask_launcher(left)):
                clock.poll(poller, left)
                self._losses.ask_launcher()
            self.take_answers(nodes)

    def _is_unseen(self, node: Node, asked: float) -> bool:
        return node.life is Life.THERE and self._losses.sees and node.connection.seen_at < asked

    def _is_undescribed(self, node: Node, asked: float) -> bool:
        """Returns whether a node's description may still come: not from one whose threads do not run."""
        at = node.connection
        stands_still = at.seen is not None and at.seen_at >= asked and hindrance(at.seen) in STANDS_STILL
        return node.life is Life.THERE and self._side.hub is not None and at.described_at < asked and not stands_still

    @uninterrupted
    def ask(self, nodes: Collection[Node]) -> None:
        """Asks nodes how they are, and takes what they have said; does not wait."""
        with self._state.lock:
            if not self._state.closed and not self._state.is_forked:
                for node in nodes:
                    if node.life is Life.THERE:
                        self._losses.glance(node)
                        self._side.describe(node)
                self._side.send_untold(nodes)

    @uninterrupted
    def take_answers(self, nodes: Collection[Node]) -> None:
        """Takes what nodes have said by now."""
        with self._state.lock:
            if not self._state.closed and not self._state.is_forked:
                self._side.send_untold(nodes)

    def _note_description(self, rank: int, description: side.Described, at: float) -> None:
        self._state.nodes[rank].connection.describe(description, at)
