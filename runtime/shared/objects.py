"""The objects that the script's process holds for all, by number: who waits at them, and what nodes have there.

    script: Local    --\\
    node:   Service  ----> Objects.ask(party, request, answer) ... answer(ObjectAnswer), once, in any thread, locked
                              \\--> Object.ask(wait, found): what its kind does (channels.py, ...)

A kind of objects is a class of its own, messages that it understands (protocol/shared_objects.py), and a handle
(handles.py). No thread and no socket is in any of this.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..process.signals import uninterrupted
from ..protocol import shared_objects as s
from ..protocol.shared_objects import ObjectAnswer

#: The script, among parties that are nodes otherwise.
SCRIPT = -1
#: The most bytes of items that a node has put and nobody has taken; what it puts then waits as in front of a full
#: channel. And the most bytes, and the most requests, of a node that wait.
MAX_HELD = MAX_WAITING = 256 << 20
MAX_REQUESTS = 4096
#: What an item counts beside its bytes.
OVERHEAD = 512


class WaitingRequest:
    """A request that has no answer yet."""

    __slots__ = ("answer", "over", "party", "request", "size")

    def __init__(self, party: int, request: Any, answer: Callable[[ObjectAnswer], None], size: int = 0) -> None:
        """``size``: the bytes that it has the script keep."""
        self.party, self.request, self.answer, self.size = party, request, answer, size
        self.over = False


class ObjectFigures(NamedTuple):
    """The figures of an object: its items, and who waits."""

    items: int
    taking: int  #: for an item, a turn, or the others
    putting: int  #: for room


class Object:
    """One object of all that are shared. Its methods are called under the lock of all."""

    #: The requests that this kind understands.
    asked: ClassVar[tuple[type, ...]] = ()
    #: What its handle's class is called; "" for what is a part of another one.
    word: ClassVar[str] = ""

    def __init__(self, all: Objects, number: int) -> None:
        self.all, self.number = all, number
        self.shared = False  #: whether functions on nodes may have it
        self.waits: deque[WaitingRequest] = (
            deque()
        )  #: who waits here, in order, for a kind at which all wait for the same
        self.told: deque[tuple[int, str]] = deque()  #: losses of nodes that the script has to be told before it waits

    def share(self) -> None:
        """Notes that functions on nodes may have it."""
        self.shared = True

    def ask(self, wait: WaitingRequest, found: Sequence[Any]) -> None:
        """Answers a request about the objects ``found``, of which this is the first; or ``all.enqueue`` has it
        wait."""
        raise NotImplementedError

    def waiting(self) -> Iterable[WaitingRequest]:
        """Returns who waits here, in order."""
        return self.waits

    def figures(self) -> ObjectFigures:
        """Returns how many items it has, and how many wait for it and for room in it."""
        return ObjectFigures(0, sum(1 for _ in self.waiting()), 0)

    def remove_waiting(self, wait: WaitingRequest) -> None:
        """Takes out who does not wait any more."""
        if wait in self.waits:
            self.waits.remove(wait)

    def in_vain(self, wait: WaitingRequest) -> int:
        """Returns what a wait is told that its own party ends."""
        return s.EMPTY

    def answer_waiting(self) -> None:
        """Answers all that can be answered now, in order."""

    def release_party(self, party: int) -> None:
        """Frees what a lost node has here. It waits for nothing by then."""

    @property
    def reports_losses(self) -> bool:
        """True where who waits may do so in vain once a node is lost."""
        return self.shared

    def lost(self, rank: int, why: str) -> None:
        """Tells who waits of a node's loss, once: what they wait for may never come. The script is told when it is
        about to wait if it does not now."""
        if self.reports_losses:
            waiting = list(self.waiting())
            for wait in waiting:
                self.all.finish(wait, ObjectAnswer(wait.request.call, s.LOST, count=rank, why=why))
            if all(wait.party != SCRIPT for wait in waiting):
                self.told.append((rank, why))


_Kind = TypeVar("_Kind", bound=Object)


class Objects:
    """All objects of a session. Each request is answered once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[int, Object] = {}
        self._waits: dict[tuple[int, int], WaitingRequest] = {}  #: by party and number
        self._held: dict[int, int] = {}  #: by node: the bytes of its items
        self._waiting: dict[int, tuple[int, int]] = {}  #: by node: its requests that wait, and their bytes
        self._ended = ""
        #: of requests of this process: the script's, and those of nodes that are its threads
        self.numbers = count()

    def __repr__(self) -> str:
        return f"<Objects {len(self._objects)} waiting={len(self._waits)}>"

    @uninterrupted
    def make(self, kind: Callable[[Objects, int], Object]) -> int:
        """Makes an object; returns its number."""
        with self._lock:
            number = len(self._objects)
            self._objects[number] = kind(self, number)
            return number

    @uninterrupted
    def figures(self) -> list[tuple[int, str, ObjectFigures]]:
        """Returns the number of each object that tasks have made, the name of its handle's class, and its figures."""
        with self._lock:
            return [(number, x.word, x.figures()) for number, x in self._objects.items() if x.word]

    def word(self, number: int) -> str:
        """Returns the name of the class of an object's handle; "" for what is a part of another one, or gone."""
        found = self._objects.get(number)
        return "" if found is None else found.word

    @uninterrupted
    def share(self, number: int) -> None:
        """Notes that functions on nodes may have an object."""
        with self._lock:
            self._objects[number].share()

    @uninterrupted
    def change(self, number: int, change: Callable[[Any], object]) -> None:
        """Changes an object, for the script. Does nothing once the session has ended."""
        with self._lock:
            if (found := self._objects.get(number)) is not None:
                change(found)

    def is_shared(self, number: int, kind: type[Object]) -> bool:
        """Returns whether functions on nodes may have an object, and it is of this kind."""
        found = self._objects.get(number)
        return isinstance(found, kind) and found.shared

    @uninterrupted
    def ask(self, party: int, request: s.Asking, answer: Callable[[ObjectAnswer], None]) -> None:
        """Answers a request, now or when it can be."""
        with self._lock:
            found = [x for x in map(self._objects.get, request.of) if x is not None]
            if self._ended:
                answer(ObjectAnswer(request.call, s.ENDED, why=self._ended))
            elif len(found) != len(request.of) or not (party == SCRIPT or all(x.shared for x in found)):
                answer(ObjectAnswer(request.call, s.REFUSED, why=f"node {party} has no such object"))
            elif not all(isinstance(request, x.asked) for x in found):
                why = f"a {type(found[0]).__name__} has no {type(request).__name__}"
                answer(ObjectAnswer(request.call, s.REFUSED, why=why))
            else:
                found[0].ask(WaitingRequest(party, request, answer), found)

    @uninterrupted
    def withdraw(self, party: int, call: int) -> None:
        """Answers a request that waits as one that does not. Does nothing to others."""
        with self._lock:
            wait = self._waits.get((party, call))
            if wait is not None:
                self.finish(wait, ObjectAnswer(call, self._objects[wait.request.of[0]].in_vain(wait)))

    @uninterrupted
    def lost(self, rank: int, why: str) -> None:
        """Ends what a lost node waits for, frees what it has, and tells others of it."""
        with self._lock:
            self._leave(rank)
            for x in list(self._objects.values()):
                x.lost(rank, why)

    @uninterrupted
    def close(self, why: str) -> None:
        """Answers all that wait, and all that ask from now on: the session has ended."""
        with self._lock:
            self._ended = why
            for wait in list(self._waits.values()):
                self.finish(wait, ObjectAnswer(wait.request.call, s.ENDED, why=why))
            self._objects.clear()

    def forked(self) -> None:
        """Makes a forked child's copy unusable."""
        self._lock = threading.Lock()
        self._waits.clear()
        self._objects.clear()
        self._ended = "this is a forked child of the script"

    # ---- for objects, under the lock ---------------------------------------------------------------------------------

    def of_kind(self, kind: type[_Kind], numbers: Iterable[int]) -> list[_Kind]:
        """Returns objects by their numbers, but for those that are of another kind."""
        return [x for x in map(self._objects.get, numbers) if isinstance(x, kind)]

    def enqueue(self, wait: WaitingRequest) -> bool:
        """Has a request wait; or refuses it, where too many of that node do. Returns whether it waits."""
        key = wait.party, wait.request.call
        count, size = self._waiting.get(wait.party, (0, 0))
        many = wait.party != SCRIPT and (count >= MAX_REQUESTS or (size and size + wait.size > MAX_WAITING))
        if many or key in self._waits:
            why = f"{count} requests of {size} bytes of node {wait.party} wait already; take items out before"
            wait.answer(ObjectAnswer(wait.request.call, s.REFUSED, why=why))
            return False
        self._waits[key] = wait
        self._waiting[wait.party] = count + 1, size + wait.size
        return True

    def waiting_for(self, party: int, call: int) -> WaitingRequest | None:
        """Returns a request that has no answer yet; None for others."""
        return self._waits.get((party, call))

    def finish(self, wait: WaitingRequest, answer: ObjectAnswer | None) -> None:
        """Ends a wait, with an answer if somebody is there to have one. Does nothing to one that is over."""
        if wait.over:
            return
        wait.over = True
        del self._waits[wait.party, wait.request.call]
        count, size = self._waiting[wait.party]
        self._waiting[wait.party] = count - 1, size - wait.size
        for number in wait.request.of:
            if (x := self._objects.get(number)) is not None:
                x.remove_waiting(wait)
        if answer is not None:
            wait.answer(answer)

    def report_loss(self, wait: WaitingRequest, found: Iterable[Object]) -> bool:
        """Tells the script, which is about to wait, of a loss that it has not been told. Returns whether there was
        one."""
        if wait.party == SCRIPT:
            for x in found:
                if x.told:
                    rank, why = x.told.popleft()
                    wait.answer(ObjectAnswer(wait.request.call, s.LOST, count=rank, why=why))
                    return True
        return False

    def room(self, party: int, size: int) -> bool:
        """Returns whether a party may have so many bytes more kept. It may have one item of any size."""
        held = self._held.get(party, 0)
        return party == SCRIPT or not held or held + size <= MAX_HELD

    def bytes_of(self, party: int) -> int:
        """Returns the bytes that are kept for a party."""
        return self._held.get(party, 0)

    def keep(self, party: int, size: int) -> None:
        """Counts bytes that are kept for a party."""
        self._held[party] = self._held.get(party, 0) + size

    def let_go(self, party: int, size: int, besides: Object) -> None:
        """Counts bytes that are not kept any more, and settles what may have waited for them elsewhere."""
        before = self._held[party]
        self._held[party] = before - size
        if party != SCRIPT and before > MAX_HELD // 2:
            for other in list(self._objects.values()):
                if other is not besides:
                    other.answer_waiting()

    def _leave(self, rank: int) -> None:
        for wait in [wait for (party, _), wait in self._waits.items() if party == rank]:
            self.finish(wait, None)
        for x in list(self._objects.values()):
            x.release_party(rank)
