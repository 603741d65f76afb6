"""The values of a report about a record: the JSON in the page that report_page.py makes.

However many commands there were, it has a bounded number of values: shares of equal pieces of time for each node, the
longest commands and transfers by themselves, and sums by line and by pair of processes. All times are seconds since the
begin of the record, by the script's clock; those of slices are microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import itemgetter
from typing import Any, NamedTuple

from ..runtime.channel.base import MASTER
from ..runtime.master.failures import Site, expression
from ..runtime.master.looking_in import NodeEvent
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.traits import without_stream
from ..session.holdings import LineHolds
from .recording import LineNames, NodeRecord, ProfileRecord
from .shares import Spans, joined, lines_of, only, script_waits, seconds, spans_of
from .time_buckets import TimeBuckets, in_bytes, in_words

#: The most buckets of a row, those of all rows together, and the least of a row.
BUCKETS, ALL_BUCKETS, FEWEST = 2000, 160_000, 50
#: The most slices of all rows together, and of one: half are transfers.
SLICES, ROW_SLICES = 12_000, 1000
#: The most samples of the memory of a node, and of all nodes.
MEMORY, ALL_MEMORY = 400, 20_000
#: The most lines of a table, names of commands, pairs of processes, and characters of a text.
LINES, NAMES, PAIRS, WIDE = 100, 4000, 5000, 300
#: The kinds of slices, by their numbers in the page.
KINDS = ("command", "function", "collective", "graph", "sent", "received", "unfinished", "wait", "region")


#: The kinds of slices that events of nodes are.
_KIND_OF = {"done": "command", "function": "function", "collective": "collective", "graph": "graph"}


class MemorySample(NamedTuple):
    """The memory of a node at some moment."""

    at: float  #: by the script's clock
    held: int  #: bytes of tensors
    rss: int  #: bytes of its process


@dataclass
class RunSeen:
    """All that was seen of a run beside its events."""

    memory: dict[int, list[MemorySample]] = field(default_factory=dict)  #: by rank
    holds: dict[int, list[LineHolds]] = field(default_factory=dict)  #: by rank, at the end
    slow: list[str] = field(default_factory=list)  #: the nodes that were slow, in words
    output: dict[int, list[str]] = field(default_factory=dict)  #: by rank: the last lines


class PairTotals(NamedTuple):
    """The transfers from one process to another by one channel, for one use."""

    source: int  #: -1 is the script, -2 the group of a collective that the channel does itself
    target: int
    channel: str
    transfers: int
    bytes: int
    seconds: float  #: in which at least one was under way


#: A slice of a row: begin, microseconds, kind, name, bytes (of what has none -1).
SliceRow = tuple[int, int, int, int, int]


def cut(text: str, most: int = WIDE) -> str:
    """Returns a text of a bounded length, which JSON can say."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else f"{text[: most - 4]} ..."


class RunReport:
    """The report of a record."""

    def __init__(self, record: ProfileRecord, seen: RunSeen | None = None) -> None:
        self._record, self._seen = record, seen or RunSeen()
        self._lines = LineNames()
        self._issuers = transfer_sites(record)
        self._names: dict[tuple[str, str], int] = {}
        rows = len(record.nodes) + 1
        self._buckets = TimeBuckets(record.began, record.ended, max(FEWEST, min(BUCKETS, ALL_BUCKETS // rows)))
        self._row_slices = max(2, min(ROW_SLICES, SLICES // rows))

    def to_dict(self, title: str, version: str) -> dict[str, Any]:
        """Returns all of it, as JSON has it. ``title``: the script's name."""
        record, seen = self._record, self._seen
        waits = script_waits(record)
        nodes = [self._node(node, waits) for _, node in sorted(record.nodes.items())]
        return {
            "title": cut(title),
            "version": version,
            "wall": record.wall / 1e9,
            "seconds": record.ended - record.began,
            "buckets": self._buckets.count,
            "kinds": KINDS,
            "script": self._script(waits),
            "nodes": nodes,
            "lines": [[cut(it.line), cut(it.code), it.commands, it.seconds] for it in lines_of(record, LINES)],
            "waits": self._waits_by_line(),
            "pairs": [[*it[:2], cut(it.channel), *it[3:]] for it in pairs_of(record)[:PAIRS]],
            "losses": [[self._since(it.at), it.node, cut(it.why)] for it in record.losses],
            "slow": [cut(it) for it in seen.slow],
            "holds": self._holds(),
            "output": {str(rank): [cut(it) for it in lines] for rank, lines in sorted(seen.output.items())},
            "dropped": {kind: count for kind, count in record.dropped.items() if count},
            "names": [[cut(what), cut(line)] for what, line in self._names],
        }

    def _since(self, at: float) -> float:
        return at - self._record.began

    def _name(self, what: str, site: Site | None) -> int:
        """Returns the number of a name: of an operator, with its line."""
        key = what, self._lines.of(site)
        found = self._names.get(key)
        if found is None:
            if len(self._names) >= NAMES:
                key = "others", ""
            found = self._names.setdefault(key, len(self._names))
        return found

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _node(self, node: NodeRecord, waits: Spans) -> dict[str, Any]:
        record, buckets = self._record, self._buckets
        spans = spans_of(record, node, waits)
        names, ids = dict[tuple[str, int, int], int](), list[int]()
        done = [each for each in node.events if each.kind == "done"]
        for each in done:
            site = each.site
            key = (each.what, id(site[0]), site[1]) if site is not None else (each.what, 0, 0)
            if key not in names:
                names[key] = self._name(each.what, site)
            ids.append(names[key])
        ahead = node.ahead
        longest = buckets.longest([it.began - ahead for it in done], [it.at - ahead for it in done], ids)
        moved = [it for it in node.events if it.kind in ("sent", "received")]
        moving = joined((it.began - ahead, it.at - ahead) for it in moved)
        lost = next((it for it in record.losses if it.node == node.rank), None)
        slices = [*self._longest_commands(node), *self._longest_moves(node.rank, moved, ahead)]
        return {
            "rank": node.rank,
            "host": cut(node.host),
            "device": cut(node.device),
            "missing": cut(node.missing),
            "lost": None if lost is None else self._since(lost.at),
            "dropped": node.dropped,
            "within": None if node.shares_clock or node.within == float("inf") else node.within,
            "shares": [seconds(each) for each in spans],
            "busy": in_bytes(buckets.filled(spans.busy)),
            "script": in_bytes(buckets.filled(spans.script)),
            "nodes": in_bytes(buckets.filled(spans.nodes)),
            "idle": in_bytes(buckets.filled(spans.idle)),
            "moves": in_bytes(buckets.filled(moving)),
            "longest": in_words(longest),
            "slices": slices,
            "memory": self._memory(node.rank),
        }

    def _slice(self, began: float, ended: float, kind: str, name: int, size: int = -1) -> SliceRow:
        at = round(self._since(began) * 1e6)
        return at, max(0, round(self._since(ended) * 1e6) - at), KINDS.index(kind), name, size

    def _longest_commands(self, node: NodeRecord) -> list[SliceRow]:
        """Returns the longest of what a node has done, and what it was at when nothing more is known of it."""
        begun: dict[tuple[str, int], NodeEvent] = {}
        found: list[tuple[float, str, NodeEvent]] = []
        for it in node.events:
            if it.kind == "begun":
                begun[it.stream, it.number] = it
            elif (kind := _KIND_OF.get(it.kind)) is not None:
                begun.pop((it.stream, it.number), None)
                found.append((it.at - it.began, kind, it))
        end = self._record.ended + node.ahead
        found += [(end - it.began, "unfinished", it._replace(at=end)) for it in begun.values() if it.began < end]
        return [
            self._slice(
                it.began - node.ahead, it.at - node.ahead, kind,
                self._name(f"graph {it.what}" if kind == "graph" else it.what, it.site),
                it.bytes if kind == "collective" else -1,
            )
            for _, kind, it in nlargest(self._row_slices // 2, found, key=itemgetter(0))
        ]  # fmt: skip

    def _longest_moves(self, rank: int, moved: Iterable[NodeEvent], ahead: float) -> list[SliceRow]:
        longest = nlargest(self._row_slices // 2, moved, key=lambda it: it.at - it.began)
        return [
            self._move(
                it.began - ahead, it.at - ahead, it.kind == "sent", rank, it.peer, it.what, it.transfer, it.bytes
            )
            for it in longest
        ]

    def _move(
        self, began: float, ended: float, sent: bool, end: int, peer: int, channel: str, transfer: int, size: int
    ) -> SliceRow:
        kind, name = ("sent", f"to {process(peer)}") if sent else ("received", f"from {process(peer)}")
        site = self._issuers.get((end if sent else peer, transfer))
        return self._slice(began, ended, kind, self._name(f"{name}, {channel}", site), size)

    def _script(self, waits: Spans) -> dict[str, Any]:
        record, buckets = self._record, self._buckets
        whole = [(record.began, record.ended)]
        names = [self._name(f"waits for node {it.node}", it.site) for it in record.waits]
        longest = buckets.longest([it.began for it in record.waits], [it.at for it in record.waits], names)
        moving = joined((it.began, it.at) for it in record.transfers)
        half = self._row_slices // 2
        held = nlargest(half, zip(record.waits, names, strict=True), key=lambda it: it[0].at - it[0].began)
        regions = nlargest(half, record.regions, key=lambda it: it.at - it.began)
        moves = nlargest(half, record.transfers, key=lambda it: it.at - it.began)
        return {
            "busy": in_bytes(buckets.filled(only(whole, waits))),
            "nodes": in_bytes(buckets.filled(waits)),
            "moves": in_bytes(buckets.filled(moving)),
            "longest": in_words(longest),
            "shares": [seconds(only(whole, waits)), seconds(waits)],
            "slices": [
                *(self._slice(it.began, it.at, "wait", name) for it, name in held),
                *(self._slice(it.began, it.at, "region", self._name(it.name, None)) for it in regions),
                *(
                    self._move(
                        it.began, it.at, it.sent, MASTER, it.peer, f"{it.channel} {it.use}", it.transfer, it.bytes
                    )
                    for it in moves
                ),
            ],
        }

    # ---- sums --------------------------------------------------------------------------------------------------------

    def _waits_by_line(self) -> list[list[Any]]:
        """Returns the lines that have waited longest: line, code, waits, seconds, the longest one, and the node that
        was waited for longest."""
        sites = dict[str, Site | None]()
        single, by_node = defaultdict[str, list[float]](list), defaultdict[str, dict[int, float]](dict)
        for it in self._record.waits:
            line = self._lines.of(it.site)
            sites.setdefault(line, it.site)
            single[line].append(it.at - it.began)
            by_node[line][it.node] = by_node[line].get(it.node, 0.0) + it.at - it.began
        costliest = nlargest(LINES, single, key=lambda line: sum(single[line]))
        found = []
        for line in costliest:
            site, each, nodes = sites[line], single[line], by_node[line]
            code = "" if site is None else expression(site)
            found.append([cut(line), cut(code), len(each), sum(each), max(each), max(nodes, key=nodes.__getitem__)])
        return found

    def _memory(self, rank: int) -> list[list[float]]:
        most = max(2, min(MEMORY, ALL_MEMORY // len(self._record.nodes)))
        samples = thinned(self._seen.memory.get(rank, ()), most)
        return [[round(self._since(it.at), 4), it.held, it.rss] for it in samples]

    def _holds(self) -> list[list[Any]]:
        """Returns the lines that have made what nodes hold: line, tensors, bytes, nodes, the largest one."""
        groups = defaultdict[str, list[LineHolds]](list)
        for lines in self._seen.holds.values():
            for it in lines:
                groups[it.line].append(it)
        largest = nlargest(LINES, groups.items(), key=lambda group: sum(it.bytes for it in group[1]))
        return [
            [cut(line), sum(it.tensors for it in its), sum(it.bytes for it in its), len(its), cut(its[0].largest)]
            for line, its in largest
        ]


def pairs_of(record: ProfileRecord) -> list[PairTotals]:
    """Returns the transfers of each pair of processes, those of most bytes first: as the sender has noted them, or the
    receiver where nothing is known of the sender."""
    known = {MASTER, *(rank for rank, node in record.nodes.items() if not node.missing)}
    spans = defaultdict[tuple[int, int, str], list[tuple[float, float]]](list)
    sizes = defaultdict[tuple[int, int, str], int](int)

    def note(end: int, peer: int, sent: bool, channel: str, span: tuple[float, float], size: int) -> None:
        source, target = (end, peer) if sent else (peer, end)
        if sent or source not in known:
            spans[source, target, channel].append(span)
            sizes[source, target, channel] += size

    for it in record.transfers:
        note(MASTER, it.peer, it.sent, f"{it.channel} {it.use}", (it.began, it.at), it.bytes)
    for rank, node in record.nodes.items():
        for event in node.events:
            if event.kind in ("sent", "received"):
                span = event.began - node.ahead, event.at - node.ahead
                note(rank, event.peer, event.kind == "sent", event.what, span, event.bytes)
    found = [PairTotals(*key, len(each), sizes[key], seconds(joined(each))) for key, each in spans.items()]
    return sorted(found, key=lambda it: (-it.bytes, it))


def process(rank: int) -> str:
    """Returns what a process is called."""
    return {MASTER: "the script"}.get(rank, f"node {rank}" if rank >= 0 else "the group")


def thinned(samples: Sequence[MemorySample], most: int) -> list[MemorySample]:
    """Returns so many of the samples at most, evenly over time: of several that with the most tensors."""
    step = -(-len(samples) // most) or 1
    return [max(samples[at : at + step], key=lambda it: it.held) for at in range(0, len(samples), step)]


def transfer_sites(record: ProfileRecord) -> dict[tuple[int, int], Site]:
    """Returns the lines that have issued transfers, by the sender and the transfer's number. What collectives and
    graphs transfer has none."""
    found: dict[tuple[int, int], Site] = {}
    for sent in record.sent:
        for outer, site in zip(codec.decode_batch(sent.message).commands, sent.sites, strict=True):
            match without_stream(outer):
                case c.Send(transfer=transfer) if site is not None:
                    found[sent.node, transfer] = site
                case c.Recv(transfer=transfer, peer=peer) if site is not None and peer == MASTER:
                    found[MASTER, transfer] = site
    return found
