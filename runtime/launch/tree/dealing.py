"""Which node goes where: ranks in blocks over hosts in their order, as mpirun deals them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .control import Start
from .host_starter import Branch


class RankAssignment:
    """Who sits where, and who has no seat yet. A rank that has ended gives its seat back."""

    def __init__(self) -> None:
        self.unseated: dict[int, Start] = {}
        self.pids: dict[int, int] = {}  #: rank -> pid, of those that run
        self._at: dict[int, tuple[Branch, int]] = {}  #: rank -> where, and its number there

    def ask(self, start: Start) -> None:
        """A node that wants a seat."""
        self.unseated[start.bundle.rank] = start

    def branch_of(self, rank: int) -> Branch | None:
        return self._at[rank][0] if rank in self._at else None

    def of(self, branch: Branch) -> tuple[int, ...]:
        """The ranks at a branch."""
        return tuple(rank for rank, (at, _) in self._at.items() if at is branch)

    def leave(self, rank: int) -> int:
        """It has ended; gives its pid, or 0."""
        self._at.pop(rank, None)
        return self.pids.pop(rank, 0)

    def free(self, branches: Iterable[Branch]) -> int:
        """How many seats nobody sits on, and nobody waits for."""
        there = sum(branch.slots for branch in branches if branch.gone is None)
        return max(0, there - len(self._at) - len(self.unseated))

    def deal(self, branches: Sequence[Branch]) -> list[tuple[Branch, Start]]:
        """RankAssignment for those that have none, in the order of ranks. Nobody sits down before there are seats for all that
        begin together, so that it does not matter who comes first."""
        wanted = self.unseated
        if not wanted or any(len(wanted) + len(self._at) < start.bundle.nodes for start in wanted.values()):
            return []
        if sum(branch.slots for branch in branches) < len(self._at) + len(wanted):
            return []
        taken = {branch: {seat for at, seat in self._at.values() if at is branch} for branch in branches}
        dealt: list[tuple[Branch, int]] = []
        for branch in self._in_order(branches):
            free = [seat for seat in range(branch.slots) if seat not in taken[branch]]
            for rank in self._choice(branch, sorted(wanted))[: len(free)]:
                self._at[rank] = branch, free.pop(0)
                dealt.append((branch, rank))
        return [(branch, self._complete(wanted.pop(rank), branches)) for branch, rank in dealt]

    def _in_order(self, branches: Sequence[Branch]) -> list[Branch]:
        """Those that were promised their ranks first; all of a host together, in the order of the hosts."""
        hosts = list(dict.fromkeys(branch.host for branch in branches))
        return sorted(branches, key=lambda b: (b.wish < 0, max(b.wish, 0), hosts.index(b.host)))

    def _choice(self, branch: Branch, ranks: list[int]) -> list[int]:
        """The ranks that this branch prefers, of those that are left."""
        ranks = [rank for rank in ranks if rank not in self._at]
        if branch.wish < 0:
            return ranks
        own = range(branch.wish, branch.wish + branch.slots)
        return [rank for rank in ranks if rank in own] + [rank for rank in ranks if rank not in own]

    def _complete(self, start: Start, branches: Sequence[Branch]) -> Start:
        """With its place among the nodes of its host."""
        branch, seat = self._at[start.bundle.rank]
        first, size = branch.place
        if not size:
            # several agents may be on one host: those before it come first
            mates = [b for b in branches if b.host == branch.host]
            first = sum(len(self.of(b)) for b in mates[: mates.index(branch)])
            size = sum(len(self.of(b)) for b in mates)
        bundle = msgspec.structs.replace(start.bundle, local_rank=first + seat, local_size=size)
        return msgspec.structs.replace(start, bundle=bundle)
