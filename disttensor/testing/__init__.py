"""For tests of programs that use disttensor: what crosses the wire, what is under way, and what breaks.

    from disttensor import testing

    with testing.MessageLog() as log:
        step()
    assert log.questions == []              # the step waits for nothing

Import it by itself; ``import disttensor`` does not. Nothing here costs a program anything that does not use it.
docs/TESTING.md shows how to use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from ..dispatch.op_table import entries
from ..runtime.contracts.data_channel import check_data_channel
from ..session import caches, current, kernel_choice
from ..session.places import Place
from ..torch_backend import device_module
from .breaking import cut, kill, resume, stop
from .message_log import MessageLog, NodeLog, wrapped

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
    """``check_launcher``, whose modules nothing else here needs."""
    if name == "check_launcher":
        from ..runtime.contracts.launcher import check_launcher

        return check_launcher
    raise AttributeError(f"module 'disttensor.testing' has no attribute {name!r}")


# ---- what there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Queued:
    """What waits or is under way, as the script knows it."""

    commands: int  #: issued, and not sent yet
    in_flight: int  #: commands sent that a node has not reported as done; the last that it answered is among them
    dead: int  #: tensors that the script has dropped and the nodes have not been told of
    held: int  #: tensors that graphs hold on to
    full: bool  #: a node is so far behind that what is issued for it waits (``limit("window")``)
    questions: int  #: answers that threads wait for
    fetches: int  #: ``dt.fetch`` that have not come yet
    uploads: int  #: bytes of copies of tensors that have not left yet; of all nodes, whichever was asked about


def queued(node: int | None = None) -> Queued:
    """Counts what waits or is under way for one node, or for all of them together. Sends nothing, waits for nothing.

    Raises ValueError for a node that there is not, DisttensorError without a session.
    """
    session = current.session()
    boxes = session.link.outboxes if node is None else [session.places.at(node).outbox]
    with session.link._lock:
        return Queued(
            commands=sum(len(box.queue) // 2 for box in boxes),
            in_flight=sum(box.sent - box.done for box in boxes if box.lost is None),
            dead=sum(len(box.dead) for box in boxes),
            held=sum(len(box._holds) for box in boxes),
            full=any(box.full for box in boxes),
            questions=sum(node in (None, r.node) for r in list(session.link._requests.values())),
            fetches=sum(node in (None, at) for at, _ in list(session.transfers.arriving.values())),
            uploads=sum(list(session.transfers.staged.values())),
        )


class Usage(NamedTuple):
    """What the tensors of a node come to, on all its devices."""

    tensors: int  #: how many there are
    bytes: int  #: of their memory, counted once where tensors share it


def usage(where: torch.Tensor | torch.device | str | int) -> Usage:
    """Asks a node for its live tensors, once it has done what was issued: what was dropped before is not among them.

    ``where`` is a node's number, a device ("node:1") or a tensor there. Raises ValueError or RuntimeError for what
    there is not, NodeLost, DisttensorError without a session.
    """
    return Usage(*device_module.usage(_place(where)))


def plans() -> dict[str, int]:
    """How many plans are cached, by operator ("aten::mul.Tensor"), for those that have any.

    An operator has one for each kind of call that it has seen: shapes, dtypes, devices, options; not for each number.
    """
    return {entry.name: len(entry.plans) for entry in list(entries.values()) if entry.plans}


# ---- limits ----------------------------------------------------------------------------------------------------------

#: Where each limit is.
_LIMITS = {
    "window": ("runtime.master.outbox", "MAX_COMMANDS"),
    "message": ("runtime.master.outbox", "MAX_BATCH"),
    "sweep": ("runtime.master.outbox", "SWEEP"),
    "idle": ("runtime.master.link", "IDLE"),
    "tick": ("runtime.master.link", "TICK"),
    "slow": ("runtime.master.link", "SLOW"),
    "staged": ("session.transfers", "STAGE"),
    "room": ("runtime.channel.shm.sharing", "AHEAD"),
    "part": ("graphs.recorder", "_PART"),
    "error": ("runtime.node.failures", "MAX_TEXT"),
    "lately": ("runtime.node.streams.scheduler", "LATELY"),
    "templates": ("session.places", "GENERATION"),
    "pickle": ("tasks.functions", "MAX_PICKLE"),
}


def limit(name: str) -> float:
    """Gives one of the limits by which this process decides what to do:

    "window"  commands in flight to a node, from which on what is issued for it waits
    "message" commands in one message, at most
    "sweep"   commands after which a node is told of tensors that were dropped, at most
    "idle"    seconds after which commands leave that nothing else sends
    "tick"    seconds after which who waits looks at the nodes by itself
    "slow"    seconds of waiting at a full window, after which that is logged
    "staged"  bytes of copies of uploads under way, from which on an upload waits
    "room"    bytes that a shared-memory channel keeps for tensors that leave before they are asked for
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
    """Has limits of this process be others inside of a block, as ``with limits(window=100):``.

    Nodes of ``launcher="inproc"`` are in this process; those that are processes keep their own. A node reports every
    1024 commands, so a window has to be larger, or it may stay full. Raises ValueError for a name that ``limit`` does
    not know.
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


# ---- moments ---------------------------------------------------------------------------------------------------------

#: What a thread comes to, as (what has the method: one or several, its name).
_POINTS: dict[str, Callable[[Any], tuple[list[object], str]]] = {
    "window": lambda session: ([session.link], "_wait_window"),
    "wait": lambda session: ([session.link], "wait"),
    "ask": lambda session: ([session], "ask"),
    "pack": lambda session: (session.link.outboxes, "pack"),
    "bury": lambda session: (session.link.outboxes, "_queue_frees"),
    "send": lambda session: ([session.link.hub], "send"),
    "receive": lambda session: ([session.link.hub], "drain"),
    "acknowledge": lambda session: (session.link.outboxes, "acknowledge"),
    "upload": lambda session: ([session.channel], "isend"),
}


@contextlib.contextmanager
def at(point: str, fn: Callable[[], object], *, after: bool = False) -> Iterator[None]:
    """Has ``fn()`` called each time that a thread of the script comes to a point, inside of the block:

    "window"      it is about to wait, as a node is too many commands behind
    "wait"        it is about to wait for a node, for whatever reason
    "ask"         it is about to ask a node something (``x.item()``)
    "pack"        a message is about to be made of what is queued for a node
    "bury"        a node is about to be told of tensors that were dropped, if there are any
    "send"        a message is about to be sent
    "receive"     it is about to look for messages
    "acknowledge" a node has reported what it has done, and that is about to be noted
    "upload"      a tensor of the script's is about to leave by the data channel

    With ``after``, each time that it has done it. ``fn`` is called in that thread, which may hold locks: it may set an
    event, wait for one, raise a signal; not use tensors. What it raises is raised there. Raises ValueError for other
    points, DisttensorError without a session.
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

    with contextlib.ExitStack() as undo:
        for owner in owners:
            undo.enter_context(wrapped(owner, name, wrap))
        yield


# ---- places ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def as_cuda(where: torch.Tensor | torch.device | str | int, capability: tuple[int, int] = (8, 0)) -> Iterator[None]:
    """Has the script take a simulated CUDA device, or a node's CPU, for a real CUDA device inside of the block.

    It then chooses what it would choose for one of this capability: dtypes of autocast, kernels, optimizers over all
    parameters. The node computes as before, so it fails where a kernel is CUDA's only. ``where`` is as for ``usage``,
    and so is what it raises.
    """
    place = _place(where)
    node = msgspec.structs.replace(place.record.node, cudnn=91900, cuda=(13, 0), flash=True)
    with taken_for(place, kernel_choice.Record("cuda", capability, place.record.version, node)):
        yield


@contextlib.contextmanager
def taken_for(place: Place, record: kernel_choice.Record) -> Iterator[None]:
    """Has the script choose for a place, inside of the block, what torch would choose with another record."""
    before = place.record
    _give(place, record)
    try:
        yield
    finally:
        _give(place, before)


def _give(place: Place, record: kernel_choice.Record) -> None:
    for seen in (place, place.twin):
        seen.record, seen.kernels = record, record.kind
    caches.drop_plans()  # what was chosen was chosen for the other


def _place(where: torch.Tensor | torch.device | str | int) -> Place:
    places = current.session().places
    if isinstance(where, int):
        return places.at(where)
    device = where.device if isinstance(where, torch.Tensor) else torch.device(where)
    if device.type != "node":
        raise ValueError(f"{device} is no device of a node")
    return places.of(device)
