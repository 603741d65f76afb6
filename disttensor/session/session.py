"""A session: the nodes, the link to them, the data channel, and what it takes to start and end them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from ..runtime.channel.opened import Channels
from ..runtime.host.launcher import Launcher
from ..runtime.master.failures import Failure, Site, in_short, line_of
from ..runtime.master.link import Link
from ..runtime.master.outbox import Outbox
from ..runtime.master.requests import Request
from ..runtime.master.route import waits
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.bundle import Bundle
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..runtime.transport.base import Hub
from . import caches
from .callbacks import Callbacks
from .channel_router import ChannelRouter
from .places import NodeState, Place, Places
from .transfers import Transfers

R = TypeVar("R", c.Answer, c.Shapes, c.Result, c.Done)

_log = logging.getLogger("disttensor")


def _left(deadline: float | None) -> float | None:
    """Seconds until ``deadline`` (of time.monotonic), at least a moment: what is done already is never too late."""
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
        trusted: bool = False,
    ) -> None:
        """``backend`` names the channel that is open. ``trusted``: the user has said so of the network."""
        self.job = job
        self.channel = channels.data[0]
        self.link = Link(hub, nodes, launcher, self._lost)
        self.board = ChannelRouter(
            self.link, channels, job, secret, backend, trusted=trusted, threads=launcher is None, failure=self.failure
        )
        self.states = [NodeState(self, rank, self.link.outboxes[rank]) for rank in range(nodes)]
        self.places: Places
        #: operators that nodes run
        self.allow = AllowList()
        self.launcher = launcher
        self.most = nodes  #: how many nodes there can be, if more may join
        self.plain: Bundle | None = None  #: what a node more starts with, but for its rank and keys
        #: nodes that are threads of this process
        self.threads: list[threading.Thread] = []
        self.changes = contextlib.ExitStack()  #: of this process, undone at the end
        self._default_dtype = torch.float32
        self.transfers = Transfers(self.link, self.board, self.failure, self._sync)
        self.callbacks = Callbacks()
        self.counted: dict[object, Any] = {}  #: what ``stats`` does not count any more
        self.pieces = threading.RLock()  #: held while the pieces of a function are queued, one after another

    def __repr__(self) -> str:
        lost = [box.rank for box in self.link.outboxes if box.lost is not None]
        return f"<Session {self.job} nodes={len(self.states)}{f' lost={lost}' if lost else ''} {self.link!r}>"

    def introduce(self) -> None:
        """After all hellos: places, and everybody learns where everybody's data channel is."""
        hellos = self.link.hellos
        n = len(self.states)
        self.board.begin()
        self.places = Places(self, [hellos[r].devices for r in range(n)], self.most)
        self.board.introduce(0, {r: hellos[r].channel for r in range(n)}, self.channel.address())
        self.check_default_dtype()
        self.link.flush_all()

    def extend(self, outboxes: Sequence[Outbox]) -> None:
        """After the hellos of nodes that have come later: as ``introduce``, for them. Waits while they open channels.

        A node of which there is no hello is one that is lost. Raises ValueError when they must not use a channel that
        is open, and what opening it raises there; they are lost then.
        """
        hellos = self.link.hellos
        for outbox in outboxes:
            rank = outbox.rank
            self.states.append(NodeState(self, rank, outbox))
            self.places.extend(hellos[rank].devices if rank in hellos else ("cpu",))
        come = [outbox for outbox in outboxes if outbox.lost is None]
        try:
            self.board.welcome({outbox.rank: hellos[outbox.rank].channel for outbox in come})
        except BaseException as e:
            for outbox in come:
                self.link.lose(outbox.rank, f"it could not be taken in: {e}")
            raise
        if self._default_dtype is not torch.float32:
            for outbox in come:
                outbox.add(c.Default(codec.dtype_id(self._default_dtype)))
        caches.drop_plans()  # some choices depend on what devices there are
        self.link.flush_all()

    def _lost(self, error: NodeLost) -> None:
        self.board.forget(error.rank, error.cause)

    def check_default_dtype(self) -> None:
        """Tells the nodes when the default dtype is another than they know; every plan may depend on it."""
        default = torch.get_default_dtype()
        if default is not self._default_dtype:
            self._default_dtype = default
            caches.drop_plans()
            for outbox in [] if self.shares_process else self.link.outboxes:
                outbox.add(c.Default(codec.dtype_id(default)))

    @property
    def shares_process(self) -> bool:
        """Whether the nodes are threads of this process (``launcher="inproc"``), and its settings theirs."""
        return self.launcher is None

    def finish(self) -> None:
        """Waits until all nodes have done everything, and raises nothing."""
        self.link.flush_all()
        for rank in range(len(self.states)):
            with suppress(DisttensorError):
                self._sync(rank, None)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def flush(self, outbox: Outbox) -> None:
        """What an issuing thread calls when its node's queue is long enough."""
        self.link.tick(outbox)
        if outbox.blocking:
            self.synchronize(outbox.rank)

    def ask(self, place: Place, kind: type[R], command: Callable[[int], c.Command], site: Site | None) -> R:
        """One round trip: sends everything that is queued anywhere, waits for the reply, which is of this ``kind``.

        Raises what made an operand fail, NodeLost, GraphError while a graph is recorded.
        """
        waits("this operation")
        link = self.link
        request = link.request(place.node, kind)
        commands = place.outbox.commands
        commands += (command(request.id), site)
        reply = link.exchange(place.outbox, request, None)
        if isinstance(reply, c.Poisoned):
            raise self.failure(reply.rank, reply.seq)
        return reply  # type: ignore[return-value]  # the link has looked

    def failure(self, rank: int, seq: int) -> Exception:
        """The exception for what failed at command ``seq`` of node ``rank``."""
        found = self.link.failures.get((rank, seq))
        if found is None and 0 <= rank < len(self.states):
            self._sync(rank, None)
            found = self.link.failures.get((rank, seq))
        if found is None:
            return DisttensorError(f"command {seq} of node {rank} failed, and why is not known")
        return found.exception()

    def unobserved(self) -> list[Failure]:
        return [f for f in list(self.link.failures.values()) if not f.observed]

    def synchronize(self, node: int | None = None, timeout: float | None = None) -> None:
        """Waits until a node (all of them: None) has done everything and what is fetched from it has come; raises the
        earliest error not raised yet.

        Raises NodeLost, TimeoutError after ``timeout`` seconds.
        """
        self.link.flush_all()
        deadline = None if timeout is None else time.monotonic() + timeout
        ranks = range(len(self.states)) if node is None else [node]
        asked: list[Request] = []
        try:
            for rank in ranks:  # all first: their round trips are one
                asked.append(self._ask_sync(rank))
            for request in asked:
                self.link.wait(request, _left(deadline))
        except TimeoutError:
            raise TimeoutError(f"node {request.node} has not answered within {timeout} s") from None
        finally:
            for request in asked:
                self.link.drop(request)
        for rank in ranks:
            self.transfers.finish(rank, _left(deadline))
        self.complain(node)

    def complain(self, node: int | None = None) -> None:
        """Raises the earliest error of a node (of all: None) that was not raised yet; later ones are its notes."""
        left = [f for f in self.unobserved() if node is None or f.rank == node]
        if left:
            error = left[0].exception(others=left[1:])
            for f in left:
                f.observed = True
            raise error

    def _sync(self, rank: int, timeout: float | None) -> None:
        self.link.wait(self._ask_sync(rank), timeout)

    def _ask_sync(self, rank: int) -> Request:
        request = self.link.request(rank)
        outbox = self.link.outboxes[rank]
        outbox.add(c.Sync(request.id))
        self.link.flush(outbox, wait=False)  # what it waits for, for as long as it may, is the reply
        return request

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drain_and_collect_errors(self, timeout: float | None = None) -> Exception | None:
        """Waits until the nodes have done everything, ``timeout`` seconds at most; gives what nothing has raised yet.

        That is the earliest error of an operation, else the loss of a node; further losses are its notes. A node that
        is still busy after ``timeout`` is logged.
        """
        link = self.link
        link.patient = timeout is None
        deadline = None if timeout is None else time.monotonic() + timeout
        said = frozenset(link.said)  # what is raised below is said to nobody
        errors: list[Exception] = []

        asked: dict[int, Request] = {}

        def send(outbox: Outbox) -> None:
            asked[outbox.rank] = self._ask_sync(outbox.rank)

        def wait(outbox: Outbox) -> None:
            link.wait(asked.get(outbox.rank) or self._ask_sync(outbox.rank), _left(deadline))
            self.transfers.finish(outbox.rank, _left(deadline))

        for act in (send, wait):  # to all first: nodes may wait for each other
            for outbox in link.outboxes:
                if outbox.lost is None:
                    try:
                        act(outbox)
                    except NodeLost:
                        continue  # below
                    except TimeoutError:
                        _log.warning(
                            "node %d was still busy at the end, with what was issued at %s; nothing waits for it",
                            outbox.rank,
                            line_of(outbox.running()),
                        )
                    except DisttensorError as e:
                        errors.append(e)
        left = self.unobserved()
        if left:
            errors.insert(0, left[0].exception(others=left[1:]))
        errors += [lost.again() for lost in link.losses if lost.rank not in said]
        for other in errors[1:]:
            errors[0].add_note(in_short(other))
        return errors[0] if errors else None

    def forked(self) -> None:
        """In a forked child: nothing works any more, and nothing waits for a thread that held a lock and isn't here."""
        self.transfers.forked()
        self.pieces = threading.RLock()
        self.board.forked()
        self.callbacks.forked()
        self.places.lock = threading.RLock()
        for node in self.states:
            node.lock = threading.RLock()
        self.link.forked()

    def close(self, grace: float = 2.0) -> None:
        """Ends the nodes and lets go of everything. Never raises for a node that is gone already."""
        link = self.link
        if not link.closed:
            link.closing = True
            for outbox in link.outboxes:
                if outbox.lost is None:
                    outbox.add(c.Stop())
                    try:
                        link.flush(outbox)
                    except DisttensorError:
                        continue
        link.close()
        self.board.close()
        self.callbacks.close()
        if self.launcher is not None:
            self.launcher.stop(grace)
        self.changes.close()
        for thread in self.threads:
            thread.join(grace)  # one that the end of the process met inside of torch would abort it
        caches.forget_session()
        link.interrupts.restore()
