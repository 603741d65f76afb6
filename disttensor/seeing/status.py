"""A status: what the script and the nodes were at, as plain values, and how these are shown.

The tables and the HTML need these values only, so a status of another process is shown in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..runtime.process.tables import columns, duration, html, size

#: The most characters of a cell of the text: one reason of a loss would make all rows too wide.
WIDE = 90
#: The most nodes of which the text has the last line.
SAID = 10
#: Seconds from which on it is said how old a row is that does not say so by itself.
OLD = 1.0


@dataclass(frozen=True)
class ScriptWait:
    """A thread of the script that waits for a node."""

    thread: str  #: its name
    node: int
    seconds: float
    line: str  #: such as "train.py:12"; "" where no line of the script's waits
    code: str  #: such as "loss.item()"


@dataclass(frozen=True)
class UndertakingStatus:
    """Something that the script is at that may take long: a start, an upload, a checkpoint, a map, a wait for what
    tasks share."""

    what: str  #: with how far it has come, such as "starting 8 nodes: 6 ready"
    seconds: float
    line: str  #: such as "train.py:12"; "" where no line of the script's is at it


@dataclass(frozen=True)
class ScriptStatus:
    """The script: what it waits for, and what it has under way."""

    name: str
    host: str
    pid: int
    waits: tuple[ScriptWait, ...]  #: of its threads, the longest first
    commands: int  #: how many it has issued, to all nodes
    rss: int  #: bytes of memory
    uploads: int  #: bytes of copies for nodes that have not left yet
    fetches: int  #: fetches (``dt.fetch``) that have not arrived yet
    undertakings: tuple[UndertakingStatus, ...] = ()  #: what it is at, the one that began first comes first


@dataclass(frozen=True)
class GpuStatus:
    """A CUDA device of a node's, used by whatever process."""

    device: str
    used: int  #: bytes of its memory
    total: int
    busy: float | None  #: the share of the time in which it ran something, of late; None without pynvml


@dataclass(frozen=True)
class NodeStatus:
    """A node: what it is at, as it was seen ``age`` seconds before, and what it has."""

    rank: int
    host: str
    pid: int  #: 0 for one that has not started yet
    devices: tuple[str, ...]
    #: "idle", "running", "waiting" for another node, "stopped" (SIGSTOP), "paused" (by its host, which hears nothing
    #: of the script's), "at a breakpoint" (its ``note`` says where), "disconnected", "starting", "lost"; "unseen" where
    #: nothing but its reports tell of it
    state: str
    what: str  #: the operator, the function or the collective; "" where it is at none
    line: str  #: the line that has issued it, such as "train.py:12"
    seconds: float  #: for how long it is at that
    waits_for: int | None  #: the node that it waits for
    note: str  #: what else is to be said, such as why it is lost
    behind: int  #: commands that were issued and are not known to be done
    tensors: int | None  #: how many it has; None where it has not said so
    bytes: int | None  #: of their memory, counted once where they share it
    rss: int | None  #: bytes of its process's memory
    cpu: float | None  #: how many cores it has used since the last status, or since its start
    age: float | None  #: seconds since it was seen; None: it never was
    said: float | None  #: seconds since it said what tensors and transfers it has; None: it never did
    oldest: float = 0.0  #: seconds since the oldest command behind was sent; 0 where none is
    peak: int | None = None  #: the most bytes of tensors that it had; None where no peak is counted
    peak_rss: int | None = None  #: the most bytes of memory that its process had
    last_line: str = ""  #: the last line of its output
    gpus: tuple[GpuStatus, ...] = ()


@dataclass(frozen=True)
class MeshStatus:
    """A mesh: its nodes in one row. ``dt.seeing.status(mesh)`` has a row for each."""

    name: str  #: such as "dp=4, tp=2"
    nodes: tuple[int, ...]
    says: str  #: such as "dp=3 waits for dp=1; 2 idle"
    behind: int  #: of the node that is furthest behind
    tensors: int | None  #: sums over the nodes, as far as these are known
    bytes: int | None
    rss: int | None
    cpu: float | None
    age: float | None  #: of the oldest report; None: a node was never seen
    oldest: float = 0.0  #: of the node whose oldest command behind is oldest
    peak: int | None = None  #: sums over the nodes
    peak_rss: int | None = None
    gpus: tuple[GpuStatus, ...] = ()  #: those of all its nodes


@dataclass(frozen=True)
class TransferStatus:
    """The transfers between two processes in one direction, of which some are under way."""

    source: str  #: "script" or "node 0"
    target: str  #: the same, or "group": of a collective that the channel does itself
    channel: str
    use: str  #: "transfers" or "collectives"
    under_way: int
    seconds: float  #: for how long at least one has been
    begun: int  #: how many there were in all
    bytes: int  #: of all these
    rate: float  #: bytes per second, while at least one was under way


@dataclass(frozen=True)
class CopyStatus:
    """A large transfer that is under way."""

    source: str  #: as in TransferStatus
    target: str
    channel: str
    use: str
    bytes: int
    done: int | None  #: how many have passed; None where the channel doesn't count them
    seconds: float  #: since it began
    rate: float | None  #: bytes per second, since the first of them passed
    left: float | None  #: in how many seconds all will have passed at this rate
    line: str  #: the line that has issued it, such as "train.py:12"; "" where that isn't known


@dataclass(frozen=True)
class CompileStatus:
    """A node that compiles programs of graphs."""

    node: int
    programs: int  #: how many are compiled, or wait for that
    seconds: float  #: for how long the one that is has been


@dataclass(frozen=True)
class QueueStatus:
    """An object that tasks share: a queue, a lock, a dictionary."""

    kind: str  #: such as "Channel"
    name: str
    items: int
    taking: int  #: who waits for an item, a turn or the others
    putting: int  #: who waits for room


@dataclass(frozen=True)
class ActorStatus:
    """An actor: how many of its calls are not done."""

    name: str
    node: int
    calls: int


@dataclass(frozen=True)
class SlowStatus:
    """A node that is slow beside the others of its mesh."""

    node: int
    place: str  #: such as "dp=3"
    host: str
    behind: float  #: by which part its work, or its sends, take longer than those of the median of the others
    cause: str  #: such as "throttled by its cgroup for 31% of the time"
    line: str  #: the line that has issued what takes it longest, such as "train.py:33"; "" where that isn't known
    what: str  #: that, such as "aten::mm"

    def __str__(self) -> str:
        host = f", host {self.host}" if self.host else ""
        longest = f"; longest {_longest(self)}" if self.what else ""
        return f"node {self.node} ({self.place}{host}) is {self.behind:.0%} behind its mesh: {self.cause}{longest}"


@dataclass(frozen=True)
class LineStatus:
    """A line of the script that has waited for nodes."""

    line: str  #: such as "train.py:41"
    code: str  #: such as "loss.item()"
    waits: int
    seconds: float


@dataclass(frozen=True)
class JobStatus:
    """The script and the nodes, and what is under way. Prints as tables, in a notebook too."""

    script: ScriptStatus
    nodes: tuple[NodeStatus, ...]
    meshes: tuple[MeshStatus, ...]
    transfers: tuple[TransferStatus, ...]
    compiles: tuple[CompileStatus, ...]
    queues: tuple[QueueStatus, ...]
    actors: tuple[ActorStatus, ...]
    lines: tuple[LineStatus, ...]  #: those that have waited longest, the costliest first
    copies: tuple[CopyStatus, ...] = ()  #: those of ``transfers`` that are large or take long, the oldest first
    slow: tuple[SlowStatus, ...] = ()  #: the nodes that are slow beside the others of their mesh
    coordinates: tuple[str, ...] = ()  #: of the nodes, in the mesh whose status this is, such as "dp=1"

    def __repr__(self) -> str:
        text = [_script(self.script)]
        for title, head, rows in self._tables():
            short = [[cell if len(cell) <= WIDE else f"{cell[: WIDE - 4]} ..." for cell in row] for row in rows]
            table = columns([head, *short], [str.rjust if name in _NUMBERS else str.ljust for name in head])
            text.append(f"{title}\n{table}" if title else table)
        return "\n\n".join(text)

    def _repr_html_(self) -> str:
        """Returns the tables for a notebook."""
        tables = (html(title or "nodes", head, rows, heads=1) for title, head, rows in self._tables())
        return html(_script(self.script), [], []) + "".join(tables)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, which json writes."""
        return asdict(self, dict_factory=_plain)

    def scalars(self) -> dict[str, float]:
        """Returns its figures by names, for TensorBoard, W&B and their like: "script/rss", "node/0/behind"."""
        script, lost = self.script, sum(node.state == "lost" for node in self.nodes)
        found: dict[str, float | None] = {
            "nodes": len(self.nodes),
            "nodes/lost": lost,
            "script/commands": script.commands,
            "script/rss": script.rss,
            "script/uploads": script.uploads,
            "script/fetches": script.fetches,
            "script/waiting": len(script.waits),
        }
        for node in self.nodes:
            for name in ("behind", "oldest", "tensors", "bytes", "peak", "rss", "peak_rss", "cpu", "age"):
                found[f"node/{node.rank}/{name}"] = getattr(node, name)
            for gpu in node.gpus:
                found[f"node/{node.rank}/{gpu.device}/used"] = gpu.used
                found[f"node/{node.rank}/{gpu.device}/busy"] = gpu.busy
        for slow in self.slow:
            found[f"node/{slow.node}/slow"] = slow.behind
        return {name: float(value) for name, value in found.items() if value is not None}

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _tables(self) -> Iterator[tuple[str, Sequence[str], list[Sequence[str]]]]:
        """Yields (title, head, rows) of each table that has rows."""
        in_meshes = {rank for mesh in self.meshes for rank in mesh.nodes}
        names = self.coordinates or [f"{node.rank}" for node in self.nodes]
        rows = [_node(name, it) for name, it in zip(names, self.nodes, strict=True) if it.rank not in in_meshes]
        has_gpus = any(it.gpus for it in self.nodes)
        cells = [each if has_gpus else each[: -len(_GPUS)] for each in (*map(_mesh, self.meshes), *rows)]
        said: list[Sequence[str]] = [
            (name, it.last_line) for name, it in zip(names, self.nodes, strict=True) if it.last_line
        ]
        found: list[tuple[str, Sequence[str], list[Sequence[str]]]] = [
            ("", _NODES + _GPUS if has_gpus else _NODES, cells),
            ("the script is at", _UNDERTAKINGS, [
                (it.what, duration(it.seconds), it.line) for it in self.script.undertakings
            ]),
            ("large transfers", _COPIES, [*map(_copy, self.copies)]),
            ("transfers", _TRANSFERS, [*map(_transfer, self.transfers)]),
            ("compiles", _COMPILES, [(f"{it.node}", f"{it.programs}", duration(it.seconds)) for it in self.compiles]),
            ("slow nodes", _SLOW, [
                (f"{it.node}", it.place, it.host, f"{it.behind:.0%}", it.cause, _longest(it)) for it in self.slow
            ]),
            ("queues", _QUEUES, [
                (f"{it.kind} {it.name}".rstrip(), f"{it.items}", f"{it.taking}", f"{it.putting}") for it in self.queues
            ]),
            ("actors", _ACTORS, [(it.name, f"{it.node}", f"{it.calls}") for it in self.actors]),
            ("costliest waits of the script", _LINES, [
                (it.line, it.code, f"{it.waits:,}", duration(it.seconds)) for it in self.lines
            ]),
            ("last lines of output", _SAID, said[:SAID]),
        ]  # fmt: skip
        yield from (each for each in found if each[2])


_NODES = ("node", "host", "state", "line", "behind", "cpu", "rss", "peak", "tensors", "held", "age")
_GPUS = ("gpu", "gpu memory")
_UNDERTAKINGS = ("what", "since", "line")
_COPIES = ("from", "to", "channel", "for", "done", "of", "since", "rate", "left", "line")
_SAID = ("node", "line")
_TRANSFERS = ("from", "to", "channel", "for", "under way", "since", "begun", "in all", "rate")
_COMPILES = ("node", "programs", "since")
_SLOW = ("node", "place", "host", "behind by", "why", "longest")
_QUEUES = ("queue", "items", "taking", "putting")
_ACTORS = ("actor", "node", "calls")
_LINES = ("line", "code", "waits", "in all")
#: Columns whose cells stand at the right.
_NUMBERS = {
    "behind", "cpu", "rss", "peak", "tensors", "held", "age", "gpu", "gpu memory", "done", "of", "left", "under way",
    "since", "begun", "behind by", "in all", "rate", "programs", "items", "taking", "putting", "calls", "waits",
}  # fmt: skip


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in fields}


def _script(it: ScriptStatus) -> str:
    """Returns the line of the script."""
    parts = [f"{it.name} on {it.host}, pid {it.pid}: {_waits(it.waits)}", f"{it.commands:,} commands", size(it.rss)]
    if it.uploads:
        parts.append(f"{size(it.uploads)} on their way to nodes")
    if it.fetches:
        parts.append(f"{it.fetches} fetches under way")
    return ", ".join(parts)


def _waits(waits: Sequence[ScriptWait]) -> str:
    if not waits:
        return "waits for no node"
    it, more = waits[0], len(waits) - 1
    at = f" at {it.line}: {it.code}" if it.line else ""
    others = f" (and {more} other threads)" if more else ""
    return f"waits for node {it.node} since {duration(it.seconds)}{at}{others}"


def _mesh(it: MeshStatus) -> Sequence[str]:
    return it.name, f"{len(it.nodes)} nodes", it.says, "", *_figures(it)


def _node(name: str, it: NodeStatus) -> Sequence[str]:
    return name, it.host, phrase(it), it.line, *_figures(it)


def _figures(it: NodeStatus | MeshStatus) -> Sequence[str]:
    busy = [gpu.busy for gpu in it.gpus if gpu.busy is not None]
    used, total = sum(gpu.used for gpu in it.gpus), sum(gpu.total for gpu in it.gpus)
    return (
        f"{it.behind:,}" + (f" ({duration(it.oldest)})" if it.oldest >= OLD else ""),
        _percent(it.cpu),
        _size(it.rss),
        _size(it.peak_rss),
        "-" if it.tensors is None else f"{it.tensors:,}",
        _size(it.bytes) + ("" if it.peak is None else f" (peak {size(it.peak)})"),
        "-" if it.age is None else f"{it.age:.1f} s",
        _percent(sum(busy) / len(busy) if busy else None),
        f"{size(used)} of {size(total)}" if it.gpus else "-",
    )


def _longest(it: SlowStatus) -> str:
    return " ".join(filter(None, (it.line and f"at {it.line}", it.what)))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else size(nbytes)


def phrase(it: NodeStatus) -> str:
    """Returns what a node is at, in words."""
    text = it.state
    if it.state == "at a breakpoint":
        text += f", {it.note}, in {it.what}" + (f" {duration(it.seconds)}" if it.seconds >= OLD else "")
        return text
    if it.state == "waiting" and it.waits_for is not None:
        text += f" for {of(it.waits_for)}"
        text += f" in {it.what}" if it.what else ""
    elif it.what:
        text += f" {it.what}" if it.state == "running" else f" in {it.what}"
    if it.seconds >= OLD:
        text += f" {duration(it.seconds)}"
    return f"{text}: {it.note}" if it.note else text


def of(rank: int) -> str:
    """Returns the name of a process: a node, or the script."""
    return f"node {rank}" if rank >= 0 else "the script"


def _transfer(it: TransferStatus) -> Sequence[str]:
    rate = f"{size(int(it.rate))}/s" if it.rate else "-"
    return (
        it.source, it.target, it.channel, it.use, f"{it.under_way}", duration(it.seconds), f"{it.begun:,}",
        size(it.bytes), rate,
    )  # fmt: skip


def _copy(it: CopyStatus) -> Sequence[str]:
    return (
        it.source, it.target, it.channel, it.use, _size(it.done), size(it.bytes), duration(it.seconds),
        "-" if it.rate is None else f"{size(int(it.rate))}/s", "-" if it.left is None else duration(it.left), it.line,
    )  # fmt: skip
