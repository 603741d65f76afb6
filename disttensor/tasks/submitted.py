"""Functions of the user on nodes for which nobody waits yet: ``dt.submit(fn, *args, node=k)``, and their Works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, overload

from ..dispatch.call_site import here
from ..errors.missing import advised
from ..futures.listening import Listened, wait_for_answer
from ..futures.work import T_co
from ..runtime.channel.ticket import Ticket
from ..runtime.master.failures import Failure, Site
from ..runtime.master.requests import CallbackRequest, ItemsRequest
from ..runtime.master.route import waits
from ..runtime.node.streams.lane import when_all
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import CancelledError, DisttensorError, NodeLost
from ..session import current
from ..session.node_context import chosen_node
from ..session.places import NodePlace
from ..session.session import Session
from ..streams.streams import Event, Owned, Stream, current_stream
from .announcing import Announcing
from .calls import Each, FunctionCall, PickledArguments, first_of, name_of
from .functions import check_call, check_each, place_of_call
from .process_groups import worlds_of
from .sending import NodeResult, pickled_items
from .signatures import A, B, C, Given, GivenEach, Node, Nodes, P, R, Takes1, Takes2, Takes3
from .targets import Targets


@overload
def submit(fn: Callable[..., R], /, *, node: Node | None, **kwargs: Any) -> Submitted[R]: ...
@overload
def submit(fn: Takes1[A, R], a: Given[A], /, *, node: Node | None, **kwargs: Any) -> Submitted[R]: ...
@overload
def submit(fn: Takes2[A, B, R], a: Given[A], b: Given[B], /, *, node: Node | None, **kwargs: Any) -> Submitted[R]: ...
@overload
def submit(
    fn: Takes3[A, B, C, R], a: Given[A], b: Given[B], c: Given[C], /, *args: Any, node: Node | None, **kwargs: Any
) -> Submitted[R]: ...
@overload
def submit(fn: Callable[..., R], /, *, node: Nodes, distributed: bool = False, **kwargs: Any) -> Submitted[list[R]]: ...
@overload
def submit(
    fn: Takes1[A, R], a: GivenEach[A], /, *, node: Nodes, distributed: bool = False, **kwargs: Any
) -> Submitted[list[R]]: ...
@overload
def submit(
    fn: Takes2[A, B, R], a: GivenEach[A], b: GivenEach[B], /, *, node: Nodes, distributed: bool = False, **kwargs: Any
) -> Submitted[list[R]]: ...
@overload
def submit(
    fn: Takes3[A, B, C, R],
    a: GivenEach[A],
    b: GivenEach[B],
    c: GivenEach[C],
    /,
    *args: Any,
    node: Nodes,
    distributed: bool = False,
    **kwargs: Any,
) -> Submitted[list[R]]: ...
@overload
def submit(fn: Callable[..., R], /, *args: Any, beside: bool, **kwargs: Any) -> Submitted[R]: ...
@overload
def submit(fn: Callable[..., R], /, *args: Any, returns: Any, **kwargs: Any) -> Submitted[R]: ...
@overload
def submit(fn: Callable[..., R], /, *args: Any, raises: Any, **kwargs: Any) -> Submitted[R]: ...
@overload
def submit(fn: Callable[[A], R], a: Given[A], /) -> Submitted[R]: ...
@overload
def submit(fn: Callable[[A, B], R], a: Given[A], b: Given[B], /) -> Submitted[R]: ...
@overload
def submit(fn: Callable[[A, B, C], R], a: Given[A], b: Given[B], c: Given[C], /) -> Submitted[R]: ...
@overload
def submit(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Submitted[R]: ...
def submit(  # type: ignore[misc]  # of a function that takes a ``node``, this one has it
    fn: Any,
    *args: Any,
    node: Node | Nodes | None = None,
    nodes: Nodes | None = None,
    distributed: bool = False,
    beside: bool = False,
    **kwargs: Any,
) -> Any:
    """Does what ``run`` does without waiting: returns a Work at once, whose ``result()`` is what the function returns.

        >>> works = [dt.submit(pow, k, 2, node=k) for k in (0, 1)]
        >>> [work.result() for work in works]
        [0, 1]

    The Works of other functions may be arguments: the function gets their results. That of a function of the same node
    is taken there, and nothing waits here; another one is waited for.

        >>> dt.submit(pow, dt.submit(pow, 2, 3, node=1), 2, node=1).result()
        64

    Args:
        fn, *args, **kwargs, distributed: as for ``run``.
        node: as for ``run``; or "any": the node for which the fewest functions wait. Default: the node of the ``with
            dt.node(k)`` block that this is in, else "any".
        beside: the function runs on a stream of its own, beside what its node does otherwise, when everything that was
            issued before for its arguments is done. Else it runs in its turn, and what is issued to its node later
            begins after it, on whatever stream.

    The function is begun in its turn on its node, whether anybody waits or not. ``work.cancel()`` has it not begin, or
    ends it by a KeyboardInterrupt. A Work that is dropped goes on; an error that nobody asked for is raised by
    ``dt.synchronize()`` or at the end of the session. Raises at once what ``run`` raises for a function and arguments
    that can't be sent, NodeLost, GraphError while a graph is recorded.
    """
    session = current.session()
    site = here()
    check_call(fn, kwargs, "submit")
    waits("a function")
    if node is None and nodes is None and not distributed:
        node = "any" if (chosen := chosen_node()) is None else chosen
    _, as_ranks, given = place_of_call("submit", session, node, nodes, distributed)
    calls, what = list[FunctionCall](), f"{name_of(fn)}()"
    try:
        if not isinstance(given, Targets):
            calls.append(FunctionCall(session, given, fn, args, kwargs, site, what=what))
            return issue(session, calls, what, site, beside=beside)
        check_each(given, args, kwargs)
        for i, place in enumerate(given.places):
            mine = [x.values[i] if isinstance(x, Each) else x for x in args]
            named = {name: x.values[i] if isinstance(x, Each) else x for name, x in kwargs.items()}
            calls.append(FunctionCall(session, place, fn, mine, named, site, what=what))
            calls[-1].as_rank(given.mesh, i)
        return issue(session, calls, what, site, targets=given, as_ranks=as_ranks, beside=beside)
    except NodeLost as error:
        if isinstance(given, Targets):
            given.located(error, error.rank)
        raise
    finally:
        for call in calls:
            call.end()


def submit_on_node(
    session: Session,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Any,
    node: int,
    site: Any,
    beside: bool,
    announcing: Announcing | None = None,
    what: str = "",
) -> Submitted[Any]:
    """Does what ``submit`` does on one node, for a line of the user's that is another one than the caller's.
    ``announcing``, ``what``: as for FunctionCall."""
    what = what or f"{name_of(fn)}()"
    call = FunctionCall(session, session.places.at(node).one, fn, args, kwargs, site, what=what, announcing=announcing)
    try:
        return issue(session, [call], what, site, beside=beside)
    finally:
        call.end()


def submit_items(
    session: Session,
    fn: Callable[..., Any],
    items: Sequence[bytes],
    kwargs: Any,
    node: int,
    site: Any,
    beside: bool,
    when_told: Callable[[], None],
) -> Submitted[Any]:
    """Does what ``submit_on_node`` does for a chunk of items, pickled one by one. ``when_told`` is called, in any
    thread, when there is something that ``parts[0].take_told`` returns."""
    what, arguments = f"{name_of(fn)}()", PickledArguments()
    arguments.data = pickled_items(items)
    place = session.places.at(node).one
    call = FunctionCall(session, place, fn, (), kwargs, site, arguments, what, items=len(items))
    call.when_told = when_told
    try:
        return issue(session, [call], what, site, beside=beside)
    finally:
        call.end()


def issue(
    session: Session,
    calls: Sequence[FunctionCall],
    what: str,
    site: Site | None,
    *,
    targets: Targets | None = None,
    as_ranks: bool = False,
    beside: bool = False,
    streams: Sequence[Stream] = (),
) -> Submitted[Any]:
    """Has calls that were sent begin, each in its turn on its node, and returns their Work. Their result is a list
    where there are ``targets``, else that of the only one. ``streams``: one for each, on which it runs."""
    work: Submitted[Any] = Submitted(session, calls, what, targets)
    lanes = list(streams)
    with contextlib.ExitStack() as turn:
        if as_ranks and targets is not None:
            work.world = turn.enter_context(worlds_of(session).turn(session, targets, site))
        commands: list[c.Command] = []
        for i, (call, part) in enumerate(zip(calls, work.parts, strict=True)):
            if beside:
                lanes.append(Stream(call.place.device))
                if call.uses:
                    done = Event()
                    done.record(current_stream(call.place.device))
                    done.wait(lanes[i])
            part.expect_result(session)
            run = call.command(part.request.id, work.world, draws=not lanes, token=part.token.ref)
            commands.append(c.On(lanes[i].stream_id, run) if lanes else run)
        if targets is None:
            session.link.sender.issue_call(calls[0].place.node, commands[0], site, calls[0].nbytes)
        else:
            nodes = [call.place.node for call in calls]
            session.link.sender.together([*zip(nodes, commands, repeat(site))])
        for call in calls:
            call.issued()
    return work


class _Part:
    """A function on one node: its request, the ticket that ends with it, and the owner of what it returns."""

    request: CallbackRequest

    def __init__(self, call: FunctionCall, ended: Ticket) -> None:
        self.call, self.ended = call, ended
        self.token = Owned(call.place)  #: of its whole result

    def expect_result(self, session: Session) -> None:
        if self.call.items:
            self.request = session.link.requests.new_items(self.call.place.node, self.call.items, self._pass_on_answer)
            return
        self.request = session.link.requests.new_told(self.call.place.node, c.Result, self.ended.finish)

    def _pass_on_answer(self) -> None:
        if self.request.done:
            self.ended.finish()
        elif (then := self.call.when_told) is not None:
            then()

    def take_told(self) -> c.Mapped | None:
        """Takes what its node has told next of items."""
        told = self.request.told if isinstance(self.request, ItemsRequest) else ()
        return told.popleft() if told else None

    def unheard(self, session: Session) -> None:
        """Keeps an error with which the function itself has ended from being raised by a later synchronization."""
        failure = self.failure(session)
        # one of another node, or that was issued as something else, is that of an argument
        its_own = failure is not None and failure.rank == self.call.place.node
        if failure is not None and its_own and self.call.issued_as(failure.told.op, failure.site):
            failure.observed = True

    def failure(self, session: Session) -> Failure | None:
        """Returns the failure with which it has ended, where that was told. It is not raised by that: an error that is
        asked for counts as raised, and ``dt.synchronize()`` is silent about it."""
        reply = self.request.reply
        return session.link.failures.get((reply.rank, reply.seq)) if isinstance(reply, c.Poisoned) else None

    def outcome(self, session: Session) -> Any:
        """Returns what the function has returned; raises its error, NodeLost, DisttensorError after shutdown."""
        reply: Any = self.request.reply
        if reply is None:
            if not session.link.closed or self.call.place.outbox.lost is not None:
                session.link.check(self.call.place.outbox)
            raise DisttensorError("the session was shut down before the function had ended")
        if isinstance(reply, c.Poisoned):
            raise self.call.raised(session.questions.failure(reply.rank, reply.seq, self.call.place.node))
        return self.call.result(reply)


class Submitted(NodeResult[T_co]):
    """A function on its way, on one node or several: what ``dt.submit`` returns, and an actor's methods.

    It is a ``dt.futures.Work`` that can be cancelled too.
    """

    def __init__(self, session: Session, calls: Sequence[FunctionCall], what: str, targets: Targets | None) -> None:
        """``targets``: the several nodes; the result is a list then."""
        self._session, self._targets = session, targets
        self.world: c.World | None = None
        self._node = calls[0].place.node
        self._transfer = self._ended = ended = Listened(session, self._node)
        if targets is None:
            self.parts = [_Part(calls[0], ended)]
            self._text = f"{what} on node {self._node}"
        else:
            self.parts = [_Part(call, Ticket()) for call in calls]
            self._text = f"{what} on nodes {', '.join(str(call.place.node) for call in calls)}"
            when_all([part.ended for part in self.parts], ended.finish)
        self._lock = threading.RLock()
        self._outcome: tuple[bool, Any] | None = None

    def is_completed(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once. Does not wait."""
        return self._ended.has_ended()

    def cancel(self) -> bool:
        """Has the function not begin, or ends it by a KeyboardInterrupt on its node. Does not wait.

        Returns False if it has ended already, or can't be told: on nodes that are threads functions go on, which the
        log says. Else the Work ends with CancelledError, unless the function catches the KeyboardInterrupt and
        returns; so does what uses its result. What a C library does goes on until it is back in Python; a warning says
        so after 5 s. A second cancel does nothing.
        """
        link = self._session.link
        told = [link.cancel(part.request.node, part.request.id) for part in self.parts if not part.ended.is_completed()]
        return any(told)

    def abandon(self) -> None:
        """Cancels it for a caller that asks for no result: an error with which it ends meanwhile is raised nowhere."""
        self.cancel()
        for part in self.parts:
            self._ended.call_at_end(partial(part.unheard, self._session))

    def cancelled(self) -> bool:
        """Returns whether it has ended by CancelledError. Does not wait for it."""
        if not self.is_completed() or self.returned():
            return False
        failures = [part.failure(self._session) for part in self.parts]
        known = all(failures) and not any(failure.is_cancelled for failure in failures if failure is not None)
        return not known and isinstance(self.exception(), CancelledError)

    def returned(self) -> bool:
        """Returns whether the functions have returned. Does not wait, and asks for no error."""
        return all(isinstance(part.request.reply, c.Result) for part in self.parts)

    def lost(self) -> bool:
        """Returns whether a node's loss has ended it, as far as that was told. Does not wait, and asks for no error."""
        failures = [part.failure(self._session) for part in self.parts]
        if any(failure is not None and failure.told.lost >= 0 for failure in failures):
            return True
        return any(part.request.reply is None and part.call.place.outbox.lost is not None for part in self.parts)

    def call_at_end(self, fn: Callable[[], None]) -> None:
        """Has ``fn`` called at its end, in any thread, by one who waits for it: it must not block."""
        self._ended.call_at_end(fn)

    def on_node(self, place: NodePlace) -> int:
        """Returns the ref of the result on the node of ``place``; 0 where it is none of that node's."""
        part = self.parts[0]
        alone = self._targets is None and place.session is self._session and place.node == part.call.place.node
        return part.token.ref if alone else 0

    def _await_end(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            for part in self.parts:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                wait_for_answer(self._session, part.request.node, part.ended, left)
        except TimeoutError:
            nodes = self._session.nodes
            stopped = [rank for rank in (part.request.node for part in self.parts) if nodes[rank].connection.breakpoint]
            why = "".join(f"; node {rank}: {nodes[rank].connection.at_breakpoint}" for rank in stopped)
            raise TimeoutError(f"{self._text} has not ended within {timeout:g} s; it goes on{why}") from None
        if not self._ended.is_completed():  # a forked child: nobody answers
            self._session.link.check(self.parts[0].call.place.outbox)

    def _end(self, timeout: float | None) -> None:
        try:
            self._await_end(timeout)
            self._value()
        finally:
            del self  # as in ``wait``

    def _value(self) -> Any:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = True, self._made()
                except Exception as error:
                    self._outcome = False, error.with_traceback(None)  # whose frames have this Work
            well, value = self._outcome
        try:
            if not well:
                raise value
            return value
        finally:
            del self, value  # as in ``wait``

    def _made(self) -> Any:
        results: list[Any] = []
        failed: list[Exception] = []
        for part in self.parts:
            try:
                results.append(part.outcome(self._session))
            except Exception as error:
                if isinstance(error, ModuleNotFoundError):
                    error = advised(error, self._session.bundle)
                failed.append(self._targets.located(error, part.request.node) if self._targets else error)
        kept = not failed and all(part.request.reply.kept for part in self.parts)  # type: ignore[union-attr]
        if self.world is not None and not kept:
            worlds_of(self._session).discard_world(self.world)
        if failed:
            raise first_of(failed)
        return results if self._targets else results[0]
