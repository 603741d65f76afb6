"""Actors: objects of the user's that live on a node. The script runs the functions of this file there.

An actor has a token (tokens.py), which each call names among its operands, and a stream of its own, on which its calls
are done in order. So a call that is under way keeps the actor, and a token that failed to be made (``__init__`` has
raised) fails each call with that error. Calls of other nodes come by a thread (runtime/shared/actor_calls.py); the lock
of an actor has all be done one at a time.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..process.torch_threads import compute_as_told
from ..protocol.errors import DisttensorError
from ..protocol.values import is_announcable
from .own_draws import OwnDraws
from .tokens import behind, token_of


class Actor:
    """An object of the user's, and what its methods draw from."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.draws = OwnDraws(seed)
        self.object: Any = None  #: None once it has ended
        self.lock = threading.RLock()  #: held while a method runs
        self.number: int | None = None  #: by which other nodes call it
        self.retire: Callable[[], object] = lambda: None  #: tells those that it has ended

    def close(self) -> None:
        """Calls the object's ``close()``, if its class has one, and drops the object."""
        with self.lock:
            found, self.object = self.object, None
            close = getattr(type(found), "close", None)
            try:
                with self.draws:
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
    actor: Actor | None = None


_now = _Now()


def current() -> Actor | None:
    """Returns the actor of which this thread runs a method; None elsewhere."""
    return _now.actor


def make(kind: type, args: Sequence[Any], kwargs: dict[str, Any], name: str, seed: int) -> torch.Tensor:
    """Makes an actor. Returns its token."""
    actor = Actor(name, seed)
    with actor.draws:
        actor.object = kind(*args, **kwargs)
    return token_of(actor, actor)


def call(token: torch.Tensor, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a method of an actor."""
    return call_of(behind(token), method, args, kwargs)


def call_of(actor: Actor, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a method of an actor, when no other one of its methods runs."""
    with actor.lock, actor.draws:
        if actor.object is None:
            raise DisttensorError(f"the actor {actor.name} is closed")
        before, _now.actor = _now.actor, actor
        try:
            result = getattr(actor.object, method)(*args, **kwargs)
        finally:
            _now.actor = before
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
