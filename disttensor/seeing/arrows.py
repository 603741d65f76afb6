"""The arrows of a timeline: from the line that has issued a command to its execution, to the transfer that it does, and
to the wait that this ends.

    issued --> the command's number, by the message in which it has left --> its execution on the node
    a Send  --> the transfer of its number, at both ends      a question --> the wait for its request

A point of an arrow names what it is at by its place in the record; chrome_trace.py knows which slice that is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from ..runtime.channel.base import MASTER
from ..runtime.master.failures import Site
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.failure_ids import position
from ..runtime.protocol.traits import request_of, without_stream
from ..runtime.protocol.transfer_ids import COLLECTIVES
from .recording import ProfileRecord

#: The bits of an arrow's number below that of the node.
NUMBER = 40

#: What a point is at: an event of the script, or of a node.
At: TypeAlias = Literal["issued", "command", "sent", "received", "wait"]


class PointOf(NamedTuple):
    """A point of an arrow."""

    at: At
    end: int  #: the node; -1 is the script
    place: int  #: of the event: in the record's list of its kind, or in that of the node's events


class Arrow(NamedTuple):
    """An arrow: of a command, or of a transfer that is one of many that a command does."""

    of: Literal["command", "transfer"]
    id: int  #: the node << 40 | the number of its command; of a transfer, its place among those that the node has sent
    points: tuple[PointOf, ...]


class CommandKnown(NamedTuple):
    """A command that a node was sent."""

    number: int
    stream: str
    command: c.Command
    issued: int  #: the index of its event; -1 where that is not known


class Transferred(NamedTuple):
    """One end of a transfer."""

    end: int
    place: int
    at: float


#: What both ends of a transfer know: its use, its number, the sender, the receiver.
_Key: TypeAlias = tuple[bool, int, int, int]


class Arrows:
    """The arrows of a record, and the commands that nodes were sent."""

    def __init__(self, record: ProfileRecord) -> None:
        self._record = record
        #: by node and number
        self.commands: dict[tuple[int, int], CommandKnown] = {}
        #: by node and number: the index of the event that tells of its execution
        self.executed: dict[tuple[int, int], int] = {}
        self._read_messages()
        self._read_executions()

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _read_messages(self) -> None:
        """Finds the commands of messages, and when each was issued: those of one line and kind leave in their order."""
        waiting = defaultdict[tuple[object, ...], deque[int]](deque)
        for index, issued in enumerate(self._record.issued):
            for node in issued.nodes:
                waiting[node, issued.kind, issued.stream, _line_of(issued.site)].append(index)
        for sent in self._record.sent:
            for number, outer in enumerate(codec.decode_batch(sent.message).commands, sent.number):
                command, site = without_stream(outer), sent.sites[number - sent.number]
                stream = str(outer.stream) if isinstance(outer, c.On) else ""
                queue = waiting[sent.node, type(command), stream, _line_of(site)]
                issued_at = queue.popleft() if queue and type(command) is not c.Free else -1
                self.commands[sent.node, number] = CommandKnown(number, stream, command, issued_at)

    def _read_executions(self) -> None:
        """Finds where each command was done: on its stream, where the node has given it to one."""
        for rank, node in self._record.nodes.items():
            for index, event in enumerate(node.events):
                key = rank, event.number
                if event.kind == "done" and (key not in self.executed or event.stream):
                    self.executed[key] = index

    # ---- arrows ------------------------------------------------------------------------------------------------------

    def found(self) -> list[Arrow]:
        """Returns the arrows."""
        paths: dict[tuple[int, int], list[PointOf]] = {}
        for (rank, number), known in self.commands.items():
            path = paths[rank, number] = []
            if known.issued >= 0:
                path.append(PointOf("issued", MASTER, known.issued))
            if (at := self.executed.get((rank, number))) is not None:
                path.append(PointOf("command", rank, at))
        single, loose = self._transfers(paths)
        self._waits(paths, single)
        found = [
            Arrow("command", rank << NUMBER | number, tuple(path))
            for (rank, number), path in sorted(paths.items())
            if len(path) > 1
        ]
        return found + loose

    def _transfers(self, paths: dict[tuple[int, int], list[PointOf]]) -> tuple[dict[int, tuple[int, int]], list[Arrow]]:
        """Adds both ends of copies to the arrows of their commands. Returns these commands by the transfers' numbers,
        for those with the script, and the arrows of the transfers of collectives and graphs."""
        owners: dict[tuple[int, int], tuple[int, int]] = {}
        for (rank, number), known in self.commands.items():
            match known.command:
                case c.Send(transfer=transfer):
                    owners[rank, transfer] = rank, number
                case c.Recv(transfer=transfer, peer=peer) if peer == MASTER:
                    owners[MASTER, transfer] = rank, number
        single, loose = dict[int, tuple[int, int]](), list[Arrow]()
        counted = defaultdict[int, int](int)
        for (_, transfer, sender, receiver), (send, receive) in self._both_ends():
            ends = [PointOf("sent", sender, send.place), PointOf("received", receiver, receive.place)]
            owner = owners.get((sender, transfer))
            if owner is not None:
                paths[owner] += ends
                if MASTER in (sender, receiver):
                    single[transfer] = owner
            else:
                counted[sender] += 1
                loose.append(Arrow("transfer", (sender + 1) << NUMBER | counted[sender], tuple(ends)))
        return single, loose

    def _both_ends(self) -> Iterator[tuple[_Key, tuple[Transferred, Transferred]]]:
        """Yields the transfers of which both ends are known. Those of one number follow each other at both ends."""
        sends, receives = defaultdict[_Key, list[Transferred]](list), defaultdict[_Key, list[Transferred]](list)

        def note(end: int, index: int, at: float, peer: int, sent: bool, transfer: int) -> None:
            shared = transfer >= COLLECTIVES
            sender, receiver = (end, peer) if sent else (peer, end)
            (sends if sent else receives)[shared, transfer, sender, receiver].append(Transferred(end, index, at))

        for index, it in enumerate(self._record.transfers):
            note(MASTER, index, it.at, it.peer, it.sent, it.transfer)
        for rank, node in self._record.nodes.items():
            for index, event in enumerate(node.events):
                if event.kind in ("sent", "received"):
                    note(rank, index, event.at, event.peer, event.kind == "sent", event.transfer)
        for key in sorted(sends.keys() & receives.keys()):
            for pair in zip(sends[key], receives[key], strict=False):
                yield key, pair

    def _waits(self, paths: dict[tuple[int, int], list[PointOf]], single: dict[int, tuple[int, int]]) -> None:
        """Adds the waits to the arrows of what has ended them."""
        answering = {
            (rank, request): (rank, number)
            for (rank, number), known in self.commands.items()
            if (request := request_of(known.command)) > 0
        }
        for index, wait in enumerate(self._record.waits):
            owner = answering.get((wait.node, wait.request)) if wait.request > 0 else single.get(-wait.request)
            if owner is not None and paths[owner][-1].at != "wait":
                paths[owner].append(PointOf("wait", MASTER, index))


def plain_number(number: int) -> int:
    """Returns the number of a command of a node's, of one that a graph has replayed that of the replay."""
    return position(number)[0] if number >= 0 else -1


def _line_of(site: Site | None) -> tuple[int, int] | None:
    """Returns what tells sites apart. By id: hashing a code object hashes its bytecode each time."""
    return None if site is None else (id(site[0]), site[1])
