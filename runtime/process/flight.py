"""The flight record: what each end has done last. It is always on, and costs a call for each message.

    node    Ring, in the memory of its page (page.py), which outlives it --> fork server: Look, Ended
    script  Trail of each node (master/outbox.py), and a Ring of the process's own transfers

A ring has the last ``KEPT`` records of 32 bytes each, in the order of their ends; the place of the next one is
``slot()``, which threads may call at once. What is under way has no record yet: the page says it. A record is one call
without a frame of Python's: 0.15 us. A tuple in a ``deque`` takes 0.08 and seven times the memory, in objects that the
collector goes through, and a NamedTuple, as listeners get, 2.4 (docs/SEEING.md has the cost of it all).
"""

from __future__ import annotations

import math
import struct
import time
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

#: What a record is of. Those below are what a node's page has, and received tensors (``page.RECEIVE``).
SENT, REPORTED, WAITED, LOST, SENDING = range(6, 11)
#: All of them in words.
KINDS = (
    "nothing", "message", "function", "collective", "receive", "streams", "sent", "report", "wait", "lost", "send",
)  # fmt: skip
#: How many records a ring has; and the largest number in their field ``figure``, of whose bits callers give no more.
KEPT, COUNT = 2000, 0xFFFF
#: The time, a number, bytes, seconds (less than 0: it is under way), a count or the peer, and what it is.
_RECORD = struct.Struct("<dqQfHBx")
SIZE = KEPT * _RECORD.size
#: What stands before the records of a node: the time by the clock that they have, and by that of the calendar.
_HEAD = struct.Struct("<dd")
#: The most records of what is under way, and the most bytes of a node's record.
_UNDER_WAY = 64
MOST = _HEAD.size + SIZE + _UNDER_WAY * _RECORD.size

#: Where the records of a ring stand. One tuple for all rings, each of which goes round and round in it.
_SLOTS = tuple(range(0, SIZE, _RECORD.size))


class FlightRecord(NamedTuple):
    """Something that an end has done, or is at."""

    at: float  #: when it began; by the clock of the calendar, once ``decode`` has read it
    number: int  #: of the (first) command, the transfer, the request, or the commands that are done
    bytes: int
    seconds: float  #: less than 0: it is under way
    figure: int  #: of commands, of the nodes of a collective; the peer of a transfer; whom it waits for
    kind: int

    @property
    def peer(self) -> int:
        """The figure as the peer that it is of a transfer: -1 is the script, -2 a group."""
        return self.figure if self.figure < COUNT - 1 else self.figure - COUNT - 1


class Ring:
    """The last records of one end.

    Attributes:
        slot: returns the place of the next record.
        write: writes a record there: ``write(slot(), at, number, bytes, seconds, figure, kind)``.
    """

    __slots__ = ("_memory", "slot", "write")

    def __init__(self, memory: bytearray | memoryview | None = None) -> None:
        self._memory = bytearray(SIZE) if memory is None else memory
        self.slot = cycle(_SLOTS).__next__
        self.write: Any = partial(_RECORD.pack_into, self._memory)

    def copy(self) -> bytes:
        """Returns the records as they are now, without the room that was never used."""
        used = bytes(self._memory).rstrip(b"\0")
        return used.ljust(-(-len(used) // _RECORD.size) * _RECORD.size, b"\0")


class Trail(Ring):
    """The last records of what the script has sent to a node and heard of it, with lines."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        super().__init__()
        #: by slot: where the first command of a message was issued, of those that lines have issued
        self.lines: list[Any] = [None] * KEPT

    def records(self) -> list[tuple[FlightRecord, Any]]:
        """Returns the records, the oldest first, each with its line where it is of a message that was sent."""
        records, lines = self.copy(), list(self.lines)
        found = (
            (_record(records, slot), line) for slot, line in zip(_SLOTS, lines, strict=True) if slot < len(records)
        )
        return sorted(((it, line if it.kind == SENT else None) for it, line in found if it is not None), key=_time)


def calendar() -> float:
    """Returns the time by the clock of the calendar, in seconds."""
    return time.time()


def _time(found: tuple[FlightRecord, Any]) -> float:
    return found[0].at


def under_way(at: float, number: int, peer: int, kind: int) -> bytes:
    """Returns the record of what has not ended."""
    return _RECORD.pack(at, number & (1 << 62) - 1, 0, -1.0, peer & COUNT, kind)


def encode(ring: Ring, at_work: list[bytes]) -> bytes:
    """Returns the record of a node: its ring, and what it is at, with the time of now."""
    return b"".join([_HEAD.pack(time.monotonic(), calendar()), ring.copy(), *at_work[:_UNDER_WAY]])


def decode(record: bytes) -> list[FlightRecord]:
    """Returns what ``encode`` has written, the oldest first, with times of the calendar. Leaves out whatever is not a
    record."""
    if len(record) < _HEAD.size:
        return []
    now, calendar = _HEAD.unpack_from(record)
    records = record[_HEAD.size : MOST]
    found = [_record(records, slot) for slot in range(0, len(records) - _RECORD.size + 1, _RECORD.size)]
    shifted = [it._replace(at=calendar - (now - it.at)) for it in found if it is not None]
    return sorted(it for it in shifted if math.isfinite(it.at))


def own(ring: Ring) -> list[FlightRecord]:
    """Returns the records of a ring of this process, as ``decode`` does."""
    return decode(encode(ring, []))


def _record(records: bytes, slot: int) -> FlightRecord | None:
    it = FlightRecord(*_RECORD.unpack_from(records, slot))
    return it if it.at and math.isfinite(it.seconds) and it.kind < len(KINDS) else None
