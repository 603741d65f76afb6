"""Handles of queues: what they have in common, channels, and the wait for the first of several."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, Self

from ..process.spelling import shown
from ..protocol import shared_objects as s
from ..protocol.errors import DisttensorError
from . import channels
from .handles import ObjectHandle, ShutDown, checked
from .values import pack, unpack
from .waiting import check_timeout


class Queue(ObjectHandle):
    """A queue into which all put items: a Channel, or a WorkQueue."""

    maxsize: int

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{f' maxsize={self.maxsize}' if self.maxsize > 0 else ''}>"

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an item in; waits for room, ``timeout`` seconds at most. Raises queue.Full, ShutDown once the queue is
        closed, TypeError and ValueError for what is no item, NodeLost."""
        check_timeout(timeout)
        packed = pack(item, self._refers)
        block = block and timeout != 0
        ask = self._asking()
        self._check_answer(ask.ask(s.Put(ask.number(), (self._number,), packed, block), timeout if block else None))

    def put_nowait(self, item: Any) -> None:
        """Puts an item in if there is room. Raises as ``put``."""
        self.put(item, block=False)

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Puts items in, one after the other; ``timeout`` is each one's. Raises as ``put``: those before are in."""
        for item in items:
            self.put(item, timeout=timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        raise NotImplementedError

    def get_nowait(self) -> Any:
        """Takes the next item out if there is one. Raises as ``get``."""
        return self.get(block=False)

    def qsize(self) -> int:
        """Returns the number of items that are in now, and that nobody has."""
        return self._state().count

    def empty(self) -> bool:
        """Returns whether there is no item now."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Returns whether there is no room now."""
        return 0 < self.maxsize <= self.qsize()

    def close(self, immediate: bool = False) -> None:
        """Lets nothing more in. What is in comes out first, unless ``immediate`` drops it; then readers are told by
        ShutDown. Wakes all who wait in vain. Closing twice is fine."""
        ask = self._asking()
        self._check_answer(ask.ask(s.Close(ask.number(), (self._number,), immediate)))

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return self._state().closed

    def __iter__(self) -> Iterator[Any]:
        """Takes items out, until it is closed and there will be none any more."""
        while True:
            try:
                item = self.get()
            except ShutDown:
                return
            yield item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Channel(Queue):
    """A queue that the script and functions on all nodes use: first in, first out, whoever puts and gets.

        >>> squares = dt.tasks.Channel()
        >>> def work(out, n):
        ...     for i in range(n):
        ...         out.put(i * i)
        ...     out.close()
        >>> dt.run(work, squares, 4, node=1)
        >>> list(squares)
        [0, 1, 4, 9]

    Items are plain data (None, numbers, text, bytes, lists, tuples, sets, dicts of them), tensors, and what the script
    holds for all, such as channels; 64 MiB at most. They are copied when they are put: a tensor on a node is fetched
    then, and whoever gets it has a local tensor. Methods and exceptions have the names of ``queue.Queue``'s. The script
    makes channels, and gives them to functions as arguments. A wait raises NodeLost, once, when a node is lost
    meanwhile: what is waited for may never come; the channel goes on.

    Args:
        maxsize: how many items it has room for; 0: no limit.
        name: a name for ``repr``, and by which ``Channel.named`` finds it.
    """

    _object = channels.ChannelState
    _crosses: ClassVar = {"maxsize": int}

    def __init__(self, maxsize: int = 0, name: str | None = None) -> None:
        """Raises DisttensorError without a session, and in a function on a node."""
        if isinstance(maxsize, bool) or not isinstance(maxsize, int):
            raise TypeError(f"Channel(maxsize={shown(maxsize)}) takes a number of items")
        super().__init__(partial(channels.ChannelState, maxsize=maxsize), name)
        self.maxsize = maxsize
        self._be_found()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes the next item out; waits for one, ``timeout`` seconds at most. Raises queue.Empty, ShutDown once the
        channel is closed and empty, NodeLost."""
        return select(self, timeout=timeout if block else 0)[1]

    @property
    def drained(self) -> bool:
        """True once the channel is closed, and nothing is left in it."""
        state = self._state()
        return state.closed and state.count == 0


def select(*channels: Channel, timeout: float | None = None) -> tuple[Channel, Any]:
    """Takes the next item of whichever channel has one; waits for one, ``timeout`` seconds at most.

        >>> channel, item = dt.tasks.select(squares, cubes)

    Where several have items, each is as likely. Raises queue.Empty, ShutDown once all are closed and empty, ValueError
    without channels, or for channels of several sessions, NodeLost.
    """
    check_timeout(timeout)
    for channel in channels:
        if not isinstance(channel, Channel):
            raise TypeError(f"select takes channels, not {shown(channel)}")
    numbers = tuple(dict.fromkeys(channel._number for channel in channels))
    if not 1 <= len(numbers) <= s.MAX_SELECTED:
        raise ValueError(f"select takes 1 to {s.MAX_SELECTED} channels, not {len(numbers)}")
    ask = channels[0]._asking()
    if any(channel._asking() is not ask for channel in channels):
        raise ValueError("select takes channels of one session")
    request = s.Take(ask.number(), numbers, timeout != 0)
    said, what = ask.ask(request, timeout or None), ", ".join(map(repr, itertools.islice(channels, 4)))
    answer = checked(said, what, channels[0]._referred)
    if answer.item is None:
        raise DisttensorError("an item came without a value")
    found = next(channel for channel in channels if channel._number == answer.of)
    return found, unpack(answer.item, found._referred)
