"""Actors: objects of the user's that live on a node. The script runs the functions of this file there.

An actor has a token (tokens.py), which each call names among its operands, and a stream of its own, on which its calls
are done in order. So a call that is under way keeps the actor, and a token that failed to be made (``__init__`` has
raised) fails each call with that error. Calls of other nodes come by a thread (runtime/shared/actor_calls.py); the lock
of an actor has all be done one at a time. Nodes call an actor by its number, which it is told beside all else that it
does: the script ends circles of actors that wait for each other, and one may wait before its handle first travels.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..host import cuda_devices
from ..process.torch_threads import compute_as_told
from ..protocol.errors import DisttensorError
from ..protocol.values import is_announcable
from .own_draws import OwnDraws
from .tokens import behind, token_of

#: An actor of a session, before it has a number: the job, and the ref of its token.
Key = tuple[str, int]

#: Tells the script for which call the actor waits whose number is given.
Tell = Callable[[int], object]

_naming = threading.Lock()
_actors: weakref.WeakValueDictionary[Key, ActorInstance] = weakref.WeakValueDictionary()
_numbers: dict[Key, int] = {}  #: of actors that are not made yet


class ActorInstance:
    """An object of the user's, and what its methods draw from."""

    def __init__(self, name: str, seed: int, key: Key) -> None:
        self.name = name
        self.draws = OwnDraws(seed)
        self.object: Any = None  #: None once it has ended
        self.lock = threading.RLock()  #: held while a method runs
        self.after: list[Any] = []  #: CUDA events of what its last method was at; the next one's streams may be others
        self._numbering = threading.Lock()
        self._awaited: Tell | None = None  #: tells the script for which call a method waits
        with _naming:
            _actors[key] = self
            self._number = _numbers.pop(key, None)
        self.retire: Callable[[], object] = lambda: None  #: tells those that it has ended

    def number_is(self, number: int) -> None:
        """Notes the number by which other nodes call it, and tells for which call it waits."""
        with self._numbering:
            self._number = number
            if self._awaited is not None:
                self._awaited(number)

    def awaits(self, tell: Tell | None) -> None:
        """Notes that a method begins to wait for a call, and tells so by ``tell`` as soon as there is a number; None:
        that it waits no more."""
        with self._numbering:
            self._awaited = tell
            if tell is not None and self._number is not None:
                tell(self._number)

    def close(self) -> None:
        """Calls the object's ``close()``, if its class has one, and drops the object."""
        with self.lock:
            found, self.object = self.object, None
            close = getattr(type(found), "close", None)
            try:
                with self.draws:
                    cuda_devices.follow(self.after)
                    if callable(close):
                        found.close()
                    del found  # here, so that its __del__ draws as its methods do
            finally:
                self.retire()

    def end(self) -> None:
        """Ends an actor that the script has dropped, in a thread of its own: its ``close()`` may take long."""
        if self.object is not None:
            threading.Thread(target=self._end, name="disttensor-actor-end", daemon=True).start()

    def _end(self) -> None:
        compute_as_told()
        try:
            self.close()
        except BaseException:
            print(f"disttensor: the end of the actor {self.name} failed:", file=sys.stderr)
            traceback.print_exc()


class _Now(threading.local):
    actor: ActorInstance | None = None


_now = _Now()


def current() -> ActorInstance | None:
    """Returns the actor of which this thread runs a method; None elsewhere."""
    return _now.actor


class _Within:
    """The time in which this thread runs a method of an actor, after what the last one has given other streams."""

    def __init__(self, actor: ActorInstance) -> None:
        self._actor = actor

    def __enter__(self) -> None:
        self._before, _now.actor = _now.actor, self._actor
        cuda_devices.follow(self._actor.after)

    def __exit__(self, *_: object) -> None:
        _now.actor = self._before
        self._actor.after = cuda_devices.ends()


def make(kind: type, args: Sequence[Any], kwargs: dict[str, Any], name: str, seed: int, key: Key) -> torch.Tensor:
    """Makes an actor. Returns its token."""
    actor = ActorInstance(name, seed, key)
    with actor.draws, _Within(actor):
        actor.object = kind(*args, **kwargs)
    return token_of(actor, actor)


def number(key: Key, number: int) -> None:
    """Gives an actor the number by which other nodes call it. The actor may not be there yet, or be gone."""
    with _naming:
        if (actor := _actors.get(key)) is None:
            _numbers[key] = number
    if actor is not None:
        actor.number_is(number)


def call(token: torch.Tensor, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of an actor."""
    return call_of(behind(token), method, args, kwargs)


def call_of(actor: ActorInstance, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a method of an actor, when no other one of its methods runs."""
    with actor.lock, actor.draws:
        if actor.object is None:
            raise DisttensorError(f"the actor {actor.name} is closed")
        with _Within(actor):
            result = getattr(actor.object, method)(*args, **kwargs)
        if result is actor.object and not is_announcable(type(result)):
            raise TypeError(
                f"{actor.name}.{method}() returned the actor's object, which stays on its node; return None, or what "
                "the script is to know of it"
            )
        return result


#: Tensors of a method's result that the actor keeps too are copied: it may write them in its next call.
call.keeps_state = True  # type: ignore[attr-defined]


def close(token: torch.Tensor) -> None:
    """Ends an actor."""
    behind(token).close()
