"""The kinds of collectives: a row for each, which both ends go by.

A kind needs, beside its row, a function that runs it on a node (``node/collectives.py: RUNNERS``) and one that computes
it here, to compare (``disttensor/verify/references.py: REFERENCES``). ``tests/unit/test_collective_kinds.py`` says what
is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of collective."""

    name: str  #: in the command
    called: str = ""  #: the name that users have for it, as in dt.channels.select; empty: ``name``
    algorithms: tuple[str, ...] = ()  #: those that it has, if several, or several ways to use one
    reduces: bool = False  #: results are sums (or other reductions), whose last bits depend on their order
    shares: bool = False  #: a node may have several tensors, or be in it with tensors of another length
    values: bool = True  #: it writes tensors

    @property
    def users_name(self) -> str:
        """The name that users have for it."""
        return self.called or self.name


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "all_reduce",
            algorithms=("all", "doubling", "halving", "direct", "ring", "tree"),
            reduces=True,
            shares=True,
        ),
        Kind("reduce", algorithms=("tree", "scatter"), reduces=True, shares=True),
        Kind("broadcast", algorithms=("tree",), shares=True),
        Kind("all_gather", algorithms=("direct", "ring"), shares=True),
        Kind("gather"),
        Kind("scatter"),
        Kind("reduce_scatter", algorithms=("direct", "ring"), reduces=True),
        Kind("all_to_all"),
        Kind("shift", called="sendreceive"),
        Kind("barrier", values=False),
    )
}

#: The names that users have for collectives -> their algorithms.
ALGORITHMS = {kind.users_name: kind.algorithms for kind in KINDS.values()}
