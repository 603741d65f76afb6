"""Queues of work as objects that are shared: items that are leased until they are done, and what has come out of them.

    put --> items --Lease--> a holder's, until TaskDone --> its result is among the answers
              ^--------------------------------  Return, its end, its node's loss: another one's try; or the last one

A queue that is closed closes its answers, once nothing of it is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from ..protocol import shared_objects as s
from ..protocol.codec import printable
from ..protocol.shared_objects import Item, ObjectAnswer
from .channels import ChannelState
from .objects import OVERHEAD, SCRIPT, Objects, WaitingRequest


class WorkItem:
    """An item that is to be done."""

    __slots__ = ("ends", "item", "number", "party", "rank", "size")

    def __init__(self, number: int, item: Item, party: int, size: int) -> None:
        self.number, self.item, self.party, self.size = number, item, party, size
        self.ends: list[str] = []  #: how the tries before have ended, in words
        self.rank = -1  #: the node of the last one, if that was lost


class Answers(ChannelState):
    """The channel of what has come out of a queue of work. Who finds nothing in it is told what was given up."""

    word = ""

    def __init__(self, all: Objects, number: int) -> None:
        super().__init__(all, number)
        self.work: WorkQueueState | None = None

    def news(self, call: int) -> ObjectAnswer | None:
        return self.work.loss_answer(call) if self.work is not None else None

    def lost(self, rank: int, why: str) -> None:
        if self.work is None or self.work.misses(rank):
            super().lost(rank, why)


class WorkQueueState(ChannelState):
    """A queue of work."""

    asked = (s.Put, s.Inspect, s.Close, s.Lease, s.TaskDone, s.Return, s.JoinQueue)
    word = "WorkQueue"

    def __init__(self, all: Objects, number: int, maxsize: int, tries: int, answers: int) -> None:
        """``tries``: after how many an item is given up; ``answers``: the number of that channel."""
        super().__init__(all, number, maxsize)
        self.tries = tries
        (self.answers,) = all.of_kind(Answers, [answers])
        self.answers.work = self
        self.items: deque[WorkItem]  #: those that nobody has
        self._numbers = count()
        #: by party and number of a holder there: who it is, and what it has, the oldest first
        self._leases: dict[tuple[int, int], tuple[str, deque[WorkItem]]] = {}
        self._unfinished = 0
        self._joining: deque[WaitingRequest] = deque()
        self._finishing: deque[WaitingRequest] = deque()  #: results for which there is no room
        self._given_up: deque[WorkItem] = deque()  #: of which nobody has been told
        self._workers: set[int] = set()  #: parties that have taken something
        self._makers: set[int] = set()  #: and that have put something

    def share(self) -> None:
        super().share()
        self.answers.share()

    def ask(self, wait: WaitingRequest, found: Sequence[Any]) -> None:
        call, party = wait.request.call, wait.party
        match wait.request:
            case s.Lease() as request:
                if self.items:
                    self._give_item(wait)
                    self.answer_waiting()
                elif self._over:
                    wait.answer(ObjectAnswer(call, s.SHUT))
                elif not request.wait:
                    wait.answer(ObjectAnswer(call, s.EMPTY))
                elif not self.all.report_loss(wait, [self]) and self.all.enqueue(wait):
                    self.taking.append(wait)
            case s.TaskDone(holder=holder) as request:
                wait.size = request.item.nbytes + OVERHEAD if request.item is not None else 0
                if wait.size > s.MAX_ITEM + OVERHEAD:
                    wait.answer(ObjectAnswer(call, s.REFUSED, why=f"a result has {wait.size} bytes"))
                elif self._finish(wait):
                    self.answer_waiting()  # what was done takes no room any more
                elif self.all.enqueue(wait):
                    self._finishing.append(wait)
            case s.Return(holder=holder) as request:
                if (party, holder) in self._leases:
                    self._back(party, holder, request.lease, request.why if request.counted else "", -1)
                wait.answer(ObjectAnswer(call, s.OK))
                self.answer_waiting()
            case s.JoinQueue():
                if self._unfinished:
                    if not self.all.report_loss(wait, [self]) and self.all.enqueue(wait):
                        self._joining.append(wait)
                else:
                    wait.answer(self.loss_answer(call) or ObjectAnswer(call, s.OK))
            case s.Put(back=True):
                wait.answer(ObjectAnswer(call, s.REFUSED, why="what is put back into it was leased"))
            case _:
                super().ask(wait, found)

    # ---- who waits ---------------------------------------------------------------------------------------------------

    def waiting(self) -> Iterable[WaitingRequest]:
        return (*super().waiting(), *self._joining)

    def remove_waiting(self, wait: WaitingRequest) -> None:
        for queue in (self.putting, self.taking, self._finishing, self._joining):
            if wait in queue:
                queue.remove(wait)

    def in_vain(self, wait: WaitingRequest) -> int:
        return s.FULL if isinstance(wait.request, s.Put | s.TaskDone) else s.EMPTY

    def release_party(self, party: int) -> None:
        self._workers.discard(party)
        for of, holder in [key for key in self._leases if key[0] == party]:
            self._back(of, holder, None, "had it when its node was lost", party)
        self.answer_waiting()

    @property
    def reports_losses(self) -> bool:
        return self.shared and not (self.closed and not self._unfinished)

    def misses(self, rank: int) -> bool:
        """Returns whether those who wait may do so in vain without a node: none is left of those that took something,
        or it may have been about to put something."""
        return rank in self._makers or not self._workers

    def lost(self, rank: int, why: str) -> None:
        """Tells who waits, unless others do that node's work."""
        if self.misses(rank):
            super().lost(rank, why)

    def loss_answer(self, call: int) -> ObjectAnswer | None:
        """Returns what says that an item was given up, if one was and nobody has been told."""
        if not self._given_up:
            return None
        task = self._given_up.popleft()
        why = f"item {task.number} was tried {len(task.ends)} times, and is given up: {'; '.join(task.ends)}"
        trusted = task.party == SCRIPT
        return ObjectAnswer(call, s.DROPPED, self.number, task.item, task.rank, why=why, trusted=trusted)

    # ---- what is done ------------------------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        """True when there will be no item any more: what is leased may come back."""
        return self.closed and not self.items and not self._leases

    def _state(self, call: int) -> ObjectAnswer:
        count, left = len(self.items), self._unfinished
        return ObjectAnswer(call, s.OK, self.answers.number, count=count, closed=self.closed, left=left)

    def _push(self, wait: WaitingRequest, first: bool = False) -> None:
        self.items.append(WorkItem(next(self._numbers), wait.request.item, wait.party, wait.size))
        self._unfinished += 1
        self._makers.add(wait.party)
        self.all.keep(wait.party, wait.size)

    def _give_item(self, wait: WaitingRequest) -> None:
        task, request = self.items.popleft(), wait.request
        self._workers.add(wait.party)
        for x in (self, self.answers):  # a loss of one that only worked: another does it now
            if x.told:
                x.told = deque(told for told in x.told if told[0] in self._makers)
        self._leases.setdefault((wait.party, request.holder), (printable(request.who), deque()))[1].append(task)
        trusted = task.party == SCRIPT
        wait.answer(ObjectAnswer(request.call, s.OK, self.number, task.item, task.number, trusted=trusted))

    def _pop(self) -> Item:
        task = self.items.popleft()
        self._finished(task)
        return task.item

    def _finish(self, wait: WaitingRequest) -> bool:
        """Ends the oldest lease of a holder, if there is room for what has come out. Returns False where there is
        none."""
        call, key, item = wait.request.call, (wait.party, wait.request.holder), wait.request.item
        has, shut = key in self._leases, self.answers.closed
        if has and item is not None and not shut and not self.all.room(wait.party, wait.size):
            return False
        if wait in self._finishing:
            self.all.finish(wait, None)
        if not has:
            wait.answer(ObjectAnswer(call, s.EMPTY))
            return True
        leased = self._leases[key][1]
        task = leased.popleft()
        if not leased:
            del self._leases[key]
        if item is not None and not shut:
            self.answers._push(wait)
        wait.answer(ObjectAnswer(call, s.SHUT if item is not None and shut else s.OK, left=len(leased)))
        self.answers.answer_waiting()
        self._finished(task)
        return True

    def _finished(self, task: WorkItem) -> None:
        self._unfinished -= 1
        self._settle_ends()
        self.all.let_go(task.party, task.size, self)

    def _back(self, party: int, holder: int, number: int | None, why: str, rank: int) -> None:
        """Takes back what a holder has leased, or one item of that; ``why``: what it has done, where that was a try."""
        who, leased = self._leases[party, holder]
        back = [task for task in leased if number in (None, task.number)]
        for task in back:
            leased.remove(task)
        if not leased:
            del self._leases[party, holder]
        for task in reversed(back):
            if why:
                task.rank = rank
                task.ends.append(f"{who}{f' on node {party}' if party != SCRIPT else ''} {printable(why)}")
            if len(task.ends) < self.tries:
                self.items.appendleft(task)
            else:
                self._given_up.append(task)
                self._finished(task)

    def answer_waiting(self) -> None:
        ended = True
        while ended:  # what ends a result's wait may make room here
            super().answer_waiting()
            ended = any([self._finish(wait) for wait in list(self._finishing) if not wait.over])

    def _settle_ends(self) -> None:
        """Tells what was given up, and that all is done, to those who wait for it."""
        if self._over:
            for wait in list(self.taking):
                self.all.finish(wait, ObjectAnswer(wait.request.call, s.SHUT))
        for waiting in (self.answers.taking, self._joining):
            while self._given_up and waiting and (waiting is not self._joining or not self._unfinished):
                wait = waiting[0]
                self.all.finish(wait, self.loss_answer(wait.request.call))
        if not self._unfinished:
            while self._joining:
                self.all.finish(self._joining[0], ObjectAnswer(self._joining[0].request.call, s.OK))
            if self.closed and not self.answers.closed:
                self.answers.closed = True
                self.answers.answer_waiting()
