"""Reports of nodes: takes them from the hub, checks them, and passes on what they say.

Hub.drain --> Report --> acknowledge, failures, requests        under the link's lock
"""

from __future__ import annotations

from ..process.flight import REPORTED
from ..process.observing import ReportTaken
from ..process.signals import uninterrupted
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import ProtocolError
from ..protocol.failure_ids import position
from .connection import Life
from .failures import Failure
from .link_state import LinkState
from .losses import Losses
from .node import Node
from .requests import ItemsRequest, Request, Requests

#: The replies that answer no request, or several.
_UNASKED = (c.Hello, c.Failed, c.Warned, c.AtBreakpoint, c.TookPart)
#: The most failures that a node may tell twice: those of answers too long to be sent, on streams, have one number.
REPEATED = 256


class Replies:
    """The way in: what nodes report. A node that breaks the protocol is lost."""

    __slots__ = ("_hub", "_losses", "_nodes", "_now", "_reported", "_requests", "_state")

    def __init__(self, state: LinkState, requests: Requests, losses: Losses) -> None:
        self._state, self._requests, self._losses = state, requests, losses
        self._hub, self._nodes, self._reported = state.hub, state.nodes, state.seam.reported
        self._now = state.clock.now

    def drain(self) -> None:
        """Takes in what has arrived, and waits until it is known why nodes are gone. Callable by any thread."""
        self.lock_and_take_in()
        if self._losses.unexplained:
            self._losses.explain()

    @uninterrupted
    def lock_and_take_in(self) -> None:
        """Takes in what has arrived, and leaves connections that have ended to be explained."""
        with self._state.lock:
            self.take_in()

    def take_in(self) -> None:
        """Takes in what has arrived. The caller holds the lock."""
        if self._state.closed or self._state.is_forked:
            return
        for rank, message in self._hub.drain():
            node = self._nodes[rank]
            outbox, connection = node.outbox, node.connection
            if connection.life is Life.LOST:
                continue  # the node was given up: its messages come too late
            try:
                report = codec.decode_report(message)
                done = report.done
                if not outbox.first <= done <= outbox.sent:
                    raise ProtocolError(f"node {rank} reports {done} of {outbox.sent} commands")
                if not report.replies and done <= outbox.done:
                    raise ProtocolError("a report that says nothing")
                now, trail = self._now(), outbox.trail
                trail.write(trail.slot(), now, done, len(message), 0.0, 0, REPORTED)
                if self._reported.listeners:
                    self._reported.notify(ReportTaken(now, rank, done, report.busy, message))
                for reply in report.replies:
                    self._take_reply(node, reply)
            except ProtocolError as e:
                self._losses.lose(rank, f"broke the protocol: {e}")
                self._hub.cut(rank)  # what it goes on sending is not to be taken in
                continue
            outbox.acknowledge(done)
            connection.busy = report.busy
        for rank in self._hub.gone():
            self._losses.connection_ended(rank, "its connection ended")

    def _take_reply(self, node: Node, reply: c.Reply) -> None:
        codec.check_reply(reply)
        rank, hello = node.rank, node.said_hello
        if hello is not None and not isinstance(reply, _UNASKED):  # first: a question to a mesh has so many of them
            request = self._asked(node, reply, reply.request)
            if request is None:
                return
            if isinstance(reply, c.Poisoned):
                self._check_cause(reply)
            elif not isinstance(reply, request.kind):
                if isinstance(reply, c.Mapped) and isinstance(request, ItemsRequest):
                    request.take_items(reply)
                    return
                raise ProtocolError(f"a {type(reply).__name__} where {request.kind.__name__} was asked for")
            elif isinstance(reply, c.Unusable) and len(reply.reasons) != request.due:
                raise ProtocolError(f"{len(reply.reasons)} reasons of node {rank} where {request.due} were asked for")
            node.connection.answered = reply.request
            self._requests.answer(request, rank, reply)
        elif hello is not None and type(reply) is c.TookPart:
            for number in self._requests.take_parts(rank, reply.requests):
                request = self._asked(node, reply, number)
                if request is not None:
                    raise ProtocolError(f"a TookPart where {request.kind.__name__} was asked for")
            if reply.requests:
                node.connection.answered = reply.requests[-1]
        elif isinstance(reply, c.Hello):
            if hello is not None:
                raise ProtocolError("a second hello")
            node.connection.greet(reply)
        elif hello is None:
            raise ProtocolError(f"a {type(reply).__name__} before its hello")
        elif isinstance(reply, c.Failed):
            seq = position(reply.seq)[0]
            if not node.outbox.first <= seq < node.outbox.sent:
                raise ProtocolError(f"a failure of command {reply.seq}, and {node.outbox.sent} were sent")
            peer = self._nodes[reply.lost] if 0 <= reply.lost < len(self._nodes) else None
            which = -1 if peer is None else reply.incarnation
            if peer is not None and which < 0:
                which = node.connection.incarnation_at(seq, peer.rank, peer.connection.number)
            # of what an earlier worker in its own place had, a node may have the loss itself
            own = reply.lost == rank and not 0 <= reply.incarnation < node.connection.number
            if not -1 <= reply.lost < len(self._nodes) or own or (peer is not None and which > peer.connection.number):
                raise ProtocolError(f"a failure by the loss of node {reply.lost}, and no such peer is there")
            if (rank, reply.seq) not in self._state.failures:
                site, noted = node.outbox.site(seq), node.note_at(seq)
                failure = Failure(rank, hello.host, hello.pid, reply, site, noted=noted, incarnation=which)
                if reply.holdings is not None:  # now, as the history forgets
                    failure.makers = node.makers({held.ref for held in reply.holdings.largest})
                self._state.failures.keep(failure)
                return
            node.connection.repeated += 1
            if node.connection.repeated > REPEATED:
                raise ProtocolError(f"{node.connection.repeated} failures that it has told before")
        elif isinstance(reply, c.Warned):
            seq = position(reply.seq)[0]
            if not node.outbox.first <= seq < node.outbox.sent:
                raise ProtocolError(f"a warning of command {reply.seq}, and {node.outbox.sent} were sent")
            self._state.failures.on_warning(reply, rank, node.outbox.site(seq))
        elif isinstance(reply, c.AtBreakpoint):
            self._state.breakpoints.take_reply(rank, node.connection.stops, reply)

    def _asked(self, node: Node, reply: c.Reply, number: int) -> Request | None:
        """Returns the request of a number that a node's reply names; None if nobody waits for that any more. Raises
        ProtocolError where it was not asked."""
        request = self._requests.get(number)
        if request is None:
            if number not in node.connection.unawaited:
                raise ProtocolError(f"{type(reply).__name__} {number}, which nobody has asked for")
            node.connection.unawaited.discard(number)
        elif request.node != node.rank and not request.asks(node.rank):
            raise ProtocolError(f"node {node.rank} answers a request to node {request.node}")
        return request

    def _check_cause(self, reply: c.Poisoned) -> None:
        """Refuses a cause that cannot be: the failure of a command that no node was sent. Raises ProtocolError."""
        seq = position(reply.seq)[0]
        if not (0 <= reply.rank < len(self._nodes) and 0 <= seq < self._nodes[reply.rank].outbox.sent):
            raise ProtocolError(
                f"the failure of command {reply.seq} of node {reply.rank}, which was not sent that many"
            )
