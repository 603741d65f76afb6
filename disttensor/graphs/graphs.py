"""Graphs: the commands of a whole step are recorded once, and replayed with one small command per node, or for all
nodes of a mesh.

    g = dt.Graph()
    with dt.graph(g):               # nothing runs: commands are recorded instead of sent
        loss = step(x, y)
    g.replay()                      # runs all of it; loss has its value now

The API is that of torch.cuda.CUDAGraph: run the step once before (the allocations, questions and choices of first calls
are done then), copy new inputs into the recorded ones, and read the new values of outputs in the same tensors after
each replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextvars import Token
from types import TracebackType
from typing import Any

from ..dispatch.call_site import here
from ..runtime.master.failures import Replayed, Site
from ..runtime.master.route import Route, route
from ..runtime.node.graphs.engines.registry import check_engine
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import GraphError
from ..session import current
from ..session.places import Place
from . import optimizer_steps
from .recorder import GraphRecorder
from .traced_numbers import Number


class Graph:
    """A recording of commands for any number of nodes. It is empty until a ``with dt.graph(g)`` block has filled it.

    >>> w, x = torch.ones(3, device="node:0"), torch.ones(3, device="node:0")
    >>> loss = (w * x).sum()            # once before
    >>> g = dt.Graph()
    >>> with dt.graph(g):
    ...     lr = g.number("lr", 0.5)
    ...     loss = (w * x).sum() * lr
    >>> g.replay()
    >>> loss.item()
    1.5
    >>> g.replay(lr=2.0)
    >>> loss.item()
    6.0
    """

    def __init__(self) -> None:
        self._recorded: GraphRecorder | None = None
        self._recording: GraphRecorder | None = None
        self._declared: dict[str, Any] = {}
        self._marked: list[tuple[str, Number]] = []
        self._numbers: Callable[[], tuple[float, ...]] | None = None

    def number(self, name: str, value: float) -> float:
        """Declares a number that each replay may change, ``g.replay(lr=0.05)``, and returns it; ``value`` until then.

        Call this in the ``with dt.graph(g)`` block, where arithmetic on the number and operations with it are recorded.
        Raises GraphError outside of the block.
        """
        if self._recording is None:
            raise GraphError(
                "numbers are declared in the graph's own block: with dt.graph(g): lr = g.number('lr', 0.1)"
            )
        self._declared[name] = float(value)
        declared = self._declared  # not the graph, which would live until the collector finds it in a circle
        number = self._recording.tape.root(float(value), lambda: declared[name])
        self._marked.append((name, number))
        return number

    def unreached(self) -> list[str]:
        """Returns the names of declared numbers that no recorded operation and no branch depends on."""
        return [name for name, number in self._marked if not number.tape.reached(number)]

    def replay(self, **numbers: float) -> None:
        """Runs the recorded commands on their nodes. Returns at once, as operations do.

        ``numbers`` are new values of declared numbers; each keeps its value until it is given another. Raises
        GraphError for an empty graph, a number that was not declared, while a graph is recorded, and where a branch of
        the program would go the other way with these numbers; NodeLost. An error of a recorded operation poisons the
        outputs that depend on it, and names the line that recorded it.
        """
        for name, value in numbers.items():
            if name not in self._declared:
                declared = ", ".join(self._declared) or "none"
                raise GraphError(f"the graph has no number {name!r}; declared are: {declared}")
            self._declared[name] = float(value)
        self.play()

    def engines(self) -> dict[int, list[tuple[str, str]]]:
        """Returns the engines that run the graph: by node, a list of (engine, reason) with one pair per program.

        A program is a sequence of commands between two transfers. The engine is the one that ran it last; the reason
        says why that is not the requested engine ("" while that is not known). Waits for the nodes. Raises GraphError
        for an empty graph; NodeLost.
        """
        recorder = self.recorded
        session, found = recorder.session, {}
        for rank in recorder.logs:
            place = session.places.at(rank)
            found[rank] = list(
                session.ask(place, c.GraphEngines, lambda id: c.Engines(id, recorder.id), here()).programs
            )
        return found

    def play(
        self,
        inputs: Sequence[int] = (),
        outputs: Sequence[int] = (),
        advance: bool = True,
        line: Callable[[int], Site | None] = here,
    ) -> None:
        """Issues one replay. ``inputs``: the refs of the tensors that replace the recorded inputs; ``outputs``: refs
        for its results. ``line``: finds the user's line that replays.

        Optimizers' counts of steps advance with ``advance``: not for a replay that will be undone.
        """
        recorder, compute = self.recorded, self._numbers
        assert compute is not None
        if route.get().recorder is not None:
            raise GraphError("a graph can't be replayed while another one is recorded")
        link, queue = recorder.session.link, recorder.queue
        values = compute()
        transfer = recorder.session.transfers.new_row(len(recorder.transfers)) if recorder.transfers else 0
        site = line(3)
        command = c.Replay(self.id, transfer, values, tuple(inputs), tuple(outputs))
        replayed = None if site is None else Replayed(site, recorder.sites)
        boxes = [log.node.outbox for log in recorder.logs.values()]
        for box in boxes if queue is None else [queue]:
            link.check(box)

        def put() -> bool:
            if advance:
                recorder.steps.advance()
            if queue is not None:
                return queue.add_many(command, replayed, recorder.size)
            link.sender.send_together([(rank, command, replayed) for rank in recorder.logs])
            return False

        link.interrupts.look()
        due = recorder.issue(put)
        if queue is None:
            link.sender.after_sending(boxes)
        elif due:
            link.sender.flush(queue)

    @property
    def recording(self) -> GraphRecorder:
        """The recorder of the block under way. Raises GraphError without one."""
        if self._recording is None:
            raise GraphError("the graph is not being recorded")
        return self._recording

    @property
    def recorded(self) -> GraphRecorder:
        """The recorder of the finished recording. Raises GraphError for an empty graph."""
        if self._recorded is None:
            raise GraphError("the graph is empty: record it first (with dt.graph(g): ...)")
        return self._recorded

    @property
    def id(self) -> int:
        """The recording's number on its nodes; 0 for an empty graph."""
        return self._recorded.id if self._recorded is not None else 0

    @uninterrupted
    def reset(self) -> None:
        """Drops the recording and the tensors that it holds. The graph can be recorded again. Returns at once."""
        recorder, self._recorded, self._numbers = self._recorded, None, None
        self._declared.clear()
        self._marked.clear()
        if recorder is not None:
            for log in recorder.logs.values():
                log.node.standing.pop(("graph", recorder.id), None)
                log.node.outbox.queue += (c.Discard(recorder.id), None)
                log.release_later(log.external)

    @uninterrupted
    def __del__(self) -> None:
        if hasattr(self, "_recorded"):  # else a call with wrong arguments has made it
            self.reset()  # takes no lock


class graph:
    """Records the commands of a ``with`` block into ``g`` instead of sending them. One block per graph, until
    ``g.reset()``.

    ``engine`` runs the graph on the nodes: "interpreter" (the default; its results are eager's to the bit), "inductor",
    "cudagraph" or "auto" (docs/GRAPHS.md).

    Tensors that the block makes have values after the first replay. Nothing in the block can wait: ``.item()``,
    ``.cpu()``, shapes that depend on data, ``dt.run`` and the first call of an operation that has to ask its node raise
    GraphError there. Local tensors that the block sends are sent once, while it is recorded.

    Raises ValueError for an engine that does not exist; to enter the block raises GraphError while another graph is
    recorded, or for a graph that has a recording; DisttensorError without a session.
    """

    def __init__(self, g: Graph, *, engine: str = "interpreter") -> None:
        self._graph = g
        self._engine = check_engine(engine)
        self._token: Token[Route] | None = None
        #: the inputs that a replay replaces by others, and the results that it renames: ref -> place
        self.inputs: dict[int, Place] = {}
        self.returned: dict[int, Place] = {}

    @uninterrupted
    def __enter__(self) -> Graph:
        if route.get().recorder is not None:
            raise GraphError("a graph is being recorded already")
        if self._graph._recorded is not None:
            raise GraphError("the graph has a recording already; g.reset() drops it")
        session = current.session()
        session.check_default_dtype()
        optimizer_steps.install()
        self._graph._recording = recorder = GraphRecorder(session, session.allow, self.inputs)
        self._routed = list(session.link.queues)  # there may be more nodes at the recording's end
        for outbox in self._routed:
            outbox.add_route(+1)
        self._token = route.set(route.get()._replace(recorder=recorder))
        return self._graph

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self._end_recording(error)
        if error is not None:
            return
        for name in self._graph.unreached():
            warnings.warn(
                f"the number {name!r} reached no recorded operation as it is, so that replays can't change anything by "
                "it (math.sqrt and others make ordinary numbers)",
                stacklevel=2,
            )
        for log in recorder.logs.values():
            recorder.session.link.sender.flush(log.node.outbox)

    @uninterrupted
    def _end_recording(self, error: BaseException | None) -> GraphRecorder:
        recorder = self._graph.recording
        assert self._token is not None
        route.reset(self._token)
        self._graph._recording = None
        for outbox in self._routed:
            outbox.add_route(-1)
        if error is not None:
            recorder.discard_recording()
        else:
            recorder.finish(self.returned, self._engine)
            self._graph._recorded, self._graph._numbers = recorder, recorder.tape.compiled()
        return recorder


__all__ = ["Graph", "Number", "graph"]
