"""The comparison that names the slow node of a mesh, and why it is: the numbers of its nodes, window by window.

    every WINDOW seconds, each node from outside (a glance)       --> MeshWatch.look --> Slow: who, by how much, why
    SlowWatch (slow_watch.py) asks for the glances, finds the line, and tells

What is measured. Ranks that meet in collectives have one step time. They differ in how much of it each one works: the
slow one works longest, and waits least. So a node notes twice a second, in a page of memory that is read without it,
for how many seconds it has worked so far: what it already counts per message, without the time in collectives and in
waits for tensors. Nothing is counted per command, and nothing more per message. Beside that stands what the kernel
counts of its process: time on cores, time in which it had work and no core (schedstat), time for which its control
group was throttled, pages that came from a disk; and the bytes that it has sent to other nodes, with the seconds of
that. A glance costs the node nothing, and the fork server above it a few reads in /proc. Only nodes of one mesh are
compared, with others that were issued about as many commands.

When one is named. In a window a node is behind if its work has taken at least BEHIND more than that of the median of
the others, and at least LOST of the window; likewise if its sends have taken so much longer, of as many bytes. It is
named when it was furthest behind in WINDOWS of the last OF windows (MORE in a mesh of less than four), and is behind
over all of them together, further from the median than the others are among themselves (SPREAD times), and for sends
well further than the next one. Where nodes differ by chance only, each is as likely as the others to be the furthest
behind, so that of N nodes any one is named by chance, after a given window, with a probability of at most

    N * comb(OF, WINDOWS) * (q / N) ** WINDOWS        q: that of somebody being behind in one window

For eight nodes and q = 1/10, which is noise of some 8 % of a window, that is 9e-10. With q = 3/4, noise of 20 %, it is
2e-4, and hardly ever is such a node behind over all of the windows together as well. For two nodes (8 of 10 windows) it
is 4e-9 with q = 1/10. Noise that lasts for ten seconds does not count as noise there: SPREAD is for what all nodes
share.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple, TypeAlias

from ..runtime.host.process_use import ProcessUse
from ..session.holdings import size

#: Seconds between two looks at a mesh.
WINDOW = 1.25
#: The windows in which a node was furthest behind when it is named, and of how many these are; in a mesh of less than
#: four nodes so many more of both.
WINDOWS, OF, MORE = 6, 8, 2
#: The part by which its work takes longer than that of the median of the others.
BEHIND = 0.2
#: The least part of the window that this is.
LOST = 0.05
#: How many times as far from the median as the others are.
SPREAD = 3.0
#: The windows in a row in which a node is not half so much behind, after which it has recovered.
RECOVERED = 10
#: Nobody can be behind in a window of which the median node has worked more than this share, as in a step of many
#: windows: such a one is left out.
ALWAYS = 1 / (1 + BEHIND)
#: The most seconds that a window which counts lies back.
LATELY = 30.0
#: The most by which the numbers of commands of nodes that do the same differ.
OTHERS = 0.1
#: The most by which the bytes differ that nodes have sent whose sends are compared.
BYTES = 0.25
#: The least page faults a second that are told.
FAULTS = 20.0
#: The standard deviation of a normal distribution whose median absolute deviation is 1.
_NORMAL = 1.4826

Measure: TypeAlias = Literal["work", "sends"]
_MEASURES: tuple[Measure, ...] = ("work", "sends")
#: The rank of nobody.
NOBODY = -1


class NodeLook(NamedTuple):
    """A node as it was seen once."""

    use: ProcessUse
    commands: int  #: how many had been issued to it


class Slow(NamedTuple):
    """A node that is slow."""

    rank: int
    behind: float  #: by which part it takes longer than the median of the others
    cause: str  #: in words; "" where nothing but its own commands is known to take longer
    peer: int  #: the node that stands for the others: of these the median one
    measure: Measure  #: in what it is behind


class _Part(NamedTuple):
    """The work of a node between two looks."""

    rank: int
    worked: float  #: the share of the time
    seconds: float
    commands: int
    sent: int
    sending: float
    ran: float  #: the share of the time, on a core
    delayed: float  #: the share of the time, with work and no core
    throttled: float  #: the share of the time
    faults: float  #: a second
    swapped: int


def _part(rank: int, before: NodeLook, now: NodeLook) -> _Part | None:
    """Returns what a node was at; None where it has not counted anything new."""
    old, new = before.use, now.use
    seconds = new.tally.at - old.tally.at
    if not (WINDOW / 4 < seconds < 1e6 and old.tally.at > 0):
        return None
    return _Part(
        rank,
        min(1.0, max(0.0, (new.tally.worked - old.tally.worked) / seconds)),
        seconds,
        now.commands - before.commands,
        max(0, new.tally.sent - old.tally.sent),
        max(0.0, new.tally.sending - old.tally.sending),
        min(1.0, max(0.0, (new.ran - old.ran) / seconds)),
        min(1.0, max(0.0, (new.delayed - old.delayed) / seconds)),
        min(1.0, max(0.0, (new.throttled - old.throttled) / seconds)),
        max(0.0, (new.faults - old.faults) / seconds),
        new.swapped,
    )


class _Excess(NamedTuple):
    """By how much a node is behind in one measure."""

    rank: int
    behind: float
    lost: float  #: which part of the time this is
    spread: float  #: how far the others are from their median, in the same part
    margin: float  #: how far it is from the next one
    others: tuple[_Part, ...]

    @property
    def counts(self) -> bool:
        return self.behind >= BEHIND and self.lost >= LOST

    def is_far(self, measure: Measure) -> bool:
        """Returns whether it counts, and stands out: by its sends from each other one, as in a ring over several hosts
        the last node of each sends by the network, and the others do not."""
        return self.counts and (
            self.lost >= SPREAD * self.spread if measure == "work" else self.margin >= self.lost / 4
        )


def _alike(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Returns the nodes by the numbers of their commands: those that do the same together."""
    found: list[list[_Part]] = []
    for it in sorted(parts, key=lambda each: each.commands):
        if found and it.commands <= (1 + OTHERS) * found[-1][0].commands:
            found[-1].append(it)
        else:
            found.append([it])
    return found


def _value(measure: Measure, it: _Part) -> float:
    return it.worked if measure == "work" else it.sending / it.seconds


def _excess(measure: Measure, it: _Part, alike: Sequence[_Part]) -> _Excess | None:
    """Compares a node with those of the others that do the same; None where there is nothing to compare."""
    others = tuple(each for each in alike if each is not it)
    value = _value(measure, it)
    if not others or not value:
        return None
    usual = [_value(measure, each) for each in others]
    middle = median(usual)
    lost, spread = value - middle, _NORMAL * median(abs(each - middle) for each in usual)
    # how much longer all of it takes: sends are beside what else a node does, or nearly all of it
    behind = value / max(middle, 1e-12) - 1 if measure == "work" else lost / (1 - min(lost, 0.9))
    return _Excess(it.rank, behind, lost, spread, value - max(usual), others)


def _excess_of(measure: Measure, rank: int, parts: Sequence[_Part]) -> tuple[_Part, _Excess] | None:
    """Returns what a node was at, and by how much it is behind."""
    for alike in _alike(parts):
        for it in alike:
            if it.rank == rank and (excess := _excess(measure, it, alike)) is not None:
                return it, excess
    return None


class MeshWatch:
    """The nodes of one mesh, look by look."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        more = MORE if len(self.ranks) < 4 else 0
        self._needed, of = WINDOWS + more, OF + more
        self._looks: deque[Mapping[int, NodeLook]] = deque(maxlen=self._needed + 1)
        #: by measure, of the last windows: when each was, and who was furthest behind; NOBODY: nobody was
        self._leading: dict[Measure, deque[tuple[float, int]]] = {it: deque(maxlen=of) for it in _MEASURES}
        self._slow: dict[int, tuple[Measure, int]] = {}  #: by rank: and in how many windows it was not behind since

    def __repr__(self) -> str:
        return f"<MeshWatch of {len(self.ranks)} nodes slow={sorted(self._slow)}>"

    def rest(self) -> None:
        """Forgets the last windows: the nodes have had nothing to do."""
        self._looks.clear()
        for leading in self._leading.values():
            leading.clear()

    def look(self, seen: Mapping[int, NodeLook]) -> list[Slow]:
        """Takes the nodes as they are seen now. Returns those that are slow."""
        if not self._looks:
            self._looks.append(seen)
            return []
        parts = self._parts(self._looks[-1], seen)
        if len(parts) < 2:
            self.rest()
            self._looks.append(seen)
            return []
        now = max(it.use.tally.at for it in seen.values())
        for measure in _MEASURES:
            self._count(measure, parts, now)
        self._looks.append(seen)
        return self._verdicts(seen)

    @staticmethod
    def _parts(before: Mapping[int, NodeLook], seen: Mapping[int, NodeLook]) -> list[_Part]:
        found = (_part(rank, before[rank], now) for rank, now in seen.items() if rank in before)
        return [it for it in found if it is not None]

    def _count(self, measure: Measure, parts: Sequence[_Part], now: float) -> None:
        """Notes who is furthest behind, and who of the slow ones is not behind any more."""
        tops = ((max(alike, key=lambda it: _value(measure, it)), alike) for alike in _alike(parts) if len(alike) > 1)
        found = [it for top, alike in tops if (it := _excess(measure, top, alike)) is not None]
        first = max(found, key=lambda it: it.behind, default=None)
        leading = self._leading[measure]
        while leading and now - leading[0][0] > LATELY:
            leading.popleft()
        if first is not None and first.counts:
            leading.append((now, first.rank))
        elif found and (measure == "sends" or median(it.worked for it in parts) <= ALWAYS):
            leading.append((now, NOBODY))
        for rank, (by, windows) in list(self._slow.items()):
            if by == measure:
                pair = _excess_of(measure, rank, parts)
                is_behind = pair is not None and pair[1].behind >= BEHIND / 2 and pair[1].lost >= LOST / 2
                self._slow[rank] = by, 0 if is_behind else windows + 1
                if self._slow[rank][1] >= RECOVERED:
                    del self._slow[rank]

    def _leader(self, measure: Measure) -> tuple[int, int]:
        """Returns who was furthest behind in most of the last windows, and in how many."""
        counts = Counter(rank for _, rank in self._leading[measure] if rank != NOBODY)
        return next(iter(counts.most_common(1)), (NOBODY, 0))

    def _verdicts(self, seen: Mapping[int, NodeLook]) -> list[Slow]:
        parts = self._parts(self._looks[0], seen)
        for measure in _MEASURES:
            rank, windows = self._leader(measure)
            # sends wait for who is late to receive: where somebody's work is, they say nothing
            if windows >= self._needed and not (measure == "sends" and self._leader("work")[1] >= self._needed / 2):
                pair = _excess_of(measure, rank, parts)
                if pair is not None and pair[1].is_far(measure) and (measure == "work" or _sent_alike(*pair)):
                    self._slow.setdefault(rank, (measure, 0))
        found = (self._verdict(rank, by, parts) for rank, (by, _) in self._slow.items())
        return [it for it in found if it is not None]

    @staticmethod
    def _verdict(rank: int, measure: Measure, parts: Sequence[_Part]) -> Slow | None:
        pair = _excess_of(measure, rank, parts)
        if pair is None:
            return None
        it, excess = pair
        others = sorted(excess.others, key=lambda each: each.worked)
        cause = _slow_sends(it, excess) if measure == "sends" else _cause(it, excess)
        return Slow(rank, max(0.0, excess.behind), cause, others[len(others) // 2].rank, measure)


def _cause(it: _Part, excess: _Excess) -> str:
    """Returns why a node's work takes longer, in words, as far as its host tells; what it is of several comes first."""

    def beyond(value: Callable[[_Part], float]) -> float:
        return value(it) - median(map(value, excess.others))

    matters = max(LOST, excess.lost / 3)
    if beyond(lambda each: each.throttled) >= matters:
        return f"throttled by its cgroup for {it.throttled:.0%} of the time"
    # who waits for the others may do so on a core, or for one, so their times without one say little
    stood = it.worked - it.ran - it.delayed
    if it.delayed >= matters and max(stood, beyond(lambda each: each.ran)) < excess.lost / 2:
        return f"without a core for {it.delayed:.0%} of the time, as other processes run there"
    if beyond(lambda each: each.faults) >= FAULTS:
        swapped = f", {size(it.swapped)} of it are in swap" if it.swapped else ""
        return f"its memory comes from a disk: {it.faults:.0f} page faults a second{swapped}"
    return ""


def _sent_alike(it: _Part, excess: _Excess) -> bool:
    """Returns whether a node has sent about as much as the others."""
    usual = median(each.sent for each in excess.others)
    return abs(it.sent - usual) <= BYTES * max(it.sent, usual)


def _slow_sends(it: _Part, excess: _Excess) -> str:
    mine = it.sent / it.sending if it.sending else 0.0
    usual = median(each.sent / each.sending if each.sending else 0.0 for each in excess.others)
    return f"its transfers are slower: {size(round(mine))}/s, those of the others {size(round(usual))}/s"
