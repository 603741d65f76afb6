"""Timelines of nodes as torch's profiler (Kineto) writes them, for the file that has all nodes.

A file's times are microseconds since a moment of its own, by the calendar of its host. The node has read both of its
clocks at either end, so they are known by its own clock, which the script compares with its own.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ..runtime.protocol.errors import UNDECODABLE, ProtocolError

#: The most bytes of one, which are those of a page of text.
MOST = 1 << 30
#: The bits of a number in one of them: those of another node are beyond.
NUMBER = 40
#: The arguments of events by which the events of one file refer to each other.
_NUMBERS = ("External id", "correlation", "Ev Idx", "Python id", "Python parent id")

#: What a number may be, that another program writes into a file.
_Us = Annotated[float, msgspec.Meta(ge=0, le=2.0**53)]
#: A moment by the calendar, in nanoseconds since 1970, and by a clock.
_Calendar = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Moment = tuple[_Calendar, Annotated[float, msgspec.Meta(ge=-(2.0**53), le=2.0**53)]]
#: What a node returns beside its file.
_Told = tuple[tuple[_Moment, _Moment], dict[int, str]]


class TorchEvent(msgspec.Struct):
    """An event of a file."""

    ph: str
    name: str = ""
    cat: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: _Us = 0.0
    dur: Annotated[float, msgspec.Meta(ge=-(2.0**53), le=2.0**53)] = 0.0
    id: int | str = 0
    s: str = "t"
    args: dict[str, Any] = {}

    @property
    def begin_ns(self) -> int:
        """Its begin, in nanoseconds of its file."""
        return round(self.ts * 1000)

    @property
    def end_ns(self) -> int:
        """Its end."""
        return self.begin_ns + max(0, round(self.dur * 1000))


class TorchFile(msgspec.Struct):
    """The parts of a file that are needed."""

    traceEvents: list[TorchEvent]
    baseTimeNanoseconds: _Calendar = 0


@dataclass
class TorchTrace:
    """The timeline of one node's torch.profiler."""

    rank: int
    missing: str = ""  #: why it could not be had; "" where it is there
    data: bytes = b""  #: torch's file, compressed
    events: Sequence[TorchEvent] = ()
    base: int = 0  #: the moment from which its times count, in nanoseconds since 1970
    #: the begin and the end: by the calendar, in nanoseconds since 1970, and by the node's clock
    moments: Sequence[tuple[int, float]] = ((0, 0.0), (1, 1e-9))
    #: Python's names of threads, by torch's numbers
    threads: Mapping[int, str] = field(default_factory=dict)

    def at(self, ns: int) -> float:
        """Returns a moment of the file's by the node's clock. Where the calendar was changed meanwhile torch's own
        times are between both ends, and so are these."""
        (began, began_now), (ended, ended_now) = self.moments
        return began_now + (self.base + ns - began) * (ended_now - began_now) / (ended - began)

    def places(self) -> dict[tuple[int | str, int | str], str]:
        """Returns the names of the file's threads: of those of the process Python's, where it has one."""
        labels, names = dict[int | str, str](), dict[tuple[int | str, int | str], str]()
        for event in self.events:
            if event.ph == "M" and event.name == "process_labels":
                labels[event.pid] = str(event.args.get("labels", ""))
            elif event.ph == "M" and event.name == "thread_name":
                names[event.pid, event.tid] = str(event.args.get("name", "")).strip()
        found: dict[tuple[int | str, int | str], str] = {}
        for place in {(event.pid, event.tid): None for event in self.events}:
            process, thread = place
            label = labels.get(process, str(process))
            name = self._own(thread) if label == "CPU" else f"{label} {names.get(place, thread)}"
            found[place] = f"torch: {name}"
        return found

    def _own(self, thread: int | str) -> str:
        name = self.threads.get(thread, "") if isinstance(thread, int) else ""
        lane = name.removeprefix(f"disttensor-lane-{self.rank}-")
        if lane != name:
            return "default stream" if lane == "default" else f"stream {lane}"
        if name == "MainThread":
            return "main thread"
        return f"{name}, thread {thread}" if name else f"thread {thread}"

    def slices(self) -> Iterator[TorchEvent]:
        """Yields what lasts."""
        return (event for event in self.events if event.ph == "X")

    def without_length(self) -> Iterator[TorchEvent]:
        """Yields what does not last: the points of arrows, in order, and instants, counters."""
        yield from self._arrows()
        yield from (event for event in self.events if event.ph in ("i", "C"))

    def more(self, event: TorchEvent) -> dict[str, Any]:
        """Returns what an event that does not last has, besides what each has."""
        match event.ph:
            case "s":
                return {"id": self._number(event.id)}
            case "f":
                return {"id": self._number(event.id), "bp": "e"}
            case "i":
                return {"s": event.s, "args": self.args(event)}
        return {"args": event.args}

    def _arrows(self) -> Iterator[TorchEvent]:
        """Yields the points of arrows of which both ends are there."""
        points = defaultdict[tuple[str, str, int | str], list[TorchEvent]](list)
        for event in self.events:
            if event.ph in ("s", "f"):
                points[event.cat, event.name, event.id].append(event)
        for ends in points.values():
            ends.sort(key=lambda each: (each.ts, each.ph == "f"))
            if "".join(each.ph for each in ends) == "sf":
                yield from ends

    def args(self, event: TorchEvent) -> dict[str, Any]:
        """Returns the arguments of an event, with numbers that only this node has."""
        changed = {name: self._number(event.args[name]) for name in _NUMBERS if name in event.args}
        return {**event.args, **changed}

    def _number(self, number: Any) -> Any:
        return (self.rank + 1) << NUMBER | (number & ((1 << NUMBER) - 1)) if type(number) is int else number


def trace_of(rank: int, data: bytes, told: Any) -> TorchTrace:
    """Returns the timeline of a node, of what it has returned: the bytes of torch's file, compressed, and the two
    moments and the threads beside them. Raises ProtocolError for what is none."""
    try:
        moments, threads = msgspec.convert(told, _Told)
    except msgspec.ValidationError as e:
        raise ProtocolError(f"what has come beside a timeline of torch's profiler is not that: {e}") from None
    if moments[0][0] >= moments[1][0]:
        raise ProtocolError("the calendar of its host was set back meanwhile, by which torch's profiler has its times")
    file = decode_file(plain(data))
    events = [event for event in file.traceEvents if isinstance(event.pid, int)]  # others are marks for torch's viewer
    return TorchTrace(rank, "", data, events, file.baseTimeNanoseconds, moments, threads)


def plain(data: bytes) -> bytes:
    """Returns the bytes of a file that has come compressed. Raises ProtocolError for what is none, or too long."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        found = unpacker.decompress(data, MOST)
    except zlib.error as e:
        raise ProtocolError(f"the timeline of torch's profiler has arrived damaged: {e}") from None
    if unpacker.unconsumed_tail:
        raise ProtocolError(f"the timeline of torch's profiler has more than {MOST:,} bytes: record fewer steps")
    if not unpacker.eof:
        raise ProtocolError("the timeline of torch's profiler has not arrived as a whole")
    return found


def decode_file(data: bytes) -> TorchFile:
    """Returns what a file of torch's profiler has. Raises ProtocolError for what is none."""
    try:
        return msgspec.json.decode(data, type=TorchFile)
    except UNDECODABLE as e:
        raise ProtocolError(f"these bytes are not a timeline of torch's profiler: {e}") from None
