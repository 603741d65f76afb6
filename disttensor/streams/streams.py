"""Streams and events, as in ``torch.cuda``. On the CPU of a node a stream is a thread that does its commands in order.

Operations on several streams of a node run side by side. An operation that uses a tensor which another stream makes
waits for that tensor by itself; in-place writes are ordered by events only, as in CUDA.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from ..dispatch.call_site import here
from ..errors.argument_checks import seconds, seconds_of, spelled
from ..proxy.meta import new_ref
from ..runtime.master.failures import Site
from ..runtime.master.route import Route, route, waits
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import commands as c
from ..session import current
from ..session.current import session_of
from ..session.node_context import choose_place, current_node, restore_place
from ..session.node_context import reset_current_node as forget_node
from ..session.node_context import use as use_node
from ..session.places import NodePlace

Device = torch.device | str | int | None


#: The blocks of ``with s:`` that this thread or asyncio task is in.
_entered: ContextVar[tuple[stream, ...]] = ContextVar("disttensor.streams", default=())


class Owned:
    """The owner of what a node has under ``ref`` that is no tensor: a stream, an event, the result of a function."""

    __slots__ = ("_dead", "ref")

    def __init__(self, place: NodePlace) -> None:
        self.ref = new_ref()
        self._dead = place.dead

    def __del__(self) -> None:  # no lock and no I/O: the collector can run this anywhere
        self._dead.append(self.ref)


class OwnedStream(Owned):
    """The owner of a stream, which each connection of its node is to have, until the script has it no more."""

    __slots__ = ("_standing",)

    def __init__(self, place: NodePlace, priority: int, site: Site | None) -> None:
        super().__init__(place)
        node = place.session.nodes[place.node]
        self._standing = node.standing
        make = c.MakeStream(self.ref, place.name, priority)
        with node.lock:
            self._standing[self.ref] = (make,)
            place.outbox.add(make, site)

    def __del__(self) -> None:  # as above
        if hasattr(self, "_standing"):
            self._standing.pop(self.ref, None)
        super().__del__()


class Stream:
    """A queue of work on one device of one node. Operations on a stream are done in the order in which they are issued.

    Args:
        node: a node's number, or a device of type "node", which names node and device. Default: the current node.
        device: a device of that node as ``disttensor.device`` takes it ("cpu", "cuda:1", 1). Default: the node's
            default device.
        priority: as in ``torch.cuda.Stream``, lower numbers first; CPUs have no priorities.

    Two streams of a CPU are two threads of the node's process, and share its cores. To make a stream does not wait.
    Raises ValueError or RuntimeError for a node or a device that does not exist, NodeLost.

        side = dt.Stream(node=0)
        with dt.stream(side):
            y = x * 10          # on node 0, beside its default stream
        z = y + 1               # on the default stream; waits there for `y`
    """

    def __init__(self, node: torch.device | str | int | None = None, device: Device = None, priority: int = 0) -> None:
        self._set(_place(node, device))
        self.priority = int(priority)
        self._place.session.link.check(self._place.outbox)
        self._owned: Owned | None = OwnedStream(self._place, self.priority, here())

    def _set(self, place: NodePlace) -> None:
        self._place = place
        self.node = place.node  #: the node's number
        self.device = place.device  #: the torch.device, of type "node"

    @property
    def stream_id(self) -> int:
        """The stream's number, which no other stream has; 0 for default streams."""
        return 0 if self._owned is None else self._owned.ref

    def wait_stream(self, stream: Stream) -> None:
        """Has work that is issued to this stream from now on wait for all that was issued to ``stream`` before.

        Returns at once. Raises NodeLost.
        """
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        """Has work that is issued to this stream from now on wait for ``event``. Returns at once. Raises NodeLost."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Records ``event``, by default a new one, on this stream, and returns it at once. Raises NodeLost."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Has the script wait until all that was issued to this stream is done.

        Raises the earliest error on its node that nothing has raised yet, NodeLost.
        """
        self.record_event().synchronize()

    def query(self) -> bool:
        """Returns whether all that was issued to this stream is done. Waits for one round trip. Raises NodeLost."""
        return self.record_event().query()

    def is_capturing(self) -> bool:
        """Returns False: the script captures no CUDA graph. Optimizers ask a stream for that since torch 2.15."""
        return False

    @uninterrupted
    def __enter__(self) -> Stream:
        """Enters ``disttensor.stream(self)``."""
        block = stream(self)
        block.__enter__()
        _entered.set((*_entered.get(), block))
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        *outer, block = _entered.get()
        _entered.set(tuple(outer))
        block.__exit__(kind, error, trace)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return (self._place, self.stream_id) == (other._place, other.stream_id)

    def __hash__(self) -> int:
        return hash((self._place, self.stream_id))

    def __repr__(self) -> str:
        kind = f"stream {self.stream_id}" if self.stream_id else "default stream"
        return f"<disttensor.Stream {kind} of {self._place}>"


class _Default(Stream):
    """The default stream of a device, which is never made."""

    def __init__(self, place: NodePlace) -> None:
        self._set(place)
        self.priority = 0
        self._owned = None


class Event:
    """A point in the work of a stream that other streams, of any node, or the script can wait for.

    Args:
        enable_timing: whether ``elapsed_time`` may be asked.
        blocking: as in ``torch.cuda.Event``; a wait for a node never spins, so it changes nothing.

    An event can be recorded again; streams that wait for it already wait for the point that it was then.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._timing = enable_timing
        self._place: NodePlace | None = None
        self._owned: Owned | None = None
        self._reached = False

    def record(self, stream: Stream | None = None) -> None:
        """Records the event on ``stream``, by default the current node's current one. Returns at once.

        Raises NodeLost.
        """
        stream = current_stream() if stream is None else stream
        place = stream._place
        if route.get().recorder is not None:
            self._place, self._owned = None, None  # a graph is replayed in the order of its commands
            return
        place.session.link.check(place.outbox)
        owned = Owned(place)
        _issue(stream, c.Record(owned.ref, place.name, self._timing))
        self._place, self._owned, self._reached = place, owned, False

    def wait(self, stream: Stream | None = None) -> None:
        """Has work that is issued to ``stream`` (by default the current one) from now on wait for the event.

        Returns at once, also for streams of two nodes: the nodes tell each other. Nothing happens if the event was not
        recorded. Raises NodeLost.
        """
        stream = current_stream() if stream is None else stream
        if self._owned is None or self._place is None or route.get().recorder is not None:
            return
        there = stream._place
        if there.session is not self._place.session:
            self._place.session.link.check(self._place.outbox)
        if there.node == self._place.node:
            _issue(stream, c.Wait(self._owned.ref))
            return
        session = session_of(there)
        transfer = session.transfers.new()
        site = here()
        session.router.introduce(0, self._place.node, there.node)
        session.link.sender.together(
            [
                (self._place.node, c.Signal(transfer, self._owned.ref, there.node), site),
                (there.node, _on(stream, c.Await(transfer, self._place.node)), site),
            ]
        )

    def query(self) -> bool:
        """Returns whether the work before the event is done; True for an event that was not recorded.

        Waits for one round trip. Raises GraphError while a graph is recorded, NodeLost.
        """
        waits("a question about an event")
        if self._owned is not None and not self._reached:
            place, ref = self._asked()
            self._reached = bool(place.session.ask(place, c.Answer, lambda id: c.Query(id, ref), here()).value)
        return self._owned is None or self._reached

    def synchronize(self) -> None:
        """Has the script wait until the work before the event is done. Returns at once if it was not recorded.

        Raises the earliest error on its node that nothing has raised yet, GraphError while a graph is recorded,
        NodeLost.
        """
        waits("Event.synchronize")
        if self._owned is None:
            return
        place, ref = self._asked()
        place.session.ask(place, c.Done, lambda id: c.Join(id, ref), here())
        self._reached = True
        session_of(place).questions.raise_pending_error(place.node)

    def elapsed_time(self, end_event: Event) -> float:
        """Returns the milliseconds between this event and a later one of the same node, by the node's clock.

        Waits for one round trip. Raises RuntimeError unless both were recorded with ``enable_timing=True`` and are
        done, ValueError for events of two nodes.
        """
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._owned is None or end_event._owned is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        place, first = self._asked()
        other, second = end_event._asked()
        if place.node != other.node:
            raise ValueError(f"events of nodes {place.node} and {other.node}: each node has a clock of its own")
        reply = place.session.ask(place, c.Answer, lambda id: c.Elapsed(id, first, second), here())
        if reply.value is None:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return float(reply.value)  # type: ignore[arg-type]

    def _asked(self) -> tuple[NodePlace, int]:
        assert self._place is not None
        assert self._owned is not None
        return self._place, self._owned.ref

    def __repr__(self) -> str:
        return f"<disttensor.Event {'not recorded' if self._place is None else f'on {self._place}'}>"


class _Streams(dict[int, int]):
    """A Route's current streams, by node. Keeps the streams alive for threads and tasks that inherit the Route."""

    held: dict[int, Stream]


def _on(stream: Stream, command: c.Record | c.Wait | c.Await) -> c.Command:
    return c.On(stream.stream_id, command) if stream.stream_id else command


def _issue(stream: Stream, command: c.Record | c.Wait | c.Await) -> None:
    """Issues a command to ``stream``, whichever stream is current."""
    place = stream._place
    if place.outbox.add(_on(stream, command), here(3)):
        place.session.flush(place.outbox)


class stream:
    """Makes a stream the current one of its node inside of a ``with`` block, and that node the current node.

    Everything that the block issues to the node goes to the stream: operations, copies, backward passes,
    ``disttensor.run``. ``stream(None)`` changes nothing. Blocks nest; threads and asyncio tasks have current streams of
    their own.

    Entering does not wait. It raises NodeLost, DisttensorError for a stream of a session that was shut down.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._entered: list[tuple[Any, Token[Route], Any]] = []

    @uninterrupted
    def __enter__(self) -> stream:
        if self.stream is not None:
            place, now = self.stream._place, route.get()
            outbox, node = place.outbox, place.node
            place.session.link.check(outbox)
            before = choose_place(node)
            streams = _Streams(now.streams)
            streams.held = {**getattr(now.streams, "held", {}), node: self.stream}
            streams[node] = self.stream.stream_id
            outbox.add_route(1)
            self._entered.append((outbox, route.set(Route(streams, now.recorder)), before))
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.stream is not None:
            outbox, token, before = self._entered.pop()
            route.reset(token)
            outbox.add_route(-1)
            restore_place(before)

    def __repr__(self) -> str:
        return f"stream({self.stream!r})"


StreamContext = stream


def set_stream(stream: Stream) -> None:
    """Makes a stream, and its node, the current ones of this thread or asyncio task, until another call changes them.

    ``with stream(s):`` does so for a while; a ``with`` block in which this is called ends as if it had not been called.
    Raises NodeLost, DisttensorError for a stream of a session that was shut down.
    """
    place = stream._place
    place.session.link.check(place.outbox)
    use_node(stream.node)
    now = route.get()
    streams = _Streams(now.streams)
    streams.held = {**getattr(now.streams, "held", {}), stream.node: stream}
    streams[stream.node] = stream.stream_id
    if stream.stream_id:
        place.outbox.add_route(1)  # for good, as no end is known
    route.set(Route(streams, now.recorder))


def reset_current_streams() -> None:
    """Makes node 0 and default streams the current ones. Called at a session's end, for the next session."""
    forget_node()
    route.set(Route())


@spelled
def default_stream(node: torch.device | str | int | None = None, device: Device = None) -> Stream:
    """Returns the default stream of a node (by default the current one), which takes what no other stream is given."""
    return _Default(_place(node, device))


@spelled
def current_stream(node: torch.device | str | int | None = None, device: Device = None) -> Stream:
    """Returns the stream that takes what is issued now to a node, by default the current one."""
    place = _place(node, device)
    current: Stream | None = getattr(route.get().streams, "held", {}).get(place.node)
    return current if current is not None and current.stream_id else _Default(place)


@spelled
def synchronize(node: torch.device | str | int | None = None, *, timeout: float | timedelta | None = None) -> None:
    """Has the script wait until a node (a number or a device; None: all nodes) has done everything, on all its streams.

    Raises the earliest error that nothing has raised yet, NodeLost (for all nodes once: a script that has caught it
    goes on with the others, and what has failed on these by that loss is not raised), ValueError for a node that does
    not exist, TimeoutError after ``timeout`` seconds (the nodes go on; ``disttensor.kill`` ends one that never will).
    """
    limit = seconds_of(timeout)
    if limit is not None:
        seconds("timeout", limit)
    current.session().synchronize(None if node is None else _place(node).node, limit)


def _place(node: torch.device | str | int | None, device: Device = None) -> NodePlace:
    places = current.session().places
    if isinstance(device, (str, torch.device)) and torch.device(device).type == "node":
        return places.of(torch.device(device)).one
    return places.at(current_node() if node is None else node, device).one
