"""A session: the nodes, the link to them, the data channels, and the steps that start and end them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from ..errors import late_warnings
from ..runtime.channel.base import Protection
from ..runtime.channel.opened import Channels
from ..runtime.host.launcher import Launcher
from ..runtime.master.command_queue import CommandQueue
from ..runtime.master.failures import in_short, line_of
from ..runtime.master.link import Link
from ..runtime.master.node import Node
from ..runtime.master.outbox import Outbox
from ..runtime.master.requests import Request
from ..runtime.master.route import route
from ..runtime.process.observing import ScriptSeam
from ..runtime.process.signals import Interrupts
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.arguments import Addresses
from ..runtime.protocol.bundle import Bundle
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..runtime.transport.base import Hub
from ..runtime.transport.zmq import ZmqHub
from . import caches
from .callbacks import Callbacks
from .channel_router import ChannelRouter
from .places import NodePlace, Places
from .questions import Questions
from .switches import Switches
from .transfers import Transfers
from .waits import Waits

T = TypeVar("T")

_log = logging.getLogger("disttensor")


def _left(deadline: float | None) -> float | None:
    """Returns the seconds until ``deadline`` (of time.monotonic), at least a moment, so that a wait for something that
    is done already never times out."""
    return None if deadline is None else max(0.01, deadline - time.monotonic())


class Session:
    """One master with its nodes, ready for commands. Made by startup/start.py."""

    def __init__(
        self,
        job: str,
        secret: bytes,
        hub: Hub,
        nodes: int,
        channels: Channels,
        launcher: Launcher | None,
        backend: str = "",
        protection: Protection = Protection(),  # noqa: B008 - frozen
        interrupts: Interrupts | None = None,
        seam: ScriptSeam | None = None,
    ) -> None:
        """Begins with ``nodes`` nodes, which have not said hello yet.

        ``backend`` names the session's own data channel, which is open in ``channels``. ``launcher`` is None where the
        nodes are threads of this process. ``protection`` is that of tensors on their way. ``interrupts``
        have wrapped the handlers of signals already. ``seam``: the one at which ``channels`` tell of transfers.
        """
        self.job = job
        self.synchronized = 0  #: how often all nodes were waited for
        self._parts: dict[Any, Any] = {}
        self.channel = channels.data[0]
        self.link = Link(hub, nodes, launcher, self._lost, interrupts, seam=seam)
        #: the nodes, by rank. One that joins is here when it has been taken in, and in the link's from its key on
        self.nodes: list[Node] = list(self.link.nodes)
        self.link.failures.on_warning = late_warnings.keep_warning
        self.waits = counted = Waits()  #: those of the script, by line
        self.link.waiting.on_value, self.link.waiting.on_waited = counted.add, counted.add_other
        self.questions = questions = Questions(self.link)
        self.ask = questions.ask
        self.router = ChannelRouter(
            self.link,
            channels,
            job,
            secret,
            backend,
            protection=protection,
            threads=launcher is None,
            failure=questions.failure,
        )
        self.places: Places
        #: the operators that nodes may run
        self.allow = AllowList()
        self.launcher = launcher
        #: opens one more hub for nodes' connections, given their public keys; None where they have no keys for it
        self.hub_beside: Callable[[Mapping[int, str]], ZmqHub] | None = None
        #: called before a function is sent to a node, with where it goes and the user's line
        self.before_functions: Callable[[NodePlace, Any], None] | None = None
        #: what compares copies and collectives with local torch's (``verify=``), in whose place it is called
        self.check: Any = None
        self.max_nodes = nodes  #: the largest number of nodes, with those that may still join
        self.never_again = ""  #: the reason why no process can be started in a lost node's place; empty where one can
        self.bundle: Bundle | None = None  #: the bundle of one more node, but for its rank and keys
        #: nodes that are threads of this process
        self.threads: list[threading.Thread] = []
        self.ends = contextlib.ExitStack()  #: what is done at the end while the nodes are there
        self.flight = ""  #: the last flight record of a long wait or a loss (seeing/flight.py)
        self.changes = contextlib.ExitStack()  #: changes of this process that are undone at the end
        self._default_dtype = torch.float32
        self.transfers = Transfers(self.link, self.router, questions.failure, questions.sync, counted)
        self.callbacks = Callbacks()
        self.switches = Switches(self.link, shared=launcher is None)

    def __repr__(self) -> str:
        lost = [node.rank for node in self.nodes if node.lost is not None]
        return f"<Session {self.job} nodes={len(self.nodes)}{f' lost={lost}' if lost else ''} {self.link!r}>"

    def begin(self) -> None:
        """Makes the places, and notes the addresses of the nodes' data channels. Called after all hellos.

        Raises ValueError when these nodes must not use the session's own channel, DisttensorError for too many nodes.
        """
        self.router.begin()
        self.places = Places(self, self.nodes)
        self.questions.coordinates = self.places.coordinates
        self.router.take_addresses(
            0, {node.rank: node.hello.addresses for node in self.nodes}, Addresses(self.channel.address())
        )
        self.check_default_dtype()
        self.switches.follow()
        self.link.sender.flush_all()

    def extend(self, nodes: Sequence[Node]) -> None:
        """Takes in nodes that have joined, after their hellos: the steps of ``begin``, for them. Waits
        while they open channels.

        A node without a hello is lost already. Raises ValueError when these nodes must not use a channel that is open,
        and the error that opening a channel raises there; the nodes are lost then.
        """
        for node in nodes:
            self.nodes.append(node)
            self.places.extend(node)
        come = [node for node in nodes if node.lost is None]
        try:
            self.router.add_peers({node.rank: node.hello.addresses for node in come})
        except BaseException as e:
            for node in come:
                self.link.losses.lose(node.rank, f"it could not be taken in: {e}")
            raise
        if self._default_dtype is not torch.float32:
            for node in come:
                node.outbox.add(c.Default(codec.dtype_id(self._default_dtype)))
        self.switches.send_to_joined(come)
        caches.drop_plans()  # some choices depend on what devices there are
        self.link.sender.flush_all()

    def take_back(self, node: Node, new_ref: Callable[[], int]) -> None:
        """Takes in another worker in a lost node's place, after its hello: it has none of the tensors, and is told all
        that its node is to know. Waits while it opens channels.

        Raises what ``extend`` does, DisttensorError for a worker that lacks a device, NodeLost; it is lost then.
        """
        try:
            with self.places.lock, self.switches.lock:
                state = self.switches.state()
                if self._default_dtype is not torch.float32 and not self.shares_process:
                    state.append(c.Default(codec.dtype_id(self._default_dtype)))
                seeds = self.places.begin_again(node)
                self.router.forgive(node)
                for part in list(self._parts.values()):
                    if (returned := getattr(part, "returned", None)) is not None:
                        returned(node.rank)
                self.link.resume(node.rank, new_ref, state if self.shares_process else [*state, *seeds])
            self.router.add_peers({node.rank: node.hello.addresses})
        except BaseException as e:
            self.link.losses.lose(node.rank, f"it could not be taken in: {e}")
            raise
        caches.drop_plans()  # some choices depend on what a host can
        self.link.sender.flush_all()

    def _lost(self, error: NodeLost) -> None:
        if hasattr(self, "router"):  # the link is made first, and a host may be lost at once
            self.router.mark_lost(error.rank, error.cause)
            for part in list(self._parts.values()):
                if (lost := getattr(part, "lost", None)) is not None:
                    lost(error)

    def check_default_dtype(self) -> None:
        """Tells the nodes the default dtype if it has changed; every plan may depend on it."""
        default = torch.get_default_dtype()
        if default is not self._default_dtype:
            self._default_dtype = default
            caches.drop_plans()
            for node in [] if self.shares_process else self.nodes:
                node.outbox.add(c.Default(codec.dtype_id(default)))

    @property
    def shares_process(self) -> bool:
        """Returns whether the nodes are threads of this process (``launcher="inproc"``), so that its settings are
        theirs."""
        return self.launcher is None

    def settle_threads(self) -> None:
        """Waits until nodes that are threads of this process have done what was issued: what it is about to change, or
        the generator that it is about to draw from, is theirs. Does nothing in such a thread, which would wait for
        itself, nor while a graph is captured, and raises nothing."""
        in_node = threading.current_thread().name.startswith("node ")
        if self.shares_process and not in_node and route.get().recorder is None:
            self.questions.sync_all()

    def part(self, make: Callable[[], T]) -> T:
        """Returns the part that another folder of the front end keeps for this session; its first use makes it by
        ``make()``.

        A part ends with the session. Its method ``forked``, if it has one, is called in a forked child; ``finish`` at
        the session's end, with the time until which it may wait for what is under way: it returns errors. One that has
        ``outlasts`` is waited for first, as long as it takes, however the session ends; ``lost`` when a node is lost,
        under the link's lock; ``returned`` with a rank when another worker is in its place, which knows nothing.
        """
        found = self._parts.get(make)
        if found is None:
            found = self._parts.setdefault(make, make())
        return found  # type: ignore[no-any-return]

    # ---- commands ----------------------------------------------------------------------------------------------------

    def flush(self, outbox: CommandQueue) -> None:
        """Flushes or sweeps a node's queue; an issuing thread calls it when the queue is long enough.

        With DISTTENSOR_LAUNCH_BLOCKING it also waits until the node has done everything, and raises its errors.
        """
        self.link.sender.at_limit(outbox)
        if outbox.blocking:
            for rank in outbox.ranks:
                self.synchronize(rank)

    def synchronize(self, node: int | None = None, timeout: float | None = None) -> None:
        """Waits until a node (None: all nodes, without those of whose loss the script was told) has done everything and
        its fetches have ended; then raises the earliest error that was not raised yet.

        Raises NodeLost, TimeoutError after ``timeout`` seconds.
        """
        self.link.sender.flush_all()
        deadline = None if timeout is None else time.monotonic() + timeout
        told = self.link.told_losses
        ranks = [rank for rank in range(len(self.nodes)) if rank not in told] if node is None else [node]
        asked: list[Request] = []
        began = time.monotonic()
        try:
            for rank in ranks:  # asks all nodes first, so that their round trips are one
                asked.append(self.questions.ask_sync(rank))
            for request in asked:
                request.counted = True  # all are one wait of the line
                self.link.waiting.wait(request, _left(deadline))
        except TimeoutError:
            at = self.nodes[request.node].connection.at_breakpoint
            why = f": {at}" if at else ""
            raise TimeoutError(f"node {request.node} has not answered within {timeout} s{why}") from None
        finally:
            for request in asked:
                self.link.requests.withdraw(request)
            self.waits.add_other(time.monotonic() - began)
        for rank in ranks:
            self.transfers.finish(rank, _left(deadline))
        if node is None:
            self.synchronized += 1
        self.questions.raise_pending_error(node)
        late_warnings.show_warnings()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drain_and_collect_errors(self, timeout: float | None = None) -> Exception | None:
        """Waits until the nodes have done everything, ``timeout`` seconds at most; returns the error that nothing has
        raised yet.

        This is the earliest error of an operation, else the loss of a node; further losses are its notes. A node that
        is still busy after ``timeout`` is logged.
        """
        link = self.link
        link.patient = timeout is None
        with link.unheard():
            errors = self.outlast()
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in list(self._parts.values()):
            if not getattr(part, "outlasts", False) and (finish := getattr(part, "finish", None)) is not None:
                with link.unheard():
                    errors += finish(deadline)

        asked: dict[int, Request] = {}

        def send(outbox: Outbox) -> None:
            asked[outbox.rank] = self.questions.ask_sync(outbox.rank)

        def wait(outbox: Outbox) -> None:
            link.waiting.wait(asked.get(outbox.rank) or self.questions.ask_sync(outbox.rank), _left(deadline))
            self.transfers.finish(outbox.rank, _left(deadline))

        for act in (send, wait):  # to all first: nodes may wait for each other
            for node in self.nodes:
                outbox = node.outbox
                if outbox.lost is None:
                    try:
                        with link.unheard():
                            act(outbox)
                    except NodeLost:
                        continue  # reported below
                    except TimeoutError:
                        _log.warning(
                            "node %d was still busy at the end, with what was issued at %s; nothing waits for it",
                            outbox.rank,
                            line_of(outbox.running()),
                        )
                    except DisttensorError as e:
                        errors.append(e)
        left = self.questions.unobserved()
        if left:
            errors.insert(0, self.questions.exception(left[0], left[1:], 0.0))
        named = {error.rank for error in errors if isinstance(error, NodeLost)}  # by what failed for its loss
        errors += [lost.fresh_copy() for lost in link.losses.errors if lost.rank not in link.told_losses | named]
        for other in errors[1:]:
            errors[0].add_note(in_short(other))
        return errors[0] if errors else None

    def outlast(self) -> list[Exception]:
        """Waits for what the script's end waits for as long as it takes; returns its errors that nobody has asked for.

        Ctrl-C ends the waiting.
        """
        return [e for part in list(self._parts.values()) if getattr(part, "outlasts", False) for e in part.finish(None)]

    def forked(self) -> None:
        """Makes a forked child's copy unusable: nothing works any more, and nothing waits for a lock that a thread of
        the parent held."""
        self.transfers.forked()
        for part in self._parts.values():
            if (forked := getattr(part, "forked", None)) is not None:
                forked()
        self.router.forked()
        self.callbacks.forked()
        self.places.lock = threading.RLock()
        self.link.forked()

    def close(self, grace: float = 2.0) -> None:
        """Ends the nodes and releases all resources; waits up to ``grace`` seconds for nodes to end by themselves.

        Never raises for a node that is gone already.
        """
        link = self.link
        if not link.closed:
            with link.lock:
                link.breakpoints.on_end()
            link.closing = True
            for node in link.there():
                node.outbox.add(c.StopNode())
                with suppress(DisttensorError):
                    link.sender.flush(node.outbox, wait=False)  # a node that is behind, or stopped, is not waited for
        link.close()
        self.router.close()
        self.callbacks.close()
        if self.launcher is not None:
            self.launcher.stop(grace)
        self.changes.close()
        for thread in self.threads:
            thread.join(grace)  # a thread that is inside of torch when the process ends would abort it
        caches.forget_session()
        link.interrupts.restore()
