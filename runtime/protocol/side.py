"""Words of the side channel, the second connection of a node, by which it can be told something whatever it is at.

Commands wait for those before them; a word does not. So a word is never about what has to be told in its turn: it ends
waiting that is in vain, or concerns what observers see, and changes nothing else. A node answers Gather and Describe.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from math import isfinite
from operator import le
from typing import Literal, TypeAlias, get_args

import msgspec

from .arguments import Message
from .errors import ProtocolError
from .framing import Decoder

#: Moments as they are told, and the bytes of one.
Moments: TypeAlias = bytes
MOMENT = 8


class Gone(Message, frozen=True, tag=1):
    """A peer is lost: what it has not sent by now does not come. The command Lost says so in its turn, too.

    A word about a worker in whose place another one has come, which Again has told, is late.
    """

    rank: int
    why: str
    incarnation: int = 0


class Cancel(Message, frozen=True, tag=2):
    """The script does not wait for a function any more: it is to be interrupted, or not to begin."""

    request: int


#: The points of a node's seam (process/observing.py).
Point: TypeAlias = Literal["applied", "collective", "commands", "function", "graph", "timed", "transferred"]
POINTS: tuple[Point, ...] = get_args(Point)


class Watch(Message, frozen=True, tag=3):
    """Observers note what happens at these points from now on, and at no others."""

    points: tuple[Point, ...]
    room: int  #: the most events that the node keeps: the last ones
    commands: int = 0  #: the most commands whose times it keeps


class Gather(Message, frozen=True, tag=4):
    """The node is to answer with what was noted, from event number ``first`` on; what was before has arrived."""

    request: int
    first: int


class Describe(Message, frozen=True, tag=5):
    """The node is to answer with what it has and what is under way there, as nobody else knows."""

    request: int


class DebuggerLine(Message, frozen=True, tag=6):
    """The answer of the script to a debugger that asks (AtBreakpoint), or what its user does meanwhile."""

    stop: int  #: the number of the debugger
    number: int  #: of this word among those to this debugger: one that comes twice counts once
    #: a line that was typed; the function goes on, as nobody types; Ctrl-C while the debugger was at something; the
    #: function ends, as the session does
    kind: Literal["line", "go on", "interrupt", "quit"]
    text: str = ""


#: What the master tells a node.
Word: TypeAlias = Gone | Cancel | Watch | Gather | Describe | DebuggerLine


class Noted(Message, frozen=True):
    """An event that was noted. Times are by the node's clock; a field that an event has not says nothing."""

    kind: str
    at: float
    began: float
    stream: str = ""
    number: int = -1  #: of its command
    what: str = ""
    transfer: int = -1
    peer: int = -1
    bytes: int = 0
    failed: bool = False
    #: for "timed" and "timing": the moments at which commands began, those from ``number`` on, each the end of the one
    #: before, as doubles (``MOMENT``). The last one is the end of the last command, or of "timing" its begin
    moments: Moments = b""


def moments_in(noted: Noted) -> array[float]:
    """Returns the moments of a "timed" or "timing". Raises ProtocolError for bytes that are none, and for times that go
    back."""
    moments = array("d")
    if len(noted.moments) % MOMENT or len(noted.moments) < MOMENT * (1 if noted.kind == "timing" else 2):
        raise ProtocolError(f"{len(noted.moments)} bytes are not the moments of commands")
    moments.frombytes(noted.moments)
    if sys.byteorder == "big":
        moments.byteswap()
    if not (isfinite(moments[0]) and isfinite(moments[-1]) and all(map(le, moments, moments[1:]))):
        raise ProtocolError("moments of commands go back, or are none")
    return moments


def moments_of(values: Sequence[float]) -> Moments:
    """Returns moments as they are told."""
    return struct.pack(f"<{len(values)}d", *values)


def events_in(noted: Noted) -> int:
    """Returns how many events one is: each command of several counts, so that it is known how many were forgotten."""
    return max(1, len(noted.moments) // MOMENT - 1)


class Gathered(Message, frozen=True, tag=1):
    """The events that were noted: the answer to a Gather."""

    request: int
    now: float  #: what time it is, by the node's clock
    first: int  #: the number of the first event; each counts as many as it is (``events_in``)
    events: tuple[Noted, ...]
    more: bool  #: whether there are more than one message takes
    clock: str = ""  #: the name of the node's clock (process/clock.py); "" where that isn't known


class DeviceTensors(Message, frozen=True):
    """The tensors on one of a node's devices."""

    device: str
    tensors: int
    bytes: int  #: of their memory, counted once where they share it
    peak: int = -1  #: the most that they were, since a peak is counted; -1 where none is


class Moving(Message, frozen=True):
    """The transfers with one peer in one direction, of which some are under way."""

    channel: str
    use: str  #: "transfers" or "collectives"
    peer: int
    sent: bool  #: or received
    under_way: int  #: how many are
    since: float  #: for how many seconds at least one has been
    begun: int  #: how many there were in all
    bytes: int  #: of all these
    seconds: float  #: in which at least one was under way


class LargeMoving(Message, frozen=True):
    """A large transfer that is under way."""

    channel: str
    use: str  #: "transfers" or "collectives"
    peer: int
    sent: bool  #: or received
    transfer: int  #: its number
    bytes: int
    seconds: float  #: since it began
    passed: int  #: bytes; -1 where the channel doesn't count them
    passing: float  #: for how many seconds they have


class GpuUse(Message, frozen=True):
    """The use of a CUDA device of a node's, by whatever process."""

    device: str
    used: int  #: bytes of its memory
    total: int
    busy: float  #: the share of the time in which it ran something, of late; -1 where that isn't known


class Described(Message, frozen=True, tag=2):
    """A node's description of itself, with what is under way there: the answer to a Describe."""

    request: int
    done: int  #: the number of the first command that it has not done
    held: tuple[DeviceTensors, ...]
    moving: tuple[Moving, ...]
    building: int  #: how many programs are compiled, or wait for that
    building_for: float  #: for how many seconds the one that is compiled has been
    large: tuple[LargeMoving, ...] = ()
    gpus: tuple[GpuUse, ...] = ()


#: What a node says.
Answer: TypeAlias = Gathered | Described

encode = msgspec.msgpack.Encoder().encode
#: Decodes a word. Raises ProtocolError.
decode: Callable[[bytes], Word] = Decoder[Word](Word, "a word").decode
#: Decodes what a node says. Raises ProtocolError.
decode_answer: Callable[[bytes], Answer] = Decoder[Answer](Answer, "an answer to a word").decode
