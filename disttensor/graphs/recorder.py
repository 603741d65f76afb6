"""What a graph records: the commands of a ``with dt.graph(g)`` block, per node, and which tensors they use.

A ref is the recording's own (made by a recorded command, and on the node after a replay only), one of its inputs (each
replay names another in its place), or external: there before. Externals are held, so that no replay finds them freed.
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
from ..runtime.node.graphs.program import line_of_call, program, writers
from ..runtime.node.template import Template
from ..runtime.process.signals import whole
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.errors import GraphError
from ..runtime.protocol.traits import TRAITS, kinds
from ..session.places import NodeState
from ..session.session import Session
from .optimizer_steps import Steps
from .traced_numbers import Tape

_RECORDABLE = kinds("recordable")
#: Arguments of the commands in one Part, at most: a tenth of what a message takes.
_PART = 16_384

_ids = count(1)


@dataclass
class Log:
    """The recording of one node."""

    state: NodeState
    commands: list[Any] = field(default_factory=list)
    sites: list[Site | None] = field(default_factory=list)
    numbers: list[dict[int, int]] = field(default_factory=list)  #: of each command: argument -> its number
    made: dict[int, None] = field(default_factory=dict)
    external: dict[int, None] = field(default_factory=dict)
    constants: dict[int, int] = field(default_factory=dict)  #: what the recording means to be uploaded -> what was
    used: list[int] = field(default_factory=list)  #: which numbers this node needs, by their place among all


class Recorder:
    """Takes a thread's commands (runtime/master/route.py)."""

    def __init__(self, session: Session, allow: AllowList, inputs: dict[int, int]) -> None:
        """``inputs``: refs for which each replay names others, with their nodes."""
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

    @whole
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
            log = self.logs[rank] = Log(self.session.states[rank])
        return log

    def _template(self, log: Log, number: int) -> Template:
        key = (log.state.rank, number)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = Template(log.state.defined[number], self._allow, {}, str)  # type: ignore[arg-type]
        return template

    def _transfer(self, transfer: int) -> int:
        """Transfers count from 0 in a recording."""
        return self.transfers.setdefault(transfer, len(self.transfers))

    def _use(self, log: Log, ref: int) -> None:
        if ref not in log.made and ref not in log.external and ref not in log.constants and ref not in self.inputs:
            log.external[ref] = None
            log.state.outbox.hold(ref)

    def _make(self, log: Log, ref: int) -> None:
        log.made[ref] = None
        log.state.outbox.hold(ref)

    def _constant(self, log: Log, command: c.Recv, site: Site | None) -> None:
        """An upload happens now, once. Under another ref, for the program may write it."""
        hidden = new_ref()
        log.constants[command.out] = hidden
        log.state.outbox.hold(command.out)
        log.state.outbox.queue += (replace(command, out=hidden), site)

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Forgets everything: the recording has failed."""
        self.steps.restore()
        self._empties.clear()
        for log in self.logs.values():
            box = log.state.outbox
            box.release(log.external)
            box.release([*log.made, *log.constants], made=False)
            box.dead.extend(log.constants.values())

    def finish(self, returned: dict[int, tuple[int, ...]], engine: str) -> None:
        """Sends what was recorded. ``returned``: per node, results for which each replay names other refs."""
        self.engine = engine
        self.steps.restore()
        self._empties.clear()
        for rank, log in self.logs.items():
            box = log.state.outbox
            self._settle_constants(log)
            held = list(log.made)
            mine = returned.get(rank, ())
            outputs = tuple(box.living(held))
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
        box.queue += (command, None)

    def _settle_constants(self, log: Log) -> None:
        """An upload that the program writes is copied at the beginning of each replay; of others there is one."""
        if not log.constants:
            return
        box = log.state.outbox
        touched = self.writers(log)
        clone = log.state.define("aten::clone", (c.Hole(True),), (), 1, None)
        alias = log.state.define("aten::alias", (c.Hole(True),), (), 1, None)
        for ref, hidden in log.constants.items():
            log.external[hidden] = None
            box.hold(hidden)
            box.dead.append(hidden)  # nothing but the graph has it
            if ref in touched:
                log.commands.insert(0, c.Call(clone, ref, (ref - hidden,)))
                log.sites.insert(0, None)
                log.numbers.insert(0, {})
                log.made[ref] = None
            else:
                self._queue(box, c.Call(alias, ref, (ref - hidden,)))
                log.external[ref] = None

    def writers(self, log: Log) -> dict[int, int]:
        """The externals and inputs of a node whose memory is written, each with the last command that does."""
        calls = [(i, call) for i, call in enumerate(log.commands) if isinstance(call, c.Call)]
        lines = [line_of_call(self._template(log, call.template), call, {}) for _, call in calls]
        written = {ref: calls[k][0] for ref, k in writers(program(lines, (), 0)).items()}
        for i, command in enumerate(log.commands):
            for ref in () if isinstance(command, c.Call) else TRAITS[type(command)].writes(command, None):
                written[ref] = max(i, written.get(ref, 0))
        return written

    def name(self, log: Log, at: int) -> str:
        """What a recorded command is called."""
        command = log.commands[at]
        return self._template(log, command.template).name if isinstance(command, c.Call) else type(command).__name__

    def makes(self, rank: int, ref: int) -> bool:
        """Whether a tensor of this node's is made by what was recorded so far."""
        return rank in self.logs and ref in self.logs[rank].made


def _parts(commands: list[Any]) -> Iterator[range]:
    """The commands that go together into a message."""
    start, size = 0, 0
    for i, command in enumerate(commands):
        size += 4 + (len(command.args) if isinstance(command, c.Call) else 0)
        if size >= _PART:
            yield range(start, i + 1)
            start, size = i + 1, 0
    if start < len(commands):
        yield range(start, len(commands))
