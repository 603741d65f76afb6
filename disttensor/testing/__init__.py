"""Tools for tests of programs that use disttensor: they show messages and work under way, and break connections.

    from disttensor import testing

    with testing.MessageLog() as log:
        step()
    assert log.questions == []              # the step waits for nothing

Import this module by itself; ``import disttensor`` does not. It costs nothing to a program that does not use it.
docs/TESTING.md shows how to use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from ..dispatch.op_table import entries
from ..runtime.contracts.data_channel import check_data_channel
from ..runtime.master.requests import ReplyRequest
from ..session import caches, current, kernel_choice
from ..session.places import Place
from ..torch_backend import device_module
from .breaking import cut, kill, resume, stop
from .message_log import MessageLog, NodeLog

if TYPE_CHECKING:
    from ..runtime.contracts.launcher import check_launcher

__all__ = [
    "MessageLog",
    "NodeLog",
    "Queued",
    "Usage",
    "as_cuda",
    "at",
    "check_data_channel",
    "check_launcher",
    "cut",
    "kill",
    "limit",
    "limits",
    "plans",
    "queued",
    "resume",
    "stop",
    "usage",
]


def __getattr__(name: str) -> Any:
    """Imports ``check_launcher`` when it is first used, as nothing else here needs its modules."""
    if name == "check_launcher":
        from ..runtime.contracts.launcher import check_launcher

        return check_launcher
    raise AttributeError(f"module 'disttensor.testing' has no attribute {name!r}")


# ---- what there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queued:
    """The counts of work that waits or is under way, as the script knows it. Returned by ``queued``."""

    commands: int  #: commands that were issued and not sent yet
    in_flight: int  #: commands sent that a node has not reported as done; the last that it answered is among them
    dead: int  #: tensors that the script has dropped and the nodes have not been told of
    held: int  #: tensors that graphs keep alive
    full: bool  #: whether a node is so far behind that issuing a command to it waits (``limit("window")``)
    questions: int  #: answers that threads wait for
    fetches: int  #: fetches (``dt.fetch``) that have not arrived yet
    uploads: int  #: bytes of staged copies of uploads that have not left yet; of all nodes, whichever was asked about


def queued(node: int | None = None) -> Queued:
    """Counts the work that waits or is under way for one node, or for all nodes together. Sends and awaits nothing.

    Raises ValueError for a node that does not exist, DisttensorError without a session.
    """
    session = current.session()
    ranks = range(len(session.nodes)) if node is None else [session.places.at(node).one.node]
    boxes = [session.nodes[rank].outbox for rank in ranks]
    queues = [queue for queue in session.link.queues if not set(ranks).isdisjoint(queue.ranks)]
    with session.link.lock:
        return Queued(
            commands=sum(len(queue.queue) // 2 for queue in queues),
            in_flight=sum(box.sent - box.done for box in boxes if box.lost is None),
            dead=sum(len(queue.dead) for queue in queues),
            held=sum(len(box._holds) for box in boxes),
            full=any(box.full for box in boxes),
            questions=sum(node in (None, r.node) for r in session.link.requests if type(r) is not ReplyRequest),
            fetches=sum(node in (None, at) for at, _ in list(session.transfers.arriving.values())),
            uploads=sum(list(session.transfers.staged.values())),
        )


class Usage(NamedTuple):
    """The number and memory of a node's tensors, on all its devices. Returned by ``usage``."""

    tensors: int  #: the number of live tensors
    bytes: int  #: the bytes of their memory, counted once where tensors share it


def usage(where: torch.Tensor | torch.device | str | int) -> Usage:
    """Asks a node for its live tensors, after all that was issued to it: tensors dropped before are not among them.

    ``where`` is a node's number, a device ("node:1") or a tensor there. Waits for one round trip. Raises ValueError or
    RuntimeError for a node or device that does not exist, NodeLost, DisttensorError without a session.
    """
    return Usage(*device_module.usage(_place(where)))


def plans() -> dict[str, int]:
    """Returns the number of cached plans by operator ("aten::mul.Tensor"), for operators that have any.

    An operator has one plan for each kind of call that it has seen: shapes, dtypes, devices, options; not one for each
    number. A loop that makes new plans is slower than one that does not.
    """
    return {entry.name: len(entry.plans) for entry in list(entries.values()) if entry.plans}


# ---- limits ----------------------------------------------------------------------------------------------------------

#: The module and attribute of each limit.
_LIMITS = {
    "window": ("runtime.master.outbox", "MAX_COMMANDS"),
    "message": ("runtime.master.command_queue", "MAX_BATCH"),
    "sweep": ("runtime.master.command_queue", "SWEEP"),
    "idle": ("runtime.master.idle", "IDLE"),
    "tick": ("runtime.master.waiting", "TICK"),
    "slow": ("runtime.master.sender", "SLOW"),
    "unheeded": ("runtime.master.patience", "UNHEEDED"),
    "staged": ("session.transfers", "STAGE"),
    "leaving": ("runtime.node.store", "LEAVING"),
    "room": ("runtime.channel.shm.sharing", "AHEAD"),
    "part": ("graphs.recorder", "_PART"),
    "error": ("runtime.node.failures", "MAX_TEXT"),
    "lately": ("runtime.node.streams.scheduler", "LATELY"),
    "templates": ("runtime.master.home", "GENERATION"),
    "pickle": ("tasks.sending", "MAX_PICKLE"),
}


def limit(name: str) -> float:
    """Returns one of the limits by which this process decides what to do:

    "window"  commands in flight to a node, from which on issuing another one waits
    "message" commands in one message, at most
    "sweep"   commands after which a node is told of tensors that were dropped, at most
    "idle"    seconds after which commands leave that nothing else sends
    "tick"    seconds after which a waiting thread looks at the nodes by itself
    "slow"    seconds of waiting at a full window, after which the wait is logged
    "unheeded" seconds after which a function is named that was cancelled and goes on
    "staged"  bytes of copies of uploads under way, from which on an upload waits
    "leaving" bytes of copies from a node that are under way, from which on it waits before it begins another
    "room"    bytes that a shared-memory channel keeps for tensors that leave before their receiver asks for them
    "part"    bytes of recorded commands in one message, about
    "error"   characters of an error's message, and of its traceback, that a node sends
    "lately"  commands for the default stream alone, after which a node's receiving thread runs them by itself again
    "templates" operators with their static arguments that a node is told of, before it forgets them all
    "pickle"  bytes of a pickled function with its arguments

    Raises ValueError for other names.
    """
    module, attribute = _limit(name)
    return getattr(module, attribute)  # type: ignore[no-any-return]


@contextlib.contextmanager
def limits(**values: float) -> Iterator[None]:
    """Changes limits of this process inside of a ``with`` block, as in ``with limits(window=2000):``.

    Nodes of ``launcher="inproc"`` are in this process; nodes that are processes keep their own limits. A node reports
    every 1024 commands, so a window has to be larger, or it may stay full. Raises ValueError for a name that ``limit``
    does not know.
    """
    found = [(*_limit(name), value) for name, value in values.items()]
    with contextlib.ExitStack() as undo:
        for module, attribute, value in found:
            undo.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, value)
        yield


def _limit(name: str) -> tuple[Any, str]:
    if name not in _LIMITS:
        raise ValueError(f"there is no limit {name!r}; there are {', '.join(_LIMITS)}")
    module, attribute = _LIMITS[name]
    return import_module(f"disttensor.{module}"), attribute


def _outboxes(session: Any) -> list[object]:
    return [node.outbox for node in session.nodes]


# ---- moments ---------------------------------------------------------------------------------------------------------

#: The points that a thread comes to, as a function of the session: (the objects that have the method, its name).
_POINTS: dict[str, Callable[[Any], tuple[list[object], str]]] = {
    "window": lambda session: ([session.link.sender], "wait_for_room"),
    "wait": lambda session: ([session.link.waiting], "wait"),
    "ask": lambda session: ([session.questions], "ask_now"),
    "pack": lambda session: (_outboxes(session), "pack"),
    "bury": lambda session: (_outboxes(session), "take_dead"),
    "send": lambda session: ([session.link.hub], "send"),
    "receive": lambda session: ([session.link.hub], "drain"),
    "acknowledge": lambda session: (_outboxes(session), "acknowledge"),
    "upload": lambda session: ([session.channel], "isend"),
}


@contextlib.contextmanager
def at(point: str, fn: Callable[[], object], *, after: bool = False) -> Iterator[None]:
    """Has ``fn()`` called each time that a thread of the script comes to a point, inside of a ``with`` block:

    "window"      the thread is about to wait, as a node is too many commands behind
    "wait"        the thread is about to wait for a node, for whatever reason
    "ask"         the thread is about to ask a node something (``x.item()``)
    "pack"        a message is about to be made of the commands that are queued for a node
    "bury"        a node is about to be told of tensors that were dropped, if there are any
    "send"        a message is about to be sent
    "receive"     the thread is about to look for messages
    "acknowledge" a node's report of its progress is about to be noted
    "upload"      a tensor of the script's is about to leave by the data channel

    With ``after``, ``fn`` is called each time that the thread has passed the point. ``fn`` is called in that thread,
    which may hold locks: ``fn`` may set an event, wait for one, raise a signal; it must not use tensors. Its errors are
    raised there. Raises ValueError for other points, DisttensorError without a session.

    By decision this replaces the methods of these moments while the block runs, and does not listen at the seam of
    observers: a fault comes before a moment, waits there and raises, where an observer is told afterwards and can't
    fail what it observes; and a look for listeners at each moment would cost every message of every program, for tests
    only (tests/transport/test_opcodes.py). docs/dev/debugging.md says what the seam would need.
    """
    if point not in _POINTS:
        raise ValueError(f"there is no point {point!r}; there are {', '.join(_POINTS)}")
    owners, name = _POINTS[point](current.session())

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if not after:
                fn()
            result = method(*args, **options)
            if after:
                fn()
            return result

        return called

    with _wrapped(owners, name, wrap):
        yield


@contextlib.contextmanager
def _wrapped(
    owners: Sequence[object], name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces a method of some objects of one class by ``wrap(method)`` inside of a ``with`` block.

    It is replaced in the class, and does what it did for all other objects: one with slots has no method of its own.
    """
    kind = type(owners[0])
    before, method = vars(kind).get(name), getattr(kind, name)
    own = {id(owner): wrap(MethodType(method, owner)) for owner in owners}

    def called(self: object, *args: Any, **options: Any) -> Any:
        wrapper = own.get(id(self))
        return method(self, *args, **options) if wrapper is None else wrapper(*args, **options)

    setattr(kind, name, called)
    try:
        yield
    finally:
        if before is None:
            delattr(kind, name)
        else:
            setattr(kind, name, before)


# ---- places ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_cuda(where: torch.Tensor | torch.device | str | int, capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
    """Has the script take a simulated CUDA device, or a node's CPU, for a real CUDA device inside of a ``with`` block.

    The script then makes its choices for a device of this capability: dtypes of autocast, kernels, optimizers over all
    parameters. The node computes as before, so it fails where only CUDA has a kernel. ``where`` is as for ``usage``,
    and so are the errors.
    """
    place = _place(where)
    node = msgspec.structs.replace(place.record.node, cudnn=91900, cuda=(13, 0), flash=True)
    with taken_for(place, kernel_choice.KernelFacts("cuda", capability, place.record.version, node)):
        yield


@contextlib.contextmanager
def taken_for(place: Place, record: kernel_choice.KernelFacts) -> Iterator[None]:
    """Has the script make its choices for a place by another record, inside of a ``with`` block."""
    before = place.record
    _set_record(place, record)
    try:
        yield
    finally:
        _set_record(place, before)


def _set_record(place: Place, record: kernel_choice.KernelFacts) -> None:
    for seen in (place, place.twin):
        seen.record, seen.kernels = record, record.kind
    caches.drop_plans()  # their choices were made by the other record


def _place(where: torch.Tensor | torch.device | str | int) -> Place:
    places = current.session().places
    if isinstance(where, int):
        return places.at(where)
    device = where.device if isinstance(where, torch.Tensor) else torch.device(where)
    if device.type != "node":
        raise ValueError(f"{device} is no device of a node")
    return places.of(device)
