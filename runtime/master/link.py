"""The master's connection with all nodes, in parts; each is made of those before it:

    LinkState   link_state.py  the nodes, their queues, the lock, and whether anything can be used still
    Requests    requests.py    the answers that are due
    Losses      losses.py      which nodes are gone, and why, as the launcher says
    Replies     replies.py     the way in: what nodes report
    Waiting     waiting.py     threads that wait for answers; there is no receiving thread
    Sender      sender.py      the way out: queues are packed, and their messages sent
    LookingIn   looking_in.py  what observers at nodes have seen, by their side channels
    RollCall    roll_call.py   how all nodes are, for who asks at any time
    IdleFlush   idle.py        the thread that flushes after a short idle

Each has slots, and reads of another part what has no underscore before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..host.launcher import Launcher
from ..process.clock import CLOCK, Clock
from ..process.observing import ScriptSeam
from ..process.signals import Interrupts, uninterrupted
from ..protocol import commands as c
from ..protocol.errors import DisttensorError, NodeLost
from ..transport.base import Hub
from .connection import Life, NodeConnection
from .idle import IdleFlush
from .link_state import LinkState
from .looking_in import LookingIn
from .losses import Losses
from .node import Node
from .replies import Replies
from .requests import Requests
from .roll_call import RollCall
from .sender import Sender
from .side_channels import SideChannels
from .waiting import Waiting

_log = logging.getLogger("disttensor")


class Link(LinkState):
    """The state that the parts share, with the parts."""

    __slots__ = ("idle", "looking", "losses", "replies", "requests", "roll_call", "sender", "side", "waiting")

    def __init__(
        self,
        hub: Hub,
        nodes: int,
        launcher: Launcher | None,
        on_lost: Callable[[NodeLost], None],
        interrupts: Interrupts | None = None,
        clock: Clock = CLOCK,
        seam: ScriptSeam | None = None,
    ) -> None:
        """Takes the arguments of LinkState, the launcher, and what is told of each loss."""
        super().__init__(hub, nodes, interrupts, clock, seam)
        self.side = SideChannels(clock)
        self.requests = Requests(self)
        self.losses = Losses(self, self.requests, self.side, launcher, on_lost)
        self.replies = Replies(self, self.requests, self.losses)
        self.waiting = Waiting(self, self.requests, self.losses, self.replies)
        self.sender = Sender(self, self.requests, self.losses, self.replies, self.waiting)
        self.looking = LookingIn(self, self.side)
        self.roll_call = RollCall(self, self.losses, self.side)
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
            self.add_queue(self.nodes[-1].outbox)
            self.watch_queues()
            return self.nodes[-1]

    def reconnect(self, rank: int, key: str, side_key: str = "") -> NodeConnection:
        """Begins another connection of a lost node, by the public keys of a new worker; those of the lost one are
        refused from now on. The node counts as lost until ``resume``.

        Raises as ``check`` after the session's end, DisttensorError for a node that is not lost.
        """
        with self.lock:
            node = self.nodes[rank]
            if self.closed or self.is_forked:
                self.check(node.outbox)
            if node.life is not Life.LOST:
                raise DisttensorError(f"node {rank} is not lost: it is {node.life.value}")
            self.hub.readmit(rank, key)
            self.side.readmit(rank, side_key)
            self.losses.errors = [error for error in self.losses.errors if error.rank != rank]
            return node.begin_connection()

    @uninterrupted
    def resume(self, rank: int, new_ref: Callable[[], int], state: Sequence[c.Command] = ()) -> None:
        """Has commands leave again for a node whose new connection has said hello, and for the meshes that it is in.

        All nodes hear that what they miss below a ref, which ``new_ref`` mints, is gone: what the lost connection held,
        and what was issued for the node and its meshes since then, and thrown away. The connection is sent what it is
        to know before all else, with what its process begins with (``state``).

        Raises NodeLost where the new connection is lost, too.
        """
        node = self.nodes[rank]
        with node.lock, self.lock:
            if (lost := node.connection.lost) is not None:
                raise lost.fresh_copy()
            outbox = node.outbox
            fan_outs = outbox.overlaps
            if outbox.shut:
                outbox.open(outbox)  # while it is lost: what is packed goes to the other members
            for queue in (outbox, *fan_outs):
                queue.discard()
            before = new_ref()  # after that: what was thrown away makes none from here on
            for other in self.there():
                if other is not node and other.lost is None:
                    other.outbox.put(c.Again(rank, node.connection.number, before))
                    until = other.outbox.sent + other.outbox.waiting + len(other.outbox.queue) // 2
                    other.connection.told_again.append((until, rank, node.connection.number - 1))
            node.resume(before, state)
            self.rouse(outbox)
            for fan_out in fan_outs:
                fan_out.reopen()
            self.losses.forget_loss(rank)

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
