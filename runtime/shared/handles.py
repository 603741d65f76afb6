"""Handles: what a program and its functions on nodes use. A handle is pickled as the number of what it stands for.

One that has a name is found by it, too, in the script and in functions on nodes: the script tells a node of all names
before the next function that it sends there.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from importlib import import_module
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from ..node import where
from ..process import role
from ..process.spelling import shown
from ..protocol import shared_objects as s
from ..protocol.errors import DisttensorError, NodeLost
from ..protocol.shared_objects import ObjectAnswer
from . import callers
from .objects import Object, Objects
from .values import unpack
from .waiting import Caller

if TYPE_CHECKING:

    class ShutDown(Exception):
        """Raised by a closed channel: ``queue.ShutDown``, which Python has from 3.13 on."""

elif hasattr(queue, "ShutDown"):
    ShutDown = queue.ShutDown
else:

    class ShutDown(Exception):
        """Raised by a closed channel: ``queue.ShutDown``, which Python has from 3.13 on."""


class Dropped(DisttensorError):
    """Raised when an item of a WorkQueue was given up: all who have tried it have ended. ``item`` is what it was."""

    def __init__(self, message: str, item: Any = None) -> None:
        super().__init__(message)
        self.item = item


class ServiceRoute(NamedTuple):
    """The way by which a function on a node reaches what the script holds."""

    job: str
    addresses: tuple[str, ...]  #: of the service, in the order of the script's; none where nodes are threads


class ObjectsOwner(Protocol):
    """The script's end: what holds all for the session."""

    caller: callers.Local
    named: dict[tuple[str, str], ObjectHandle]  #: by the names of a kind and of one of these

    def pickled(self, function: Any, what: str) -> bytes:
        """Pickles a function that is in an item. Raises TypeError."""

    def register_name(self, handle: ObjectHandle, name: str) -> None:
        """Has a handle be found by its name."""

    def where(self, number: int) -> ServiceRoute:
        """Tells functions on nodes how to reach a channel, from now on. Raises DisttensorError where they can't."""


#: Returns the holder of the script's session; set by the front end.
current_holder: list[Callable[[], ObjectsOwner]] = []
#: Sessions of this process, by job: their nodes may be threads of it.
here: dict[str, Caller] = {}
#: On a node: the handles that have names.
_told: dict[tuple[str, str], ObjectHandle] = {}
#: The kinds of handles, and the modules here that have them: a node may not have imported one that comes in an item.
_KINDS = {
    "Channel": "channel_handles",
    "WorkQueue": "work_queue_handles",
    "SharedDict": "table_handles",
    "Lock": "lock_handles",
    "Barrier": "lock_handles",
}
_Kind = TypeVar("_Kind", bound="ObjectHandle")


def caller_at(where: ServiceRoute) -> Caller:
    """Returns what asks, where a handle was unpickled."""
    found = here.get(where.job)
    if found is not None:
        return found
    if not where.addresses:
        raise DisttensorError("this channel's session has ended")
    return callers.client(where.addresses)


class Counted:
    """A handle of an actor, of which the script knows who has one: among arguments of calls it crosses, and in no
    item."""


class ObjectHandle:
    """A shared object, as the script or a function on a node has it. It is pickled as its number, and where to ask."""

    #: What it stands for.
    _object: ClassVar[type[Object]]
    #: Its attributes that cross with it when it is an item, or in one, and what these may be.
    _crosses: ClassVar[dict[str, type | UnionType]] = {}

    def __init__(self, kind: Callable[[Objects, int], Object], name: str | None) -> None:
        """Raises DisttensorError without a session, and in a function on a node."""
        if not isinstance(name, str | None):
            raise TypeError(f"{type(self).__name__}(name={shown(name)}) takes a text")
        holder = self._made_by()
        self.name = name
        self._holder: ObjectsOwner | None = holder
        self._caller: Caller | None = holder.caller
        self._number = holder.caller.objects.make(kind)
        self._where: ServiceRoute | None = None

    def _be_found(self) -> None:
        """Has it be found by its name; called when it is whole."""
        if self.name is not None and self._holder is not None:
            self._holder.register_name(self, self.name)

    @classmethod
    def _made_by(cls) -> ObjectsOwner:
        """Returns who holds what is made now."""
        if where.found() is not None or role.is_node():
            raise DisttensorError(f"a {cls.__name__} is made by the script, which gives it to functions as an argument")
        if not current_holder:
            raise DisttensorError("there is no session; call disttensor.init_master_worker() first")
        return current_holder[0]()

    @classmethod
    def named(cls: type[_Kind], name: str) -> _Kind:
        """Returns the one that the script has made with this name, the last one of several: in the script, and in
        functions that were sent to nodes since. Raises LookupError where there is none."""
        here = where.found() is None and not role.is_node()
        known = (current_holder[0]().named if current_holder else {}) if here else _told
        found = known.get((cls.__name__, name))
        if isinstance(found, cls):
            return found
        others = sorted(other for kind, other in known if kind == cls.__name__)
        raise LookupError(
            f"no {cls.__name__} has the name {shown(name)}; "
            + (f"there are {', '.join(map(repr, others[:8]))}" if others else "the script makes it, with that name")
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or self._number}>"

    def __getstate__(self) -> dict[str, Any]:
        found = self._where if self._holder is None else self._holder.where(self._number)
        return {**self.__dict__, "_holder": None, "_caller": None, "_where": found}

    # ---- a handle in an item -----------------------------------------------------------------------------------------

    def _refers(self, value: Any) -> list[Any] | None:
        """Returns what stands for a handle that is put into this one, from where whoever gets it can use it; None for
        others."""
        if isinstance(value, Counted):
            raise TypeError(f"{value!r} can't be put into {self!r}: give it as an argument to a function or an actor")
        if not isinstance(value, ObjectHandle):
            return None
        if value._asking() is not self._asking():
            raise ValueError(f"{shown(value)} is of another session than {self!r}, into which it is put")
        parts = {name: getattr(value, name) for name in value._crosses}
        for name, part in parts.items():
            if not isinstance(part, value._crosses[name]):
                raise TypeError(f"{shown(value)} can't be put into {self!r}: its {name.strip('_')} can't cross")
        if value._holder is not None:
            value._holder.where(value._number)
        return [type(value).__name__, value._number, value.name, *parts.values()]

    def _referred(self, told: list[Any]) -> Any:
        """Returns the handle that ``_refers`` has told. Raises ValueError."""
        kind, number, name, *parts = told
        module = _KINDS.get(kind) if isinstance(kind, str) else None
        cls: type[ObjectHandle] | None = getattr(import_module(f".{module}", __package__), kind) if module else None
        allowed = cls._crosses if cls is not None else {}
        if (
            cls is None
            or type(number) is not int
            or not isinstance(name, str | None)
            or len(parts) != len(allowed)
            or not all(map(isinstance, parts, allowed.values()))
            or any(isinstance(part, bool) for part in parts)
        ):
            raise ValueError(f"{told!r:.100} is nothing that the script holds for all")
        # what a node has put may name an object that the script has for itself
        if self._holder is not None and not self._holder.caller.objects.is_shared(number, cls._object):
            raise ValueError(f"no {cls.__name__} that nodes have has the number {number}")
        return self._beside(cls, number, name, dict(zip(allowed, parts, strict=True)))

    def _beside(self, cls: type[_Kind], number: int, name: str | None, parts: dict[str, Any]) -> _Kind:
        """Makes a handle of another object of this session."""
        made = cls.__new__(cls)
        mine = {key: self.__dict__[key] for key in ("_holder", "_caller", "_where")}
        made.__setstate__({**mine, "_number": number, "name": name, **parts})
        return made

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)

    def _asking(self) -> Caller:
        if self._caller is None:
            if self._where is None:
                raise DisttensorError(f"this {type(self).__name__} has no session")
            self._caller = caller_at(self._where)
        return self._caller

    def _state(self) -> ObjectAnswer:
        ask = self._asking()
        return self._check_answer(ask.ask(s.Inspect(ask.number(), (self._number,))))

    def _check_answer(self, answer: ObjectAnswer) -> ObjectAnswer:
        return checked(answer, repr(self))


def learn(handles: list[ObjectHandle]) -> None:
    """Has functions on this node find handles by their names. The script runs it."""
    _told.update({(type(handle).__name__, handle.name): handle for handle in handles if handle.name is not None})


def forget_names() -> None:
    """Forgets what ``learn`` has told: the session has ended whose nodes are threads of this process."""
    _told.clear()


def checked(answer: ObjectAnswer, what: str, referred: Callable[[list[Any]], Any] | None = None) -> ObjectAnswer:
    """Returns an answer that says OK. Raises what the others mean. ``referred``: as for ``unpack``."""
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
            raise NodeLost.told_by_script(
                answer.count, f"{answer.why}; {what} goes on, and may get nothing of that node's"
            )
        case s.ENDED:
            raise DisttensorError(f"{what}: {answer.why}")
        case s.DROPPED:
            raise Dropped(f"{what}: {answer.why}", answer.item and unpack(answer.item, referred))
        case _:
            raise DisttensorError(f"{what}: {answer.why or 'refused'}")
