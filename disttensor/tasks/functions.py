"""Users' functions on nodes: ``dt.run(fn, *args, node=k)``."""

from __future__ import annotations

import contextlib
import inspect
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch

from ..dispatch.call_site import here
from ..dispatch.copies import move, upload
from ..dispatch.first_call import layout_of
from ..dispatch.lazy_views import materialise
from ..errors.argument_checks import spelled
from ..errors.missing import REMEDY, advised, culprit
from ..meshes.mesh import Mesh
from ..proxy.meta import Handle, meta_told, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.master.failures import Site, in_short
from ..runtime.master.requests import Request
from ..runtime.master.route import waits
from ..runtime.node.user_functions import MAX_PICKLE, decode_result, key_of
from ..runtime.process.signals import uninterrupted
from ..runtime.process.spelling import did_you_mean
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, NodeLost, PeerFailed
from ..session import current
from ..session.current import session_of
from ..session.node_context import current_node
from ..session.places import MeshPlace, Place, one_session
from ..session.session import Session
from .process_groups import worlds_of
from .reloaded_modules import Modules
from .targets import Targets

_serial = count()

#: Bytes of a pickled function or its arguments per Piece, well under a message's limit.
PIECE = 512 << 10


def run(
    fn: Callable[..., Any],
    *args: Any,
    node: int | str | torch.device | Iterable[int] | Mesh | None = None,
    nodes: Iterable[int] | Mesh | None = None,
    **kwargs: Any,
) -> Any:
    """Runs ``fn(*args, **kwargs)`` on a node (the current one by default), waits for it, and returns its result.

        >>> def center(t):
        ...     return t - t.mean(), t.shape[0]
        >>> dt.run(center, torch.arange(4.0, device="node:0"), node=1)
        (tensor([-1.5000, -0.5000,  0.5000,  1.5000], device='node:1'), 4)

    On a mesh each node gets its own part of a tensor that is there:

        >>> mesh = dt.mesh(dp=2)
        >>> dt.run(center, dt.shard(torch.arange(4.0), mesh, dp=0), nodes=mesh)
        [(tensor([-0.5000,  0.5000], device='node:0'), 2), (tensor([-0.5000,  0.5000], device='node:1'), 2)]

    Args:
        fn: any function. It goes to the node with cloudpickle, once; pickled it has at most 64 MiB.
        *args, **kwargs: its arguments, at most 64 MiB when pickled, without their tensors. Tensors among them (at any
            depth, of any shape and dtype) arrive as ordinary local tensors: those of that node as they are, of a
            mesh's tensor the node's own shard, and others are sent first. An argument ``dt.tasks.Each(values)`` is
            another value for each of several nodes.
        node: a number or a text such as "node:1". Or several, such as a ``Group`` or a ``Mesh``: the function runs on
            all of them at once, and the results come in a list, in their order.
        nodes: several nodes, or a mesh, on which torch.distributed is initialized first: the first one is rank 0 of the
            default process group, by gloo (NCCL for CUDA tensors, where each node has a GPU of its own). The process
            group stays for the next call with the same nodes. A rank that fails ends the others' waiting for it
            (docs/PROCESS_GROUPS.md). The results come in a list. On a mesh ``dt.tasks.device_mesh()`` in the function
            is torch's DeviceMesh, with a process group for each dim.

    Tensors in the result come back as proxies, without a transfer (``dt.meshes.from_shards(mesh, results)`` makes those
    of a mesh's nodes one tensor); everything else must be plain data (None, numbers, text, bytes, lists, tuples, sets,
    dicts of it).

    Raises the error that the function raised, with the node's traceback as a note; TypeError for other results, and for
    a function or arguments that can't be pickled; ValueError for what exceeds 64 MiB, and for nodes that do not exist;
    GraphError while a graph is recorded; NodeLost; CancelledError where ``interrupt`` has ended the function. With
    several nodes all have ended then, and further errors are in notes; on a mesh with the nodes' coordinates.
    DisttensorError for a mesh that is closed. With ``nodes`` also ValueError where gloo must not be used between their
    hosts, and DisttensorError where nodes are threads (launcher="inproc").

    Ctrl-C ends the waiting, and the function by a KeyboardInterrupt on its node, which stays usable. It does not
    interrupt what a C library does, nor, on a node that has streams, what waits in the kernel (``time.sleep``), nor
    nodes that are threads; a warning names what goes on after 5 s.
    """
    session = current.session()
    site = here()
    _check_call(fn, kwargs)
    if nodes is not None:
        if node is not None:
            raise TypeError("run takes node= or nodes=, not both")
        if isinstance(nodes, (int, str, torch.device)):
            raise TypeError(
                f"run(nodes=) takes a mesh, or a list of nodes such as [0, 1], that form a process group of "
                f"torch.distributed; on one node it is node={nodes!r}"
            )
        return _run_on_all(session, Targets(session, nodes), fn, args, kwargs, site, as_ranks=True)
    if isinstance(node, Mesh) or (isinstance(node, Iterable) and not isinstance(node, str)):
        return _run_on_all(session, Targets(session, node), fn, args, kwargs, site)
    place = session.places.at(current_node() if node is None else node)
    if isinstance(place, MeshPlace):
        raise TypeError(
            f"run(node={node!r}): that is {place}; node=mesh runs the function on each of its nodes, and nodes=mesh as "
            "ranks of torch.distributed"
        )
    call = _Call(session, place, fn, args, kwargs, site)
    try:
        return call.result(session.ask(call.place, c.Result, call.command, site))
    except ModuleNotFoundError as error:
        raise advised(error, session.bundle) from None
    finally:
        call.end()


@spelled
def interrupt(node: int | str | torch.device) -> int:
    """Ends the function that a node runs by a KeyboardInterrupt, and those that wait there to begin. Does not wait.

        >>> threading.Timer(0.5, dt.tasks.interrupt, [1]).start()
        >>> dt.run(time.sleep, 3600, node=1)
        Traceback (most recent call last):
        disttensor.runtime.protocol.errors.CancelledError: sleep() was cancelled

    Returns the number of these functions. Threads that wait for them in ``run`` raise CancelledError, unless a function
    catches the KeyboardInterrupt and returns. What can't be interrupted is as with Ctrl-C in ``run``; ``kill`` ends
    that, with the node. Raises NodeLost, ValueError for a node that does not exist.
    """
    session = current.session()
    place = session.places.at(node)
    session.link.check(place.outbox)
    requests = session.link.waited_for(place.node, c.Result)
    for request in reversed(requests):  # or the next one begins when that which runs has been interrupted
        session.link.cancel(place.node, request)
    return len(requests)


def _check_call(fn: Any, kwargs: dict[str, Any]) -> None:
    """Raises TypeError for what is no function, and for a misspelt argument of ``run`` that the function does not take
    either: the error from the node would say that the function got it."""
    if not callable(fn):
        raise TypeError(f"run takes a function and its arguments, and {fn!r:.60} can't be called")
    for name in kwargs:
        if (meant := did_you_mean(name, ("node", "nodes"), "{}=")) and not _takes(fn, name):
            raise TypeError(f"run() has no argument {name!r}, and {_name(fn)} takes none of that name{meant}")


def _takes(fn: Callable[..., Any], keyword: str) -> bool:
    """Returns whether a function has an argument of that name, as far as can be known."""
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # written in C
        return True
    return any(p.kind is p.VAR_KEYWORD or (p.name == keyword and p.kind is not p.POSITIONAL_ONLY) for p in parameters)


def _name(fn: Any) -> str:
    """Returns a function's name for messages: its name where it is defined."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__).rpartition("<locals>.")[2][:100]


class Each:
    """An argument of ``run`` on several nodes, or on a mesh, that is ``values[i]`` on the i-th of them.

    ``run`` raises ValueError unless there is one value per node.

        >>> dt.run(lambda k: k * k, dt.tasks.Each([2, 3]), node=[0, 1])
        [4, 9]
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values


def _run_on_all(
    session: Session,
    targets: Targets,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    site: Any,
    as_ranks: bool = False,
) -> list[Any]:
    for each in (*args, *kwargs.values()):
        if isinstance(each, Each) and len(each.values) != len(targets):
            raise ValueError(f"Each has {len(each.values)} values for the {len(targets)} nodes of {targets.given}")
    waits("a function")
    worlds = worlds_of(session)
    world: c.World | None = None
    kept = False  #: all nodes still have the world
    try:
        with Calls(session, site) as calls:
            for i, place in enumerate(targets.places):
                mine = [x.values[i] if isinstance(x, Each) else x for x in args]
                named = {name: x.values[i] if isinstance(x, Each) else x for name, x in kwargs.items()}
                calls.add(place, fn, *mine, **named)
            with worlds.turn(session, targets, site) if as_ranks else contextlib.nullcontext() as world:
                calls.begin(world)
            results = calls.outcomes()
        failed = [
            targets.located(result, place.node)
            for result, place in zip(results, targets.places, strict=True)
            if isinstance(result, Exception)
        ]
        kept = calls.kept and not failed
    except NodeLost as error:  # before any of them has begun
        targets.located(error, error.rank)
        raise
    finally:
        if world is not None and not kept:
            worlds.end(world)
    if failed:
        raise first_of(failed)
    return results


class Calls:
    """Functions that run on several nodes at once. They are begun without waiting; any thread may wait for them.

    At the end of its ``with`` block the nodes and the script drop what they keep for them.
    """

    def __init__(self, session: Session, site: Site | None) -> None:
        self._session, self._site = session, site
        self._calls: list[_Call] = []
        self._requests: list[Request] = []
        self.kept = True  #: whether the process group in which they ran still exists on all nodes

    def add(self, place: Place, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Sends a function and its arguments to a node. Raises as ``run`` does for what can't be sent."""
        self._calls.append(_Call(self._session, place, fn, args, kwargs, self._site))

    def begin(self, world: c.World | None = None, draws: bool = True) -> None:
        """Has all of them begin, each in its turn on its node. Raises NodeLost where a node is gone, and none begins.

        ``draws``: whether a function may draw random numbers, which no stream of a node in a mesh can.
        """
        link, commands = self._session.link, []
        for call in self._calls:
            self._requests.append(link.request(call.place.node, c.Result))
            commands.append((call.place.node, call.command(self._requests[-1].id, world, draws), self._site))
        link.together(commands)

    def outcomes(self) -> list[Any]:
        """Waits for all of them; returns what each has returned, or the exception that it has raised, or NodeLost."""
        session, found = self._session, list[Any]()
        for call, request in zip(self._calls, self._requests, strict=True):
            try:
                reply: Any = session.link.wait(request)
                if isinstance(reply, c.Poisoned):
                    raise session.questions.failure(reply.rank, reply.seq)
                found.append(call.result(reply))
                self.kept = self.kept and reply.kept
            except Exception as error:
                found.append(advised(error, session.bundle))
        return found

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *exc: object) -> None:
        for call in self._calls:
            call.end()
        for request in self._requests:
            self._session.link.drop(request)


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
        calls: list[_Call] = []
        try:
            commands = []
            for i, place in enumerate(targets.places):
                mine = [x.values[i] if isinstance(x, Each) else x for x in args]
                calls.append(_Call(session, place, fn, mine, {}, site))
            for call, refs in zip(calls, outs, strict=True):
                self._requests.append(session.link.request(call.place.node, c.Result))
                commands.append((call.place.node, call.into(self._requests[-1].id, refs), site))
            session.link.together(commands)
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
                reply: Any = link.wait(request)
                if isinstance(reply, c.Poisoned):
                    raise self._session.questions.failure(reply.rank, reply.seq)
                results.append(decode_result(reply.data, [None] * len(reply.tensors)))
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
            self._session.link.drop(request)


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


class _Call:
    """A function that is to run on a node, and has been sent there with its arguments."""

    def __init__(
        self, session: Session, place: Place, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any, site: Any
    ) -> None:
        self.place = place
        self._site = site
        self._what = f"{_name(fn)}()"
        self._sent = _known(session)
        self._keep: list[DistributedTensor] = []
        self._request, self._adopted = 0, False
        function = _pickled(fn, place, self._keep, f"{self._what}")
        self._holds_tensors = bool(self._keep)
        # a serial number behind the pickle gives a function or arguments used once a key of their own; the unpickler
        # doesn't read that far
        once = next(_serial).to_bytes(8, "big")
        self._function = key_of(function := function + once if self._holds_tensors else function)
        arguments = _pickled((tuple(args), kwargs), place, self._keep, f"the arguments of {self._what}") + once
        self._arguments = key_of(arguments)
        session.link.interrupts.look()
        known = None if self._holds_tensors else self._sent
        _send(place, known, (self._function, function), (self._arguments, arguments), site)

    def command(self, id: int, world: c.World | None = None, draws: bool = True) -> c.Command:
        self._request = id
        places = session_of(self.place).places
        for place in places.of_node(self.place.node) if draws else ():
            places.draw(place)  # the function may draw, and then from its node's own generators
        return self._run(id, world=world)

    def into(self, id: int, outs: tuple[int, ...]) -> c.Command:
        """Returns the command of a function that draws no random numbers, and whose tensors get these refs."""
        self._request, self._adopted = id, True
        return self._run(id, outs=outs)

    def _run(self, id: int, **more: Any) -> c.Run:
        refs = tuple(t._h.ref for t in self._keep)
        return c.Run(id, self._function, self._arguments, not self._holds_tensors, self._what, refs, **more)

    def result(self, reply: c.Result) -> Any:
        """Returns the function's result, with tensors as proxies."""
        # simulated devices are one memory, so the node can't tell which of them a result is on: take an argument's
        simulated = self.place.hello.simulated
        named = [p for t in self._keep for p in t._place.members if p.node == self.place.node] if simulated else []
        beside = next(iter(named), self.place)
        tensors = [_adopted(g, beside) for g in reply.tensors]
        if tensors:
            self.place.outbox.add(c.Adopt(self._request, tuple(t._h.ref for t in tensors)), self._site)
        self._adopted = True
        return decode_result(reply.data, tensors)

    def end(self) -> None:
        """Ends the call, whatever happened to it, Ctrl-C included: drops what the node and the script keep for it."""
        if not self._adopted:
            self._sent.discard((self.place.node, self._function))  # the node may not have come to keep it
            if self._request and self.place.outbox.lost is None:
                session_of(self.place).link.cancel(self.place.node, self._request)  # if it runs: nobody waits for it
                # nobody will adopt what it returns
                self.place.outbox.add(c.Adopt(self._request, ()), self._site)
        self._keep.clear()  # now, and not when the collector finds the pickler, which is in a cycle


class SentFunctions:
    """The functions that the nodes of a session have, and the order in which they get them."""

    def __init__(self) -> None:
        self.known: set[tuple[int, bytes]] = set()  #: (node, key)
        self.lock = threading.RLock()  #: held while the pieces of a function are queued, one after another

    def forked(self) -> None:
        """Makes a new lock in a forked child: the thread that held the other one may not be there."""
        self.lock = threading.RLock()


def _known(session: Session) -> set[tuple[int, bytes]]:
    """Returns the (node, key) pairs of functions that nodes have. Bounded well below what a node keeps."""
    known = session.part(SentFunctions).known
    if len(known) > 512:
        known.clear()
    return known


def _pickled(value: Any, place: Place, keep: list[DistributedTensor], what: str) -> bytes:
    """Pickles a value with its tensors replaced by refs; ``keep`` gets the tensors behind them.

    Raises TypeError that names the part that can't be pickled, ValueError for a pickle above MAX_PICKLE bytes.
    """
    buffer, modules = io.BytesIO(), _modules(session_of(place))
    pickler = _Pickler(buffer, place, keep, modules)
    try:
        with _by_value(stale) if (stale := modules.stale()) else contextlib.nullcontext():
            pickler.dump(value)
    except (TypeError, cloudpickle.pickle.PicklingError) as e:
        if (found := culprit(value, what, _fails)) is not None:
            e.args = (f"{what} can't be sent to node {place.node}: {found} ({e}); {REMEDY}",)
        raise
    data = buffer.getvalue()
    if len(data) > MAX_PICKLE:
        raise ValueError(
            f"arguments of {len(data)} bytes exceed {MAX_PICKLE >> 20} MiB when pickled; pass them as tensors"
        )
    return data


def _modules(session: Session) -> Modules:
    """Returns the user's modules that the nodes of this session have, or may have."""
    return session.part(Modules)


_registering = threading.RLock()


@contextlib.contextmanager
def _by_value(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Has the functions and classes of these modules pickled by value, as those of a script or a notebook, because
    nodes have older versions."""
    with _registering:
        new = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in new:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        except (TypeError, cloudpickle.pickle.PicklingError) as e:
            names = ", ".join(module.__name__ for module in modules)
            e.add_note(
                f"nodes get {names} by value, as it has changed since they imported it; a new session imports it"
            )
            raise
        finally:
            for module in new:
                cloudpickle.unregister_pickle_by_value(module)


def _fails(value: Any) -> bool:
    """Returns whether a value can't be pickled."""
    try:
        _Dry(io.BytesIO()).dump(value)
    except Exception:
        return True
    return False


class _Dry(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that sends no tensors, to try values out."""

    def persistent_id(self, value: Any) -> int | None:
        return 0 if isinstance(value, torch.Tensor) else None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, place: Place, keep: list[DistributedTensor], modules: Modules) -> None:
        super().__init__(file)
        self._place = place
        self._keep = keep
        self._modules = modules

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (FunctionType, type, ModuleType)):
            self._modules.note(value)
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        if not isinstance(value, DistributedTensor) and layout_of(value) is not torch.strided:
            return None  # by value: there are no proxies of such layouts
        tensor: Any = value.detach()
        if not isinstance(tensor, DistributedTensor):
            tensor = upload(tensor, self._place)
        elif self._place.node not in tensor._place.ranks:  # of a mesh that the node is in it gets its own shard
            tensor = move(tensor, self._place)
        else:
            one_session(tensor._place, self._place)
        self._keep.append(tensor)
        return int(tensor._h.ref or materialise(tensor._h))


@uninterrupted
def _send(
    place: Place,
    sent: set[tuple[int, bytes]] | None,
    function: tuple[bytes, bytes],
    arguments: tuple[bytes, bytes],
    site: Any,
) -> None:
    """Queues (key, data) of a function, unless it was ``sent``, and of its arguments, with no other pieces between."""
    with session_of(place).part(SentFunctions).lock:
        if sent is None or (place.node, function[0]) not in sent:
            _pieces(place, *function, site)
            if sent is not None:
                sent.add((place.node, function[0]))
        _pieces(place, *arguments, site)


def _pieces(place: Place, key: bytes, data: bytes, site: Any) -> None:
    for start in range(0, max(len(data), 1), PIECE):
        place.outbox.add(c.Piece(key, data[start : start + PIECE], start + PIECE >= len(data)), site)


def _adopted(geometry: c.Geometry, place: Place) -> DistributedTensor:
    session = place.session
    name = geometry.device if geometry.device.startswith("cuda") else "cpu"
    where = place if place.hello.simulated else session.places.at(place.node, name)
    return proxy(Handle(new_ref(), meta_told(geometry, where)))


def nodes_info() -> Sequence[dict[str, Any]]:
    """Returns a dict for each node with its "rank", "host", "pid", "devices" (a list of names) and "alive" (a bool).

    Does not wait: a loss that was not noticed yet is not shown. Raises DisttensorError without a session.
    """
    return [
        {
            "rank": node.rank,
            "host": node.hello.host,
            "pid": node.hello.pid,
            "devices": list(node.devices),
            "alive": node.lost is None,
        }
        for node in current.session().nodes
        if node.said_hello is not None
    ]


__all__ = ["DisttensorError", "nodes_info", "run"]
