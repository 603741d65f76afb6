"""Records the commands of a ``with dt.graph(g)`` block, per node, and the tensors that they use.

A ref is the recording's own (made by a recorded command, and on the node after a replay only), one of its inputs (each
replay names another in its place), or external (it existed before). The recording holds externals, so that no replay
finds them freed.

A command for the nodes of a mesh is in the log of each of them, between those for this node alone: what a node gets is
one program, in the order of issue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from msgspec.structs import replace

from ..proxy.meta import Handle, new_ref
from ..runtime.channel.base import MASTER
from ..runtime.master.command_queue import CommandQueue
from ..runtime.master.failures import Site
from ..runtime.master.node import Node
from ..runtime.master.route import Route, route
from ..runtime.node.graphs.program import line_of_call, program, written
from ..runtime.node.template import Template
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.errors import GraphError
from ..runtime.protocol.traits import TRAITS, kinds
from ..session.places import Place, varied
from ..session.session import Session
from .optimizer_steps import Steps
from .traced_numbers import Tape

_RECORDABLE = kinds("recordable")
#: The arguments of the commands in one GraphPart, at most: a tenth of a message's limit.
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
    #: the queues by which the node's tensors are freed: its own, and those of its meshes, of whose tensors it has the
    #: shards. Whichever of them owns a ref holds it. Meshes that are made later own nothing that is recorded
    queues: tuple[CommandQueue, ...] = ()

    def append(self, command: c.Command, site: Site | None = None, numbers: dict[int, int] | None = None) -> None:
        """Appends a command. ``numbers``: those of its arguments that each replay gives anew."""
        self.commands.append(command)
        self.sites.append(site)
        self.numbers.append({} if numbers is None else numbers)

    def hold_ref(self, ref: int) -> None:
        for queue in self.queues:
            queue.hold_ref(ref)

    def release(self, refs: Iterable[int], made: bool = True) -> None:
        for queue in self.queues:
            queue.release(refs, made)

    def release_later(self, refs: Iterable[int]) -> None:
        for queue in self.queues:
            queue.release_later(refs)

    def still_referenced(self, refs: Iterable[int]) -> list[int]:
        """Returns those of these held refs that are not dead otherwise."""
        left = list(refs)
        for queue in self.queues:
            left = queue.still_referenced(left)
        return left


@dataclass(frozen=True)
class Draw:
    """A place from whose generator the program draws, having drawn from another."""

    place: Place
    along: tuple[str, ...]  #: the dims of a mesh along which the numbers vary
    number: int
    begins: bool  #: the generator begins in the program


class GraphRecorder:
    """The recorder of one graph: it takes a thread's commands (runtime/master/route.py)."""

    def __init__(self, session: Session, allow: AllowList, inputs: dict[int, Place]) -> None:
        """``inputs``: the refs that each replay replaces by others, with their places."""
        self.id = next(_ids)
        self.session = session
        self.tape = Tape()
        self.steps = Steps(self.tape)
        self.inputs = inputs
        self.logs: dict[int, Log] = {}
        self.sites: dict[int, list[Site | None]] = {}  #: of a finished recording: where each node's commands come from
        self.transfers: dict[int, int] = {}
        self.engine = ""
        #: the queue of all nodes of the graph, which replays go to; None where there are several, without a mesh
        self.queue: CommandQueue | None = None
        self.size = 0  #: the commands that a replay stands for, on the node that has most
        #: the places that draw, in turns; None for a recording that began before there were meshes, when nobody told
        self.draws: list[Draw] | None = [] if session.places.with_meshes else None
        self._drawing: dict[tuple[int, str], int] = {}  #: (node, device) -> number of the generator in use
        self._seed: int | None = None  #: with which the program seeds all generators
        self._begun: set[int] = set()  #: the generators that begin in the program, once it has done that
        self._spans: set[tuple[int, ...]] = set()  #: the nodes of each mesh that has recorded commands
        #: what the program has set of torch's switches so far: a node that it comes to later begins with that
        self._switched = c.Switch(())
        self._allow = allow
        self._empties: dict[int, Handle] = {}
        self._templates: dict[tuple[int, int], Template] = {}

    # ---- while recording -------------------------------------------------------------------------------------------

    def add_empty(self, handle: Any) -> None:
        self._empties[id(handle)] = handle

    def made(self, handle: Any) -> bool:
        base = handle.base
        if base is None:
            return id(handle) in self._empties
        while not base.ref:
            if base.base is None:
                return id(base) in self._empties
            base = base.base
        log = self.logs.get(base.meta.place.ranks[0])
        return base.ref in self.inputs or (log is not None and (base.ref in log.made or base.ref in log.constants))

    @uninterrupted
    def record(self, ranks: tuple[int, ...], stream: int, command: c.Command, site: Site | None) -> None:
        if len(ranks) > 1:
            self._spans.add(ranks)
        logs = [self._log(rank) for rank in ranks]
        if isinstance(command, c.Upload) or (isinstance(command, c.Recv) and command.peer == MASTER):
            for log in logs:
                self._constant(log, command, site)
            return
        if isinstance(command, c.Seed) and command.all:
            self._seed, self._begun = command.seed, set()
        numbers: dict[int, int] = {}
        template: Template | None = None
        if type(command) not in _RECORDABLE or (isinstance(command, c.Send) and command.peer == MASTER):
            raise GraphError(f"{type(command).__name__} can't be recorded into a graph")
        if isinstance(command, c.Call):
            template = self._template(logs[0], command.template)
            for i, hole in enumerate(template.holes):
                if not hole and (number := self.tape.find(command.args[i])) is not None:
                    numbers[i] = number
        traits = TRAITS[type(command)]
        for log in logs:
            for ref in traits.reads(command, template):
                self._use(log, ref)
            for ref in traits.makes(command, template):
                self._make(log, ref)
        if traits.renumbered:
            command = replace(command, transfer=self._transfer(command.transfer))  # type: ignore[union-attr]
        for log in logs:
            log.append(command, site, numbers)

    def switch(self, command: c.Switch) -> None:
        """Has each replay set switches of torch's here, on all nodes of the graph."""
        self._switched = c.Switch((*self._switched.settings, *command.settings))
        for log in self.logs.values():
            log.append(command)

    def draw(self, place: Place) -> None:
        """Has the program put a place's generator in use, where another one is. Each replay begins with the first."""
        if self.draws is None:
            return
        places = self.session.places
        if self._seed is None:  # the generator begins outside of the program, or each replay would begin it anew
            token = route.set(Route(route.get().streams))
            try:
                places.use(place)
            finally:
                route.reset(token)
        known = None if self._seed is None else self._begun
        number, seeds = places.generator(place, known, self._seed)
        before = {self._drawing.get((rank, place.draws_from)) for rank in place.ranks}
        if before == {number} and not seeds:
            return
        self.draws.append(Draw(place, varied.get(), number, bool(seeds)))
        self._drawing.update(dict.fromkeys(((rank, place.draws_from) for rank in place.ranks), number))
        if self._seed is not None or before != {None}:
            self.record(place.ranks, 0, places.swap(place, number, seeds, self._seed), None)
        if seeds:
            self._begun.add(number)

    def _log(self, rank: int) -> Log:
        log = self.logs.get(rank)
        if log is None:
            node = self.session.nodes[rank]
            log = self.logs[rank] = Log(node, queues=(node.outbox, *node.outbox.overlaps))
            if self._switched.settings:
                log.append(self._switched)
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
        if ref not in log.made and ref not in log.external and ref not in log.constants and ref not in self.inputs:
            log.external[ref] = None
            log.hold_ref(ref)

    def _make(self, log: Log, ref: int) -> None:
        log.made[ref] = None
        log.hold_ref(ref)

    def _constant(self, log: Log, command: c.Upload | c.Recv, site: Site | None) -> None:
        """Sends an upload now, once, under another ref because the program may write the recorded one."""
        hidden = new_ref()
        log.constants[command.out] = hidden
        log.hold_ref(command.out)
        log.node.outbox.put(replace(command, out=hidden), site)

    @uninterrupted
    def issue(self, put: Callable[[], bool]) -> bool:
        """Queues a replay by ``put``, and returns what that does. Has each of its nodes begin with the generator that
        the program draws from first, and notes which ones it leaves in use: uninterrupted, or what is noted and what
        nodes do would differ."""
        places = self.session.places
        with places.lock:
            if self.draws is None:
                for place in [place for rank in self.logs for place in places.of_node(rank)]:
                    places.draw(place)
            draws = self.draws or []
            for draw in reversed(draws):
                token = varied.set(draw.along)
                try:
                    places.use(draw.place)
                finally:
                    varied.reset(token)
            due = put()
            if self._seed is not None:
                places.seeded(self._seed)
            for draw in draws[1:] if self._seed is None else draws:  # the first is in use already
                places.in_use(draw.place, draw.number, draw.begins)
        return due

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def discard_recording(self) -> None:
        """Forgets everything, after a recording that has failed."""
        self.steps.restore()
        self._empties.clear()
        for log in self.logs.values():
            log.release(log.external)
            log.release([*log.made, *log.constants], made=False)
            log.node.outbox.dead.extend(log.constants.values())

    def finish(self, returned: dict[int, Place], engine: str) -> None:
        """Sends the recorded commands to their nodes. ``returned``: the results that each replay gives other refs, with
        their places."""
        self.engine = engine
        self.steps.restore()
        self._empties.clear()
        if self._spans:
            every = tuple(sorted(self.logs))
            self.queue = self.session.link.sender.fan_out(next((s for s in self._spans if len(s) == len(every)), every))
        elif len(self.logs) == 1:
            self.queue = next(iter(self.logs.values())).node.outbox
        self.size = max((len(log.commands) for log in self.logs.values()), default=0)
        for rank, log in self.logs.items():
            box = log.node.outbox
            self._settle_constants(log, returned)
            self.sites[rank] = log.sites
            held = list(log.made)
            outputs = tuple(log.still_referenced(held))
            commands: list[c.Command] = []
            for part in _parts(log.commands):
                numbers = tuple((i - part[0], a, n) for i in part for a, n in log.numbers[i].items())
                commands.append(c.GraphPart(self.id, tuple(log.commands[i] for i in part), numbers))
            inputs, mine = [
                tuple(ref if rank in place.ranks else 0 for ref, place in refs.items())
                for refs in (self.inputs, returned)
            ]
            commands.append(c.EndGraph(self.id, inputs, outputs, mine, engine))
            used = {command.template for command in log.commands if isinstance(command, c.Call)}
            with log.node.lock:
                log.node.standing["graph", self.id] = (
                    *filter(None, map(log.node.defined.get, sorted(used))),
                    *commands,
                )
                for command in commands:
                    self._queue(box, command)
            alive = set(outputs)
            log.release([r for r in held if r in alive])
            log.release([r for r in held if r not in alive], made=False)

    @staticmethod
    def _queue(box: Any, command: c.Command) -> None:
        box.put(command)

    def _settle_constants(self, log: Log, returned: Iterable[int]) -> None:
        """Has an upload that the program writes, or that somebody can write after it, copied at the beginning of each
        replay: it, or a view of it, is held when the recording ends, or ``returned``. Other uploads are used as they
        are, by all replays."""
        if not log.constants:
            return
        box = log.node.outbox
        last, roots = self._memory(log)
        touched = set(last)
        for ref in (*log.still_referenced([*log.made, *log.constants]), *returned):
            touched |= roots.get(ref, {ref})
        clone = log.node.define("aten::clone", (c.Hole(True),), (), 1, None)
        alias = log.node.define("aten::alias", (c.Hole(True),), (), 1, None)
        for ref, hidden in log.constants.items():
            log.external[hidden] = None
            log.hold_ref(hidden)
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
        return self._memory(log)[0]

    def _memory(self, log: Log) -> tuple[dict[int, int], dict[int, frozenset[int]]]:
        """Returns what ``writers`` does, and the tensors from before the program whose memory each one may see."""
        calls = [(i, call) for i, call in enumerate(log.commands) if isinstance(call, c.Call)]
        lines = [line_of_call(self._template(log, call.template), call, {}) for _, call in calls]
        found, roots = written(program(lines, (), 0))
        last = {ref: calls[k][0] for ref, k in found.items()}
        for i, command in enumerate(log.commands):
            for ref in () if isinstance(command, c.Call) else TRAITS[type(command)].writes(command, None):
                for root in roots.get(ref, {ref}):
                    last[root] = max(i, last.get(root, 0))
        return {ref: i for ref, i in last.items() if ref not in log.made}, roots

    def name(self, log: Log, at: int) -> str:
        """Returns the name of a recorded command, for messages."""
        command = log.commands[at]
        return self._template(log, command.template).name if isinstance(command, c.Call) else type(command).__name__

    def makes(self, place: Place, ref: int) -> bool:
        """Returns whether a tensor of this place is made, or uploaded, by a command that was recorded so far."""
        log = self.logs.get(place.ranks[0])
        return log is not None and (ref in log.made or ref in log.constants)


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
