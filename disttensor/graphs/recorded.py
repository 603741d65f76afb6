"""A function's commands, recorded with stand-ins for its tensors, and played with others in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..dispatch import seen_at
from ..dispatch.call_site import here
from ..dispatch.lazy_views import materialise
from ..proxy.meta import Handle, Meta, Shared, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.master.failures import Site
from ..session.places import Place
from .graphs import Graph, graph
from .traced_numbers import Tape


@dataclass
class _Made:
    """A result that each replay makes."""

    index: int  #: of its tensor, among all that each replay makes
    meta: Meta
    place: Place | None  #: where the result is seen: one of the tensor's nodes; None for the tensor's own place


@dataclass
class _Given:
    """A result that is one of the arguments."""

    leaf: int
    place: Place | None  #: where it is seen, as above


class Recorded:
    """A recorded function."""

    def __init__(self, graph: Graph, tensors: list[int], results: list[Any]) -> None:
        self.graph = graph
        #: what the function has returned, with a `_Made` or a `_Given` for each tensor that a replay makes or is given
        self.results = results
        self._tensors = tensors  #: the indices of the arguments that are inputs
        metas = {r.index: r.meta for r in results if type(r) is _Made}
        self._metas = [metas[k] for k in range(len(metas))]
        tensors_made = [(i, r.index, r.place) for i, r in enumerate(results) if type(r) is _Made]
        tensors_given = [(i, r.leaf, r.place) for i, r in enumerate(results) if type(r) is _Given]
        #: the tensors among the results, by their indices: those that a replay makes, and arguments
        self._made = [(i, k) for i, k, _ in tensors_made]
        self._given = [(i, k) for i, k, _ in tensors_given]
        self._elsewhere = [(i, place) for i, _, place in (*tensors_made, *tensors_given) if place is not None]

    def play(self, leaves: Sequence[Any], advance: bool = True, line: Callable[[int], Site | None] = here) -> list[Any]:
        """Replays the function on these arguments, and returns its results. ``advance``, ``line``: as for
        ``Graph.play``."""
        refs = [new_ref() for _ in self._metas]
        made = [proxy(Handle(ref, meta)) for ref, meta in zip(refs, self._metas, strict=True)]
        self.graph.play(self.refs(leaves), refs, advance, line)
        results = list(self.results)
        for i, k in self._made:
            results[i] = made[k]
        for i, k in self._given:
            results[i] = leaves[k]
        for i, place in self._elsewhere:
            results[i] = seen_at.alias(results[i], place)
        return results

    def refs(self, leaves: Sequence[Any]) -> list[int]:
        """Returns the refs of the inputs among these arguments, in the order of the recording's."""
        handles = [leaves[i]._h for i in self._tensors]
        return [handle.ref or materialise(handle) for handle in handles]


def record(
    function: Callable[[list[Any], Tape], list[Any]],
    leaves: Sequence[Any],
    tensors: Iterable[int],
    engine: str,
    distinct: bool = False,
) -> Recorded:
    """Records a function of these arguments.

    ``function`` gets a list of them, with a stand-in for each of ``tensors``, and the tape of numbers. A tensor
    that is given twice has one stand-in, unless calls of this recording may give two ``distinct`` ones. Raises
    GraphError as ``graph``, and what the function raises.
    """
    stands = list(leaves)
    given: dict[int, int] = {}  # a stand-in's ref -> its leaf
    first: dict[int, Any] = {}
    inputs: dict[int, Place] = {}
    for i in tensors:
        key = i if distinct else id(leaves[i]._h)
        if key not in first:
            handle = Handle(new_ref(), leaves[i]._h.meta)
            first[key] = proxy(handle)
            given[handle.ref] = i
            inputs[handle.ref] = handle.meta.place
        stands[i] = first[key]
    g = Graph()
    block = graph(g, engine=engine)
    block.inputs = inputs
    with block:
        first.clear()
        results = function(stands, g.recording.tape)
        stands.clear()
        found, block.returned = _results(results, given, g)
        del results  # a tensor that nothing else holds is not an output of its own
    return Recorded(g, list(given.values()), found)


def _results(results: list[Any], given: dict[int, int], g: Graph) -> tuple[list[Any], dict[int, Place]]:
    """Returns what stands for the results, and the refs of those that each replay makes, with their places."""
    returned: dict[int, Place] = {}
    found: list[Any] = []
    for leaf in results:
        if isinstance(leaf, DistributedTensor):
            handle = leaf._h
            ref = handle.ref or materialise(handle)
            seen = handle.meta.place
            while type(handle) is Shared:  # a shard of a mesh's tensor: the whole of it is what a replay makes
                handle = handle.owner
            place = None if seen is handle.meta.place else seen
            if ref in given:
                leaf = _Given(given[ref], place)
            elif g.recording.makes(seen, ref):
                returned.setdefault(ref, handle.meta.place)
                leaf = _Made(list(returned).index(ref), handle.meta, place)
        found.append(leaf)
    return found, returned
