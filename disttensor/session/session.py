"""A session: the nodes, the link to them, the data channel, and what it takes to start and end them."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from ..dispatch.op_table import drop_plans
from ..proxy.meta import contiguous, forget_all
from ..runtime.channel.base import MASTER, Arrival, DataChannel, Transfer
from ..runtime.channel.opened import Channels
from ..runtime.host.launcher import Launcher
from ..runtime.master.failures import Failure, Site, in_short, line_of
from ..runtime.master.link import Link
from ..runtime.master.outbox import Outbox
from ..runtime.master.requests import Request
from ..runtime.master.route import waits
from ..runtime.process.signals import whole
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import AllowList
from ..runtime.protocol.bundle import Bundle
from ..runtime.protocol.errors import ChannelError, DisttensorError, NodeLost, PoisonedError
from ..runtime.transport.base import Hub
from .callbacks import Callbacks
from .channel_router import Switchboard
from .places import NodeState, Place, Places

#: Uploads up to this many bytes are copied whatever is on its way.
SMALL = 64 << 10
#: Bytes of copies on their way at most; as a copy from pageable memory in CUDA, a larger upload waits.
STAGE = 64 << 20

#: Takes the uploads that read the user's own memory, as they begin: whoever wants to know when they have left.
lent: ContextVar[list[tuple[int, Transfer]] | None] = ContextVar("disttensor_lent", default=None)

T = TypeVar("T")
R = TypeVar("R", c.Answer, c.Shapes, c.Result, c.Done)

_log = logging.getLogger("disttensor")


@whole
def when_done(transfer: Transfer, fn: Callable[[], None]) -> None:
    """Has ``fn`` called at the transfer's end. It may come to calling others' as well, none of which may get lost."""
    transfer.add_done_callback(fn)


@whole
def keep_until_done(table: dict[int, T], number: int, value: T, transfer: Transfer) -> None:
    """``table[number]`` is ``value`` until the transfer's end."""
    table[number] = value
    transfer.add_done_callback(partial(_drop, table, number))


def _left(deadline: float | None) -> float | None:
    """Seconds until ``deadline`` (of time.monotonic), at least a moment: what is done already is never too late."""
    return None if deadline is None else max(0.01, deadline - time.monotonic())


def _drop(table: dict[int, Any], number: int) -> None:
    table.pop(number, None)


def _arrive(channel: DataChannel, tensor: torch.Tensor, node: int, transfer: int) -> Arrival:
    return Arrival(channel.irecv(tensor, node, transfer), lambda: tensor)


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
        self.board = Switchboard(self, channels, secret, backend, trusted)
        self.channel = channels.data[0]
        self.link = Link(hub, nodes, launcher, self._lost)
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
        self._transfers = count(1)
        self._staged: dict[int, int] = {}  #: transfer -> bytes, of copies on their way
        self._arriving: dict[int, tuple[int, Transfer]] = {}  #: transfer -> (node, itself), of fetches under way
        self.callbacks = Callbacks()
        self.counted: dict[object, Any] = {}  #: what ``stats`` does not count any more
        self._beginning = threading.RLock()  #: held while a transfer begins at both ends
        self.pieces = threading.RLock()  #: held while the pieces of a function are queued, one after another

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
        drop_plans()  # some choices depend on what devices there are
        self.link.flush_all()

    def _lost(self, error: NodeLost) -> None:
        self.board.forget(error.rank, error.cause)

    def check_default_dtype(self) -> None:
        """Tells the nodes when the default dtype is another than they know; every plan may depend on it."""
        default = torch.get_default_dtype()
        if default is not self._default_dtype:
            self._default_dtype = default
            drop_plans()
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
            self._receive_all(rank, _left(deadline))
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

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def new_transfer(self) -> int:
        return next(self._transfers)

    def new_transfers(self, n: int) -> int:
        """The first of ``n`` in a row."""
        while True:
            ids = [next(self._transfers) for _ in range(n)]
            if ids[-1] - ids[0] == n - 1:  # no other thread took one between
                return ids[0]

    def upload(
        self, tensor: torch.Tensor, place: Place, ref: int, site: Site | None, non_blocking: bool = False
    ) -> None:
        """Sends a local tensor to ``ref`` at ``place``. Returns when the tensor may be changed: at once, having copied
        it, while no more than STAGE bytes of copies are on their way; else when its bytes have left.

        ``non_blocking`` returns at once, without a copy: the tensor must not change before its bytes have left.
        """
        self.link.check(place.outbox)
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        size = tensor.numel() * tensor.element_size()
        tensor = tensor.resolve_conj().resolve_neg()
        number = self._number("upload", place, size) if self.board.rules else 0
        channel = self.board.data[number]
        staged = not non_blocking and (size <= SMALL or size + sum(list(self._staged.values())) <= STAGE)
        if staged:  # the copy leaves by itself, and the caller goes on
            tensor = channel.staging(tuple(tensor.shape), tensor.dtype, place.node).copy_(tensor)
        tensor = tensor.contiguous()
        shape, dtype = tuple(tensor.shape), codec.dtype_id(tensor.dtype)
        transfer = self.new_transfer()
        sending = self._begin(
            partial(channel.isend, tensor, place.node, transfer),
            place.outbox,
            c.Recv(transfer, ref, MASTER, shape, dtype, place.name, number),
            site,
        )
        self.link.flush(place.outbox)
        if staged:
            keep_until_done(self._staged, transfer, size, sending)
        elif not non_blocking:
            self.end_transfer(sending, place.node)
        elif (taker := lent.get()) is not None:
            taker.append((place.node, sending))

    def _number(self, op: str, place: Place, nbytes: int) -> int:
        """Of the channel for a copy between the master and a place."""
        return self.board.choose(op, "cuda" if place.is_cuda() else "cpu", nbytes)

    def _begin(self, here: Callable[[], T], outbox: Outbox, there: c.Command, site: Site | None) -> T:
        """Begins a transfer at both ends: neither without the other, which would wait for it, and in one order."""
        self.link.interrupts.look()
        return self._begin_both(here, outbox, there, site)

    @whole
    def _begin_both(self, here: Callable[[], T], outbox: Outbox, there: c.Command, site: Site | None) -> T:
        with self._beginning:
            transfer = here()
            outbox.add(there, site)
            return transfer

    def download(self, tensor: Any, site: Site | None) -> torch.Tensor:
        """A local, contiguous copy of a remote tensor."""
        place: Place = tensor._place
        receiving, _ = self._receive(tensor, None, site)
        self.link.flush_all()
        self.end_transfer(receiving, place.node)
        place.outbox.restart()
        return receiving.tensor

    def fetch(self, tensor: Any, strides: tuple[int, ...], site: Site | None) -> Arrival:
        """Begins to copy a remote tensor into a local one with these strides."""
        receiving, transfer = self._receive(
            tensor, None if strides == contiguous(tuple(tensor.shape)) else strides, site
        )
        keep_until_done(self._arriving, transfer, (tensor._place.node, receiving), receiving)
        return receiving

    def _receive(self, tensor: Any, strides: tuple[int, ...] | None, site: Site | None) -> tuple[Arrival, int]:
        """``strides``: of the local tensor, None for a contiguous one."""
        from ..dispatch.lazy_views import materialise

        waits("a copy to the master")
        place: Place = tensor._place
        self.link.check(place.outbox)
        ref = tensor._h.ref or materialise(tensor._h)
        transfer, shape = self.new_transfer(), tuple(tensor.shape)
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        number = self._number("download", place, nbytes) if self.board.rules else 0
        channel = self.board.data[number]
        if strides is None:
            begin = partial(channel.iarrive, shape, tensor.dtype, place.node, transfer)
        else:
            local = torch.empty_strided(shape, strides, dtype=tensor.dtype)
            begin = partial(_arrive, channel, local, place.node, transfer)
        receiving = self._begin(begin, place.outbox, c.Send(transfer, ref, MASTER, number), site)
        self.link.flush(place.outbox)
        return receiving, transfer

    def _receive_all(self, rank: int, timeout: float | None) -> None:
        """Waits for the fetches from a node. What they failed with is for those who hold them."""
        for node, transfer in list(self._arriving.values()):
            if node == rank:
                self.await_transfer(transfer, node, timeout)

    def end_transfer(self, transfer: Transfer, node: int, timeout: float | None = None) -> None:
        """Waits for it; raises what it failed with: what made the sender's tensor fail, NodeLost, a ChannelError."""
        self.await_transfer(transfer, node, timeout)
        try:
            transfer.wait(0)
        except PoisonedError as e:
            raise self.failure(e.rank, e.seq) from None
        except ChannelError:
            # if the node's loss or the session's end broke it, that is said, else what the channel says
            with contextlib.suppress(TimeoutError):
                self._sync(node, 5.0)
            raise

    def await_transfer(self, transfer: Transfer, node: int, timeout: float | None = None) -> None:
        """Waits for its end as for a reply, so that a lost node and Ctrl-C end the waiting."""
        if not transfer.is_completed():
            self.link.flush_all()
            request = Request(-1, node)
            when_done(transfer, request.resolve)
            self.link.wait(request, timeout, until=transfer.is_completed)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def last_words(self, timeout: float | None = None) -> Exception | None:
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
            self._receive_all(outbox.rank, _left(deadline))

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
        self._beginning = threading.RLock()
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
        forget_all()
        link.interrupts.restore()
