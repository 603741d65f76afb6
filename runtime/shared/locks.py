"""Locks and barriers as objects that are shared: who has them, who waits, and what becomes of them when one ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..protocol import shared_objects as s
from ..protocol.codec import printable
from ..protocol.shared_objects import ObjectAnswer
from .objects import SCRIPT, Object, Objects, WaitingRequest


def _named(who: str, party: int) -> str:
    """Returns a holder in words."""
    return printable(who) if party == SCRIPT else f"{printable(who)} on node {party}"


class LockState(Object):
    """A lock: one has it, the others wait in order."""

    asked = (s.Acquire, s.Release, s.Inspect)
    word = "Lock"

    def __init__(self, all: Objects, number: int) -> None:
        super().__init__(all, number)
        self.holder: tuple[int, int] | None = None  #: a party, and the number of a function or a thread there
        self.who = ""
        self.abandoned = ""  #: who has ended with it, until somebody releases it

    def ask(self, wait: WaitingRequest, found: Sequence[Any]) -> None:
        call, party = wait.request.call, wait.party
        match wait.request:
            case s.Inspect():
                wait.answer(ObjectAnswer(call, s.OK, count=len(self.waits), closed=self.holder is not None))
            case s.Acquire(holder=holder) as request:
                if self.holder is None:
                    self._grant(wait)
                elif not request.wait:
                    wait.answer(ObjectAnswer(call, s.EMPTY))
                elif request.forever and self.holder == (party, holder):
                    wait.answer(
                        ObjectAnswer(call, s.REFUSED, why=f"{self.who} has it already, and would wait for itself")
                    )
                elif self.all.enqueue(wait):
                    self.waits.append(wait)
            case s.Release(holder=holder) as request:
                if self.holder == (party, holder):
                    if request.ended:
                        self.abandoned = f"{self.who} ended with it"
                    elif not request.back:
                        self.abandoned = ""
                    wait.answer(ObjectAnswer(call, s.OK))
                    self._free()
                elif request.ended or request.back:
                    wait.answer(ObjectAnswer(call, s.OK))
                else:
                    why = f"{self.who} has it, and only that may release it" if self.holder else "nobody has it"
                    wait.answer(ObjectAnswer(call, s.REFUSED, why=why))

    def release_party(self, party: int) -> None:
        if self.holder is not None and self.holder[0] == party:
            self.abandoned = f"{self.who} had it, and that node is gone"
            self._free()

    def lost(self, rank: int, why: str) -> None:
        """Does nothing more: who waits gets the lock."""

    def _grant(self, wait: WaitingRequest) -> None:
        request: s.Acquire = wait.request
        self.holder, self.who = (wait.party, request.holder), _named(request.who, wait.party)
        wait.answer(ObjectAnswer(request.call, s.OK, why=self.abandoned))

    def _free(self) -> None:
        self.holder, self.who = None, ""
        if self.waits:
            wait = self.waits[0]
            self.all.finish(wait, None)
            self._grant(wait)


class BarrierState(Object):
    """A barrier: all wait until so many have come."""

    asked = (s.Arrive, s.Passed, s.Abort, s.Reset, s.Inspect)
    word = "Barrier"

    def __init__(self, all: Objects, number: int, parties: int, acts: bool) -> None:
        """``acts``: the last one to come has something to do before all go on."""
        super().__init__(all, number)
        self.parties, self.acts = parties, acts
        self.broken = ""  #: why
        self._come: list[WaitingRequest] = []
        self._left: list[str] = []  #: those whose node is gone while they waited
        self._acting: WaitingRequest | None = None  #: the last one, which has been told to act
        self._passing: list[WaitingRequest] = []  #: the others, meanwhile

    def waiting(self) -> Iterable[WaitingRequest]:
        return (*self._passing, *self._come)

    def remove_waiting(self, wait: WaitingRequest) -> None:
        for waiting in (self._passing, self._come):
            if wait in waiting:
                waiting.remove(wait)
                self._left.append(_named(wait.request.who, wait.party))

    def ask(self, wait: WaitingRequest, found: Sequence[Any]) -> None:
        call = wait.request.call
        match wait.request:
            case s.Inspect():
                count = len(self._come) + len(self._passing) + (self._acting is not None)
                wait.answer(ObjectAnswer(call, s.OK, count=count, closed=bool(self.broken)))
            case s.Arrive():
                if self.broken:
                    wait.answer(ObjectAnswer(call, s.BROKEN, why=self.broken))
                elif len(self._come) < self.parties - 1 or self._acting is not None:
                    if self.all.enqueue(wait):
                        self._come.append(wait)
                else:
                    self._all_here(wait)
            case s.Passed():
                if self._acting is None or self._acting.party != wait.party:
                    wait.answer(ObjectAnswer(call, s.BROKEN, why=self.broken or "it was emptied meanwhile"))
                else:
                    self._acting = None
                    wait.answer(ObjectAnswer(call, s.OK, count=len(self._passing)))
                    self._pass(self._passing)
            case s.Abort() as request:
                acting = self._acting
                it = None if acting is None else (acting.party, acting.request.call)
                if request.acting is None or it == (wait.party, request.acting):
                    self._break(f"{_named(request.who, wait.party)} {printable(request.why)}")
                wait.answer(ObjectAnswer(call, s.OK))
            case s.Reset():
                self._break("it was emptied while somebody waited")
                self.broken = ""
                wait.answer(ObjectAnswer(call, s.OK))

    def in_vain(self, wait: WaitingRequest) -> int:
        """Breaks: one who leaves would be missing."""
        self._break(f"{_named(wait.request.who, wait.party)} stopped waiting: its time limit, or an interrupt")
        return s.BROKEN

    def release_party(self, party: int) -> None:
        left, self._left = self._left, []
        if self._acting is not None and self._acting.party == party:
            left.append(_named(self._acting.request.who, party))
        if left:
            self._break(f"{', '.join(left)} waited, and that node is gone")

    def lost(self, rank: int, why: str) -> None:
        """Breaks: it may be one of those who have not come yet."""
        if self.shared:
            self._break(f"node {rank} was lost: {why}")

    def _all_here(self, last: WaitingRequest) -> None:
        come, self._come = self._come, []
        call = last.request.call
        if self.acts:
            self._acting, self._passing = last, come
            last.answer(ObjectAnswer(call, s.ACT, of=self.number, count=len(come)))
        else:
            last.answer(ObjectAnswer(call, s.OK, count=len(come)))
            self._pass(come)

    def _pass(self, come: list[WaitingRequest]) -> None:
        self._passing = []
        for index, wait in enumerate(come):
            self.all.finish(wait, ObjectAnswer(wait.request.call, s.OK, count=index))
        while len(self._come) >= self.parties and self._acting is None:  # those of the next time, who came meanwhile
            self._next()

    def _next(self) -> None:
        come, self._come = self._come[: self.parties], self._come[self.parties :]
        last = come.pop()
        self.all.finish(last, None)
        self._come, later = come, self._come
        self._all_here(last)
        self._come += later

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
        waiting, self._come, self._passing, self._acting = [*self._passing, *self._come], [], [], None
        for wait in waiting:
            self.all.finish(wait, ObjectAnswer(wait.request.call, s.BROKEN, why=why))
