"""Batches that nodes read: the script knows their shapes, and gets none of their bytes.

    a node's workers   processes that read samples (runtime/node/samples.py)
    a thread there     takes ``depth`` batches from them (runtime/node/readers.py)
    the script         waits until it knows the shapes of the next batch; has the nodes give its tensors refs, and tell
                       which batches they have by then

Nodes do that in the order of their commands, so the script gets ``depth`` batches ahead of them, and no more; and they
wait for a batch only once they have done what came before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..dispatch.call_site import here
from ..proxy.proxy import proxy
from ..runtime.master.route import waits
from ..runtime.node import readers
from ..runtime.node.samples import SamplePlan
from ..runtime.protocol.batches import Geometry, rebuild
from ..runtime.protocol.errors import NodeLost, ProtocolError
from ..tasks import Each
from ..tasks.calls import Calls, Issued, first_of
from ..tasks.targets import Targets
from .positions import Positions
from .ranks import Ranks


class DatasetThere(Positions):
    """Batches of a dataset that nodes have, each with a DataLoader for its own samples."""

    def __init__(self, dataset: Any, ranks: Ranks, depth: int, plan: SamplePlan, options: dict[str, Any]) -> None:
        super().__init__(dataset, ranks, depth, plan, options)
        nodes = [place.node for place in ranks.places]
        if len(set(nodes)) < len(nodes):
            raise ValueError(f"distribute(at='node'): {ranks} have one node twice; at='script' sends to its devices")
        self._kept: list[Any] = []  #: the tokens of the dataset on the nodes

    def batches(self, state: Mapping[str, Any]) -> Iterator[list[Any]]:
        plan, skip = self.planned(state)
        ranks = self.ranks
        if not self._kept:  # with the first loop
            self._kept = _run(ranks, readers.keep_dataset, self.dataset, self.options)
        devices = ["cpu" if place.hello.simulated else place.name for place in ranks.places]
        arguments = (Each(self._kept), plan, Each(ranks.of), skip, self.depth, Each(devices))
        loop = _Loop(ranks, _run(ranks, readers.begin_loop, *arguments))
        position = state["position"]
        try:
            while any(told := loop.next_reports()):
                position = self.after(position)
                yield self._issue_batch(told, loop, position)  # no name here keeps the batch alive
        except (Exception, KeyboardInterrupt):
            loop.cancel()
            raise
        finally:
            loop.end()

    def _issue_batch(self, told: Sequence[Any], loop: _Loop, position: int) -> list[Any]:
        """Has the nodes give a batch. Returns what has changed, and the batch."""
        made, outs = self._made(told)
        loop.take_batches([one is not None for one in told], [False] * len(told), outs)
        real = [0 if one is None else one[1] for one in told]
        return [{"position": position, "counts": self._by_rank(real)}, *made]

    def _by_rank(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the value of each rank, of those of all places."""
        return tuple(values[self.ranks.of.index(rank)] for rank in range(self.ranks.size))

    def _made(self, told: Sequence[Any]) -> tuple[list[Any], list[tuple[int, ...]]]:
        """Returns [a batch], and the refs that its tensors have on each node."""
        if self.ranks.mesh is not None:
            batch, refs = self._on_mesh(told)
            return [batch], [refs] * len(told)
        each = [(None, ()) if one is None else self._at(i, one) for i, one in enumerate(told)]
        batches = [batch for batch, _ in each]
        return [batches if self.ranks.many else batches[0]], [refs for _, refs in each]

    def _at(self, index: int, told: Any) -> tuple[Any, tuple[int, ...]]:
        refs: list[int] = []

        def tensor(path: str, geometries: Sequence[Geometry]) -> Any:
            handle = self.ranks.handle(*geometries[0], self.ranks.places[index])
            refs.append(handle.ref)
            return proxy(handle)

        return rebuild([told[2]], tensor, lambda path, values: values[0]), tuple(refs)

    def _on_mesh(self, told: Sequence[Any]) -> tuple[Any, tuple[int, ...]]:
        mesh, refs = self.ranks.mesh, list[int]()
        assert mesh is not None
        if None in told:
            raise ValueError(
                f"distribute(uneven='none'): {self.ranks.where(list(told).index(None))} has no samples in the last "
                "batch, and ranks of a mesh have one shape; uneven='drop' or 'pad'"
            )

        def tensor(path: str, geometries: Sequence[Geometry]) -> Any:
            for i, geometry in enumerate(geometries):
                if geometry != geometries[0]:
                    raise ValueError(
                        f"distribute: {path} is {geometries[0][0]} {geometries[0][1]} on {self.ranks.where(0)}, and "
                        f"{geometry[0]} {geometry[1]} on {self.ranks.where(i)}; ranks of a mesh have one shape: let "
                        "collate_fn pad to one, or give a list of nodes"
                    )
            handle = self.ranks.handle(*geometries[0], mesh)
            refs.append(handle.ref)
            return proxy(handle)

        rows = self._by_rank([one[0] for one in told])

        def plain(path: str, values: Sequence[Any]) -> Any:
            mine = self._by_rank(values)
            if all(isinstance(v, (list, tuple)) and len(v) == n for v, n in zip(mine, rows, strict=True)):
                return type(mine[0])(x for value in mine for x in value)
            for rank, value in enumerate(mine):
                if value != mine[0]:
                    raise ValueError(
                        f"distribute: {path} is {mine[0]!r:.60} at rank 0 and {value!r:.60} at rank {rank}; on a mesh "
                        "it is one value, or a list with an entry for each sample; a tensor can differ"
                    )
            return mine[0]

        return rebuild([one[2] for one in told], tensor, plain), tuple(refs)


def _run(ranks: Ranks, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Does what ``run`` does for a function that draws no random numbers: also on a stream of a node in a mesh."""
    waits("a loader of nodes")
    targets = Targets(ranks.session, ranks.targets)
    try:
        with Calls(ranks.session, here(3)) as calls:
            for i, place in enumerate(targets.places):
                calls.add(place, fn, *(x.values[i] if isinstance(x, Each) else x for x in args))
            calls.begin_calls(draws=False)
            found = calls.outcomes()
    except NodeLost as error:  # before any of them has begun
        raise targets.located(error, error.rank) from None
    failed = [
        targets.located(x, p.node) for x, p in zip(found, targets.places, strict=True) if isinstance(x, Exception)
    ]
    if failed:
        raise first_of(failed)
    return found


class _Loop:
    """A loop on each node, as the script sees them."""

    def __init__(self, ranks: Ranks, tokens: list[Any]) -> None:
        self._ranks, self._tokens = ranks, tokens
        self._known: list[deque[Any]] = [deque() for _ in tokens]  #: what each node has told of its next batches
        self._asked: deque[Issued] = deque()

    def take_batches(self, give: list[bool], wait: list[bool], outs: Sequence[tuple[int, ...]]) -> None:
        """Has each node give the oldest batch, if it is to, and tell of later ones."""
        session, targets = self._ranks.session, Targets(self._ranks.session, self._ranks.targets)
        arguments = (Each(self._tokens), Each(give), Each(wait))
        self._asked.append(Issued(session, targets, readers.take_batch, arguments, outs, here()))

    def next_reports(self) -> list[Any]:
        """Returns what the nodes have told of the next batch, each of its own. Waits until all have. Raises the error
        for which one could not read it."""
        while not all(self._known):
            if not self._asked:
                none = [False] * len(self._tokens)
                self.take_batches(none, [not known for known in self._known], [()] * len(self._tokens))
            for known, told in zip(self._known, self._asked.popleft().results(), strict=True):
                known += _checked(told)
        if any(known[0] is False for known in self._known):
            raise self._error()
        return [known.popleft() if known[0] is not None else None for known in self._known]  # after the end is the end

    def _error(self) -> Exception:
        try:
            _run(self._ranks, readers.read_batch, Each(self._tokens))
        except Exception as error:
            return error.with_traceback(None)  # whose frames have tokens: the loops would last as long as the error
        return ProtocolError("a node has said that it could not read a batch, and has no error")

    def cancel(self) -> None:
        """Has no node wait for a batch any more."""
        for issued in self._asked:
            issued.cancel()

    def end(self) -> None:
        """Ends the loops on the nodes, also where the frames of an error keep this one."""
        self._tokens.clear()
        self._asked.clear()


def _checked(told: Any) -> list[Any]:
    """Returns what a node has told of batches: that of ``Reader.news``. Raises ProtocolError for anything else."""
    match told:
        case (list() as batches, list()):
            for one in batches:
                match one:
                    case None | False | (int(), int(), list()):
                        continue
                raise ProtocolError(f"a node has said {one!r:.60} of a batch")
            return batches
    raise ProtocolError(f"a node has said {told!r:.60} of batches")
