"""Deals nodes to hosts: ranks in blocks over hosts in their order, as mpirun does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .control import Start
from .host_starter import Branch


class RankAssignment:
    """The places of ranks, and the ranks that have none yet. A rank that has ended gives its place back."""

    def __init__(self) -> None:
        self.unassigned: dict[int, Start] = {}
        self.pids: dict[int, int] = {}  #: rank -> pid, of those that run
        self._at: dict[int, tuple[Branch, int]] = {}  #: rank -> branch, and its place there
        self._used: set[tuple[Branch, int]] = set()  #: the places that any rank has had

    def ask(self, start: Start) -> None:
        """Adds a node that needs a place."""
        self.unassigned[start.bundle.rank] = start

    def withdraw(self, rank: int) -> bool:
        """Takes back the wish of a rank for a place; returns whether it had none yet."""
        return self.unassigned.pop(rank, None) is not None

    def branch_of(self, rank: int) -> Branch | None:
        return self._at[rank][0] if rank in self._at else None

    def of(self, branch: Branch) -> tuple[int, ...]:
        """Returns the ranks at a branch."""
        return tuple(rank for rank, (at, _) in self._at.items() if at is branch)

    def leave(self, rank: int) -> int:
        """Removes a rank that has ended; returns its pid, or 0."""
        self._at.pop(rank, None)
        return self.pids.pop(rank, 0)

    def free(self, branches: Iterable[Branch]) -> int:
        """Returns the number of places that no rank has, and none waits for."""
        there = sum(branch.slots for branch in branches if branch.gone is None)
        return max(0, there - len(self._at) - len(self.unassigned))

    def deal(self, branches: Sequence[Branch]) -> list[tuple[Branch, Start]]:
        """Assigns places to the ranks that have none, in their order.

        No rank gets a place before there are places for all that begin together, so that it does not matter which host
        comes first. Places that no rank has had come first: what a node has died of may be where it was.
        """
        wanted = self.unassigned
        if not wanted or any(len(wanted) + len(self._at) < start.bundle.nodes for start in wanted.values()):
            return []
        if sum(branch.slots for branch in branches) < len(self._at) + len(wanted):
            return []
        taken = {branch: {slot for at, slot in self._at.values() if at is branch} for branch in branches}
        dealt: list[tuple[Branch, int]] = []
        places = [(b, slot) for b in self._in_order(branches) for slot in range(b.slots) if slot not in taken[b]]
        for branch, slot in sorted(places, key=self._used.__contains__):
            for rank in self._choice(branch, sorted(wanted))[:1]:
                self._at[rank] = branch, slot
                self._used.add((branch, slot))
                dealt.append((branch, rank))
        return [(branch, self._complete(wanted.pop(rank), branches)) for branch, rank in dealt]

    def _in_order(self, branches: Sequence[Branch]) -> list[Branch]:
        """Orders branches: those with a preferred first rank first; all of a host together, in the hosts' order."""
        hosts = list(dict.fromkeys(branch.host for branch in branches))
        return sorted(branches, key=lambda b: (b.first_rank < 0, max(b.first_rank, 0), hosts.index(b.host)))

    def _choice(self, branch: Branch, ranks: list[int]) -> list[int]:
        """Returns the ranks that are left, in the order in which this branch prefers them."""
        ranks = [rank for rank in ranks if rank not in self._at]
        if branch.first_rank < 0:
            return ranks
        own = range(branch.first_rank, branch.first_rank + branch.slots)
        return [rank for rank in ranks if rank in own] + [rank for rank in ranks if rank not in own]

    def _complete(self, start: Start, branches: Sequence[Branch]) -> Start:
        """Returns the Start with the node's place among the nodes of its host."""
        branch, slot = self._at[start.bundle.rank]
        first, size = branch.place
        if not size:
            # several agents may be on one host: those before it come first
            same_host = [b for b in branches if b.host == branch.host]
            first = sum(len(self.of(b)) for b in same_host[: same_host.index(branch)])
            size = sum(len(self.of(b)) for b in same_host)
        bundle = msgspec.structs.replace(start.bundle, local_rank=first + slot, local_size=size)
        return msgspec.structs.replace(start, bundle=bundle)
