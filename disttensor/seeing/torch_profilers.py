"""torch's profiler on the nodes of a session, beside a profile.

script: begin    -->  start_profiler on each node, in its turn (runtime/node/torch_profiler.py)
script: collect  -->  stop_profiler, whose file comes as the bytes of a tensor, as other results do (torch_trace.py)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity

from ..runtime.master.failures import Site, short_line
from ..runtime.node import torch_profiler as at_node
from ..runtime.process import undertakings
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..session.session import Session
from ..tasks.calls import Calls
from .torch_trace import TorchTrace, trace_of

_log = logging.getLogger("disttensor")

#: Seconds in which nodes stop their profilers and have their files, where nobody has waited for what they are at.
FILES = 30.0


class TorchOptions(NamedTuple):
    """The options of torch's profilers."""

    activities: tuple[str, ...] | None  #: names of ProfilerActivity; None: all that a node has
    flags: Mapping[str, bool]  #: arguments of torch.profiler.profile


def torch_options(activities: Iterable[ProfilerActivity] | None, **flags: bool) -> TorchOptions:
    """Returns the options of these arguments. Raises TypeError for anything except activities."""
    if activities is None:
        return TorchOptions(None, flags)
    wanted = [*activities]
    for each in wanted:
        if not isinstance(each, ProfilerActivity):
            raise TypeError(f"activities has to be ProfilerActivity.CPU and the like, not {each!r}")
    return TorchOptions(tuple(each.name for each in wanted), flags)


class TorchProfilers:
    """The profilers of a session's nodes, from ``begin`` to ``end``."""

    def __init__(self, session: Session, options: TorchOptions, site: Site | None) -> None:
        """``site``: the line of the profile's begin."""
        self._session, self._options, self._site = session, options, site
        self._on: list[int] = []  #: the nodes that have one
        self._traces: list[TorchTrace] = []

    def begin(self) -> None:
        """Starts them, and waits until all are on. A node that is lost has none.

        Raises DisttensorError, which names the node, where one can't start; none is on then.
        """
        link = self._session.link
        self._on = [node.rank for node in link.nodes if node.lost is None]
        options = self._options
        with self._undertaking("starting torch's profiler"):
            found = self._call(self._on, lambda rank: (at_node.start_profiler, options.activities, options.flags))
        for rank, outcome in found.items():
            if isinstance(outcome, NodeLost):
                self._miss(rank, outcome)
            elif isinstance(outcome, Exception):
                raise DisttensorError(f"torch's profiler can't start on node {rank}: {_line(outcome)}") from outcome

    def collect(self, waits: bool) -> None:
        """Stops them, and fetches what they have recorded. Of a node whose part can't be had the log says why.

        ``waits``: nodes have done what was issued; else one that is at something has ``FILES`` seconds.
        """
        session = self._session
        about = {"world_size": len(session.nodes), "backend": session.channel.name}
        deadline = None if waits else session.link.clock.now() + FILES
        on, self._on = self._on, []  # what follows ends them, whether it is waited for or not
        with self._undertaking("fetching the timelines of torch's profiler"):
            found = self._call(on, lambda rank: (at_node.stop_profiler, {"rank": rank, **about}), deadline)
            for rank, outcome in found.items():
                if isinstance(outcome, Exception):
                    self._miss(rank, outcome)
                    continue
                try:
                    data, *told = outcome
                    self._traces.append(trace_of(rank, data.cpu().numpy().tobytes(), told))
                except DisttensorError as e:
                    self._miss(rank, e)

    def end(self) -> None:
        """Has nodes whose profilers are on, as nobody has collected what they have, end them. Does not wait."""
        on, self._on = self._on, []
        if not self._session.link.closed:
            self._call(on, lambda rank: (at_node.drop_profiler,), waits=False)

    def traces(self) -> list[TorchTrace]:
        """Returns what they have recorded, by node, once it was collected."""
        return sorted(self._traces, key=lambda each: each.rank)

    def _call(
        self,
        ranks: Iterable[int],
        what: Callable[[int], tuple[Any, ...]],
        deadline: float | None = None,
        waits: bool = True,
    ) -> dict[int, Any]:
        """Has each node run a function in its turn, whatever becomes of the others, and of this thread. Returns what it
        has returned or raised."""
        session, found = self._session, dict[int, Any]()
        with ExitStack() as ends:
            begun: dict[int, Calls] = {}
            for rank in ranks:
                calls = ends.enter_context(Calls(session, self._site, cancels=False))
                try:
                    fn, *args = what(rank)
                    calls.add(session.places.at(rank).one, fn, *args)
                    calls.begin_calls(draws=False)
                    begun[rank] = calls
                except DisttensorError as e:
                    found[rank] = e
            for rank, calls in begun.items() if waits else ():
                (found[rank],) = calls.outcomes(deadline)
        return found

    def _undertaking(self, what: str) -> Any:
        return undertakings.mine.during(lambda: what, short_line(self._site))

    def _miss(self, rank: int, error: Exception) -> None:
        self._on = [each for each in self._on if each != rank]
        self._traces.append(TorchTrace(rank, missing=_line(error)))
        _log.warning("node %d is not in the timeline of torch's profiler: %s", rank, _line(error))


def file_of_node(path: str, rank: int) -> str:
    """Returns the name of a node's own file beside that of all: "t.node1.json.gz" of "t.json.gz"."""
    suffix = next((each for each in (".json.gz", ".json", ".gz") if path.endswith(each)), "")
    return f"{path.removesuffix(suffix)}.node{rank}{suffix}"


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
