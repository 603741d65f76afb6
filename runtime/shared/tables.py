"""Dictionaries as objects that are shared: values by key, in the order in which the keys came.

Keys are bytes that are the same for keys that are equal; each value has a version, so that a function that has read
one replaces that one only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from ..protocol import shared_objects as s
from ..protocol.shared_objects import Item, ObjectAnswer
from .objects import OVERHEAD, Object, ObjectFigures, Objects, WaitingRequest

#: The bytes of keys and values after which a page ends.
PAGE = 1 << 20


class _Entry:
    __slots__ = ("at", "item", "party", "shown", "size", "version")

    def __init__(self, at: int, shown: bytes) -> None:
        self.at, self.shown = at, shown  #: at which place the key came, and as what
        self.item, self.party, self.size, self.version = Item(b""), 0, 0, 0


class Table(Object):
    """A dictionary."""

    asked = (s.Inspect, s.DictEntry, s.KeysPage)
    word = "SharedDict"

    def __init__(self, all: Objects, number: int) -> None:
        super().__init__(all, number)
        self._entries: dict[bytes, _Entry] = {}
        self._numbers = count(1)  #: of places and of versions
        self._nbytes = 0

    def figures(self) -> ObjectFigures:
        return super().figures()._replace(items=len(self._entries))

    def ask(self, wait: WaitingRequest, found: Sequence[Any]) -> None:
        match wait.request:
            case s.Inspect(call=call):
                wait.answer(ObjectAnswer(call, s.OK, count=len(self._entries), left=self._nbytes))
            case s.KeysPage() as request:
                self._page(wait, request)
            case s.DictEntry() as request:
                self._entry(wait, request)

    def _entry(self, wait: WaitingRequest, request: s.DictEntry) -> None:
        call, entry = request.call, self._entries.get(request.key)
        match request.do:
            case s.SET:
                self._set(wait, request)
            case s.SET_DEFAULT if entry is None:
                self._set(wait, request)
            case s.SWAP:
                if (entry.version if entry is not None else 0) == request.version:
                    self._set(wait, request)
                else:  # with what is there now, so that nobody has to ask for it
                    self._answer_with(wait, entry, s.FULL)
            case s.HAS:
                wait.answer(ObjectAnswer(call, s.OK if entry is not None else s.EMPTY))
            case s.POP if entry is not None:
                self._pop(wait, request.key)
            case s.POP_LAST if self._entries:
                self._pop(wait, next(reversed(self._entries)))
            case s.CLEAR:
                wait.answer(ObjectAnswer(call, s.OK))
                for key in list(self._entries):
                    self._remove_entry(key)
            case s.WAIT if entry is None:
                if not self.all.report_loss(wait, [self]) and self.all.enqueue(wait):
                    self.waits.append(wait)
            case _:  # to read it, or there is none
                self._answer_with(wait, entry, s.OK if entry is not None else s.EMPTY)

    def _answer_with(self, wait: WaitingRequest, entry: _Entry | None, said: int) -> None:
        item, version = (entry.item, entry.version) if entry is not None else (None, 0)
        wait.answer(ObjectAnswer(wait.request.call, said, self.number, item, version))

    def _set(self, wait: WaitingRequest, request: s.DictEntry) -> None:
        call, party, entry, item = request.call, wait.party, self._entries.get(request.key), request.item
        size = len(request.key) + len(request.shown) + OVERHEAD + (item.nbytes if item is not None else 0)
        mine = entry.size if entry is not None and entry.party == party else 0
        if item is None or item.nbytes > s.MAX_ITEM:
            why = "there is no value" if item is None else f"a value has {item.nbytes} bytes"
            wait.answer(ObjectAnswer(call, s.REFUSED, why=why))
            return
        if not self.all.room(party, size - mine):
            held = self.all.bytes_of(party)
            why = f"node {party} has {held} bytes in what the script holds for all, and this has {size}"
            wait.answer(ObjectAnswer(call, s.REFUSED, why=f"{why}; take something out before"))
            return
        if entry is None:
            entry = self._entries[request.key] = _Entry(next(self._numbers), request.shown)
        before = entry.party, entry.size
        entry.item, entry.party, entry.size, entry.version = item, party, size, next(self._numbers)
        self._nbytes += size - before[1]
        self.all.keep(party, size)
        wait.answer(ObjectAnswer(call, s.OK, count=entry.version))
        for other in [each for each in self.waits if each.request.key == request.key]:
            self.all.finish(other, ObjectAnswer(other.request.call, s.OK, self.number, item, entry.version))
        if before[1]:
            self.all.let_go(*before, self)

    def _pop(self, wait: WaitingRequest, key: bytes) -> None:
        entry = self._entries[key]
        keys = entry.shown, key  # with which who is interrupted puts it back
        wait.answer(ObjectAnswer(wait.request.call, s.OK, self.number, entry.item, entry.version, keys=keys))
        self._remove_entry(key)

    def _remove_entry(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._nbytes -= entry.size
        self.all.let_go(entry.party, entry.size, self)

    def _page(self, wait: WaitingRequest, request: s.KeysPage) -> None:
        keys, items, size, last = list[bytes](), list[Item](), 0, request.after
        for entry in self._entries.values():
            if entry.at <= request.after:
                continue
            size += len(entry.shown) + 16 + (entry.item.nbytes if request.values else 0)
            if keys and size > PAGE:
                break
            keys.append(entry.shown)
            if request.values:
                items.append(entry.item)
            last = entry.at
        wait.answer(
            ObjectAnswer(request.call, s.OK, count=last, closed=size <= PAGE, keys=tuple(keys), items=tuple(items))
        )
