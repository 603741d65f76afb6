"""Users' functions on nodes: ``dt.run(fn, *args, node=k)``."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch

from ..dispatch.call_site import here
from ..errors.argument_checks import flag, spelled
from ..errors.missing import advised
from ..meshes.mesh import Mesh
from ..runtime.master.route import waits
from ..runtime.node import where
from ..runtime.process.spelling import did_you_mean, shown
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, NodeLost, RemoteError
from ..session import current
from ..session.node_context import current_node
from ..session.places import MeshPlace, NodePlace
from ..session.session import Session
from .calls import Calls, Each, FunctionCall, first_of, name_of
from .process_groups import worlds_of
from .signatures import A, B, C, Given, GivenEach, Node, Nodes, P, R, Takes1, Takes2, Takes3
from .targets import Targets


@overload
def run(fn: Callable[..., R], /, *, node: Node | None, **kwargs: Any) -> R: ...
@overload
def run(fn: Takes1[A, R], a: Given[A], /, *, node: Node | None, **kwargs: Any) -> R: ...
@overload
def run(fn: Takes2[A, B, R], a: Given[A], b: Given[B], /, *, node: Node | None, **kwargs: Any) -> R: ...
@overload
def run(
    fn: Takes3[A, B, C, R], a: Given[A], b: Given[B], c: Given[C], /, *args: Any, node: Node | None, **kwargs: Any
) -> R: ...
@overload
def run(fn: Callable[..., R], /, *, node: Nodes, distributed: bool = False, **kwargs: Any) -> list[R]: ...
@overload
def run(fn: Takes1[A, R], a: GivenEach[A], /, *, node: Nodes, distributed: bool = False, **kwargs: Any) -> list[R]: ...
@overload
def run(
    fn: Takes2[A, B, R], a: GivenEach[A], b: GivenEach[B], /, *, node: Nodes, distributed: bool = False, **kwargs: Any
) -> list[R]: ...
@overload
def run(
    fn: Takes3[A, B, C, R],
    a: GivenEach[A],
    b: GivenEach[B],
    c: GivenEach[C],
    /,
    *args: Any,
    node: Nodes,
    distributed: bool = False,
    **kwargs: Any,
) -> list[R]: ...
@overload
def run(fn: Callable[..., R], /, *args: Any, returns: Any, **kwargs: Any) -> R: ...
@overload
def run(fn: Callable[..., R], /, *args: Any, raises: Any, **kwargs: Any) -> R: ...
@overload
def run(fn: Callable[[A], R], a: Given[A], /) -> R: ...
@overload
def run(fn: Callable[[A, B], R], a: Given[A], b: Given[B], /) -> R: ...
@overload
def run(fn: Callable[[A, B, C], R], a: Given[A], b: Given[B], c: Given[C], /) -> R: ...
@overload
def run(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
def run(  # type: ignore[misc]  # of a function that takes a ``node``, this one has it
    fn: Any,
    *args: Any,
    node: Node | Nodes | None = None,
    nodes: Nodes | None = None,
    distributed: bool = False,
    **kwargs: Any,
) -> Any:
    """Runs ``fn(*args, **kwargs)`` on a node (the current one by default), waits for it, and returns its result.

        >>> def center(t):
        ...     return t - t.mean(), t.shape[0]
        >>> dt.run(center, torch.arange(4.0, device="node:0"), node=1)
        (tensor([-1.5000, -0.5000,  0.5000,  1.5000], device='node:1'), 4)

    On a mesh each node gets its own part of a tensor that is there:

        >>> mesh = dt.mesh(dp=2)
        >>> dt.run(center, dt.shard(torch.arange(4.0), mesh, dp=0), node=mesh, distributed=True)
        [(tensor([-0.5000,  0.5000], device='node:0'), 2), (tensor([-0.5000,  0.5000], device='node:1'), 2)]

    Args:
        fn: any function. It goes to the node with cloudpickle, once; pickled it has at most 64 MiB.
        *args, **kwargs: its arguments, at most 64 MiB when pickled, without their tensors. Tensors among them (at any
            depth, of any shape and dtype) arrive as ordinary local tensors: those of that node as they are, of a
            mesh's tensor the node's own shard, and others are sent first. An argument ``dt.tasks.Each(values)`` is
            another value for each of several nodes.
        node: a number or a text such as "node:1". Or several, such as a ``Group`` or a ``Mesh``: the function runs on
            all of them at once, and the results come in a list, in their order.
        distributed: torch.distributed is initialized first on these nodes, which are several, or a mesh: the first one
            is rank 0 of the default process group, by gloo (NCCL for CUDA tensors, where each node has a GPU of its
            own). The process group stays for the next call with the same nodes. A rank that fails ends the others'
            waiting for it (docs/PROCESS_GROUPS.md). On a mesh ``dt.tasks.device_mesh()`` in the function is torch's
            DeviceMesh, with a process group for each dim.
        nodes: the former spelling of ``node=`` with ``distributed=True``, for one release, with a warning.

    Tensors in the result come back as proxies, without a transfer (``dt.meshes.from_shards(mesh, results)`` makes those
    of a mesh's nodes one tensor); everything else must be plain data: numbers, text, bytes, dates, paths, arrays of
    numpy, lists, tuples, sets, dicts of it; and objects of your dataclasses, namedtuples and enums, if the call has
    named the class. Nothing that a node sends is unpickled: docs/SECURITY.md.

        returns: classes of yours whose objects may come back, or types that name them such as ``list[Stats]``. Those of
            the arguments, and of the function's return annotation, are named already.
        raises: exceptions of yours that the function may raise; others are RemoteError.

    Raises the error that the function raised, with the node's traceback as a note; TypeError for other results, and for
    a function or arguments that can't be pickled; ValueError for what exceeds 64 MiB, and for nodes that do not exist;
    GraphError while a graph is recorded; NodeLost; CancelledError where ``interrupt`` has ended the function. With
    several nodes all have ended then, and further errors are in notes; on a mesh with the nodes' coordinates.
    DisttensorError for a mesh that is closed. With ``distributed`` also ValueError where gloo must not be used between
    their hosts, and DisttensorError where nodes are threads (launcher="inproc").

    Ctrl-C ends the waiting, and the function by a KeyboardInterrupt on its node, which stays usable. It does not
    interrupt what a C library does, nor, on a node that has streams, what waits in the kernel (``time.sleep``), nor
    nodes that are threads; a warning names what goes on after 5 s.
    """
    session = current.session()
    site = here()
    check_call(fn, kwargs, "run")
    _, as_ranks, place = place_of_call("run", session, node, nodes, distributed)
    if isinstance(place, Targets):
        return _run_on_all(session, place, fn, args, kwargs, site, as_ranks)
    call = FunctionCall(session, place, fn, args, kwargs, site)
    try:
        return call.result(session.ask(call.place, c.Result, call.command, site))
    except ModuleNotFoundError as error:
        raise advised(error, session.bundle) from None
    except RemoteError as error:
        raise call.raised(error) from None
    finally:
        call.end()


@spelled
def interrupt(node: int | str | torch.device) -> int:
    """Ends the function that a node runs by a KeyboardInterrupt, and those that wait there to begin. Does not wait.

        threading.Timer(0.5, dt.tasks.interrupt, [1]).start()
        dt.run(time.sleep, 3600, node=1)        # CancelledError: sleep() was cancelled

    Returns the number of these functions. Threads that wait for them in ``run`` raise CancelledError, unless a function
    catches the KeyboardInterrupt and returns. What can't be interrupted is as with Ctrl-C in ``run``; ``kill`` ends
    that, with the node. Raises NodeLost, ValueError for a node that does not exist.
    """
    session = current.session()
    place = session.places.at(node).one
    session.link.check(place.outbox)
    requests = session.link.requests.waited_for(place.node, c.Result)
    # from the last one, or the next one would begin when that which runs has been interrupted
    return sum([session.link.cancel(place.node, request) for request in reversed(requests)])


def place_of_call(
    what: str, session: Session, node: Any, nodes: Any, distributed: Any
) -> tuple[bool, bool, NodePlace | Targets]:
    """Returns where a function is to run, by the arguments ``node``, ``nodes`` and ``distributed`` of ``what``, whose
    caller is warned of ``nodes``: whether these are several nodes, whether as ranks of torch.distributed, and which.
    Raises TypeError, and as ``Targets``."""
    if session.shares_process and (found := where.found()) is not None:  # it would wait for itself
        raise DisttensorError(
            f"{what}: this function runs on node {found.node}, a thread of the script's, and what it would wait for "
            "comes after it; only the script has functions run on nodes"
        )
    if nodes is not None:
        if node is not None:
            raise TypeError(f"{what} takes node= or nodes=, not both; nodes= is node= with distributed=True")
        warnings.warn(
            f"{what}(fn, nodes=...) is {what}(fn, node=..., distributed=True) now; the old argument goes with the next "
            "release",
            DeprecationWarning,
            stacklevel=3,
        )
        node, distributed = nodes, True
    flag("distributed", distributed)
    if distributed:
        if node is None or isinstance(node, (int, str, torch.device)):
            alone = "the current node" if node is None else f"node={shown(node)}"
            raise TypeError(
                f"{what}(distributed=True) takes node=mesh, or a list of nodes such as node=[0, 1], which form a "
                f"process group of torch.distributed; on {alone} alone the function runs without"
            )
        return True, True, Targets(session, node)
    if isinstance(node, Mesh) or (isinstance(node, Iterable) and not isinstance(node, str)):
        return True, False, Targets(session, node)
    if node == "any":
        return False, False, session.places.at(least_loaded(session))
    place = session.places.at(current_node() if node is None else node)
    # a function on one node has one result; for a mesh it has to be said whether ranks are processes of a group
    if isinstance(place, MeshPlace):
        raise TypeError(
            f"{what}(node={shown(node)}): that is {place}; node=mesh runs the function on each of its nodes, and "
            "with distributed=True as ranks of torch.distributed"
        )
    return False, False, place


def least_loaded(session: Session, among: Iterable[int] | None = None) -> int:
    """Returns the node for which the fewest functions wait to end; of equals, that which has the fewest commands to
    do. Raises NodeLost where all are lost."""
    ranks = range(len(session.nodes)) if among is None else among
    there = [session.nodes[rank] for rank in ranks if session.nodes[rank].lost is None]
    if not there:
        for rank in ranks:
            session.link.check(session.nodes[rank].outbox)
    session.link.replies.drain()
    waited_for = session.link.requests.waited_for
    return min(there, key=lambda node: (len(waited_for(node.rank, c.Result)), node.behind, node.rank)).rank


def check_call(fn: Any, kwargs: dict[str, Any], what: str) -> None:
    """Raises TypeError for what is no function, and for a misspelt argument of ``what`` that the function does not take
    either: the error from the node would say that the function got it."""
    if not callable(fn):
        raise TypeError(f"{what} takes a function and its arguments, and {shown(fn)} can't be called")
    known = ("node", "distributed", "returns", "raises", *(["beside"] if what == "submit" else []))
    for name in kwargs.keys() - {"returns", "raises"}:
        if (meant := did_you_mean(name, known, "{}=")) and not _takes(fn, name):
            raise TypeError(f"{what}() has no argument {name!r}, and {name_of(fn)} takes none of that name{meant}")


def _takes(fn: Callable[..., Any], keyword: str) -> bool:
    """Returns whether a function has an argument of that name, as far as can be known."""
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):  # written in C
        return True
    return any(p.kind is p.VAR_KEYWORD or (p.name == keyword and p.kind is not p.POSITIONAL_ONLY) for p in parameters)


def check_each(targets: Targets, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises ValueError where an ``Each`` has not one value per node."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, Each) and len(each.values) != len(targets):
            raise ValueError(f"Each has {len(each.values)} values for the {len(targets)} nodes of {targets.given}")


def _run_on_all(
    session: Session,
    targets: Targets,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    site: Any,
    as_ranks: bool = False,
) -> list[Any]:
    check_each(targets, args, kwargs)
    waits("a function")
    worlds = worlds_of(session)
    world: c.World | None = None
    kept = False  #: all nodes still have the world
    try:
        with Calls(session, site) as calls:
            for i, place in enumerate(targets.places):
                mine = [x.values[i] if isinstance(x, Each) else x for x in args]
                named = {name: x.values[i] if isinstance(x, Each) else x for name, x in kwargs.items()}
                calls.add(place, fn, *mine, **named).as_rank(targets.mesh, i)
            with worlds.turn(session, targets, site) if as_ranks else contextlib.nullcontext() as world:
                calls.begin_calls(world)
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
            worlds.discard_world(world)
    if failed:
        raise first_of(failed)
    return results


__all__ = ["DisttensorError", "run"]
