"""Graphs on a node: recorded commands as steps, and their replay.

    GraphPart* EndGraph --> steps: segments of Calls, each a Program that an Engine runs; Sends, Recvs between them
    Replay              --> the steps in order; a step's results for later ones lie in the store under the recorded refs
                            (a graph of one segment, without outputs, goes past these)

A segment that meets poison, or that raises, is done call by call by the executor from there on: one way of failing.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_line
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from msgspec.structs import replace

from ...process import role, torch_switches
from ...process.observing import GraphReplayed
from ...protocol import codec
from ...protocol import commands as c
from ...protocol.errors import DisttensorError, ProtocolError
from ...protocol.failure_ids import Poison
from ...protocol.traits import TRAITS, kinds
from .. import geometry
from ..op_fast_path import plain_path
from ..state import NodeState, in_order
from ..store import Entry, Pending, Promise, Unmade, made, memory, seen
from ..template import Broken, Template
from ..warned import dropping, heard_by
from .engines.builder import Builder
from .engines.registry import ENGINES
from .program import Engine, Program, line_of_call, program, writers

_RENUMBERED = kinds("renumbered")
#: The types of a node's entries with which a program may begin at once.
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


@dataclass
class Single:
    """A step of one command, which is done like any other command."""

    at: int  #: its place in the recording
    command: c.Command


@dataclass
class GraphSegment:
    """A step of many Calls."""

    at: int
    calls: list[c.Call]
    holes: list[list[tuple[int, int]]]  #: per call: (index of an argument, number that takes its place)
    program: Program
    engine: Engine
    dead: list[list[int]]  #: refs made here that nothing needs after each call
    writes: tuple[int, ...]  #: inputs whose memory is written
    new: bool  #: contains first calls of signatures, which its first replay does one by one
    make: Callable[[Program], Engine]  #: makes an engine for a program


Pick = Callable[[tuple[int, ...]], tuple[int, ...]]  #: takes some of a tuple's refs, in an order of its own


@dataclass
class Direct:
    """The way of a graph of one segment whose results are all of one replay: from the tensors that a replay names to
    those that it makes, past the refs of the recording."""

    segment: GraphSegment
    held: tuple[int, ...]  #: the refs of the program's inputs that no replay names
    inputs: Pick  #: the refs of the program's inputs, in its order, out of a replay's inputs and, after these, ``held``
    results: Pick  #: those of the program's outputs, out of a replay's results


@dataclass
class NodeGraph:
    """One recording: its steps, inputs and outputs."""

    steps: list[Single | GraphSegment]
    frees: list[list[int]]  #: after each step: refs from earlier ones that nothing needs any more
    inputs: tuple[int, ...]
    outputs: set[int]
    returned: tuple[int, ...]  #: and ``inputs``: with 0 for what is on other nodes
    templates: frozenset[int]
    numbers: int  #: how many of a replay's numbers its programs know: the rest is for other nodes
    switches: bool  #: whether it sets switches of torch's, which are then as before after each replay
    direct: Direct | None  #: a shorter way for most replays, if there is one
    #: outputs that were freed while others (views made outside) see their memory
    orphans: dict[int, Entry] = field(default_factory=dict)
    #: views made outside that the last replay has poisoned, as it failed to make their values: (ref, view, poison)
    spoiled: list[tuple[int, torch.Tensor, Poison]] = field(default_factory=list)


@dataclass
class _Parts:
    commands: list[c.Command] = field(default_factory=list)
    numbers: dict[int, dict[int, int]] = field(default_factory=dict)  #: command -> argument -> number


def _top(parts: _Parts) -> int:
    """Returns the number after the last one that a recording's calls take."""
    return max((n for hole in parts.numbers.values() for n in hole.values()), default=-1) + 1


class NodeGraphs:
    """A node's graphs.

    ``one`` applies a recorded command; ``failed`` is the way out of one that an engine could not do.
    """

    def __init__(
        self, node: NodeState, one: Callable[[c.Command], None], failed: Callable[[c.Command, Exception], None]
    ) -> None:
        self._node, self._one, self._failed_one = node, one, failed
        self._parts: dict[int, _Parts] = {}
        self._graphs: dict[int, NodeGraph] = {}
        self._builder = Builder()

    def close(self) -> None:
        """Ends compilations under way."""
        self._builder.close()

    @property
    def building(self) -> tuple[int, float]:
        """How many programs are compiled, or wait for that; and for how many seconds the one that is has been."""
        return self._builder.under_way

    def part(self, command: c.GraphPart) -> None:
        parts = self._parts.setdefault(command.graph, _Parts())
        for i, argument, number in command.numbers:
            parts.numbers.setdefault(len(parts.commands) + i, {})[argument] = number
        parts.commands += command.commands

    def define(self, command: c.EndGraph) -> None:
        """Builds a graph. Raises ProtocolError for an unknown engine, or calls that don't fit their templates."""
        make = ENGINES.get(command.engine)
        if make is None:
            raise ProtocolError(f"there is no engine {command.engine!r}; there are {', '.join(ENGINES)}")
        parts = self._parts.pop(command.graph, _Parts())
        self._graphs[command.graph] = graph = self._build(parts, command, lambda p: make(p, self._builder))
        for ref in command.outputs:
            self._node.store.entries[ref] = Unmade()
            self._node.store.watched[ref] = graph.orphans

    def discard(self, command: c.Discard) -> None:
        self._parts.pop(command.graph, None)
        graph = self._graphs.pop(command.graph, None)
        for ref in () if graph is None else graph.outputs:
            self._node.store.watched.pop(ref, None)

    def engines(self, number: int) -> tuple[tuple[str, str], ...]:
        """Returns for each program of a graph the engine that ran it last, and the reason why no other does."""
        graph = self._graphs.get(number)
        programs = [s.engine for s in graph.steps if type(s) is GraphSegment] if graph is not None else []
        return tuple((engine.used, codec.one_line(engine.why)) for engine in programs)

    def templates(self) -> set[int]:
        """Returns the numbers of the templates that replays need."""
        return {number for graph in self._graphs.values() for number in graph.templates}

    # ---- building --------------------------------------------------------------------------------------------------

    def _build(self, parts: _Parts, command: c.EndGraph, make: Callable[[Program], Engine]) -> NodeGraph:
        commands, node = parts.commands, self._node
        reads, makes = zip(*map(self._refs, commands), strict=True) if commands else ((), ())
        stays = {*command.outputs, *command.returned} - {0}
        last = {ref: i for i in range(len(commands)) for ref in (*reads[i], *makes[i])}
        born = {ref: i for i in range(len(commands)) for ref in makes[i]}
        steps: list[Single | GraphSegment] = []
        ends: list[int] = []  # per step: the place in the recording after it
        run: list[int] = []
        awaited: set[int] = set()

        def close() -> None:
            if run:
                steps.append(self._segment(run, parts, last, stays, make))
                ends.append(run[-1] + 1)
                run.clear()

        for i, recorded in enumerate(commands):
            if isinstance(recorded, c.Call) and not isinstance(node.templates[recorded.template], Broken):
                if not awaited.isdisjoint(reads[i]):
                    close()  # no earlier, so that the transfer runs beside the calls before
                    awaited.difference_update(reads[i])
                run.append(i)
            else:
                close()
                steps.append(Single(i, recorded))
                ends.append(i + 1)
                if isinstance(recorded, c.Recv):
                    awaited.add(recorded.out)
        close()
        frees: list[list[int]] = [[] for _ in steps]
        for ref, i in last.items():
            if ref in born and ref not in stays:
                step = bisect(ends, i)
                began = ends[step - 1] if step else 0
                if born[ref] < began or isinstance(steps[step], Single):
                    frees[step].append(ref)
        named = frozenset(recorded.template for recorded in commands if isinstance(recorded, c.Call))
        top = _top(parts)
        switches = any(isinstance(recorded, c.Switch) for recorded in commands)
        direct = _direct(steps, command)
        outputs = set(command.outputs)
        return NodeGraph(steps, frees, command.inputs, outputs, command.returned, named, top, switches, direct)

    def _refs(self, command: c.Command) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the refs that a command reads or writes in place, and those that it makes."""
        traits = TRAITS[type(command)]
        template = self._node.templates[command.template] if isinstance(command, c.Call) else None
        return traits.reads(command, template), traits.makes(command, template)

    def _segment(
        self, run: list[int], parts: _Parts, last: dict[int, int], stays: set[int], make: Callable[[Program], Engine]
    ) -> GraphSegment:
        calls: list[c.Call] = [parts.commands[i] for i in run]  # type: ignore[misc]
        holes = [sorted(parts.numbers.get(i, {}).items()) for i in run]
        lines = [
            line_of_call(self._node.templates[call.template], call, dict(hole))
            for call, hole in zip(calls, holes, strict=True)
        ]
        made = {ref for line in lines for ref in line.outs}
        needed = {ref for ref in made if ref in stays or last[ref] > run[-1]}
        found = program(lines, needed, _top(parts))
        dead: list[list[int]] = [[] for _ in lines]
        place = {i: k for k, i in enumerate(run)}
        for ref in made - needed:
            dead[place[last[ref]]].append(ref)
        new = any(type(call) is c.First for call in calls)
        found = self._heard(found, calls, run[0])
        return GraphSegment(run[0], calls, holes, found, make(found), dead, tuple(writers(found)), new, make)

    def _heard(self, program: Program, calls: Sequence[c.Call], first: int) -> Program:
        """Returns a program in which calls that warn are heard; ``first``: the place of its first call in the
        recording."""
        lines = list(program.lines)
        for i, (line, call) in enumerate(zip(lines, calls, strict=True)):
            template = self._node.templates[call.template]
            if line.heard is None and (template.foreseen or template.loud):
                lines[i] = replace_line(line, heard=self._hearing(template, first + i))
        return program if lines == [*program.lines] else replace_line(program, lines=tuple(lines))

    def _hearing(self, template: Template, at: int) -> Callable[..., Any]:
        """Returns what runs a template's operator, and tells of its warnings as command ``at`` of the recording's."""
        function, node = plain_path(template.op), self._node
        if template.foreseen:
            return dropping(function)

        def run(*args: Any, **kwargs: Any) -> Any:
            node.at = at
            return heard_by(partial(function, *args, **kwargs), node.emit, node.number)[0]

        return run

    def sends(self, graph: int) -> bool:
        """Returns whether the graph's replays send anything to peers."""
        found = self._graphs.get(graph)
        steps = [] if found is None else found.steps
        return any(isinstance(s, Single) and isinstance(s.command, (c.Send, c.Collective)) for s in steps)

    def switches(self, graph: int) -> bool:
        """Returns whether the graph's replays set switches of torch's."""
        found = self._graphs.get(graph)
        return found is not None and found.switches

    # ---- replaying -------------------------------------------------------------------------------------------------

    def replay(self, command: c.Replay) -> None:
        """Replays a graph, and tells observers of it."""
        seam, graph = self._node.seam, self._graphs[command.graph]
        if seam.graph.listeners:
            named = "", self._node.seq, command.graph, len(graph.steps)
            seam.notify_end_of(seam.graph, GraphReplayed, partial(self._replay, graph, command), *named)
        else:
            self._replay(graph, command)

    def _replay(self, graph: NodeGraph, command: c.Replay) -> None:
        direct = graph.direct
        if direct is None or not self._directly(graph, direct, command):
            self._by_refs(graph, command)

    def _directly(self, graph: NodeGraph, direct: Direct, command: c.Replay) -> bool:
        """Replays a graph of one segment without its recording's refs; returns False where something is to be done
        besides running the program: nothing is done then."""
        node, entries, segment, given = self._node, self._node.store.entries, direct.segment, command.inputs
        if (
            segment.new
            or node.check is not None
            or node.take_over is not in_order
            or (segment.writes and node.store.sending)
            or segment.engine.static
            or len(given) != len(graph.inputs)
            or len(command.outputs) != len(graph.returned)
        ):
            return False
        inputs: list[Any] = list(map(entries.get, direct.inputs(given + direct.held)))
        if not {*map(type, inputs)} <= _TENSORS:
            return False
        numbers = command.numbers[: graph.numbers]
        try:
            outputs = segment.engine.run(inputs, numbers)
        except Exception as e:  # what is poisoned, and the calls after the one that has failed, go by refs
            entries.update(zip(segment.program.inputs, inputs, strict=True))
            self._failed(segment, e, numbers)
            self._finish_replay(graph, command, {})
        else:
            entries.update(zip(direct.results(command.outputs), outputs, strict=True))
        finally:
            node.at = -1
        return True

    def _by_refs(self, graph: NodeGraph, command: c.Replay) -> None:
        """Replays a graph, step by step, by the refs of its recording."""
        node, entries = self._node, self._node.store.entries
        for ref, given in zip(graph.inputs, command.inputs, strict=True):
            if ref:
                entries[ref] = node.present(given)
        kept, numbers = self._release_outputs(graph), command.numbers[: graph.numbers]
        switches = torch_switches.present() if graph.switches and role.is_node() else None
        run = self._run if node.take_over is in_order else self._run_beside
        try:
            for step, frees in zip(graph.steps, graph.frees, strict=True):
                if type(step) is GraphSegment:
                    run(step, numbers)
                else:
                    self._single(step, command.transfer)  # type: ignore[arg-type]
                for ref in frees:
                    entries.pop(ref, None)
        finally:
            node.at = -1
            if switches is not None:
                torch_switches.put(torch_switches.changed(torch_switches.present(), switches).items())
        self._finish_replay(graph, command, kept)

    def _finish_replay(self, graph: NodeGraph, command: c.Replay, kept: dict[int, torch.Tensor]) -> None:
        """Takes a replay's inputs and results from under the recording's refs. ``kept``: outputs of the last one."""
        node, entries = self._node, self._node.store.entries
        for ref in graph.inputs:
            entries.pop(ref, None)  # nothing is under 0
        try:
            self._assign_results(graph, command.outputs)
            self._refill_outputs(graph, kept)
        except Exception:  # no memory for a copy, say: what others see would show the values of another replay
            entries.update(dict.fromkeys(kept, Poison(node.rank, node.number)))
            self._refill_outputs(graph, kept)
            raise

    def _assign_results(self, graph: NodeGraph, refs: tuple[int, ...]) -> None:
        """Gives results the refs that this replay names: copies where the next replay would write over them."""
        if not refs:
            return
        entries = self._node.store.entries
        static = any([type(s) is GraphSegment and s.engine.static for s in graph.steps])
        outputs = {memory(t) for o in graph.outputs if isinstance(t := entries.get(o), torch.Tensor)}
        for ref, new in zip(graph.returned, refs, strict=True):
            if not ref:
                continue
            kept = ref in graph.outputs
            # what is kept as well may be written: it is copied, for which it has to be there
            result = self._node.entry(ref) if kept else entries.pop(ref)
            if isinstance(result, torch.Tensor) and (static or kept or memory(result) in outputs):
                result = geometry.copied(result)
            entries[new] = result

    def _release_outputs(self, graph: NodeGraph) -> dict[int, torch.Tensor]:
        """Lets go of the last replay's outputs. Returns those whose memory others see, or are going to: it gets the new
        values."""
        if not graph.outputs and not graph.spoiled:
            return {}
        entries = self._node.store.entries
        viewed = self._node.store.viewed()  # first: who makes a view meanwhile is found by ``shared``
        kept: dict[int, torch.Tensor] = {}
        for ref, view, poison in graph.spoiled:
            if entries.get(ref) is poison:
                entries[ref] = view
        graph.spoiled.clear()
        for ref in list(graph.outputs):
            entry = entries.pop(ref, None)
            old = self._last(entry, viewed)
            if old is None:
                old = self._last(graph.orphans.get(ref), viewed)
            if old is not None:
                kept[ref] = old
                continue
            graph.orphans.pop(ref, None)
            if entry is None:  # freed, and nobody can see it any more
                graph.outputs.discard(ref)
                graph.frees[-1].append(ref)
        return kept

    def _last(self, entry: Entry | None, viewed: Collection[int]) -> torch.Tensor | None:
        """Returns an output of the last replay if others have its memory, or are going to. Waits for one that a stream
        or an asynchronous collective writes, and for one to arrive that a stream makes a view of."""
        if isinstance(entry, Promise) or (isinstance(entry, Pending) and id(entry) in viewed):
            value = entry.result(partial(self._node.report_failure, "transfer"))
            return value if isinstance(value, torch.Tensor) and (id(entry) in viewed or seen(value, viewed)) else None
        return made(entry) if entry is not None and seen(entry, viewed) else None

    def _refill_outputs(self, graph: NodeGraph, kept: dict[int, torch.Tensor]) -> None:
        store = self._node.store
        if store.sending and kept:
            store.wait_for_sends(list(kept.values()))
        for ref, old in kept.items():
            new = self._awaited(ref)
            if isinstance(new, torch.Tensor):
                if memory(new) != memory(old):
                    self._node.take_over([old, new])
                    _fill(old, new)
                    self._node.take_over([old])
                store.entries[ref] = old
            elif isinstance(new, Poison):
                self._spoil(graph, old, new)
            if ref not in store.watched:
                store.entries.pop(ref, None)
                graph.orphans[ref] = old
            elif isinstance(new, torch.Tensor):
                graph.orphans.pop(ref, None)
            else:
                graph.orphans[ref] = old

    def _spoil(self, graph: NodeGraph, old: torch.Tensor, poison: Poison) -> None:
        """Poisons the views of an output that a replay failed to make, until one makes it: they would show the values
        of another replay."""
        entries = self._node.store.entries
        for ref in self._node.store.aliases(old):
            if ref not in graph.outputs and (view := made(entries[ref])) is not None:
                graph.spoiled.append((ref, view, poison))
                entries[ref] = poison

    def _single(self, step: Single, transfer: int) -> None:
        command = step.command
        if type(command) in _RENUMBERED:
            command = replace(command, transfer=transfer + command.transfer)  # type: ignore[union-attr]
        self._node.at = step.at
        if self._node.take_over is not in_order:
            self._node.take_over([self._awaited(ref) for ref in self._refs(command)[0]])
        self._one(command)

    def _run_beside(self, segment: GraphSegment, numbers: tuple[Any, ...]) -> None:
        """Runs a segment on a device that has other streams besides."""
        node, entries = self._node, self._node.store.entries
        inputs = [self._awaited(r) for r in segment.program.inputs]
        node.take_over(inputs)
        try:
            self._run(segment, numbers)
        finally:
            node.take_over([*inputs, *map(entries.get, segment.program.outputs)])

    def _run(self, segment: GraphSegment, numbers: tuple[Any, ...]) -> None:
        node, entries = self._node, self._node.store.entries
        inputs: list[Any] = list(map(entries.get, segment.program.inputs))
        if not all([isinstance(t, torch.Tensor) for t in inputs]):  # a list: faster than a generator
            inputs = [self._awaited(r) for r in segment.program.inputs]
            if not all([isinstance(t, torch.Tensor) for t in inputs]):
                self._plainly(segment, 0, numbers)
                return
        if segment.new:
            segment.new = False
            self._plainly(segment, 0, numbers)
            program = self._heard(segment.program, segment.calls, segment.at)
            if program is not segment.program:
                segment.program, segment.engine = program, segment.make(program)
            return
        if node.check is not None:  # which looks at each call, and so names its line
            self._plainly(segment, 0, numbers)
            return
        if node.store.sending and segment.writes:
            node.store.wait_for_sends(inputs)
        try:
            outputs = segment.engine.run(inputs, numbers)
        except Exception as e:
            self._failed(segment, e, numbers)
        else:
            for ref, tensor in zip(segment.program.outputs, outputs, strict=True):
                entries[ref] = tensor

    def _awaited(self, ref: int) -> Any:
        """Returns the tensor or poison under ``ref``, waiting for it; None where the call that uses it is to fail."""
        try:
            return self._node.entry(ref)
        except (KeyError, DisttensorError):
            return None

    def _failed(self, segment: GraphSegment, error: Exception, numbers: tuple[Any, ...]) -> None:
        node, entries = self._node, self._node.store.entries
        halted = segment.engine.halted(error)
        if halted is None:
            node.at = segment.at
            poison = node.report_failure("a graph", error)
            for ref in segment.program.outputs:
                entries[ref] = poison
            for ref in segment.writes:
                node.spoil(ref, poison)
            return
        at, registers = halted
        entries.update(registers)
        node.at = segment.at + at
        self._failed_one(self._call(segment, at, numbers), error)
        self._free(segment.dead[at])
        self._plainly(segment, at + 1, numbers)

    def _plainly(self, segment: GraphSegment, first: int, numbers: tuple[Any, ...]) -> None:
        """Does the segment's calls one by one, from number ``first`` on."""
        for i in range(first, len(segment.calls)):
            self._node.at = segment.at + i
            self._one(self._call(segment, i, numbers))
            self._free(segment.dead[i])

    def _free(self, refs: Iterable[int]) -> None:
        for ref in refs:
            self._node.store.entries.pop(ref, None)

    @staticmethod
    def _call(segment: GraphSegment, i: int, numbers: tuple[Any, ...]) -> c.Call:
        call = segment.calls[i]
        if not segment.holes[i]:
            return call
        args = list(call.args)
        for argument, number in segment.holes[i]:
            args[argument] = numbers[number]
        return replace(call, args=tuple(args))


def _direct(steps: Sequence[Single | GraphSegment], command: c.EndGraph) -> Direct | None:
    """Returns the shorter way of a graph's replays; None where there are transfers in between, or tensors that stay."""
    segment = steps[0] if len(steps) == 1 else None
    if not isinstance(segment, GraphSegment) or command.outputs:
        return None
    held = tuple(ref for ref in segment.program.inputs if ref not in command.inputs)
    places = {ref: i for i, ref in enumerate((*command.inputs, *held))}
    results = {ref: i for i, ref in enumerate(command.returned)}
    if results.keys() - {0} != set(segment.program.outputs):
        return None
    program = segment.program
    return Direct(
        segment, held, _pick(places[ref] for ref in program.inputs), _pick(results[ref] for ref in program.outputs)
    )


def _pick(places: Iterable[int]) -> Pick:
    """Returns a function that gives what is at these places of a tuple, in C where they are several."""
    at = tuple(places)
    return itemgetter(*at) if len(at) > 1 else lambda of: tuple([of[i] for i in at])


def _fill(old: torch.Tensor, new: torch.Tensor) -> None:
    """Writes the values of ``new``, which is of the same geometry. Torch refuses to where a dimension was expanded."""
    for dim, (size, stride) in enumerate(zip(old.shape, old.stride(), strict=True)):
        if size > 1 and stride == 0:
            old, new = old.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
    old.copy_(new)
