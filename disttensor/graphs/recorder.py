"""Records the commands of a ``with dt.graph(g)`` block, per node, and the tensors that they use.

A ref is the recording's own (made by a recorded command, and on the node after a replay only), one of its inputs (each
replay names another in its place), or external (it existed before). The recording holds externals, so that no replay
finds them freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec.structs import replace

from ..proxy.meta import Handle, new_ref
from ..runtime.channel.base import MASTER
from ..runtime.master.failures import Site
from ..runtime.master.node import Node
from ..runtime.node.graphs.program import line_of_call, program, writers
from ..runtime.node.template import Template
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.errors import GraphError
from ..runtime.protocol.traits import TRAITS, kinds
from ..session.session import Session
from .optimizer_steps import Steps
from .traced_numbers import Tape

_RECORDABLE = kinds("recordable")
#: The arguments of the commands in one Part, at most: a tenth of a message's limit.
_PART = 16_384

_ids = count(1)


@dataclass
class Log:
    """The recording of one node."""

    node: Node
    commands: list[Any] = field(default_factory=list)
    sites: list[Site | None] = field(default_factory=list)
    numbers: list[dict[int, int]] = field(default_factory=list)  #: for each command: argument -> its number
    made: dict[int, None] = field(default_factory=dict)
    external: dict[int, None] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)  #: ref of a recorded upload -> ref that it was sent under
    used: list[int] = field(default_factory=list)  #: the numbers that this node needs, as indices among all numbers


class Recorder:
    """The recorder of one graph: it takes a thread's commands (runtime/master/route.py)."""

    def __init__(self, session: Session, allow: AllowList, inputs: dict[int, int]) -> None:
        """``inputs``: the refs that each replay replaces by others, with their nodes."""
        self.id = next(_ids)
        self.session = session
        self.tape = Tape()
        self.steps = Steps(self.tape)
        self.inputs = inputs
        self.logs: dict[int, Log] = {}
        self.transfers: dict[int, int] = {}
        self.engine = ""
        self._allow = allow
        self._empties: dict[int, Handle] = {}
        self._templates: dict[tuple[int, int], Template] = {}

    # ---- while recording -------------------------------------------------------------------------------------------

    def begin(self, handle: Any) -> None:
        self._empties[id(handle)] = handle

    def made(self, handle: Any) -> bool:
        base = handle.base
        if base is None:
            return id(handle) in self._empties
        while not base.ref:
            if base.base is None:
                return id(base) in self._empties
            base = base.base
        log = self.logs.get(base.meta.place.node)
        return base.ref in self.inputs or (log is not None and (base.ref in log.made or base.ref in log.constants))

    @uninterrupted
    def record(self, rank: int, stream: int, command: c.Command, site: Site | None) -> None:
        log = self._log(rank)
        numbers: dict[int, int] = {}
        template: Template | None = None
        if isinstance(command, c.Recv) and command.peer == MASTER:
            self._constant(log, command, site)
            return
        if type(command) not in _RECORDABLE or (isinstance(command, c.Send) and command.peer == MASTER):
            raise GraphError(f"{type(command).__name__} can't be recorded into a graph")
        if isinstance(command, c.Call):
            template = self._template(log, command.template)
            for i, hole in enumerate(template.holes):
                if not hole and (number := self.tape.find(command.args[i])) is not None:
                    numbers[i] = number
        traits = TRAITS[type(command)]
        for ref in traits.reads(command, template):
            self._use(log, ref)
        for ref in traits.makes(command, template):
            self._make(log, ref)
        if traits.renumbered:
            command = replace(command, transfer=self._transfer(command.transfer))  # type: ignore[union-attr]
        log.commands.append(command)
        log.sites.append(site)
        log.numbers.append(numbers)

    def _log(self, rank: int) -> Log:
        log = self.logs.get(rank)
        if log is None:
            log = self.logs[rank] = Log(self.session.nodes[rank])
        return log

    def _template(self, log: Log, number: int) -> Template:
        key = (log.node.rank, number)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = Template(log.node.defined[number], self._allow, {}, str)  # type: ignore[arg-type]
        return template

    def _transfer(self, transfer: int) -> int:
        """Returns a transfer's number in the recording, where transfers count from 0."""
        return self.transfers.setdefault(transfer, len(self.transfers))

    def _use(self, log: Log, ref: int) -> None:
        if ref in log.node.outbox.foreign:
            raise GraphError("a graph can't use a shard of a mesh's tensor (x.at(...), x.shards()): clone it before")
        if ref not in log.made and ref not in log.external and ref not in log.constants and ref not in self.inputs:
            log.external[ref] = None
            log.node.outbox.hold(ref)

    def _make(self, log: Log, ref: int) -> None:
        log.made[ref] = None
        log.node.outbox.hold(ref)

    def _constant(self, log: Log, command: c.Recv, site: Site | None) -> None:
        """Sends an upload now, once, under another ref because the program may write the recorded one."""
        hidden = new_ref()
        log.constants[command.out] = hidden
        log.node.outbox.hold(command.out)
        log.node.outbox.put(replace(command, out=hidden), site)

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forgets everything, after a recording that has failed."""
        self.steps.restore()
        self._empties.clear()
        for log in self.logs.values():
            box = log.node.outbox
            box.release(log.external)
            box.release([*log.made, *log.constants], made=False)
            box.dead.extend(log.constants.values())

    def finish(self, returned: dict[int, tuple[int, ...]], engine: str) -> None:
        """Sends the recorded commands to their nodes. ``returned``: per node, the results that each replay gives other
        refs."""
        self.engine = engine
        self.steps.restore()
        self._empties.clear()
        for rank, log in self.logs.items():
            box = log.node.outbox
            self._settle_constants(log)
            held = list(log.made)
            mine = returned.get(rank, ())
            outputs = tuple(box.still_referenced(held))
            log.used = sorted({n for numbers in log.numbers for n in numbers.values()})
            place = {n: i for i, n in enumerate(log.used)}
            for part in _parts(log.commands):
                numbers = tuple((i - part[0], a, place[n]) for i in part for a, n in log.numbers[i].items())
                self._queue(box, c.Part(self.id, tuple(log.commands[i] for i in part), numbers))
            inputs = tuple(r for r, node in self.inputs.items() if node == rank)
            self._queue(box, c.Graph(self.id, inputs, outputs, mine, engine))
            alive = set(outputs)
            box.release([r for r in held if r in alive])
            box.release([r for r in held if r not in alive], made=False)

    @staticmethod
    def _queue(box: Any, command: c.Command) -> None:
        box.put(command)

    def _settle_constants(self, log: Log) -> None:
        """Has an upload that the program writes copied at the beginning of each replay. Other uploads are used as they
        are, by all replays."""
        if not log.constants:
            return
        box = log.node.outbox
        touched = self.writers(log)
        clone = log.node.define("aten::clone", (c.Hole(True),), (), 1, None)
        alias = log.node.define("aten::alias", (c.Hole(True),), (), 1, None)
        for ref, hidden in log.constants.items():
            log.external[hidden] = None
            box.hold(hidden)
            box.dead.append(hidden)  # only the graph uses it
            if ref in touched:
                log.commands.insert(0, c.Call(clone, ref, (ref - hidden,)))
                log.sites.insert(0, None)
                log.numbers.insert(0, {})
                log.made[ref] = None
            else:
                self._queue(box, c.Call(alias, ref, (ref - hidden,)))
                log.external[ref] = None

    def writers(self, log: Log) -> dict[int, int]:
        """Returns the externals and inputs of a node whose memory is written, each with the last command that writes
        it."""
        calls = [(i, call) for i, call in enumerate(log.commands) if isinstance(call, c.Call)]
        lines = [line_of_call(self._template(log, call.template), call, {}) for _, call in calls]
        written = {ref: calls[k][0] for ref, k in writers(program(lines, (), 0)).items()}
        for i, command in enumerate(log.commands):
            for ref in () if isinstance(command, c.Call) else TRAITS[type(command)].writes(command, None):
                written[ref] = max(i, written.get(ref, 0))
        return written

    def name(self, log: Log, at: int) -> str:
        """Returns the name of a recorded command, for messages."""
        command = log.commands[at]
        return self._template(log, command.template).name if isinstance(command, c.Call) else type(command).__name__

    def makes(self, rank: int, ref: int) -> bool:
        """Returns whether a tensor of this node is made by a command that was recorded so far."""
        return rank in self.logs and ref in self.logs[rank].made


def _parts(commands: list[Any]) -> Iterator[range]:
    """Yields the ranges of commands that go together into a message."""
    start, size = 0, 0
    for i, command in enumerate(commands):
        size += 4 + (len(command.args) if isinstance(command, c.Call) else 0)
        if size >= _PART:
            yield range(start, i + 1)
            start, size = i + 1, 0
    if start < len(commands):
        yield range(start, len(commands))
