"""Handles: what a program and its functions on nodes use. A handle is pickled as the number of what it stands for."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..node import where
from ..process import role
from ..protocol import shared_objects as s
from ..protocol.errors import DisttensorError, NodeLost
from ..protocol.shared_objects import Answer
from . import callers
from .objects import Object, Objects
from .waiting import Caller

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
