"""Graphs: the commands of a whole step, recorded once, and replayed with one small command per node.

    g = dt.Graph()
    with dt.graph(g):               # nothing runs: what would be sent is recorded
        loss = step(x, y)
    g.replay()                      # runs all of it; loss has its value now

As torch.cuda.CUDAGraph: run the step once before (what allocates, asks or is chosen at a first call is done then), new
inputs are copied into the recorded ones, and outputs have new values in the same tensors after each replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import replace
from types import TracebackType
from typing import Any

from ..dispatch.call_site import here
from ..runtime.master.failures import Replayed
from ..runtime.master.route import Route, route
from ..runtime.node.graphs.engines.registry import ENGINES
from ..runtime.process.signals import whole
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import GraphError
from ..session import current
from . import optimizer_steps
from .recorder import Recorder
from .traced_numbers import Number


class Graph:
    """A recording of commands for any number of nodes. Empty until a ``with dt.graph(g)`` block has filled it."""

    def __init__(self) -> None:
        self._recorded: Recorder | None = None
        self._recording: Recorder | None = None
        self._declared: dict[str, Any] = {}
        self._marked: list[tuple[str, Number]] = []
        self._numbers: Callable[[], tuple[float, ...]] | None = None

    def number(self, name: str, value: float) -> float:
        """A number that each replay may give anew: ``g.replay(lr=0.05)``; ``value`` until one does.

        To be called in the ``with dt.graph(g)`` block, where arithmetic on it and operations with it are recorded.
        """
        if self._recording is None:
            raise GraphError(
                "numbers are declared in the graph's own block: with dt.graph(g): lr = g.number('lr', 0.1)"
            )
        self._declared[name] = float(value)
        number = self._recording.tape.root(float(value), lambda: self._declared[name])
        self._marked.append((name, number))
        return number

    def unreached(self) -> list[str]:
        """Declared numbers that no recorded operation and no branch depends on."""
        return [name for name, number in self._marked if not number.tape.reached(number)]

    def replay(self, **numbers: float) -> None:
        """Runs what was recorded. Returns at once, as operations do. ``numbers``: new values of declared ones.

        Raises GraphError for an empty graph, a number that was not declared, and where a number would have made the
        program go another way; NodeLost.
        """
        for name, value in numbers.items():
            if name not in self._declared:
                declared = ", ".join(self._declared) or "none"
                raise GraphError(f"the graph has no number {name!r}; declared are: {declared}")
            self._declared[name] = float(value)
        self.play((), {})

    def engines(self) -> dict[int, list[tuple[str, str]]]:
        """What runs the graph: per node, for each of its programs (what is between transfers), the engine that ran it
        last, and why that is not the one that was asked for ("" while it is not known). Waits for the nodes.

        Raises GraphError for an empty graph; NodeLost.
        """
        recorder = self.recorded
        session, found = recorder.session, {}
        for rank in recorder.logs:
            reply = session.ask(session.places.at(rank), c.Answer, lambda id: c.Engines(id, recorder.id), here())
            lines = str(reply.value).splitlines()
            found[rank] = [(used, why) for used, _, why in (line.partition(": ") for line in lines)]
        return found

    def play(
        self, inputs: Sequence[tuple[int, int]], outputs: Mapping[int, tuple[int, ...]], advance: bool = True
    ) -> None:
        """``inputs``: (node, ref) of each that stands for a recorded one; ``outputs``: per node, refs of results.

        Optimizers' counts of steps ``advance``, unless this replay is to be undone.
        """
        recorder, compute = self.recorded, self._numbers
        assert compute is not None
        if route.get().recorder is not None:
            raise GraphError("a graph can't be replayed while another one is recorded")
        session = recorder.session
        values = compute()
        transfer = session.transfers.new_row(len(recorder.transfers)) if recorder.transfers else 0
        site = here(3)
        commands = []
        for rank, log in recorder.logs.items():
            given = tuple(ref for node, ref in inputs if node == rank)
            command = c.Replay(self.id, transfer, tuple(values[i] for i in log.used), given, outputs.get(rank, ()))
            commands.append((rank, command, None if site is None else Replayed(site, log.sites)))
        for log in recorder.logs.values():
            session.link.check(log.state.outbox)
        if advance:
            recorder.steps.advance()  # before, for a signal's handler may raise once the commands have left
        session.link.together(commands)

    @property
    def recording(self) -> Recorder:
        """The one under way."""
        if self._recording is None:
            raise GraphError("the graph is not being recorded")
        return self._recording

    @property
    def recorded(self) -> Recorder:
        if self._recorded is None:
            raise GraphError("the graph is empty: record it first (with dt.graph(g): ...)")
        return self._recorded

    @property
    def id(self) -> int:
        return self._recorded.id if self._recorded is not None else 0

    @whole
    def reset(self) -> None:
        """Drops the recording and what it holds. The graph can be recorded again."""
        recorder, self._recorded, self._numbers = self._recorded, None, None
        self._declared.clear()
        self._marked.clear()
        if recorder is not None:
            for log in recorder.logs.values():
                box = log.state.outbox
                box.queue += (c.Discard(recorder.id), None)
                box.release_later(log.external)

    @whole
    def __del__(self) -> None:
        self.reset()  # takes no lock


class graph:
    """Records into ``g`` what a ``with`` block would have done on the nodes. One block per graph (or ``g.reset()``).

    ``engine``: what runs it on the nodes; "interpreter" does to the bit what eager does.

    What the block makes is there after the first replay. In the block nothing can be waited for: ``.item()``,
    ``.cpu()``, shapes that depend on data, ``dt.run`` and the first call of an operation that has to ask its
    node raise GraphError there. Tensors that are sent in the block are sent once, while it is recorded.
    """

    def __init__(self, g: Graph, *, engine: str = "interpreter") -> None:
        if engine not in ENGINES:
            raise ValueError(f"there is no engine {engine!r}; there are {', '.join(ENGINES)}")
        self._graph = g
        self._engine = engine
        self._token: Token[Route] | None = None
        #: (node, ref) of what each replay names another for; and, per node, refs of results that it renames
        self.inputs: dict[int, int] = {}
        self.returned: dict[int, tuple[int, ...]] = {}

    @whole
    def __enter__(self) -> Graph:
        if route.get().recorder is not None:
            raise GraphError("a graph is being recorded already")
        if self._graph._recorded is not None:
            raise GraphError("the graph has a recording already; g.reset() drops it")
        session = current.session()
        session.check_default_dtype()
        optimizer_steps.install()
        self._graph._recording = recorder = Recorder(session, session.allow, self.inputs)
        for box in session.link.outboxes:
            box.divert(+1)
        self._token = route.set(replace(route.get(), recorder=recorder))
        return self._graph

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._end(error)
        if error is not None:
            return
        for name in self._graph.unreached():
            warnings.warn(
                f"the number {name!r} reached no recorded operation as it is, so that replays can't change anything by "
                "it (math.sqrt and others make ordinary numbers)",
                stacklevel=2,
            )
        for log in recorder.logs.values():
            recorder.session.link.flush(log.state.outbox)

    @whole
    def _end(self, error: BaseException | None) -> Recorder:
        recorder = self._graph.recording
        assert self._token is not None
        route.reset(self._token)
        self._graph._recording = None
        for box in recorder.session.link.outboxes:
            box.divert(-1)
        if error is not None:
            recorder.drop()
        else:
            recorder.finish(self.returned, self._engine)
            self._graph._recorded, self._graph._numbers = recorder, recorder.tape.compiled()
        return recorder


__all__ = ["Graph", "Number", "graph"]
