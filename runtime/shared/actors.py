"""Actors as objects that are shared: calls of nodes on their way to the node of an actor, and who still has a handle.

    caller's node --Invoke--> calls --the answer to Serve--> the actor's node: its method
                  <--answer--       <-----next Serve--------

The script's own calls go to the node as commands; that has one at a time be done (runtime/node/actors.py). What a call
has is not decoded here.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any

from ..protocol import shared_objects as s
from ..protocol.shared_objects import Item, ObjectAnswer
from .objects import OVERHEAD, Object, Objects, WaitingRequest

#: Who has the handles among arguments of calls that have not begun.
_CALLS = -2


class ActorState(Object):
    """An actor that nodes may call."""

    asked = (s.Invoke, s.Serve, s.AwaitAnswer, s.Drop, s.Retire)

    def __init__(self, all: Objects, number: int, node: int, name: str, living: weakref.ref[Any]) -> None:
        """``node``: the party that has it; ``living``: what keeps it there, as long as anybody has a handle."""
        super().__init__(all, number)
        self.node, self.name = node, name
        self._living, self._kept = living, None
        self._handles: Counter[int] = Counter()  #: by party
        self._serving: WaitingRequest | None = None  #: the actor's node, which waits for a call
        self._running: tuple[int, WaitingRequest] | None = None  #: the call that it has, and its number
        self._numbers = count()
        self._awaits: WaitingRequest | None = None  #: the request for whose answer its method waits
        self._over: Callable[[int], ObjectAnswer] | None = (
            None  #: makes the answer to every call, once none is done any more
        )

    # ---- handles -----------------------------------------------------------------------------------------------------

    def hand(self, party: int, number: int = 1) -> None:
        """Counts handles of a party: so many more, or less. The actor is kept while there are any."""
        self._handles[party] += number
        self._settle_handles()

    def release_party(self, party: int) -> None:
        self._handles.pop(party, None)
        self._settle_handles()

    def _settle_handles(self) -> None:
        anybody = any(number > 0 for number in self._handles.values())
        self._kept = (self._kept or self._living()) if anybody else None

    def _named(self, request: s.Invoke) -> list[ActorState]:
        """Returns the actors whose handles are among the arguments of a call, one for each handle."""
        return [actor for actor in self.all.of_kind(ActorState, request.handles) if actor.shared]

    # ---- calls -------------------------------------------------------------------------------------------------------

    def ask(self, wait: WaitingRequest, found: Sequence[Any]) -> None:
        request, call = wait.request, wait.request.call
        if not isinstance(request, s.Invoke | s.Drop) and wait.party != self.node:
            wait.answer(ObjectAnswer(call, s.REFUSED, why=f"the actor {self.name} is not on node {wait.party}"))
            return
        match request:
            case s.Invoke():
                self._invoke(wait, request)
            case s.Serve():
                self._serve(wait, request)
            case s.AwaitAnswer(pending=pending):
                self._awaits = None if pending is None else self.all.waiting_for(wait.party, pending)
                wait.answer(ObjectAnswer(call, s.OK))
                self._break_circle()
            case s.Drop():
                if self._handles[wait.party] > 0:  # what a node says is about its own
                    self.hand(wait.party, -1)
                wait.answer(ObjectAnswer(call, s.OK))
            case s.Retire():
                wait.answer(ObjectAnswer(call, s.OK))
                self.end_with(partial(ObjectAnswer, said=s.SHUT))

    def _invoke(self, wait: WaitingRequest, request: s.Invoke) -> None:
        named = self._named(request)
        wait.size = request.item.nbytes + OVERHEAD
        if self._over is not None:
            wait.answer(self._over(request.call))
        elif len(named) != len(request.handles):
            wait.answer(ObjectAnswer(request.call, s.REFUSED, why=f"node {wait.party} has no such actor"))
        elif wait.size > s.MAX_ITEM + OVERHEAD:
            wait.answer(ObjectAnswer(request.call, s.REFUSED, why=f"its arguments have {wait.size} bytes"))
        elif self.all.enqueue(wait):
            for actor in named:
                actor.hand(_CALLS)
            self.waits.append(wait)
            self._give_next_call()

    def _serve(self, wait: WaitingRequest, request: s.Serve) -> None:
        if self._running is not None and request.ended == self._running[0]:
            ended, self._running = self._running[1], None
            self._awaits = None
            said = s.RAISED if request.raised else s.OK
            self.all.finish(ended, ObjectAnswer(ended.request.call, said, self.number, request.item))
        if self._over is not None:
            wait.answer(ObjectAnswer(request.call, s.SHUT))
        elif self._serving is not None or self._running is not None:
            wait.answer(ObjectAnswer(request.call, s.REFUSED, why=f"the actor {self.name} is served already"))
        elif self.all.enqueue(wait):
            self._serving = wait
            self._give_next_call()

    def _give_next_call(self) -> None:
        """Gives the actor's node the next call, if both are there."""
        if self._serving is None or not self.waits:
            return
        (wait, serving), self._serving = (self.waits.popleft(), self._serving), None
        request, number = wait.request, next(self._numbers)
        self._running = number, wait
        for actor in self._named(request):
            actor.hand(self.node)
            actor.hand(_CALLS, -1)
        self.all.finish(
            serving,
            ObjectAnswer(
                serving.request.call, s.OK, self.number, request.item, number, why=request.method,
                handles=request.handles,
            ),
        )  # fmt: skip

    def remove_waiting(self, wait: WaitingRequest) -> None:
        if wait is self._serving:
            self._serving = None
        elif wait in self.waits:
            self.waits.remove(wait)
            for actor in self._named(wait.request):
                actor.hand(_CALLS, -1)

    def waiting(self) -> Iterable[WaitingRequest]:
        return (*self.waits, *((self._running[1],) if self._running is not None else ()))

    # ---- ends --------------------------------------------------------------------------------------------------------

    def end_with(self, answer: Callable[[int], ObjectAnswer]) -> None:
        """Has every call be answered so from now on, but for the one that is being done."""
        if self._over is None:
            self._over = answer
            for wait in list(self.waits):
                self.all.finish(wait, answer(wait.request.call))
            if self._serving is not None:
                self.all.finish(self._serving, ObjectAnswer(self._serving.request.call, s.SHUT))

    def fail(self, item: Item) -> None:
        """Ends an actor whose ``__init__`` has raised what an item tells."""
        self.end_with(lambda call: ObjectAnswer(call, s.RAISED, self.number, item))

    def lost(self, rank: int, why: str) -> None:
        if rank == self.node:
            waiting, self._running = list(self.waiting()), None
            self.end_with(lambda call: ObjectAnswer(call, s.LOST, count=rank, why=why))
            for wait in waiting:  # the one that was being done, too
                self.all.finish(wait, ObjectAnswer(wait.request.call, s.LOST, count=rank, why=why))

    # ---- who waits for whom ------------------------------------------------------------------------------------------

    def _break_circle(self) -> None:
        """Refuses the call for which this actor's method waits, where that waits for this actor, however far around."""
        names, actor = [self.name], self
        while (awaits := actor._awaits) is not None and not awaits.over and len(names) < s.MAX_HANDLES:
            found = self.all.of_kind(ActorState, awaits.request.of)
            if not found:
                return
            actor = found[0]
            names.append(actor.name)
            if actor is self:
                why = f"actors wait for each other: {' -> '.join(names[:8])}"
                if len(names) == 2:
                    why = "a method of an actor waits for a call of the same actor, whose calls are done one at a time"
                why += "; call self.method() there, or take the result after the method has returned"
                mine: Any = self._awaits
                self.all.finish(mine, ObjectAnswer(mine.request.call, s.REFUSED, why=why))
                return
