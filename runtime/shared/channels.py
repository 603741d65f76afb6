"""Channels as objects that are shared: items in order, and who waits for items and for room."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from ..protocol import shared_objects as s
from ..protocol.shared_objects import Item, ObjectAnswer
from .objects import OVERHEAD, Object, ObjectFigures, Objects, WaitingRequest


class ChannelState(Object):
    """A channel: first in, first out."""

    asked: ClassVar[tuple[type, ...]] = (s.Put, s.Take, s.Inspect, s.Close)
    word = "Channel"

    def __init__(self, all: Objects, number: int, maxsize: int = 0) -> None:
        super().__init__(all, number)
        self.maxsize, self.closed = maxsize, False
        self.items: deque[Any] = deque()  #: what is in: an item, who has put it, and its size
        self.putting: deque[WaitingRequest] = deque()
        self.taking: deque[WaitingRequest] = deque()

    @property
    def reports_losses(self) -> bool:
        return self.shared and not self.closed

    def ask(self, wait: WaitingRequest, found: Sequence[ChannelState]) -> None:
        call = wait.request.call
        match wait.request:
            case s.Inspect():
                wait.answer(self._state(call))
            case s.Close():
                self.closed = True
                if wait.request.immediate:
                    while self.items:
                        self._pop()
                wait.answer(ObjectAnswer(call, s.OK))
                self.answer_waiting()
            case s.Put():
                wait.size = wait.request.item.nbytes + OVERHEAD
                self._put(wait, wait.request)
            case s.Take():
                self._take_item(wait, found)

    def _put(self, wait: WaitingRequest, request: s.Put) -> None:
        call = request.call
        if wait.size > s.MAX_ITEM + OVERHEAD:
            wait.answer(ObjectAnswer(call, s.REFUSED, why=f"an item has {wait.size} bytes"))
        elif request.back and not self.all.room(wait.party, wait.size):
            wait.answer(ObjectAnswer(call, s.REFUSED, why=f"node {wait.party} has put too much back"))
        elif request.back:  # it has been in already: a channel that was closed meanwhile takes it, too
            self._push(wait, first=True)
            wait.answer(ObjectAnswer(call, s.OK))
            self.answer_waiting()
        elif self.closed:
            wait.answer(ObjectAnswer(call, s.SHUT))
        elif not self.putting and self._room(wait):
            self._push(wait)
            wait.answer(ObjectAnswer(call, s.OK))
            self.answer_waiting()
        elif not request.wait:
            wait.answer(ObjectAnswer(call, s.FULL))
        elif not self.all.report_loss(wait, [self]) and self.all.enqueue(wait):
            self.putting.append(wait)
            self.answer_waiting()  # those before it may wait for what they have elsewhere, and there is room

    def _take_item(self, wait: WaitingRequest, found: Sequence[ChannelState]) -> None:
        request = wait.request
        first = random.randrange(len(found)) if len(found) > 1 else 0  # select is fair
        for channel in (*found[first:], *found[:first]):
            if channel.items:
                channel._give_item(wait)
                channel.answer_waiting()
                return
        for channel in found:
            if (news := channel.news(request.call)) is not None:
                wait.answer(news)
                return
        if all(channel.closed for channel in found):
            wait.answer(ObjectAnswer(request.call, s.SHUT))
        elif not request.wait:
            wait.answer(ObjectAnswer(request.call, s.EMPTY))
        elif not self.all.report_loss(wait, found) and self.all.enqueue(wait):
            for channel in dict.fromkeys(found):
                channel.taking.append(wait)

    def news(self, call: int) -> ObjectAnswer | None:
        """Returns what somebody has to be told who finds no item, if there is something."""
        return None

    def waiting(self) -> Iterable[WaitingRequest]:
        return (*self.taking, *self.putting)

    def figures(self) -> ObjectFigures:
        return ObjectFigures(len(self.items), sum(1 for _ in self.waiting()) - len(self.putting), len(self.putting))

    def remove_waiting(self, wait: WaitingRequest) -> None:
        queue = self.putting if isinstance(wait.request, s.Put) else self.taking
        if wait in queue:
            queue.remove(wait)

    def in_vain(self, wait: WaitingRequest) -> int:
        return s.FULL if isinstance(wait.request, s.Put) else s.EMPTY

    def answer_waiting(self) -> None:
        moved = True
        while moved:
            moved = False
            for wait in list(self.putting):
                if wait.over:
                    continue
                if self.closed:
                    self.all.finish(wait, ObjectAnswer(wait.request.call, s.SHUT))
                elif self._room(wait):
                    self._push(wait)
                    self.all.finish(wait, ObjectAnswer(wait.request.call, s.OK))
                    moved = True
            while self.taking and self.items:
                wait = self.taking[0]
                self.all.finish(wait, None)  # before the item is out: that may settle another channel where it waits
                self._give_item(wait)
                moved = True
        self._settle_ends()

    def _settle_ends(self) -> None:
        """Tells those who wait that there will be nothing any more, if it is so."""
        if self.closed and not self.items:
            for wait in list(self.taking):
                if not wait.over and all(other.closed for other in self.all.of_kind(ChannelState, wait.request.of)):
                    self.all.finish(wait, ObjectAnswer(wait.request.call, s.SHUT))

    def _state(self, call: int) -> ObjectAnswer:
        return ObjectAnswer(call, s.OK, count=len(self.items), closed=self.closed)

    def _room(self, wait: WaitingRequest) -> bool:
        return not 0 < self.maxsize <= len(self.items) and self.all.room(wait.party, wait.size)

    def _push(self, wait: WaitingRequest, first: bool = False) -> None:
        entry = wait.request.item, wait.party, wait.size
        (self.items.appendleft if first else self.items.append)(entry)
        self.all.keep(wait.party, wait.size)

    def _give_item(self, wait: WaitingRequest) -> None:
        """Gives the next item to who takes it."""
        wait.answer(ObjectAnswer(wait.request.call, s.OK, self.number, self._pop()))

    def _pop(self) -> Item:
        entry: tuple[Item, int, int] = self.items.popleft()
        item, party, size = entry
        self.all.let_go(party, size, self)
        return item
