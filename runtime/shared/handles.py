"""Handles: what a program and its functions on nodes use. A handle is pickled as the number of what it stands for."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..node import where
from ..process import role
from ..protocol import shared_objects as s
from ..protocol.errors import DisttensorError, NodeLost
from ..protocol.shared_objects import Answer
from . import callers, channels
from .objects import Object, Objects
from .values import pack, unpack
from .waiting import Caller, check_timeout

if TYPE_CHECKING:

    class ShutDown(Exception):
        """Raised by a closed channel: ``queue.ShutDown``, which Python has from 3.13 on."""

elif hasattr(queue, "ShutDown"):
    ShutDown = queue.ShutDown
else:

    class ShutDown(Exception):
        """Raised by a closed channel: ``queue.ShutDown``, which Python has from 3.13 on."""


class Where(NamedTuple):
    """The way by which a function on a node reaches what the script holds."""

    job: str
    addresses: tuple[str, ...]  #: of the service, in the order of the script's; none where nodes are threads


class Holder(Protocol):
    """The script's end: what holds all for the session."""

    caller: callers.Local

    def where(self, number: int) -> Where:
        """Tells functions on nodes how to reach a channel, from now on. Raises DisttensorError where they can't."""


#: Returns the holder of the script's session; set by the front end.
current_holder: list[Callable[[], Holder]] = []
#: Sessions of this process, by job: their nodes may be threads of it.
here: dict[str, Caller] = {}


def caller_at(where: Where) -> Caller:
    """Returns what asks, where a handle was unpickled."""
    found = here.get(where.job)
    if found is not None:
        return found
    if not where.addresses:
        raise DisttensorError("this channel's session has ended")
    return callers.client(where.addresses)


class Handle:
    """A shared object, as the script or a function on a node has it. It is pickled as its number, and where to ask."""

    def __init__(self, kind: Callable[[Objects, int], Object], name: str | None) -> None:
        """Raises DisttensorError without a session, and in a function on a node."""
        if where.found() is not None or role.is_node():
            what = type(self).__name__
            raise DisttensorError(f"a {what} is made by the script, which gives it to functions as an argument")
        if not current_holder:
            raise DisttensorError("there is no session; call disttensor.init_master_worker() first")
        self.name = name
        self._holder: Holder | None = current_holder[0]()
        self._caller: Caller | None = self._holder.caller
        self._number = self._holder.caller.objects.make(kind)
        self._where: Where | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or self._number}>"

    def __getstate__(self) -> dict[str, Any]:
        found = self._where if self._holder is None else self._holder.where(self._number)
        return {**self.__dict__, "_holder": None, "_caller": None, "_where": found}

    def _asking(self) -> Caller:
        if self._caller is None:
            if self._where is None:
                raise DisttensorError(f"this {type(self).__name__} has no session")
            self._caller = caller_at(self._where)
        return self._caller

    def _state(self) -> Answer:
        ask = self._asking()
        return self._said(ask.ask(s.Ask(ask.number(), (self._number,))))

    def _said(self, answer: Answer) -> Answer:
        return checked(answer, repr(self))


class Channel(Handle):
    """A queue that the script and functions on all nodes use: first in, first out, whoever puts and gets.

        >>> squares = dt.tasks.Channel()
        >>> def work(out, n):
        ...     for i in range(n):
        ...         out.put(i * i)
        ...     out.close()
        >>> dt.run(work, squares, 4, node=1)
        >>> list(squares)
        [0, 1, 4, 9]

    Items are plain data, tensors and channels (None, numbers, text, bytes, lists, tuples, sets, dicts of them), 64 MiB
    at most.
    They are copied when they are put: a tensor on a node is fetched then, and whoever gets it has a local tensor.
    Methods and exceptions have the names of ``queue.Queue``'s. The script makes channels, and gives them to functions
    as arguments. A wait raises NodeLost, once, when a node is lost meanwhile: what is waited for may never come; the
    channel goes on.

    Args:
        maxsize: how many items it has room for; 0: no limit.
        name: a name for ``repr``.
    """

    def __init__(self, maxsize: int = 0, name: str | None = None) -> None:
        """Raises DisttensorError without a session, and in a function on a node."""
        if isinstance(maxsize, bool) or not isinstance(maxsize, int):
            raise TypeError(f"Channel(maxsize={maxsize!r:.60}) takes a number of items")
        super().__init__(partial(channels.Channel, maxsize=maxsize), name)
        self.maxsize = maxsize

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}{f' maxsize={self.maxsize}' if self.maxsize > 0 else ''}>"

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an item in; waits for room, ``timeout`` seconds at most. Raises queue.Full, ShutDown once the channel is
        closed, TypeError and ValueError for what is no item, NodeLost."""
        check_timeout(timeout)
        packed = pack(item, self._refers)
        block = block and timeout != 0
        ask = self._asking()
        self._said(ask.ask(s.Put(ask.number(), (self._number,), packed, block), timeout if block else None))

    def put_nowait(self, item: Any) -> None:
        """Puts an item in if there is room. Raises as ``put``."""
        self.put(item, block=False)

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Puts items in, one after the other; ``timeout`` is each one's. Raises as ``put``: those before are in."""
        for item in items:
            self.put(item, timeout=timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes the next item out; waits for one, ``timeout`` seconds at most. Raises queue.Empty, ShutDown once the
        channel is closed and empty, NodeLost."""
        return select(self, timeout=timeout if block else 0)[1]

    def get_nowait(self) -> Any:
        """Takes the next item out if there is one. Raises as ``get``."""
        return self.get(block=False)

    def qsize(self) -> int:
        """Returns the number of items that are in now."""
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
        self._said(ask.ask(s.Close(ask.number(), (self._number,), immediate)))

    @property
    def closed(self) -> bool:
        """True once the channel was closed."""
        return self._state().closed

    @property
    def drained(self) -> bool:
        """True once the channel is closed, and nothing is left in it."""
        state = self._state()
        return state.closed and state.count == 0

    def __iter__(self) -> Iterator[Any]:
        """Takes items out until the channel is closed and empty."""
        while True:
            try:
                item = self.get()
            except ShutDown:
                return
            yield item

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refers(self, value: Any) -> list[Any] | None:
        """Returns what stands for a channel that is put in, from where whoever gets it can use it; None for others."""
        if type(value) is not Channel:
            return None
        if value._asking() is not self._asking():
            raise ValueError(f"{value!r} is of another session than {self!r}, into which it is put")
        if value._holder is not None:
            value._holder.where(value._number)
        return [value._number, value.maxsize, value.name]

    def _referred(self, told: list[Any]) -> Channel:
        number, maxsize, name = told
        if type(number) is not int or type(maxsize) is not int or not isinstance(name, str | None):
            raise ValueError(f"{told!r:.100} is no channel")
        # what a node has put may name an object that the script has for itself
        if self._holder is not None and not self._holder.caller.objects.is_shared(number, channels.Channel):
            raise ValueError(f"no channel that nodes have has the number {number}")
        channel = Channel.__new__(Channel)
        channel.__dict__ |= {**self.__dict__, "_number": number, "maxsize": maxsize, "name": name}
        return channel


def select(*channels: Channel, timeout: float | None = None) -> tuple[Channel, Any]:
    """Takes the next item of whichever channel has one; waits for one, ``timeout`` seconds at most.

        >>> channel, item = dt.tasks.select(squares, cubes)

    Where several have items, each is as likely. Raises queue.Empty, ShutDown once all are closed and empty, ValueError
    without channels, or for channels of several sessions, NodeLost.
    """
    check_timeout(timeout)
    for channel in channels:
        if not isinstance(channel, Channel):
            raise TypeError(f"select takes channels, not {channel!r:.60}")
    numbers = tuple(dict.fromkeys(channel._number for channel in channels))
    if not 1 <= len(numbers) <= s.MAX_SELECTED:
        raise ValueError(f"select takes 1 to {s.MAX_SELECTED} channels, not {len(numbers)}")
    ask = channels[0]._asking()
    if any(channel._asking() is not ask for channel in channels):
        raise ValueError("select takes channels of one session")
    request = s.Take(ask.number(), numbers, timeout != 0)
    answer = checked(ask.ask(request, timeout or None), ", ".join(map(repr, itertools.islice(channels, 4))))
    if answer.item is None:
        raise DisttensorError("an item came without a value")
    found = next(channel for channel in channels if channel._number == answer.of)
    return found, unpack(answer.item, found._referred)


def checked(answer: Answer, what: str) -> Answer:
    """Returns an answer that says OK. Raises what the others mean."""
    match answer.said:
        case s.OK:
            return answer
        case s.EMPTY:
            raise queue.Empty
        case s.FULL:
            raise queue.Full
        case s.SHUT:
            raise ShutDown(f"{what}: closed")
        case s.LOST:
            raise NodeLost(answer.count, cause=f"{answer.why}; {what} goes on, and may get nothing of that node's")
        case s.ENDED:
            raise DisttensorError(f"{what}: {answer.why}")
        case _:
            raise DisttensorError(f"{what}: {answer.why or 'refused'}")
