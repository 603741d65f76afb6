"""The page of memory that a node shares with the process above it: what the node is at, for when it says nothing.

    node: its executor, per batch and before what may wait; a thread, twice a second   --> page -->  fork server: Look
          each thread that runs a function beside, at its begin and end
          all of them, what they have done last: its flight record (flight.py)

Twice a second the node also notes how long it has worked so far (``WorkTally``), so that this is seen without a report.

The node writes it without a call into the kernel, and reading it needs nothing of the node's: neither its GIL nor that
its process runs.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import flight

#: What a node is at.
IDLE, COMMANDS, FUNCTION, COLLECTIVE, RECEIVE, STREAMS = range(6)
#: Where it waits for nobody.
_OWN = frozenset({COMMANDS, FUNCTION, STREAMS})
#: The same in words.
WORDS = (
    "waits for commands", "runs operations", "runs a function", "takes part in a collective", "waits for a tensor",
    "works on its streams",
)  # fmt: skip

_AT = struct.Struct("<QBxxxid")  # the number of a command, what the node is at, the peer that it waits for, since when
_PEER = struct.Struct("<i")
_ALIVE = struct.Struct("<d")
_write, _now = _AT.pack_into, time.monotonic  # looked up once: a node writes its page for every batch
_KIND, _PEER_AT, _ALIVE_AT, _PAUSED = 8, 12, _AT.size, _AT.size + _ALIVE.size
_TALLY, _TALLY_AT = struct.Struct("<ddQd"), 40
#: The peer of a node that waits for none.
NOBODY = -2
_BESIDE = struct.Struct("<QdQ")  # the number of a command whose function runs beside, since when, and its thread
#: Where these stand, and how many: of more at once the others are not told.
_FIRST, SLOTS = 80, 32
_END = _FIRST + SLOTS * _BESIDE.size
#: Where the ring of the flight record begins, and the bytes of all.
_RING = 1024
SIZE = _RING + flight.SIZE


class Beside(NamedTuple):
    """A function that runs in another thread than the one that takes commands: on a stream, or as an actor's method."""

    number: int  #: of its command
    seconds: float  #: for how long
    thread: int  #: the identifier of its thread, as ``threading.get_ident`` gives it


class WorkTally(NamedTuple):
    """The seconds for which a node has worked, and has sent, since its start."""

    at: float = 0.0  #: when it counted them, by its host's clock; 0: it has not yet
    worked: float = 0.0  #: seconds in which it waited neither for commands nor for other nodes
    sent: int = 0  #: bytes that it has sent to other nodes over the network
    sending: float = 0.0  #: seconds in which some of these were under way, added up over the nodes


class Page:
    """The page of one node, which writes it but for ``paused``."""

    __slots__ = ("_free", "_joined", "_joining", "_kind", "_memory", "_since", "busy", "ring", "sending")

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """``memory`` is shared with a forked child; None: a page that only this process sees."""
        self._memory: Any = bytearray(SIZE) if memory is None else memory
        self._free = list(range(_FIRST, _END, _BESIDE.size))  # a list's pop and append are whole in any thread
        self._kind, self._since = IDLE, 0.0
        #: seconds for which the node was busy itself, and did not wait for commands or other nodes, until it last began
        #: or ended something. Only its own copy knows
        self.busy = 0.0
        #: what this process has done last
        self.ring = flight.Ring(memoryview(self._memory)[_RING:SIZE])
        #: seconds of collectives that were done beside, until the last one's end; and when one began that goes on
        self._joined, self._joining = 0.0, 0.0
        self.sending: Callable[[], tuple[int, float]] = _nothing_sent  #: the last two figures of a ``WorkTally``

    @classmethod
    def shared(cls) -> Page:
        """Makes a page that a child, forked after this, shares with this process."""
        return cls(mmap.mmap(-1, SIZE))

    def begin_command(self, seq: int, kind: int) -> float:
        """Notes that the node is at command ``seq``, and what it does there. Returns the time."""
        now = _now()
        if self._kind in _OWN:
            self.busy += now - self._since
        self._kind, self._since = kind, now
        _write(self._memory, 0, seq, kind, NOBODY, now)
        return now

    def await_peer(self, rank: int) -> None:
        """Notes that what the node is at waits for a peer from now on."""
        _PEER.pack_into(self._memory, _PEER_AT, rank)

    @contextlib.contextmanager
    def function(self, seq: int) -> Iterator[None]:
        """Notes, inside of a ``with`` block, that the node runs the function of command ``seq``: so it can be told in
        which one it has ended, however that was."""
        began = self.begin_command(seq, FUNCTION)
        try:
            yield
        finally:
            ended = self.begin_command(seq, COMMANDS)
            self.ring.write(self.ring.slot(), began, seq, 0, ended - began, 0, FUNCTION)

    @contextlib.contextmanager
    def function_beside(self, seq: int) -> Iterator[None]:
        """Notes, inside of a ``with`` block, that this thread runs the function of command ``seq`` beside."""
        began = _now()
        try:
            slot = self._free.pop()
        except IndexError:
            yield
            return
        _BESIDE.pack_into(self._memory, slot, seq, began, threading.get_ident())
        try:
            yield
        finally:
            _BESIDE.pack_into(self._memory, slot, 0, 0.0, 0)
            self._free.append(slot)
            self.ring.write(self.ring.slot(), began, seq, 0, _now() - began, 0, FUNCTION)

    @contextlib.contextmanager
    def collective_beside(self) -> Iterator[None]:
        """Counts, inside of a ``with`` block, what one thread does beside as a collective: mostly it waits there."""
        self._joining = began = _now()
        try:
            yield
        finally:
            self._joining = 0.0
            self._joined += _now() - began

    @property
    def beside(self) -> tuple[Beside, ...]:
        """The functions that run beside, or ran when the process ended; the one that began first comes first."""
        found = [_BESIDE.unpack_from(self._memory, slot) for slot in range(_FIRST, _END, _BESIDE.size)]
        now = time.monotonic()
        running = [Beside(seq, now - since, thread) for seq, since, thread in found if thread]
        return tuple(sorted(running, key=lambda each: -each.seconds))

    @property
    def running(self) -> int:
        """The number of the command whose function runs, or ran when the process ended; -1 for none."""
        seq, kind, _, _ = _AT.unpack_from(self._memory)
        return int(seq) if kind == FUNCTION else -1

    def rest(self) -> float:
        """Notes that the node waits for commands. Returns the time."""
        now = _now()
        if self._kind in _OWN:
            self.busy += now - self._since
        self._kind = self._memory[_KIND] = IDLE
        return now

    def end_streams(self) -> None:
        """Notes that streams, which alone were at work, have ended. Called by other threads than the one that notes
        commands, and without a lock: once in a great while the next command is taken for rest until its end."""
        if self._kind == STREAMS:
            self.rest()

    def live(self) -> None:
        """Notes that the node's threads run, and for how long it has worked."""
        now = time.monotonic()
        _ALIVE.pack_into(self._memory, _ALIVE_AT, now)
        with contextlib.suppress(RuntimeError):  # of a channel that is opened meanwhile: the next time is soon
            _TALLY.pack_into(self._memory, _TALLY_AT, now, self._worked(now), *self.sending())

    def _worked(self, now: float) -> float:
        """Returns for how long the node has worked. Another thread than the one that counts asks, and takes no lock:
        once in a great while it finds one step of that counted twice, or not yet."""
        own = now - self._since if self._kind in _OWN else 0.0
        joining = self._joining
        return self.busy + own - self._joined - (now - joining if joining else 0.0)

    def tally(self) -> WorkTally:
        """Returns what the node noted last of how long it has worked."""
        return WorkTally(*_TALLY.unpack_from(self._memory, _TALLY_AT))

    def read(self) -> tuple[int, int, int, float, float]:
        """Returns the command's number, what the node is at, the peer that it waits for there (NOBODY: none), and two
        times in seconds: for how long, and for how long its own threads have not run."""
        seq, kind, peer, since = _AT.unpack_from(self._memory)
        (alive,) = _ALIVE.unpack_from(self._memory, _ALIVE_AT)
        now = time.monotonic()
        return seq, kind, peer, now - since if since and kind else 0.0, now - alive if alive else 0.0

    def flight(self) -> bytes:
        """Returns the flight record of the node: what it has done last, and what it is at, or was when it ended."""
        seq, kind, peer, since = _AT.unpack_from(self._memory)
        at_work = [flight.under_way(since, seq, peer, kind)] if kind and since else []
        for slot in range(_FIRST, _END, _BESIDE.size):
            number, began, thread = _BESIDE.unpack_from(self._memory, slot)
            if thread:
                at_work.append(flight.under_way(began, number, NOBODY, FUNCTION))
        return flight.encode(self.ring, at_work)

    @property
    def has_begun(self) -> bool:
        """True once the node has written: before that it heeds no signal."""
        return bool(_ALIVE.unpack_from(self._memory, _ALIVE_AT)[0])

    @property
    def paused(self) -> bool:
        """True where the process above has stopped the node, which must not run then even if somebody continues it."""
        return bool(self._memory[_PAUSED])

    @paused.setter
    def paused(self, on: bool) -> None:
        self._memory[_PAUSED] = on


def _nothing_sent() -> tuple[int, float]:
    """Returns the figures of a node that has no channels yet."""
    return 0, 0.0


#: This process's page, if it is a node.
mine = Page()
