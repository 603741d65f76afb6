"""Chooses the algorithm of a collective: one table, by bytes and by the number of ranks. Which algorithms there are
stands in protocol/collective_kinds.py.

The numbers are those of tools/bench/collectives.py with the channels shm and tcp on one host, where a message costs
as much as to copy some hundred KiB: few messages win, and short ones cost more than what they overlap. Between hosts,
where a link is slower than that, halves of these numbers would do as well.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The bytes of one message of a pipelined algorithm.
CHUNK = 4 << 20


@dataclass(frozen=True)
class Way:
    """An algorithm of a collective with its parameters: ``Way("tree", base=4, chunk=1 << 20)``.

    Collectives take it as ``algorithm``, and raise ValueError for an algorithm that they do not have.

    Attributes:
        algorithm: the name of the algorithm, such as "ring" or "tree" (docs/COLLECTIVES.md).
        base: the number of children of each rank in a tree; 1 makes it a chain. Other algorithms do not use it.
        chunk: the bytes of one message of a pipelined algorithm.
    """

    algorithm: str
    base: int = 2
    chunk: int = CHUNK


#: The name of the algorithm that is the channel's own.
NATIVE = "native"

_ALWAYS = 1 << 62

#: collective -> (at most so many bytes, at most so many ranks, way); the first that fits.
TABLE: dict[str, list[tuple[int, int, Way]]] = {
    "all_reduce": [
        (4 << 20, 2, Way("all")),
        (4 << 20, _ALWAYS, Way("doubling")),
        (_ALWAYS, 8, Way("direct")),
        (_ALWAYS, _ALWAYS, Way("ring")),
    ],
    "reduce": [(1 << 20, _ALWAYS, Way("tree", 2)), (_ALWAYS, 2, Way("tree", 2)), (_ALWAYS, _ALWAYS, Way("scatter"))],
    "broadcast": [(1 << 20, _ALWAYS, Way("tree", 2)), (_ALWAYS, _ALWAYS, Way("tree", 1))],
    "all_gather": [(_ALWAYS, 8, Way("direct")), (_ALWAYS, _ALWAYS, Way("ring"))],
    "reduce_scatter": [(_ALWAYS, 8, Way("direct")), (_ALWAYS, _ALWAYS, Way("ring"))],
}


def ways(collective: str, ranks: int) -> list[Way]:
    """Returns the algorithms that ``choose`` may return for this number of ranks, whatever the bytes."""
    found: list[Way] = []
    for most, many, way in TABLE.get(collective, ()):
        if ranks <= many:
            found.append(way)
            if most == _ALWAYS:
                return found
    return [*found, Way("direct")]


def choose(collective: str, nbytes: int, ranks: int) -> Way:
    """Returns the algorithm of ``collective`` for ``nbytes`` in total (all ranks' parts, where they differ)."""
    return next(
        (way for most, many, way in TABLE.get(collective, ()) if nbytes <= most and ranks <= many), Way("direct")
    )
