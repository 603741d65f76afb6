"""Finds the commands of which a profile has noted the times alone: those that lines have issued, and those that nodes
have gone through. All else of them is in the messages in which they have left.

    script  NotedQueue (master/command_queue.py)  (time, site) of each, by thread  --issued_commands--> IssuedCommand
    node    apply_timed (node/executor.py)        the time at which each begins    --node_events-->     NodeEvent
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ..runtime.master.failures import Site
from ..runtime.master.looking_in import CommandTimes, NodeEvent
from ..runtime.process.observing import MessageSent
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


def issued_commands(
    noted: Mapping[tuple[tuple[int, ...], int], Sequence[Any]], sent: Iterable[SentMessage]
) -> list[IssuedCommand]:
    """Returns what lines have issued, in order. ``noted``: what was noted, by the nodes that it is for and the thread.

    A note belongs to the command that has left with its site: each call has a site of its own, which may have issued
    some commands one after the other. Those without a line leave in their order.
    """
    notes = sorted(
        (
            _Note(at, nodes, site, thread)
            # copies: a thread that has just begun to issue may append a pair even now
            for (nodes, thread), flat in [(key, list(pairs)) for key, pairs in list(noted.items())]
            for at, site in zip(flat[::2], flat[1::2], strict=True)
        ),
        key=lambda note: note.at,
    )
    waiting = defaultdict[tuple[int, int | None], deque[int]](deque)
    for index, note in enumerate(notes):
        for node in note.nodes:
            waiting[node, note.site and id(note.site)].append(index)
    found, told_by = list[IssuedCommand](), dict[int, int]()
    for message in sent:
        for outer, site in zip(codec.decode_batch(message.message).commands, message.sites, strict=True):
            command = without_stream(outer)
            queue = waiting.get((message.node, site and id(site)))
            if not queue or type(command) is c.Free:
                continue
            index = queue.popleft() if site is None or len(queue) > 1 else queue[0]
            if told_by.setdefault(index, message.node) == message.node:  # of what goes to several it is told once
                note = notes[index]
                stream = str(outer.stream) if isinstance(outer, c.On) else ""
                found.append(IssuedCommand(note.at, note.nodes, stream, type(command), note.site, note.thread))
    for index, note in enumerate(notes):
        if index not in told_by:
            found.append(IssuedCommand(note.at, note.nodes, "", object, note.site, note.thread))
    return sorted(found, key=lambda each: each.at)


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
