"""Actors as functions on nodes have them: their handles, calls, and the thread on an actor's node that does these.

    function, or another actor's method         the script: actors.py          the actor's node
      handle.step(x)  --Invoke: plain data-->   the calls, in order   --Serve-->   actor.object.step(x)
      work.result()   <--what it returned-----                        <--Serve--

Nothing of it is pickled: arguments and results are plain data and tensors, as the items of queues.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch

from ..master.failures import Failure, Site
from ..node import actors, holders, shared_objects, where
from ..node.failures import failure_report
from ..node.tokens import behind
from ..node.user_functions import guarded
from ..process.spelling import did_you_mean
from ..process.torch_threads import compute_as_told
from ..protocol import shared_objects as s
from ..protocol.errors import DisttensorError, NodeLost, ProtocolError
from ..protocol.shared_objects import Item, ObjectAnswer
from .handles import Counted, ObjectHandle, ServiceRoute
from .values import pack, unpack
from .waiting import AnswerSlot, Caller, check_timeout


class About(NamedTuple):
    """An actor in words, and what it can be asked."""

    kind: str  #: the name of its class
    node: int
    host: str
    pid: int  #: of its node
    methods: list[str]


class Reach(ObjectHandle):
    """The one of all actors that a handle stands for, as what crosses in calls."""

    def __init__(self, number: int, found: ServiceRoute, about: About) -> None:
        self.name, self._holder, self._caller, self._where = None, None, None, found
        self._number, self.about = number, about

    def __repr__(self) -> str:
        return f"<actor {self.about.kind} on node {self.about.node}>"

    def beside(self, number: int) -> Reach:
        """Returns another one of this session, of which nothing is known yet."""
        made = Reach(number, ServiceRoute("", ()), self.about)
        made._where, made._caller = self._where, self._caller
        return made

    def asking(self) -> Caller:
        """Returns what asks."""
        return self._asking()

    def has(self, handles: list[int]) -> Callable[[Any], list[Any] | None]:
        """Returns what stands for a handle among arguments (``values.encode``); ``handles`` gets the numbers."""

        def refers(value: Any) -> list[Any] | None:
            if not isinstance(value, ActorHandle):
                return self._refers(value)
            reach = value._reach
            if reach.asking() is not self.asking():
                raise ValueError(f"{value!r} is of another session than {self!r}, to which it is given")
            handles.append(reach._number)
            return ["Actor", reach._number, *reach.about]

        return refers

    def resolve(self, handles: list[ActorHandle], parts: list[Any]) -> Any:
        """Returns what was told by ``has``: of handles the next one. Raises ValueError."""
        if parts[:1] != ["Actor"]:
            return self._referred(parts)
        found = next((each for each in handles if each._reach._number == parts[1]), None)
        if found is None or len(parts) != 7 or not _is_about(About(*parts[2:])):
            raise ValueError(f"{parts!r:.100} is not a handle of an actor that came with it")
        handles.remove(found)
        found._reach.about = About(*parts[2:])
        return found


def _is_about(about: About) -> bool:
    """Returns whether what a node says of an actor is what it may be."""
    kinds = (str, int, str, int, list)
    return all(type(part) is kind for part, kind in zip(about, kinds, strict=True)) and all(
        type(name) is str for name in about.methods
    )


class ActorHandle(Counted):
    """An actor's handle in a function on a node, or in another actor. Its methods are those of the actor's class, and
    return Works at once.
    """

    def __init__(self, reach: Reach) -> None:
        """The script has counted this one already."""
        self._reach = reach
        ask = reach.asking()
        ask.expect_later()
        drop = s.Drop(ask.number(), (reach._number,))
        weakref.finalize(self, ask.notify_later, drop).atexit = False

    @property
    def node(self) -> int:
        """The number of the actor's node."""
        return self._reach.about.node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_reach" not in self.__dict__:
            raise AttributeError(name)
        about = self._reach.about
        if name == "close":
            raise AttributeError(f"{self!r} is closed by the script, and when the last handle of it goes")
        if name not in about.methods:
            raise AttributeError(
                f"{about.kind} has no method {name!r}{did_you_mean(name, about.methods)}; what its objects have "
                "besides is on their node, and a method can return it"
            )
        return partial(self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Calling:
        """Calls the object itself: ``__call__`` of its class."""
        if "__call__" not in self._reach.about.methods:
            raise TypeError(f"{self._reach.about.kind} can't be called: it has no __call__")
        return self._call("__call__", *args, **kwargs)

    def _call(self, method: str, /, *args: Any, **kwargs: Any) -> Calling:
        reach, handles = self._reach, list[int]()
        what = f"{reach.about.kind}.{method}()"
        item = pack([args, kwargs], reach.has(handles), f"an argument of {what}", "give")
        if len(handles) > s.MAX_HANDLES:
            raise ValueError(
                f"{what}: its arguments have {len(handles)} handles of actors, and may have {s.MAX_HANDLES}"
            )
        ask = reach.asking()
        request = s.Invoke(ask.number(), (reach._number,), method, item, tuple(handles))
        return Calling(reach, what, request, _site())

    def __copy__(self) -> ActorHandle:
        return self

    def __deepcopy__(self, _: Any) -> ActorHandle:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DisttensorError(f"{self!r} can't be saved: give it as an argument to an actor")

    def __dir__(self) -> list[str]:
        return sorted({"node", *(name for name in self._reach.about.methods if not name.startswith("_"))})

    def __repr__(self) -> str:
        return repr(self._reach)


class Calling:
    """A call of an actor on its way, from a function on a node, or from another actor: a ``Work``.

    One that is dropped goes on; the node prints the error with which it ends then.
    """

    def __init__(self, reach: Reach, what: str, request: s.Invoke, site: Site | None) -> None:
        self._reach, self._what, self._site = reach, what, site
        self._slot = _Told(request, f"{what} on node {reach.about.node}")
        reach.asking().ask_async(self._slot)

    def is_completed(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once. Does not wait."""
        return self._slot.answer is not None

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Waits for the end, and returns True if it was a success.

        Raises TimeoutError after ``timeout`` seconds (the call goes on), what the method has raised, NodeLost,
        DisttensorError where the actor is closed, and where it waits for the method that waits here.
        """
        self.result(timeout)
        return True

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """Waits, and returns what the method has returned. Raises as ``wait``."""
        answer = self._answer(timeout)
        self._slot.heard = True
        about = self._reach.about
        match answer.said:
            case s.OK if answer.item is not None:
                return unpack(answer.item, self._reach._referred)
            case s.RAISED if answer.item is not None:
                failed = s.decode_raised(answer.item.data)
                raise Failure(about.node, about.host, about.pid, failed, self._site).exception()
            case s.LOST:
                error = NodeLost.told_by_script(answer.count, answer.why)
                error.add_note(f"  the actor {about.kind} was there; its calls have ended with it")
                raise error
            case s.SHUT:
                raise DisttensorError(f"{self._reach!r} is closed")
            case s.ENDED:
                raise DisttensorError(f"{self._what}: the session has ended")
            case _:
                raise DisttensorError(f"{self._what}: {answer.why or 'refused'}")

    def exception(self, timeout: float | timedelta | None = None) -> Exception | None:
        """Waits, and returns the error that ``wait`` would raise, or None. Raises TimeoutError after ``timeout``
        seconds."""
        self._answer(timeout)
        try:
            self.result()
        except Exception as error:
            return error
        return None

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.to_thread(self.result).__await__()

    def _answer(self, timeout: float | timedelta | None) -> ObjectAnswer:
        """Waits for the answer. The script is told by whose method, as that actor may be waited for by this one."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        check_timeout(seconds)
        slot, ask, caller = self._slot, self._reach.asking(), actors.current()
        if caller is None or seconds is not None or slot.answer is not None:
            answer = slot.wait(seconds)
        else:
            caller.awaits(lambda of: ask.notify(s.AwaitAnswer(ask.number(), (of,), slot.request.call)))
            try:
                answer = slot.wait()
            except BaseException:
                caller.awaits(lambda of: ask.notify(s.AwaitAnswer(ask.number(), (of,))))
                raise
            finally:
                caller.awaits(None)
        if answer is None:
            raise TimeoutError(f"{self._what} on node {self._reach.about.node} has not ended within {seconds:g} s")
        return answer

    def __del__(self) -> None:
        if (slot := self.__dict__.get("_slot")) is not None:
            slot.abandon()

    def __repr__(self) -> str:
        state = "done" if self.is_completed() else "under way"
        return f"<Work {state}: {self._what} on node {self._reach.about.node}>"


class _Told(AnswerSlot):
    """The place of a call's answer. An error that nobody has asked for, and nobody can any more, is printed."""

    __slots__ = ("_dropped", "_what", "heard")

    def __init__(self, request: s.Invoke, what: str) -> None:
        super().__init__(request)
        self._what, self._dropped, self.heard = what, False, False

    def fill(self, answer: ObjectAnswer) -> None:
        super().fill(answer)
        if self._dropped:
            self._log_unheard()

    def abandon(self) -> None:
        """Notes that nobody will ask for the answer."""
        self._dropped = True
        if self.answer is not None:
            self._log_unheard()

    def _log_unheard(self) -> None:
        answer = self.answer
        if self.heard or answer is None or answer.said in (s.OK, s.ENDED):
            return
        self.heard, why = True, answer.why
        if answer.said == s.RAISED and answer.item is not None:
            try:
                failed = s.decode_raised(answer.item.data)
                why = f"{failed.kind.removeprefix('builtins.')}: {failed.message}"
            except ProtocolError as error:
                why = str(error)
        elif answer.said == s.SHUT:
            why = "the actor is closed"
        print(f"disttensor: {self._what}, whose result nobody has asked for: {why}", file=sys.stderr)


def _site() -> Site | None:
    """Returns the line of the user's that has called."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("disttensor."):
        frame = frame.f_back
    return None if frame is None else (frame.f_code, frame.f_lasti)


# ---- what the script runs on nodes -----------------------------------------------------------------------------------


def keep_handle(number: int, found: ServiceRoute, about: About) -> torch.Tensor:
    """Keeps a handle for functions of this node; returns its token (runtime/node/shared_objects.py)."""
    return shared_objects.keep(ActorHandle(Reach(number, found, about)))


def serve(token: torch.Tensor, number: int, found: ServiceRoute, about: About) -> None:
    """Has an actor of this node be called by others."""
    actor: actors.ActorInstance = behind(token)
    reach = Reach(number, found, about)
    ask = reach.asking()
    with actor.lock:
        actor.retire = lambda: ask.notify(s.Retire(ask.number(), (number,)))
        if actor.object is None:
            actor.retire()
    threading.Thread(
        target=_serve, args=(actor, reach, where.found()), name=f"disttensor-actor-{number}", daemon=True
    ).start()


def _serve(actor: actors.ActorInstance, reach: Reach, place: where.Where | None) -> None:
    """Does the calls of others, one after the other, until the actor or the session has ended."""
    compute_as_told()
    ask, number = reach.asking(), reach._number
    ended: int | None = None
    item: Item | None = None
    raised = False
    while True:
        slot = AnswerSlot(s.Serve(ask.number(), (number,), ended, item, raised))
        try:
            ask.ask_async(slot)
        except DisttensorError:  # the connection has ended, and so has this node
            return
        answer = slot.wait(own_thread=True)
        if answer is None or answer.said != s.OK or answer.item is None:
            return
        handles = [ActorHandle(reach.beside(each)) for each in answer.handles]  # counted as ours
        ended, (raised, item) = answer.count, _do(actor, reach, place, answer, handles)
        del slot, answer, handles


def _do(
    actor: actors.ActorInstance,
    reach: Reach,
    place: where.Where | None,
    answer: ObjectAnswer,
    handles: list[ActorHandle],
) -> tuple[bool, Item]:
    """Does a call; returns whether it has raised, and what tells of it."""
    what = f"{actor.name}.{answer.why}()"

    def job() -> Item:
        if answer.why not in reach.about.methods:  # a node may ask for anything
            raise AttributeError(f"{actor.name} has no method {answer.why!r}")
        args, kwargs = unpack(answer.item, partial(reach.resolve, handles))  # type: ignore[arg-type]
        handles.clear()
        with actor.lock, torch.enable_grad():
            if inspect.iscoroutinefunction(getattr(actor.object, answer.why, None)):
                raise TypeError(f"{what} is async, and an actor's methods are not: no event loop runs on the node")
            result = actors.call_of(actor, answer.why, args, kwargs)
            return pack(result, partial(_returned, reach), f"what {what} returned", "return")

    try:
        with where.at(place) if place is not None else nullcontext(), holders.during(what):
            return False, guarded(what, job)
    except Exception as error:
        failed = failure_report(0, what, error)
        return True, Item(s.encode(failed))


def _returned(reach: Reach, value: Any) -> list[Any] | None:
    if isinstance(value, Counted):
        raise TypeError(
            f"a method of {reach!r} returned {value!r}; give it as an argument to the one that is to have it"
        )
    return reach._refers(value)
