"""A log of the messages on the control connections, by node: ``disttensor.testing.MessageLog``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import cast

from ..runtime.process.gc_pause import no_collection
from ..runtime.process.observing import MessageSent, ReportTaken
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.traits import request_of, without_stream
from ..session import current


class NodeLog:
    """The messages of one node, or of all nodes. All properties can be read inside of the block and after it."""

    def __init__(self, log: MessageLog | None, node: int | None) -> None:
        self._log, self._node = log, node

    @property
    def commands(self) -> list[str]:
        """The names of the commands that were issued, in order (for several nodes, node by node).

        Commands that still wait to be sent are among them. A name is the kind of command and its subject: "Call
        aten::add.Tensor" runs an operator, "Ask aten::item" one that is answered, "Collective all_reduce ring" takes
        part in a collective, "On ..." is a command for a stream; "Peer" introduces the node to another one, or to the
        script, before they first exchange a tensor; "Send", "Recv", "Free", "Replay", "Sync" and the like stand for
        themselves.
        """
        return [name for name, _ in self._named()]

    @property
    def questions(self) -> list[str]:
        """The names of the commands that the nodes answer, without asynchronous collectives: what issues one does not
        wait for its end."""
        return [
            name
            for name, command in self._named()
            if request_of(command) >= 0 and not isinstance(without_stream(command), c.Collective)
        ]

    @property
    def replies(self) -> list[str]:
        """The names of the nodes' replies, as far as this process has received them: "Answer", "Done", "Failed"."""
        return [type(reply).__name__ for _, data in self._received() for reply in codec.decode_report(data).replies]

    @property
    def messages(self) -> int:
        """The number of messages that were sent. One message takes many commands."""
        return len(self._sent())

    @property
    def reports(self) -> int:
        """The number of messages that have arrived from nodes. One without replies says how far the node is."""
        return len(self._received())

    @property
    def bytes_sent(self) -> int:
        """The bytes of the messages that were sent. (``dt.channels.stats()`` counts those of tensors.)"""
        return sum(len(data) for _, data in self._sent())

    @property
    def bytes_received(self) -> int:
        """The bytes of the messages that have arrived from nodes."""
        return sum(len(data) for _, data in self._received())

    def _sent(self) -> list[tuple[int, bytes]]:
        assert self._log is not None
        return [(node, data) for node, data in self._log.sent if self._node in (None, node)]

    def _received(self) -> list[tuple[int, bytes]]:
        assert self._log is not None
        return [(node, data) for node, data in self._log.received if self._node in (None, node)]

    def _named(self) -> Iterator[tuple[str, c.Command]]:
        assert self._log is not None
        issued = self._log.issued()
        for node in sorted(issued) if self._node is None else [self._node]:
            for command in issued.get(node, []):
                yield self._log.name(node, command), command


class MessageLog(NodeLog):
    """Records the messages on the control connections between the script and its nodes, as a context manager:

        with MessageLog() as log:
            y = x + 1
        assert log[1].commands == ["Call aten::add.Tensor"]
        assert log.replies == []

    ``log[k]`` is the log of node ``k``, ``log`` itself that of all nodes together. Logs may be nested.

    To enter the block waits until the nodes have done everything that was issued before, so that none of it is counted.
    (A failure among it is raised where it would be without the log.) ``settle=False`` only sends it, where nodes are
    kept busy. Python's collector of cycles does not run by itself inside of the block: the tensors of earlier code that
    it frees would be among the commands. Raises DisttensorError without a session, IndexError for a node that does not
    exist.
    """

    def __init__(self, *, settle: bool = True) -> None:
        super().__init__(None, None)
        self._log = self
        self._settle = settle
        self._session = current.session()
        self._ended: dict[int, list[c.Command]] | None = None  #: commands that waited to be sent when the block ended
        self.sent: list[tuple[int, bytes]] = []  #: (node, message)
        self.received: list[tuple[int, bytes]] = []

    def __getitem__(self, node: int) -> NodeLog:
        if not 0 <= node < len(self._session.nodes):
            raise IndexError(f"node {node} does not exist; there are {len(self._session.nodes)} nodes")
        return NodeLog(self, node)

    def __enter__(self) -> MessageLog:
        session = self._session
        with contextlib.ExitStack() as undo:
            undo.enter_context(no_collection())  # first, as a collection in nodes that are threads sends commands, too
            if self._settle:
                session.questions.sync_all()
            session.link.sender.flush_all()
            with session.link.lock:
                seam = session.link.seam
                undo.enter_context(seam.sent.heard_by(self._note_sent))
                undo.enter_context(seam.reported.heard_by(self._note_report))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._session.link.lock:
            self._ended = self._waiting()
            self._undo.close()  # the commands of a collection from here on are in no log

    def issued(self) -> dict[int, list[c.Command]]:
        """Returns the commands that were sent or wait to be sent, by node."""
        with self._session.link.lock:
            waiting = self._waiting() if self._ended is None else self._ended
            sent = list(self.sent)
        out: dict[int, list[c.Command]] = {}
        for node, data in sent:
            out.setdefault(node, []).extend(codec.decode_batch(data).commands)
        for node, commands in waiting.items():
            out.setdefault(node, []).extend(commands)
        return out

    def name(self, node: int, command: c.Command) -> str:
        """Returns the name of a command in the log."""
        kind = "Call" if isinstance(command, c.Call) else type(command).__name__
        match command:
            case c.Call(template=template) | c.Ask(call=c.Call(template=template)):
                define = self._session.nodes[node].defined.get(template)
                return kind if define is None else f"{kind} {define.op}"
            case c.On(command=inner):
                return f"{kind} {self.name(node, inner)}"
            case c.Define(op=op):
                return f"{kind} {op}"
            case c.Collective(kind=what, algorithm=algorithm):
                return f"{kind} {what} {algorithm}".rstrip()
        return kind

    def _waiting(self) -> dict[int, list[c.Command]]:
        waiting: dict[int, list[c.Command]] = {}
        for node in self._session.nodes:
            pieces = [codec.batch(0, len(sites), [body]) for body, sites, _ in node.outbox.pieces]
            messages = [*node.outbox.ready, *pieces]
            waiting[node.rank] = [x for message in messages for x in codec.decode_batch(message).commands]
        for queue in self._session.link.queues:
            for rank in queue.ranks:
                waiting[rank] += cast("list[c.Command]", queue.queue[: len(queue.queue) // 2 * 2 : 2])
        return waiting

    def _note_sent(self, event: MessageSent) -> None:
        self.sent.append((event.node, event.message))

    def _note_report(self, event: ReportTaken) -> None:
        self.received.append((event.node, event.message))
