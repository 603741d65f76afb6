"""Actors: objects of a user's class that live on nodes, ``dt.actor(Class, *args, node=k)``, and are called from here.

    script    handle.step(x)   --Run on the actor's stream-->   node   actor.object.step(x)   -> a Result, for the Work

The node's side is runtime/node/actors.py. A handle that is an argument travels: functions on nodes, and other actors,
call by it too (runtime/shared/actor_calls.py).
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FunctionType
from typing import Any, Concatenate, Generic, NamedTuple, NoReturn, Self, TypeVar, overload

import torch

from ..dispatch.call_site import here
from ..futures.work import T_co
from ..meshes.mesh import Mesh
from ..proxy.meta import Handle, meta_of_contiguous, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.master.failures import Site
from ..runtime.master.route import waits
from ..runtime.node import actors as node_side
from ..runtime.node import shared_objects
from ..runtime.process.spelling import did_you_mean, shown
from ..runtime.protocol import commands as c
from ..runtime.protocol import shared_objects as s
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..runtime.shared import actor_calls
from ..runtime.shared import actors as shared_actors
from ..runtime.shared.handles import Counted, ServiceRoute
from ..runtime.shared.objects import SCRIPT, Objects
from ..session import current
from ..session.node_context import chosen_node
from ..session.places import MeshPlace, NodePlace
from ..session.session import Session
from ..streams import Stream
from .announcing import Announcing
from .calls import FunctionCall
from .functions import least_loaded
from .held import holder
from .sending import SharedArgument
from .signatures import A, B, C, Given, Node, P, R, Takes1, Takes2, Takes3
from .submitted import Submitted, issue

K = TypeVar("K")


@overload
def actor(kind: Callable[..., K], /, *, node: Node | None, **kwargs: Any) -> Actor[K]: ...
@overload
def actor(kind: Takes1[A, K], a: Given[A], /, *, node: Node | None, **kwargs: Any) -> Actor[K]: ...
@overload
def actor(kind: Takes2[A, B, K], a: Given[A], b: Given[B], /, *, node: Node | None, **kwargs: Any) -> Actor[K]: ...
@overload
def actor(
    kind: Takes3[A, B, C, K], a: Given[A], b: Given[B], c: Given[C], /, *args: Any, node: Node | None, **kwargs: Any
) -> Actor[K]: ...
@overload
def actor(kind: Callable[..., K], /, *args: Any, returns: Any, **kwargs: Any) -> Actor[K]: ...
@overload
def actor(kind: Callable[..., K], /, *args: Any, raises: Any, **kwargs: Any) -> Actor[K]: ...
@overload
def actor(kind: Callable[[A], K], a: Given[A], /) -> Actor[K]: ...
@overload
def actor(kind: Callable[[A, B], K], a: Given[A], b: Given[B], /) -> Actor[K]: ...
@overload
def actor(kind: Callable[[A, B, C], K], a: Given[A], b: Given[B], c: Given[C], /) -> Actor[K]: ...
@overload
def actor(kind: Callable[P, K], /, *args: P.args, **kwargs: P.kwargs) -> Actor[K]: ...
def actor(  # type: ignore[misc]  # of an __init__ that takes a ``node``, this one has it
    kind: Any,
    /,
    *args: Any,
    node: Node | None = None,
    returns: Any = (),
    raises: Any = (),
    **kwargs: Any,
) -> Any:
    """Makes an object of a class on a node, and returns its handle at once.

        >>> class Counter:
        ...     def __init__(self, n):
        ...         self.n = n
        ...     def add(self, k):
        ...         self.n += k
        ...         return self.n
        >>> counter = dt.actor(Counter, 10, node=1)
        >>> first, second = counter.add(1), counter.add(2)      # Works, at once
        >>> first.result(), second.result()
        (11, 13)
        >>> counter.close().wait()
        True

    Args:
        kind: any class; it goes to the node as functions of ``run`` do.
        *args, **kwargs: those of its ``__init__``.
        node: a number, a device or a text such as "node:1". Default: the node of the ``with dt.node(k)`` block that
            this is in, else the one that has the fewest actors.
        returns, raises: as for ``run``, for all methods, and ``raises`` for ``__init__`` too. What the return
            annotation of a method names may come back from that method.

    Each method of the class is one of the handle, which returns a ``Work`` at once. The calls of an actor are done in
    the order in which they are issued, one at a time, on a stream of its own: beside those of other actors, and beside
    all else that the node does. Arguments and results are as in ``run``, but that an actor has tensors of its own:
    those of its node are copied when the call is issued, and so is what a result shares with the actor's state. What
    its methods draw comes from a generator of the actor's (docs/TASKS.md).

    The handle may be an argument of functions and of other actors, which call its methods as the script does.

    The end of a ``with`` block, ``close()`` and the end of the last handle anywhere end the actor after what was
    issued: its ``close()``, if it has one, runs on the node then.

    Raises TypeError for what is no class, for arguments that its ``__init__`` does not take, or that can't be pickled;
    ValueError for what exceeds 64 MiB, and for a node that does not exist; GraphError while a graph is recorded;
    NodeLost. What ``__init__`` raises on the node is raised by the Work ``ready``, and by those of all calls.
    """
    waits("an actor")
    session = current.session()
    if not isinstance(kind, type):
        raise TypeError(f"actor takes a class and the arguments of its __init__, and {shown(kind)} is not a class")
    if isinstance(node, Mesh) or (not isinstance(node, (str, torch.device)) and hasattr(node, "__iter__")):
        raise TypeError(
            f"actor(node=) takes one node, not {shown(node)}: [dt.actor({kind.__name__}, node=n) for n in nodes]"
        )
    place = session.places.at(_default(session) if node is None else node)
    # an actor lives on one node
    if isinstance(place, MeshPlace):
        raise TypeError(f"actor(node={shown(node)}): that is {place}, and an actor lives on one node")
    for name in _names(kind).intersection(_OWN):
        raise TypeError(f"actor: {kind.__name__} has a {name!r}, and so has the handle of an actor; rename it")
    _fits(f"{kind.__name__}()", kind, args, kwargs)
    return Actor(session, place, kind, args, kwargs, here(), Announcing(None, returns, raises, "dt.actor"))


def _default(session: Session) -> int:
    """Returns the node of an actor that nobody gave a node."""
    if (chosen := chosen_node()) is not None:
        return chosen
    there = Counter(actor.node for actor in session.part(Actors).living if actor.kept is not None)
    nodes = [node.rank for node in session.nodes if node.lost is None]
    fewest = min((there[node] for node in nodes), default=0)
    return least_loaded(session, [node for node in nodes if there[node] == fewest] or None)


class _Method(partial["ActorWork[Any]"]):
    """A method of a handle: what is to be called, with the name, the docstring and the signature of the class's."""

    method: Any  #: that of the class
    __name__: str
    __qualname__: str

    @property
    def __signature__(self) -> inspect.Signature:
        """Returns that of the class's method without ``self``, and with a Work of what it returns."""
        found = inspect.signature(self.method)
        kind, name = self.func.__self__._kind, self.args[0]  # type: ignore[attr-defined]
        if not isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod)):
            found = found.replace(parameters=list(found.parameters.values())[1:])
        gives = found.return_annotation
        if gives is not found.empty:
            gives = f"Submitted[{gives}]" if isinstance(gives, str) else Submitted[gives]  # type: ignore[valid-type]
        return found.replace(return_annotation=gives)


class _Shared(NamedTuple):
    """An actor as nodes call it."""

    number: int  #: among what the script holds for all
    where: ServiceRoute
    about: actor_calls.About


class _Found(NamedTuple):
    """A method of an actor's class."""

    static: Any  #: as the class has it
    method: Any  #: as it is an attribute of the class
    bound: bool  #: whether that takes no ``self``
    is_async: bool
    what: str  #: a call of it, in words


class _Living:
    """An actor on its node, which ends when the script has let go of this: handles keep it, and nodes' do."""

    def __init__(self, session: Session, place: NodePlace, kind: type[Any], announcing: Announcing) -> None:
        self.session, self.place, self.kind, self.announcing = session, place, kind, announcing
        self.node = place.node
        where = session.places.at(place.node, "cpu")
        self.ref = new_ref()
        self.key = session.job, self.ref
        token: Any = proxy(Handle(self.ref, meta_of_contiguous((1,), torch.int64, where)))
        self.kept: tuple[DistributedTensor, Stream] | None = (token, Stream(place.device))
        self._closing: ActorWork[None] | None = None
        self._shared: _Shared | None = None
        self._lock = threading.RLock()
        self._found: dict[str, _Found] = {}
        self._calls: deque[int] = deque()  #: the requests of its calls, of which it does the first one first
        session.part(Actors).living.add(self)

    def find_method(self, name: str) -> _Found:
        """Returns a method of the class: what was found once, as long as that is the same. Raises AttributeError where
        the class has none of that name, or something else than a method."""
        kind, found = self.kind, self._found.get(name)
        static = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _nothing)
        if found is not None and found.static is static:
            return found
        if static is _nothing:
            names = [each for each in dir(kind) if not each.startswith("_") and callable(getattr(kind, each, None))]
            raise AttributeError(
                f"{kind.__qualname__} has no method {name!r}{did_you_mean(name, [*names, *_OWN])}; what its objects "
                "have besides is on the node, and a method can return it"
            )
        method, what = getattr(kind, name, None), f"{kind.__qualname__}.{name}()"
        if isinstance(static, property) or not callable(method):
            raise AttributeError(
                f"{what.removesuffix('()')} is not a method; an actor is on its node, and a method can return what it "
                "has"
            )
        is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
        found = _Found(static, method, isinstance(static, (staticmethod, classmethod)), is_async, what)
        self._found[name] = found
        return found

    def add_call(self, request: int) -> None:
        """Notes a call that was issued."""
        self._calls.append(request)
        self.calls()

    def calls(self) -> int:
        """Returns how many of its calls are not done."""
        requests, node = self.session.link.requests, self.session.link.nodes[self.node]
        with self._lock:
            while self._calls and not requests.is_under_way(node, self._calls[0]):
                self._calls.popleft()
            return len(self._calls)

    def close(self) -> ActorWork[None]:
        if self._closing is None:
            self._closing = self.issue(node_side.close, (), {}, f"{self.kind.__qualname__}.close()")
            self.kept = None  # its stream ends when that is done
        return self._closing

    def alive(self) -> tuple[DistributedTensor, Stream]:
        kept = self.kept
        if kept is None:
            raise DisttensorError(f"{self} is closed")
        return kept

    def issue(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, what: str, made: int = 0, method: Any = None
    ) -> ActorWork[Any]:
        """Issues one of the node's functions on the actor's stream, which takes the token first. ``made``: the ref of
        the token that it returns, and it takes none; ``method``: that of the class which it calls."""
        waits("an actor's call")
        token, stream = self.alive()
        _, *back = self.announcing
        site = here(3)
        try:
            call = FunctionCall(
                self.session, self.place, fn, args, kwargs, site, what=what, copies=True,
                token=None if made else token, announcing=Announcing(method, *back),
            )  # fmt: skip
            try:
                return ActorWork(self, call, stream, what, made, site)
            finally:
                call.end()
        except NodeLost as error:
            raise _named(error, self.kind) from None

    def share(self) -> _Shared:
        """Has nodes be able to call the actor."""
        with self._lock:
            if self._shared is None:
                self.alive()
                hello, held = self.place.hello, holder()
                about = actor_calls.About(self.kind.__qualname__, self.node, hello.host, hello.pid, _methods(self.kind))
                party = SCRIPT if self.session.shares_process else self.node
                living = weakref.ref(self)
                number = held.caller.objects.make(
                    lambda all, number: shared_actors.ActorState(all, number, party, about.kind, living)
                )
                found = _Shared(number, held.where(number), about)
                serving = self.issue(actor_calls.serve, (*found,), {}, f"{about.kind}()")
                serving.when_failed(partial(_failed, held.caller.objects, number))
                self._number(number)
                self._shared = found
            return self._shared

    def _number(self, number: int) -> None:
        """Tells the actor its number, whatever it does at that time."""
        site = here()
        call = FunctionCall(self.session, self.place, node_side.number, (self.key, number), {}, site)
        try:
            issue(self.session, [call], f"the number of {self}", site, beside=True)
        finally:
            call.end()

    def hand(self, party: int, number: int) -> None:
        """Counts handles of a node: so many more, or less."""
        of = self.share().number
        party = SCRIPT if self.session.shares_process else party
        holder().caller.objects.change(of, lambda actor: actor.hand(party, number))

    def __repr__(self) -> str:
        return f"<actor {self.kind.__qualname__} on node {self.node}>"


class Actor(SharedArgument[Any], Counted, Generic[K]):
    """The handle of an actor, which ``dt.actor`` makes. Its methods are those of the class, and return Works.

    ``handle[Class.method](...)`` is ``handle.method(...)`` in a form that a type checker can follow: it knows the
    arguments and the result.

    Among arguments of functions and of other actors it stands for the actor there, too, whose methods it calls.

    Attributes:
        node: the number of its node.
        ready: a Work that ends when ``__init__`` has; its result is None.
    """

    def __init__(
        self,
        session: Session,
        place: NodePlace,
        kind: type[K],
        args: Any,
        kwargs: Any,
        site: Any,
        announcing: Announcing,
    ) -> None:
        self.node = place.node
        self._kind, self._site = kind, site
        self._living = _Living(session, place, kind, announcing)
        #: by node and incarnation: the Work of what keeps a handle there
        self._given: dict[tuple[int, int], Submitted[Any]] = {}
        self._lock = threading.RLock()
        arguments = (kind, args, kwargs, kind.__qualname__, session.places.own_seed(), self._living.key)
        self.ready: ActorWork[None] = self._living.issue(
            node_side.make, arguments, {}, f"{kind.__qualname__}()", made=self._living.ref
        )

    def close(self) -> ActorWork[None]:
        """Ends the actor after what was issued, by its ``close()``, if it has one; returns a Work at once.

        A second call returns the same Work. Later calls of methods raise DisttensorError.
        """
        return self._living.close()

    def reduce_for(self, place: NodePlace, beside: bool = False) -> tuple[Any, tuple[Any, ...]]:
        """Returns a function and its arguments that give a handle on a node, which gets one now if it has none yet,
        ``beside`` what the node does otherwise or in its turn."""
        living = self._living
        if place.session is not living.session:
            raise DisttensorError(f"{self} is of a session that was shut down")
        with self._lock:
            at = place.node, place.incarnation
            given = self._given.get(at)
            if given is None:
                found, site = living.share(), here()
                living.hand(place.node, 1)
                try:
                    call = FunctionCall(living.session, place, actor_calls.keep_handle, found, {}, site)
                    try:
                        given = issue(living.session, [call], f"a handle of {self}", site, beside=beside)
                    finally:
                        call.end()
                except BaseException:
                    living.hand(place.node, -1)
                    raise
                self._given[at] = given
            return shared_objects.get, (given,)

    def __getattr__(self, name: str) -> Callable[..., ActorWork[Any]]:
        if name.startswith("__") or "_living" not in self.__dict__:
            raise AttributeError(name)
        kind, method = self._kind, self._living.find_method(name).method
        bound = _Method(self._call, name)
        bound.method, bound.__doc__ = method, method.__doc__
        bound.__name__, bound.__qualname__ = name, f"{kind.__qualname__}.{name}"
        return bound

    def __getitem__(self, method: Callable[Concatenate[K, P], R]) -> Callable[P, ActorWork[R]]:
        """Returns ``handle.method`` for a method of the class, with the types that it has there.

        Raises TypeError for what is not a method of the class.
        """
        name = getattr(method, "__name__", "")
        if not any(vars(base).get(name) is method for base in self._kind.__mro__):
            raise TypeError(f"{self}[...] takes a method of {self._kind.__qualname__}, and {shown(method)} is not one")
        return partial(self._call, name)

    def __call__(self, *args: Any, **kwargs: Any) -> ActorWork[Any]:
        """Calls the object itself: ``__call__`` of its class."""
        if not any("__call__" in vars(base) for base in self._kind.__mro__):
            raise TypeError(f"{self._kind.__qualname__} can't be called: it has no __call__")
        return self._call("__call__", *args, **kwargs)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> ActorWork[Any]:
        living = self._living
        _, method, bound, is_async, what = living.find_method(name)
        if is_async:
            raise TypeError(f"{what} is async, and an actor's methods are not: no event loop runs on the node for it")
        _fits(what, method, args if bound else (self, *args), kwargs)
        if name == "__call__" and issubclass(self._kind, torch.nn.Module):
            method = self._kind.forward
        return living.issue(node_side.call, (name, *args), kwargs, what, method=method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        closing = self.close()
        if kind is None:
            closing.wait()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise DisttensorError(
            f"{self} can't be copied or saved: give it as an argument to a function, or to another actor"
        )

    def __dir__(self) -> list[str]:
        names = [name for name in dir(self._kind) if callable(getattr(self._kind, name, None))]
        return sorted({*_OWN, "close", *(name for name in names if not name.startswith("_"))})

    def __repr__(self) -> str:
        return f"<actor {self._kind.__qualname__} on node {self.node}>"


class ActorWork(Submitted[T_co]):
    """A call of an actor on its way."""

    def __init__(
        self, actor: _Living, call: FunctionCall, stream: Stream, what: str, made: int, site: Site | None
    ) -> None:
        """``made``: the ref of the actor's token, if that is what the call makes."""
        super().__init__(actor.session, [call], what, None)
        self._kind = actor.kind  # and not the actor, whose end is that of the last who has it
        part = self.parts[0]
        part.expect_result(actor.session)
        id = part.request.id
        run = call.into(id, (made,)) if made else call.command(id, draws=False, token=part.token.ref)
        actor.session.link.sender.issue_call(actor.node, c.On(stream.stream_id, run), site, call.nbytes)
        call.issued()
        actor.add_call(id)

    def when_failed(self, fn: Callable[[c.Failed], object]) -> None:
        """Has ``fn`` be called with what tells of the error, if the call fails, in any thread: it must not block. The
        error counts as none that anybody has asked for."""
        part, failures = self.parts[0], self._session.link.failures

        def look() -> None:
            reply = part.request.reply
            if isinstance(reply, c.Poisoned) and (failure := failures.get((reply.rank, reply.seq))) is not None:
                fn(failure.told)

        self._ended.add_done_callback(look)

    def _made(self) -> Any:
        try:
            return super()._made()
        except NodeLost as error:
            raise _named(error, self._kind) from None


_nothing = object()
#: What a handle has for itself, besides ``close``, which calls that of the class.
_OWN = ("node", "ready")


class Actors:
    """The actors of one session that have not been closed."""

    def __init__(self) -> None:
        self.living: weakref.WeakSet[_Living] = weakref.WeakSet()

    def finish(self, deadline: float | None) -> list[Exception]:
        """Ends them all, at the session's end, which waits for what was issued, and tells what has failed."""
        for each in list(self.living):
            with suppress(DisttensorError):  # its node is lost, and that is told
                each.close()
        return []


def _failed(objects: Objects, number: int, told: c.Failed) -> None:
    """Has all calls of nodes fail with what an actor's ``__init__`` has raised."""
    item = s.Item(s.encode(told))
    objects.change(number, lambda actor: actor.fail(item))


def _methods(kind: type) -> list[str]:
    """Returns the names of what functions on nodes may call."""
    names = [name for name in dir(kind) if not name.startswith("__") and name != "close"]
    static = {name: inspect.getattr_static(kind, name) for name in names}
    found = [name for name in names if not isinstance(static[name], property) and callable(getattr(kind, name, None))]
    called = any("__call__" in vars(base) for base in kind.__mro__)
    return [*found, *(["__call__"] if called else [])]


def _named(error: NodeLost, kind: type) -> NodeLost:
    """Returns the loss of an actor's node, with a note that names the actor."""
    error.add_note(f"  the actor {kind.__qualname__} was there; dt.actor makes another one on another node")
    return error


def _names(kind: type) -> set[str]:
    """Returns the names that a class and its bases have, but for those of nn.Module: all of these have a ``node``."""
    return {name for base in kind.__mro__ if base is not torch.nn.Module for name in vars(base)}


def _fits(what: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raises TypeError for arguments that a function does not take, as far as can be known."""
    if type(fn) is FunctionType and not (kwargs or fn.__dict__ or fn.__kwdefaults__):
        code, least = fn.__code__, fn.__code__.co_argcount - len(fn.__defaults__ or ())
        if not code.co_kwonlyargcount and least <= len(args) <= code.co_argcount:
            return  # by position alone, without a signature
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{what}: {error}; it is {what.removesuffix('()')}{signature}") from None
