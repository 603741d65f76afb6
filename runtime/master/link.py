"""The master's connection with all nodes, in parts; each is made of those before it:

    LinkState   link_state.py  the nodes, their queues, the lock, and whether anything can be used still
    Requests    requests.py    the answers that are due
    Losses      losses.py      which nodes are gone, and why, as the launcher says
    Replies     replies.py     the way in: what nodes report
    Waiting     waiting.py     threads that wait for answers; there is no receiving thread
    Sender      sender.py      the way out: queues are packed, and their messages sent
    IdleFlush   idle.py        the thread that flushes after a short idle

Each has slots, and reads of another part what has no underscore before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..host.launcher import Launcher
from ..process.clock import CLOCK, Clock
from ..process.signals import Interrupts, uninterrupted
from ..protocol.errors import NodeLost
from ..transport.base import Hub
from .idle import IdleFlush
from .link_state import LinkState
from .losses import Losses
from .node import Node
from .replies import Replies
from .requests import Requests
from .sender import Sender
from .side_channels import SideChannels
from .waiting import Waiting

_log = logging.getLogger("disttensor")


class Link(LinkState):
    """The state that the parts share, with the parts."""

    __slots__ = ("idle", "losses", "replies", "requests", "sender", "side", "waiting")

    def __init__(
        self,
        hub: Hub,
        nodes: int,
        launcher: Launcher | None,
        on_lost: Callable[[NodeLost], None],
        interrupts: Interrupts | None = None,
        clock: Clock = CLOCK,
    ) -> None:
        """``interrupts``: those that have wrapped the handlers of signals already."""
        super().__init__(hub, nodes, interrupts, clock)
        self.side = SideChannels(clock)
        self.requests = Requests(self)
        self.losses = Losses(self, self.requests, self.side, launcher, on_lost)
        self.replies = Replies(self, self.requests, self.losses)
        self.waiting = Waiting(self, self.requests, self.losses, self.replies)
        self.sender = Sender(self, self.requests, self.losses, self.replies, self.waiting)
        self.idle = IdleFlush(self, self.requests, self.losses, self.replies, self.sender, self.side)

    def __repr__(self) -> str:
        boxes = [node.outbox for node in self.nodes]
        queued, flying = sum(len(box.queue) // 2 for box in boxes), sum(box.sent - box.done for box in boxes)
        state = " closed" if self.closed else ""
        return f"<Link nodes={len(boxes)} queued={queued} inflight={flying} waiting={len(self.requests)}{state}>"

    def extend(self, key: str, side_key: str = "") -> Node:
        """Lets in one more node, by its public keys of both connections; its rank is the next."""
        with self.lock:
            self.hub.admit(len(self.nodes), key)
            self.side.admit(len(self.nodes), side_key)
            self.nodes.append(Node(len(self.nodes), self.nodes[0].outbox.blocking))
            self.queues = [*self.queues, self.nodes[-1].outbox]
            return self.nodes[-1]

    @uninterrupted
    def cancel(self, rank: int, request: int) -> bool:
        """Has the function of a request interrupted on its node. Does not wait.

        Returns False, and does nothing, where it has ended, the node is lost, or this is a forked child; and where the
        node has no side channel, which is said once.
        """
        with self.lock:
            node = self.nodes[rank]
            if self.closed or self.is_forked or not self.requests.is_under_way(node, request):
                return False
            if self.side.hub is None:
                if not self.side.said_deaf:
                    self.side.said_deaf = True
                    _log.warning(
                        "a function on node %d was cancelled, and goes on: functions can't be interrupted on %s",
                        rank,
                        "nodes that are threads of the script (launcher='inproc')"
                        if self.losses.launcher is None
                        else "nodes of a launcher that gives them no side channel",
                    )
                return False
            if request not in self.side.cancelled:
                self.side.cancel(node, request)
                self.wake.set()
            return True

    def forked(self) -> None:
        """Makes a forked child's copy unusable: nothing works any more, and nothing leaves."""
        super().forked()
        self.losses.forked()
        self.side.forked()

    def close(self) -> None:
        """Closes the hub. Requests under way end with an error. Calling it twice is fine."""
        with self.lock:
            if self.closed:
                return
            self.closing = self.closed = True
            for queue in self.queues:
                queue.end()
            self.losses.launcher = None  # the session stops it
            self.hub.close()
            self.side.close()
            self.requests.end()
        self.wake.set()
        self.losses.wait_for_asker()
        self.idle.join()
