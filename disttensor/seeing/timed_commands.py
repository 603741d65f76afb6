"""Finds the commands of which a profile has noted the times alone: those that lines have issued, and those that nodes
have gone through. All else of them is in the messages in which they have left.

    script  Sender.at_limit (master/sender.py)    (time, site) of every sixteenth  --issued_commands--> IssuedCommand
            NotedQueue (master/command_queue.py)  of each, by thread, where several issue
    node    apply_timed (node/executor.py)        the time at which each begins    --node_events-->     NodeEvent
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ..runtime.master.failures import Site
from ..runtime.master.looking_in import CommandTimes, NodeEvent
from ..runtime.process.observing import IssueNotes, MessageSent
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.arguments import Message
from ..runtime.protocol.traits import without_stream

#: A message of more bytes than these, and these for each of its commands, is kept without its data; and the most items
#: of what it has in the place of lists.
BYTES, BYTES_PER_COMMAND, ITEMS = 512, 64, 64
#: The name of a command whose message was forgotten.
UNKNOWN = "a command"

#: A message of commands that has left, as it is kept.
SentMessage: TypeAlias = MessageSent


class IssuedCommand(NamedTuple):
    """A command that a line has issued."""

    at: float
    nodes: tuple[int, ...]
    stream: str
    kind: type  #: of the command; ``object`` for one that has not left
    site: Site | None
    thread: int


# ---- messages --------------------------------------------------------------------------------------------------------


def to_keep(sent: SentMessage) -> SentMessage:
    """Returns what is to be kept of a message: itself, or a short one, without data."""
    if len(sent.message) <= BYTES + BYTES_PER_COMMAND * len(sent.sites):
        return sent
    commands = tuple(map(_without_data, codec.decode_batch(sent.message).commands))
    return sent._replace(message=codec.encode(c.Batch(sent.number, commands)))


def _without_data(value: Any) -> Any:
    """Empties what may be long in a part of a command; a shape stays."""
    match value:
        case bytes():
            return b""
        case tuple():
            return tuple(map(_without_data, value)) if len(value) <= ITEMS else ()
        case Message():
            fields = {name: _without_data(getattr(value, name)) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
    return value


# ---- the script ------------------------------------------------------------------------------------------------------


class _Note(NamedTuple):
    """The time of a line's call that has issued a command, or some."""

    at: float
    nodes: tuple[int, ...]
    site: Site | None
    thread: int


class _Left:
    """A command in the message in which it has left for a node."""

    __slots__ = ("at", "command", "note", "outer", "site", "thread")

    def __init__(self, outer: c.Command, site: Site | None, note: int) -> None:
        self.outer, self.command, self.site = outer, without_stream(outer), site
        self.note = note  #: the index of the note that it has; -1: none
        self.at, self.thread = 0.0, 0


def issued_commands(
    notes: IssueNotes, sent: Sequence[SentMessage], pauses: Iterable[tuple[int, float]] = (), began: float = 0.0
) -> list[IssuedCommand]:
    """Returns what lines have issued, in order. ``pauses``: (thread, time) at which a wait of a thread has ended, or a
    part of it that has a name has begun or ended; ``began``: the begin of it all.

    A note belongs to the command that has left with its site: each call has a site of its own, which may have issued
    some commands one after the other. Commands without a line leave in their order. A command without a note gets a
    time between those of its neighbours that have one, by its place; the last ones of a message between a note and the
    message's leaving. So a time may be wrong by that in which sixteen commands are issued.
    """
    found = _notes_in_order(notes)
    waiting = defaultdict[tuple[int, int | None], deque[int]](deque)
    for index, note in enumerate(found):
        for node in note.nodes:
            waiting[node, note.site and id(note.site)].append(index)
    ended = defaultdict[int, list[float]](list)
    for thread, at in sorted(pauses, key=itemgetter(1)):
        ended[thread].append(at)
    gone = dict[int, float]()  #: by node: when the last message has left
    timing = defaultdict[int, _Timing](lambda: _Timing(found, ended, notes.thread, began))
    issued = _Issued(found)
    for message in sent:
        gone[message.node], lefts = message.at, list[_Left]()
        for outer, site in zip(codec.decode_batch(message.message).commands, message.sites, strict=True):
            queue = waiting.get((message.node, site and id(site)))
            if isinstance(without_stream(outer), c.Free):
                continue
            its = -1
            if queue:
                its = queue.popleft() if site is None or len(queue) > 1 else queue[0]
            lefts.append(_Left(outer, site, its))
        timing[message.node].put(lefts, message.at)
        for left in lefts:
            issued.add(message.node, left)
    for index, note in enumerate(found):
        if index not in issued.told_by and all(note.at > gone.get(node, -inf) for node in note.nodes):
            issued.commands.append(IssuedCommand(note.at, note.nodes, "", object, note.site, note.thread))
    return sorted(issued.commands, key=lambda each: each.at)


def _notes_in_order(notes: IssueNotes) -> list[_Note]:
    lines = list(notes.lines)
    found = [
        _Note(at, nodes, site, thread)
        for at, last, nodes, thread in zip(lines[::4], lines[1::4], lines[2::4], lines[3::4], strict=True)
        for site in last
        if site is not None  # of what no line has issued it shows nothing
    ]
    found += [
        _Note(at, nodes, site, thread)
        # copies: a thread that has just begun to issue may append a pair even now
        for (nodes, thread), flat in [(key, list(pairs)) for key, pairs in list(notes.noted.items())]
        for at, site in zip(flat[::2], flat[1::2], strict=True)
    ]
    return sorted(found, key=lambda note: note.at)


class _Timing:
    """The times of what leaves for one node."""

    def __init__(self, notes: Sequence[_Note], ended: Mapping[int, Sequence[float]], thread: int, began: float) -> None:
        self._notes, self._ended = notes, ended
        self._thread, self._since = thread, began  #: of the last command before

    def put(self, lefts: Sequence[_Left], at: float) -> None:
        """Sets the times and threads of the commands of a message that has left at a time."""
        between = list[_Left]()
        for left in lefts:
            if left.note < 0:
                between.append(left)
                continue
            note = self._notes[left.note]
            left.at, left.thread = note.at, note.thread
            self._spread(between, note.at, note.thread)
            between = []
        self._spread(between, at, self._thread)

    def _spread(self, lefts: Sequence[_Left], until: float, thread: int) -> None:
        """Sets the times of commands that have no notes, and were issued before then."""
        since, ended = min(self._since, until), self._ended.get(thread, ())
        last = bisect_right(ended, until) - 1
        if last >= 0:
            since = max(since, ended[last])  # a thread that waits issues nothing
        for place, left in enumerate(lefts, 1):
            left.at, left.thread = since + (until - since) * place / (len(lefts) + 1), thread
        self._since, self._thread = until, thread


class _Issued:
    """The commands that lines have issued: what goes to several nodes was issued once."""

    def __init__(self, notes: Sequence[_Note]) -> None:
        self.commands: list[IssuedCommand] = []
        self.told_by: dict[int, int] = {}  #: by index of the note: the node of which it is told
        self._notes = notes
        self._alike: dict[int, list[tuple[int, c.Command]]] = {}  #: by id of the site: without notes, where and what

    def add(self, node: int, left: _Left) -> None:
        """Adds a command that has left for a node, unless it is known from another one."""
        nodes: tuple[int, ...] = (node,)
        if left.note >= 0:
            if self.told_by.setdefault(left.note, node) != node:
                return
            nodes = self._notes[left.note].nodes
        elif left.site is not None:
            alike = self._alike.setdefault(id(left.site), [])
            for index, command in alike:
                known = self.commands[index]
                if node not in known.nodes and command == left.outer:
                    self.commands[index] = known._replace(nodes=(*known.nodes, node))
                    return
            alike.append((len(self.commands), left.outer))
        stream = str(left.outer.stream) if isinstance(left.outer, c.On) else ""
        self.commands.append(IssuedCommand(left.at, nodes, stream, type(left.command), left.site, left.thread))


# ---- a node ----------------------------------------------------------------------------------------------------------


class NamedCommands:
    """The names and lines of the commands that a node was sent, by number."""

    def __init__(self, messages: Iterable[SentMessage], defined: Mapping[int, c.Define]) -> None:
        """``messages``: in order; ``defined``: the templates that the node knew before, or knows now."""
        self._firsts: list[int] = []
        self._rows: list[tuple[list[str], Sequence[Site | None]]] = []
        operators = {number: define.op for number, define in defined.items()}
        for sent in messages:
            names = []
            for outer in codec.decode_batch(sent.message).commands:
                command = without_stream(outer)
                if isinstance(command, c.Define):
                    operators[command.template] = command.op
                names.append(_name_of(command, operators))
            self._firsts.append(sent.number)
            self._rows.append((names, sent.sites))

    def of(self, numbers: Iterable[int]) -> Iterator[tuple[int, str, Site | None]]:
        """Yields number, name and line of each."""
        for number in numbers:
            at = bisect_right(self._firsts, number) - 1
            names, sites = self._rows[at] if at >= 0 else ([], ())
            place = number - self._firsts[at] if at >= 0 else 0
            yield (number, names[place], sites[place]) if place < len(names) else (number, UNKNOWN, None)


def _name_of(command: c.Command, operators: Mapping[int, str]) -> str:
    """Returns the name of a command as its node has it for observers."""
    match command:
        case c.Call(template=number) | c.Ask(call=c.Call(template=number)) if number in operators:
            return operators[number]
        case c.Collective(kind=kind):
            return kind
        case c.Run(what=what) if what:
            return what
    return type(command).__name__


def node_events(node: int, times: Iterable[CommandTimes], named: NamedCommands) -> Iterator[NodeEvent]:
    """Yields the events of the commands of which a node has told the times: "done", and "begun" for one that had not
    ended."""
    for each in times:
        names = named.of(each.commands)
        for (began, at), (number, what, site) in zip(pairwise(each.moments), names, strict=False):
            yield NodeEvent(node, "done", at, began, "", number, what, -1, -1, 0, False, site)
        if not each.is_over:
            began = each.moments[-1]
            for number, what, site in named.of(each.commands[-1:]):
                yield NodeEvent(node, "begun", began, began, "", number, what, -1, -1, 0, False, site)
