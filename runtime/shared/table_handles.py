"""The handle of a dictionary that is shared: what a program and its functions on nodes use."""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any

import numpy as np

from ..process.spelling import shown
from ..protocol import shared_objects as s
from ..protocol.errors import DisttensorError
from ..protocol.shared_objects import Item, ObjectAnswer
from . import tables
from .handles import ObjectHandle
from .values import decode_plain, encode_plain, pack, unpack
from .waiting import check_timeout

_NONE: Any = object()


class SharedDict(ObjectHandle, MutableMapping[Any, Any]):
    """A dictionary that the script and functions on all nodes use.

        >>> seen = dt.tasks.SharedDict()
        >>> def note(seen, k):
        ...     seen[k] = k * k
        ...     seen.add("calls")
        >>> works = [dt.submit(note, seen, k, node=k) for k in range(3)]
        >>> _ = [work.result() for work in works]
        >>> seen == {0: 0, 1: 1, 2: 4, "calls": 3}
        True

    It is a ``collections.abc.MutableMapping``. Values are copied, in and out, as a Channel's items: what is changed in
    a value has to be put in again. Each call by itself is done as a whole; ``modify`` and ``add`` read, compute and
    replace so that no other's change is lost. Keys are None, numbers, text, bytes and tuples of these.

    Args:
        items: a mapping, or pairs, that it has to begin with.
        name: a name for ``repr``, and by which ``SharedDict.named`` finds it.
    """

    _object = tables.Table

    def __init__(self, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (), name: str | None = None) -> None:
        """Raises DisttensorError without a session, and in a function on a node; TypeError and ValueError for what is
        no key or value."""
        super().__init__(tables.Table, name)
        self.update(items)
        self._be_found()

    def __getitem__(self, key: Any) -> Any:
        return self._value(self._of(s.GET, key), key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(s.SET, key, pack(value, self._refers))

    def __delitem__(self, key: Any) -> None:
        if self._of(s.POP, key).said == s.EMPTY:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return self._of(s.HAS, key).said == s.OK

    def __len__(self) -> int:
        return self._state().count

    def __iter__(self) -> Iterator[Any]:
        """Returns the keys, in the order in which they came. Those that come or go meanwhile may be among them."""
        for key, _ in self._pages(values=False):
            yield key

    def items(self) -> ItemsView[Any, Any]:
        """Returns a view of the keys with their values, which come in pages."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Returns a view of the values, which come in pages."""
        return _Values(self)

    def pop(self, key: Any, default: Any = _NONE) -> Any:
        """Takes a key out; returns its value. Raises KeyError for one that is not there, without a ``default``."""
        answer = self._of(s.POP, key)
        return default if answer.said == s.EMPTY and default is not _NONE else self._value(answer, key)

    def popitem(self) -> tuple[Any, Any]:
        """Takes out the key that came last, and its value. Raises KeyError where there is none."""
        answer = self._of(s.POP_LAST)
        if answer.said == s.EMPTY or not answer.keys:
            raise KeyError(f"popitem(): {self!r} is empty")
        return decode_plain(answer.keys[0], []), self._value(answer, None)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Returns a key's value, which is set to ``default`` where there is none."""
        answer = self._of(s.SET_DEFAULT, key, pack(default, self._refers))
        return default if answer.item is None else self._value(answer, key)

    def clear(self) -> None:
        """Takes all keys out."""
        self._of(s.CLEAR)

    def modify(self, key: Any, function: Callable[[Any], Any], default: Any = _NONE) -> Any:
        """Replaces a key's value by ``function(value)``, and returns that. No change of others is lost: where there was
        one meanwhile, the function is called again, with the new value. Raises KeyError for a key that is not there,
        without a ``default`` to begin with; what the function raises."""
        answer = self._of(s.GET, key)
        while True:
            value = default if answer.item is None and default is not _NONE else self._value(answer, key)
            new = function(value)
            version = answer.count if answer.item is not None else 0
            answer = self._of(s.SWAP, key, pack(new, self._refers), version)
            if answer.said == s.OK:
                return new

    def add(self, key: Any, amount: Any = 1) -> Any:
        """Adds to a key's value, which is 0 where there is none; returns the sum. No addition is lost."""
        return self.modify(key, lambda value: value + amount, 0)

    def wait(self, key: Any, timeout: float | None = None) -> Any:
        """Returns a key's value; waits until there is one, ``timeout`` seconds at most. Raises TimeoutError; NodeLost,
        once, when a node is lost meanwhile, which may have been about to set it."""
        check_timeout(timeout)
        answer = self._of(s.WAIT, key, timeout=timeout)
        if answer.said == s.EMPTY:
            raise TimeoutError(f"{self!r} has had no {shown(key)} within {timeout} s")
        return self._value(answer, key)

    @property
    def nbytes(self) -> int:
        """The bytes that its keys and values take in the script's process, with what is kept for each."""
        return self._state().left

    def _of(
        self, do: int, key: Any = None, item: Item | None = None, version: int = 0, timeout: float | None = None
    ) -> ObjectAnswer:
        ask = self._asking()
        same, shown = _key(key) if do not in (s.POP_LAST, s.CLEAR) else (b"", b"")
        request = s.DictEntry(ask.number(), (self._number,), do, same, shown, item, version)
        answer = ask.ask(request, timeout)
        return answer if answer.said in (s.EMPTY, s.FULL) else self._check_answer(answer)

    def _value(self, answer: ObjectAnswer, key: Any) -> Any:
        if answer.item is None:
            raise KeyError(key)
        return unpack(answer.item, self._referred)

    def _pages(self, values: bool) -> Iterator[tuple[Any, Any]]:
        after, over = 0, False
        while not over:
            ask = self._asking()
            page = self._check_answer(ask.ask(s.KeysPage(ask.number(), (self._number,), after, values)))
            after, over = page.count, page.closed
            if values and len(page.items) != len(page.keys):
                raise DisttensorError("a page of keys came without their values")
            for own, item in zip(page.keys, page.items if values else [None] * len(page.keys), strict=True):
                yield decode_plain(own, []), unpack(item, self._referred) if item is not None else None


class _Items(ItemsView[Any, Any]):
    _mapping: SharedDict

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self._mapping._pages(values=True)


class _Values(ValuesView[Any]):
    _mapping: SharedDict

    def __iter__(self) -> Iterator[Any]:
        for _, value in self._mapping._pages(values=True):
            yield value


def _key(key: Any) -> tuple[bytes, bytes]:
    """Returns bytes that are the same for keys that are equal, and such that show it as it is. Raises TypeError,
    ValueError."""
    if isinstance(key, np.generic):
        key = key.item()
    shown = _encoded(_checked(key))
    same = _same(key)
    return (shown if same is key else _encoded(same)), shown


def _encoded(key: Any) -> bytes:
    data = encode_plain(key, [], "a key", "use", beside=False)
    if len(data) > s.MAX_KEY:
        raise ValueError(f"a key of a SharedDict has {len(data)} bytes, and may have {s.MAX_KEY >> 10} KiB")
    return data


def _checked(key: Any) -> Any:
    kind = type(key)
    if kind is tuple:
        for part in key:
            _checked(part)
    elif kind not in (str, bytes, int, bool, float, type(None)):
        raise TypeError(
            f"a key of a SharedDict is None, a number, text, bytes or a tuple of these, not a {kind.__qualname__}"
        )
    elif kind is float and math.isnan(key):
        raise ValueError("NaN is no key of a SharedDict: it is not equal to itself")
    return key


def _same(key: Any) -> Any:
    """Returns one key for all that are equal: 1 for 1, 1.0 and True."""
    if type(key) is tuple:
        return tuple(map(_same, key))
    return int(key) if isinstance(key, bool | float) and key == key // 1 and not math.isinf(key) else key
