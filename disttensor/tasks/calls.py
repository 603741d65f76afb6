"""Functions that have been sent to nodes: how they begin there, what they return, and their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Generic

from ..errors.missing import advised
from ..futures.work import T_co
from ..proxy.meta import Handle, meta_told, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.master.failures import Site, in_short, line_of
from ..runtime.master.requests import Request
from ..runtime.master.route import waits
from ..runtime.node.user_functions import key_of
from ..runtime.protocol import commands as c
from ..runtime.protocol import values
from ..runtime.protocol.errors import NodeLost, PeerFailed, ProtocolError
from ..session.current import session_of
from ..session.places import NodePlace
from ..session.session import Session
from .announcing import Announcing, announced_by, raised
from .here import world_size
from .sending import (
    SMALL_ARGUMENTS,
    KeptAlive,
    known_functions,
    pickled_arguments,
    pickled_function,
    send_function,
    send_once,
)
from .targets import Targets

_serial = count()


def name_of(fn: Any) -> str:
    """Returns a function's name for messages: its name where it is defined."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__).rpartition("<locals>.")[2][:100]


class Each(Generic[T_co]):
    """An argument of ``run`` on several nodes, or on a mesh, that is ``values[i]`` on the i-th of them.

    ``run`` raises ValueError unless there is one value per node.

        >>> dt.run(lambda k: k * k, dt.tasks.Each([2, 3]), node=[0, 1])
        [4, 9]
    """

    def __init__(self, values: Sequence[T_co]) -> None:
        self.values = values


class PickledArguments:
    """The pickle of arguments that several nodes get; none where they name tensors, which each node has under refs of
    its own."""

    data: bytes | None = None


class ItemError:
    """Stands for the result of an item that can't be made."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class FunctionCall:
    """A function that is to run on a node, and has been sent there with its arguments."""

    def __init__(
        self,
        session: Session,
        place: NodePlace,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Any,
        site: Any,
        ready: PickledArguments | None = None,
        what: str = "",
        copies: bool = False,
        token: DistributedTensor | None = None,
        announcing: Announcing | None = None,
        items: int = 0,
    ) -> None:
        """``what``: the function in words, if not its name. ``copies``: as for KeptAlive. ``token``: of an
        actor, which comes before the arguments.
        ``items``: how many items ``ready`` is a list of, if it is one. ``announcing``: what may come back; without it
        ``returns`` and ``raises`` among ``kwargs`` say it, and are not the function's. Raises TypeError for what they
        can't be, and as ``pickled``."""
        if session.before_functions is not None:
            session.before_functions(place, site)
        self.place = place
        self.cancels = True  #: whether its end cancels a function that has not ended; else that goes on, for nobody
        self._site, self.items = site, items
        self.when_told: Callable[[], None] | None = None  #: is called when the node tells of items, in any thread
        if announcing is None:
            kwargs = dict(kwargs)
            announcing = Announcing(fn, kwargs.pop("returns", ()), kwargs.pop("raises", ()))
        self._named_in = announcing.where
        self._what = what or f"{name_of(fn)}()"
        self._sent = known_functions(session)
        self._keep = KeptAlive(copies)
        self._beside: NodePlace = place
        self._request, self._adopted, self._into = 0, False, False
        self._rank: tuple[c.MeshDims | None, int] = (None, 0)
        function, self._function = pickled_function(fn, session, place, self._keep, self._what)
        self.holds_tensors = bool(self._keep)  #: whether the function holds some, or results
        self._first = 0
        if token is not None:
            self._first = token._h.ref
            self._keep.tensors.append(token)
        arguments = ready.data if ready is not None else None
        if arguments is None:
            what = f"the arguments of {self._what}"
            arguments = pickled_arguments(tuple(args), kwargs, place, self._keep, what)
            if ready is not None and not self._keep:
                ready.data = arguments
        self._arguments, self._apart = arguments, len(arguments) > SMALL_ARGUMENTS
        self._announced = announced_by(announcing, self._keep.classes)
        if self.holds_tensors or self._apart or (place.node, self._function) not in self._sent:
            session.link.interrupts.look()
            self._send_pieces(function)

    def _send_pieces(self, function: bytes) -> None:
        """Queues the function, if the node has it not, and long arguments."""
        # a serial number behind the pickle gives what is used once a key of its own; the unpickler doesn't read that
        # far
        once = next(_serial).to_bytes(8, "big")
        if self.holds_tensors:
            function += once
            self._function = key_of(function)
            send_once(self.place, self._function, function, self._site)
        else:
            send_function(self.place, self._function, function, self._site)
        if self._apart:
            arguments = self._arguments + once
            self._arguments = key_of(arguments)
            send_once(self.place, self._arguments, arguments, self._site)

    def as_rank(self, mesh: c.MeshDims | None, index: int) -> None:
        """Has the function see its node as one of a mesh."""
        self._rank = mesh, index

    @property
    def uses(self) -> bool:
        """True where the function, or its arguments, name what is on the node."""
        return bool(self._keep)

    def command(
        self, id: int, world: c.World | None = None, draws: bool = True, token: int = 0, holds: bool = False
    ) -> c.Run:
        """Returns the command that runs it. ``draws``: whether it may draw random numbers; ``token``: the ref of its
        whole result; ``holds``: whether it gets tensors ``Held``."""
        self._request = id
        if draws:  # the function may draw, and then from its node's own generators
            session_of(self.place).places.draw_on(self.place.node)
        return self._run(id, world=world, token=token, holds=holds)

    def into(self, id: int, outs: tuple[int, ...]) -> c.Run:
        """Returns the command of a function that draws no random numbers, and whose tensors get these refs."""
        self._request, self._adopted, self._into = id, True, True
        return self._run(id, outs=outs, beside=False)

    def _run(self, id: int, **more: Any) -> c.Run:
        place, keep, (mesh, index) = self.place, not self.holds_tensors, self._rank
        # simulated devices are one memory, so the node can't tell which of them a result is on: take an argument's
        if place.hello.simulated:
            named = (p for t in self._keep.tensors for p in t._place.members if p.node == place.node)
            self._beside = next(named, place)
        return c.Run(
            id, self._function, self._arguments, keep, self._what, self._keep.refs, mesh=mesh, index=index,
            items=self.items > 0, nodes=world_size(place.session.nodes), apart=self._apart, first=self._first, **more
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """The bytes that its command has besides a few."""
        return len(self._arguments)

    def result(self, reply: c.Result) -> Any:
        """Returns the function's result, with tensors as proxies; with None for those that have refs already."""
        if self._into:
            return values.decode(reply.data, [None] * len(reply.tensors))
        tensors = [_result_proxy(g, self._beside) for g in reply.tensors]
        if tensors:
            self.place.outbox.add(c.Adopt(self._request, tuple(t._h.ref for t in tensors)), self._site)
        self._adopted = True
        return self._value(reply.data, tensors)

    def item_results(self, results: Sequence[bytes]) -> list[Any]:
        """Returns the results of items, as ``result`` does; in place of one that can't be made, an ItemError."""
        try:
            return list(values.decode(values.encoded_list(results), [], self._announced))
        except (values.Unannounced, ProtocolError):
            return [self._item_result(data) for data in results]

    def _item_result(self, data: bytes) -> Any:
        try:
            return self._value(data, [])
        except Exception as error:
            return ItemError(error)

    def _value(self, data: bytes, tensors: list[DistributedTensor]) -> Any:
        try:
            return values.decode(data, tensors, self._announced)
        except (values.Unannounced, ProtocolError) as e:
            error = e
        if isinstance(error, values.Unannounced):
            error = values.Unannounced(
                f"{self._what} on node {self.place.node}: {error}; objects of your classes come back if "
                f"{self._named_in} has named the class: returns=Class, a return annotation of the function, or an "
                "argument that has one"
            )
        hello = self.place.hello
        where = f"{self._what} on node {self.place.node} (host {hello.host}, pid {hello.pid})"
        error.add_note(f"  failed: {where}\n  issued: {line_of(self._site)}")
        raise error from None

    def raised(self, error: Exception) -> Exception:
        """Returns what the function has raised: of its own class, if that was announced."""
        return raised(error, self._announced, self._named_in)

    def issued_as(self, op: str, site: Any) -> bool:
        """Returns whether a node tells of this call by such a name and line."""
        return (op, site) == (self._what, self._site)

    def issued(self) -> None:
        """Notes that it is queued, and that its result has an owner."""
        self._adopted = True

    def end(self) -> None:
        """Ends the call, whatever happened to it, Ctrl-C included: drops what the node and the script keep for it."""
        if not self._adopted:
            self._sent.discard((self.place.node, self._function))  # the node may not have come to keep it
            if self._request and self.place.outbox.lost is None:
                if self.cancels:  # if it runs: nobody waits for it
                    session_of(self.place).link.cancel(self.place.node, self._request)
                # nobody will adopt what it returns
                self.place.outbox.add(c.Adopt(self._request, ()), self._site)
        self._keep.clear()  # now, and not when the collector finds the pickler, which is in a cycle


class Calls:
    """Functions that run on several nodes at once. They are begun without waiting; any thread may wait for them.

    At the end of its ``with`` block the nodes and the script drop what they keep for them.
    """

    def __init__(self, session: Session, site: Site | None, cancels: bool = True) -> None:
        """``cancels``: functions for which nobody waits any more are cancelled; else they run all the same."""
        self._session, self._site, self._cancels = session, site, cancels
        self._calls: list[FunctionCall] = []
        self._requests: list[Request] = []
        self.kept = True  #: whether the process group in which they ran still exists on all nodes

    def add(self, place: NodePlace, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> FunctionCall:
        """Sends a function and its arguments to a node; returns the call. Raises as ``run`` does."""
        self._calls.append(FunctionCall(self._session, place, fn, args, kwargs, self._site))
        self._calls[-1].cancels = self._cancels
        return self._calls[-1]

    def begin_calls(self, world: c.World | None = None, draws: bool = True, holds: bool = False) -> None:
        """Has all of them begin, each in its turn on its node. Raises NodeLost where a node is gone, and none begins.

        ``draws``: whether a function may draw random numbers, which no stream of a node in a mesh can. ``holds``: they
        get tensors ``Held`` (runtime/node/held.py), as they are now whatever other streams write to them meanwhile.
        """
        link, commands = self._session.link, []
        for call in self._calls:
            self._requests.append(link.requests.new(call.place.node, c.Result))
            commands.append(
                (call.place.node, call.command(self._requests[-1].id, world, draws, holds=holds), self._site)
            )
        link.sender.together(commands)

    def count_ended(self) -> tuple[int, int]:
        """Returns how many of them have ended, and how many there are. Any thread may ask."""
        requests = list(self._requests)
        return sum(request.done for request in requests), len(self._calls)

    def outcomes(self, deadline: float | None = None) -> list[Any]:
        """Waits for all of them; returns what each has returned, or the exception that it has raised, or NodeLost, or
        TimeoutError at ``deadline``, by the link's clock."""
        session, found = self._session, list[Any]()
        for call, request in zip(self._calls, self._requests, strict=True):
            try:
                left = None if deadline is None else max(0.0, deadline - session.link.clock.now())
                reply: Any = session.link.waiting.wait(request, left)
                if isinstance(reply, c.Poisoned):
                    raise session.questions.failure(reply.rank, reply.seq)
                found.append(call.result(reply))
                self.kept = self.kept and reply.kept
            except Exception as error:
                found.append(advised(call.raised(error), session.bundle))
        return found

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *exc: object) -> None:
        for call in self._calls:
            call.end()
        for request in self._requests:
            self._session.link.requests.withdraw(request)


class Issued:
    """A function of disttensor's own that was issued to several nodes, and for whose result nobody waits yet.

    It draws no random numbers. The tensors that it returns get refs which the script has chosen, and the result is the
    rest. One that is dropped is forgotten: that takes no lock, as it may happen anywhere.
    """

    def __init__(
        self,
        session: Session,
        targets: Targets,
        fn: Callable[..., Any],
        args: Sequence[Any],
        outs: Sequence[tuple[int, ...]],
        site: Any,
    ) -> None:
        """``outs``: the refs on each node. Raises NodeLost, GraphError while a graph is recorded."""
        waits("a function")
        self._session, self._targets, self._gives = session, targets, any(outs)
        self._requests: list[Request] = []
        calls: list[FunctionCall] = []
        try:
            commands = []
            for i, place in enumerate(targets.places):
                mine = [x.values[i] if isinstance(x, Each) else x for x in args]
                calls.append(FunctionCall(session, place, fn, mine, {}, site))
            for call, refs in zip(calls, outs, strict=True):
                self._requests.append(session.link.requests.new(call.place.node, c.Result))
                commands.append((call.place.node, call.into(self._requests[-1].id, refs), site))
            session.link.sender.together(commands)
        except NodeLost as error:
            targets.located(error, error.rank)
            raise
        finally:
            for call in calls:
                call.end()

    def results(self) -> list[Any]:
        """Waits for all nodes, and returns what the function has, without its tensors. Raises as ``run``; Ctrl-C ends
        the function as well."""
        link = self._session.link
        results: list[Any] = []
        failed: list[Exception] = []
        for request in self._requests:
            try:
                reply: Any = link.waiting.wait(request)
                if isinstance(reply, c.Poisoned):
                    raise self._session.questions.failure(reply.rank, reply.seq)
                results.append(values.decode(reply.data, [None] * len(reply.tensors)))
            except Exception as error:
                failed.append(self._targets.located(error, request.node))
            except BaseException:
                self.cancel()
                raise
        if failed:
            raise first_of(failed)
        return results

    def cancel(self) -> None:
        """Interrupts the function where it runs, and has it not begin elsewhere; not one that makes tensors, which the
        script has and may use. Does not wait."""
        for request in () if self._gives else self._requests:
            self._session.link.cancel(request.node, request.id)

    def __del__(self) -> None:
        for request in self._requests:
            self._session.link.requests.withdraw(request)


def first_of(failed: list[Exception]) -> Exception:
    """Returns the first error, with the others as notes. Nodes that broke off because a rank had failed come last, in
    one line."""
    first, *others = sorted(failed, key=lambda error: isinstance(error, PeerFailed))
    broke_off = [other for other in others if isinstance(other, PeerFailed)]
    for other in others:
        if other not in broke_off:
            first.add_note(f"and on another node: {type(other).__name__}: {in_short(other)}")
    if broke_off:
        first.add_note(f"and {len(broke_off)} other nodes broke off, as ranks wait for each other")
    return first


def _result_proxy(geometry: c.Geometry, place: NodePlace) -> DistributedTensor:
    session = place.session
    name = geometry.device if geometry.device.startswith("cuda") else "cpu"
    where = place if place.hello.simulated else session.places.at(place.node, name)
    return proxy(Handle(new_ref(), meta_told(geometry, where)))
