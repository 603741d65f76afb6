"""A session's copies between the script and its nodes, each begun at both ends in one order."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, TypeVar

import torch

from ..errors import late_warnings
from ..runtime.channel.base import MASTER, Arrival, DataChannel, Transfer
from ..runtime.channel.counted import BY_COMMANDS, Figures, Row, TransferTally
from ..runtime.channel.payload import bytes_of, of_bytes, scratch
from ..runtime.channel.ticket import Ticket, poisoned
from ..runtime.master.command_queue import CommandQueue
from ..runtime.master.failures import Site
from ..runtime.master.link import Link
from ..runtime.master.requests import EndRequest, Request
from ..runtime.master.route import waits
from ..runtime.process import undertakings
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.dtypes import IDS
from ..runtime.protocol.errors import BrokenError, ChannelError, DisttensorError, PoisonedError
from ..runtime.protocol.transfer_ids import ORDERED
from . import holdings
from .channel_router import ChannelRouter
from .places import NodePlace, Place
from .waits import Waits

#: Uploads up to this many bytes travel with the commands.
SMALL = 64 << 10
#: Downloads up to this many bytes travel with the replies. Where more would, they are encrypted for longer than a data
#: channel of one host takes.
REPLIED = 32 << 10
#: The most bytes of copies on their way. A larger upload waits, as a copy from pageable memory does in CUDA.
STAGE = 64 << 20
#: The uploads that travel with commands which are counted at once.
NOTED = 256
#: A download in words.
DOWN = "a copy to the master"
#: Seconds between two looks whether data that is arriving in a user's tensor goes on to do so.
_ARRIVING = 0.05

#: A list that gets the uploads that read the user's own memory, as they begin: for a caller that has to know when their
#: bytes have left.
lent: ContextVar[list[tuple[int, Transfer]] | None] = ContextVar("disttensor_lent", default=None)

T = TypeVar("T")


@uninterrupted
def when_done(transfer: Transfer, fn: Callable[[], None]) -> None:
    """Has ``fn`` called at the transfer's end.

    Uninterrupted, because this may call other callbacks, too, none of which may get lost.
    """
    transfer.add_done_callback(fn)


@uninterrupted
def keep_until_done(table: dict[int, T], number: int, value: T, transfer: Transfer) -> None:
    """Keeps ``value`` as ``table[number]`` until the transfer's end."""
    table[number] = value
    transfer.add_done_callback(partial(_remove_entry, table, number))


def _remove_entry(table: dict[int, Any], number: int) -> None:
    table.pop(number, None)


def _arrive(channel: DataChannel, tensor: torch.Tensor, node: int, transfer: int) -> Arrival:
    return Arrival(channel.irecv(tensor, node, transfer), lambda: tensor)


def _by_rank(tallies: dict[tuple[int, ...], TransferTally]) -> dict[int, Figures]:
    """Returns the sums for each node of counts by the nodes that have taken part."""
    sums: dict[int, Figures] = {}
    for ranks, tally in list(tallies.items()):
        for rank in ranks:
            calls, nbytes, seconds = sums.get(rank, (0, 0, 0.0))
            more = tally.figures()
            sums[rank] = calls + more[0], nbytes + more[1], seconds + more[2]
    return sums


def _words_of_upload(node: int, nbytes: int, transfer: Transfer) -> str:
    done, seconds = transfer.passed() or (0, 0.0)
    text = f"uploading to node {node}: {f'{holdings.size(done)} of ' if done else ''}{holdings.size(nbytes)}"
    if done and seconds > 0:
        rate = done / seconds
        text += f", {holdings.size(int(rate))}/s, {(nbytes - done) / rate:.0f} s left"
    return text


class RepliedArrival(Arrival):
    """A fetch that comes with a reply: it ends when a thread takes that in. Whoever waits does so."""

    def __init__(self, transfers: Transfers, meta: Any, place: NodePlace, strides: Any, ended: Ticket) -> None:
        """``meta``: that of the tensor; ``ended``: its end, which takes callbacks of those who do not wait."""
        self._transfers, self._meta, self._place, self._strides = transfers, meta, place, strides
        self._transfer: Ticket = ended
        self._began = perf_counter()
        self._data = b""
        self._made: dict[str, torch.Tensor] = {}
        self.number = 0  #: of its request

    def take_reply(self, reply: c.Reply | None) -> None:
        """Takes the node's answer, and ends; None: there will be none."""
        if type(reply) is c.Downloaded:
            meta, data = self._meta, reply.data
            if reply.shape != meta.shape or reply.dtype != IDS[meta.dtype] or len(data) != meta.nbytes:
                self._transfer.fail(BrokenError, _words_of_another(reply, meta, self._place))
                return
            self._data = data
            self._transfers.downloads[self._place.outbox.ranks].add(len(data), self._began)
            self._transfer.finish()
        elif isinstance(reply, c.Poisoned):
            self._transfer.fail(poisoned(reply.rank, reply.seq), "")
        else:
            self._transfer.fail(BrokenError, f"{self._place} has not answered")

    @uninterrupted
    def call_at_end(self, fn: Callable[[], object]) -> None:
        """Adds a callback for one who waits, and so takes in replies."""
        Ticket.add_done_callback(self._transfer, fn)  # type: ignore[arg-type]

    def wait(self, timeout: float | None = None) -> None:
        self._transfers.wait(self, self._place.node, timeout)
        self._transfer.wait(0)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that arrived, the same each time; waits for it. Raises as ``wait`` does."""
        self.wait()
        if not self._made:
            # not by the thread that has taken the reply in, whose modes are not those of who asks
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                tensor = of_bytes(self._data, self._meta.dtype, self._meta.shape)
                if self._strides is not None:
                    tensor = torch.empty_strided(tensor.shape, self._strides, dtype=tensor.dtype, device="cpu").copy_(
                        tensor
                    )
            self._made.setdefault("tensor", tensor)  # one of two threads has the first
            self._data = b""
        return self._made["tensor"]


def _words_of_another(reply: c.Downloaded, meta: Any, place: Place) -> str:
    return (
        f"{place} has sent {len(reply.data)} bytes of dtype {reply.dtype} {reply.shape!s:.500}, and was asked for "
        f"{meta.nbytes} of {IDS[meta.dtype]} {meta.shape}"
    )


class Transfers:
    """The copies of one session, and the numbers of all its transfers.

    ``failure(rank, seq)`` returns the exception for a failed command of a node; ``sync(rank, timeout)`` waits for a
    node.
    """

    def __init__(
        self,
        link: Link,
        router: ChannelRouter,
        failure: Callable[[int, int], Exception],
        sync: Callable[[int, float | None], None],
        counted: Waits,
    ) -> None:
        self._counted = counted
        self.link, self.router = link, router
        self._failure, self._sync = failure, sync
        self._numbers = count(1)
        #: the uploads that travelled with commands, and the downloads with replies, by the nodes that have taken part
        self.uploads: defaultdict[tuple[int, ...], TransferTally] = defaultdict(TransferTally)
        #: the uploads that are not counted yet: the nodes, the bytes, when each began and ended. Without a lock, so
        #: that an upload need not be safe from handlers of signals
        self._issued = deque[tuple[tuple[int, ...], int, float, float]]()
        self.downloads: defaultdict[tuple[int, ...], TransferTally] = defaultdict(TransferTally)
        self.staged: dict[int, int] = {}  #: transfer -> bytes, of copies on their way
        self.arriving: dict[int, tuple[int, Transfer]] = {}  #: transfer -> (node, itself), of fetches under way
        self._beginning = threading.RLock()  #: held while a transfer begins at both ends

    def new(self) -> int:
        """Returns the number of a new transfer, never used before in this session. Both ends have to be told of it in
        one order."""
        return ORDERED + next(self._numbers)

    def new_loose(self) -> int:
        """Returns the number of a new transfer that may come at any time; or of a collective."""
        return next(self._numbers)

    def new_row(self, n: int) -> int:
        """Returns the first of ``n`` new numbers in a row: a graph's copies and collectives, which share them."""
        while True:
            ids = [next(self._numbers) for _ in range(n)]
            if ids[-1] - ids[0] == n - 1:  # no other thread took one between
                return ids[0]

    def by_command(self, nbytes: int, place: Place) -> bool:
        """Returns whether an upload of so many bytes to a place travels with the commands: it is SMALL, and no data
        channel was selected for it."""
        return nbytes <= SMALL and not (self.router.rules and self._is_selected("upload", nbytes, place))

    def by_reply(self, nbytes: int, place: Place) -> bool:
        """Returns whether a download of so many bytes travels with the replies: no more than REPLIED do, nor what a
        data channel was selected for."""
        return nbytes <= REPLIED and not (self.router.rules and self._is_selected("download", nbytes, place))

    def _is_selected(self, op: str, nbytes: int, place: Place) -> bool:
        device = "cuda" if place.is_cuda() else "cpu"
        return any(self.router.selected(op, device, nbytes, (MASTER, rank)) is not None for rank in place.ranks)

    def upload(
        self, tensor: torch.Tensor, place: Place, ref: int, site: Site | None, non_blocking: bool = False
    ) -> None:
        """Sends a local tensor to ``ref`` at ``place``, which is a mesh only for what travels ``by_command``. Returns
        when the tensor may be changed: at once, having copied it, while no more than STAGE bytes of copies are on
        their way; else when its bytes have left.

        ``non_blocking`` returns at once, and without a copy of what a data channel carries: that tensor must not change
        before its bytes have left. Raises NodeLost, RuntimeError for a tensor that can't be copied.
        """
        outbox = place.outbox
        if outbox.over:
            self.link.check(outbox)
        codec.check_copy(tensor.shape, tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        if self.by_command(size, place):
            self._issue_upload(tensor, place, ref, site)
            return
        if tensor.device.type != "cpu":
            tensor = tensor.cpu()
        tensor = tensor.resolve_conj().resolve_neg()
        # what does not travel with commands a mesh gets from node to node
        assert isinstance(place, NodePlace)
        number = self._number("upload", place, size) if self.router.rules else 0
        self.router.introduce(number, MASTER, place.node)
        channel = self.router.data[number]
        staged = not non_blocking and size + sum(list(self.staged.values())) <= STAGE
        if staged:  # the copy leaves in the background, and the caller goes on
            tensor = channel.staging(tuple(tensor.shape), tensor.dtype, place.node).copy_(tensor)
        tensor = tensor.contiguous()
        shape, dtype = tuple(tensor.shape), codec.dtype_id(tensor.dtype)
        transfer = self.new()
        sending = self._begin_transfer(
            partial(channel.isend, tensor, place.node, transfer),
            place.outbox,
            c.Recv(transfer, ref, MASTER, shape, dtype, place.name, number),
            site,
        )
        self.link.sender.flush(place.outbox)
        if staged:
            keep_until_done(self.staged, transfer, size, sending)
        elif not non_blocking:
            with undertakings.mine.during(partial(_words_of_upload, place.node, size, sending)):
                self.wait_for_transfer(sending, place.node, number=transfer)
        elif (taker := lent.get()) is not None:
            taker.append((place.node, sending))

    def _issue_upload(self, tensor: torch.Tensor, place: Place, ref: int, site: Site | None) -> None:
        """Issues an upload as an operation is issued: its bytes are copied now, and leave with the next message."""
        began = perf_counter()
        if type(tensor) is not torch.Tensor:  # another class says itself what a copy is, and may have no memory
            tensor = scratch(tensor).view(tensor.shape).copy_(tensor)
        data = bytes_of(tensor)
        command = c.Upload(ref, tuple(tensor.shape), codec.dtype_id(tensor.dtype), place.name, data)
        outbox, noted, link = place.outbox, self._issued, self.link
        if outbox.shut or outbox.asleep:
            link.interrupts.look()
        due = outbox.add_data(command, site, len(data))
        noted.append((place.ranks, len(data), began, perf_counter()))
        if len(noted) >= NOTED:
            self._count_uploads()
        if due:
            link.sender.flush(outbox)
        elif link.interrupts.pending:
            link.interrupts.check()

    def _count_uploads(self) -> None:
        """Counts the uploads that were noted. Any thread may do so at any time: each is taken by one of them."""
        self.link.interrupts.look()
        self._count_noted()
        if self.link.interrupts.pending:
            self.link.interrupts.check()

    @uninterrupted
    def _count_noted(self) -> None:
        """Counts them: uninterrupted, or a handler that raises could leave the count's lock held."""
        with contextlib.suppress(IndexError):  # another thread has taken the last one
            while self._issued:
                ranks, nbytes, began, ended = self._issued.popleft()
                self.uploads[ranks].add_ended(nbytes, began, ended)

    def rows_by_command(self) -> list[Row]:
        """Returns the counts of the copies that travelled with commands and replies, of each node."""
        self._count_uploads()
        sent, received = _by_rank(self.uploads), _by_rank(self.downloads)
        none: Figures = (0, 0, 0.0)
        ranks = sorted({*sent, *received})
        return [(BY_COMMANDS, "transfers", rank, sent.get(rank, none), received.get(rank, none)) for rank in ranks]

    def _number(self, op: str, place: NodePlace, nbytes: int) -> int:
        """Returns the number of the channel for a copy between the master and a place."""
        return self.router.choose(op, "cuda" if place.is_cuda() else "cpu", nbytes, (MASTER, place.node))

    def _begin_transfer(self, here: Callable[[], T], outbox: CommandQueue, there: c.Command, site: Site | None) -> T:
        """Begins a transfer at both ends, in one order: one end alone would wait for the other."""
        self.link.interrupts.look()
        return self._begin_both(here, outbox, there, site)

    @uninterrupted
    def _begin_both(self, here: Callable[[], T], outbox: CommandQueue, there: c.Command, site: Site | None) -> T:
        with self._beginning:
            transfer = here()
            outbox.add(there, site)
            return transfer

    def download(self, tensor: torch.Tensor, place: Place, ref: int, site: Site | None) -> torch.Tensor:
        """Returns a local, contiguous copy of the tensor ``ref`` at ``place``, which is a mesh only for what travels
        ``by_reply``; ``tensor`` is its proxy. Waits.

        Raises as ``wait_for_transfer``; RanksDiffer where the ranks of a mesh have different ones.
        """
        began, meta = perf_counter(), tensor._h.meta  # type: ignore[attr-defined]  # it is a proxy
        if self.by_reply(meta.nbytes, place):
            # as a question for a value is answered: the elements come with the reply
            reply = place.session.ask(place, c.Downloaded, lambda id: c.Download(id, ref), site, what=DOWN)
            return self._take_download(reply, meta, place, began)
        self.may_begin(place)
        # what does not travel with replies comes from one of a mesh's nodes
        assert isinstance(place, NodePlace)
        receiving, transfer, _ = self._begin_download(tensor, place, ref, None, site)
        self._end_download(receiving, transfer, place, site, began)
        return receiving.tensor

    @uninterrupted
    def _take_download(self, reply: c.Downloaded, meta: Any, place: Place, began: float) -> torch.Tensor:
        """Counts a download and returns its tensor: uninterrupted, as ``_queue_upload`` is. Raises DisttensorError for
        another tensor than one with this ``meta``."""
        shape, dtype, data = meta.shape, meta.dtype, reply.data
        if reply.shape != shape or reply.dtype != IDS[dtype] or len(data) != meta.nbytes:
            raise DisttensorError(_words_of_another(reply, meta, place))
        self.downloads[place.outbox.ranks].add(len(data), began)
        return of_bytes(data, dtype, shape)

    def may_receive_into(self, target: torch.Tensor, place: NodePlace) -> bool:
        """Returns whether ``download_into`` can be used: the channel gives a user's tensor back when the wait ends."""
        return self.router.data[self._download_channel(place, target.nbytes)].capabilities.takes_back

    def download_into(self, target: torch.Tensor, place: NodePlace, ref: int, site: Site | None) -> None:
        """Copies the tensor ``ref`` at ``place`` into a local one of its shape and dtype, which lies in memory as it
        travels. Waits.

        Raises as ``wait_for_transfer``; the target may have any contents then, and nothing writes it any more.
        """
        began = perf_counter()
        receiving, transfer, channel = self._begin_download(target, place, ref, target, site)
        try:
            self._end_download(receiving, transfer, place, site, began)
        except BaseException:  # Ctrl-C, too
            while not (receiving.is_completed() or channel.take_back(place.node, transfer)):
                with contextlib.suppress(ChannelError, TimeoutError):
                    receiving.wait(_ARRIVING)
            raise

    def fetch(
        self,
        tensor: torch.Tensor,
        place: NodePlace,
        ref: int,
        strides: tuple[int, ...] | None,
        site: Site | None,
        ended: Ticket | None = None,
    ) -> Arrival:
        """Begins a copy like that of ``download``, into a tensor with these strides (None: contiguous); returns at
        once. ``ended``: the end of one that travels ``by_reply``; None: a data channel carries it."""
        if ended is not None:
            return self._ask_for_copy(tensor, place, ref, strides, site, ended)
        local = None if strides is None else torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype)
        receiving, transfer, _ = self._begin_download(tensor, place, ref, local, site)
        self.link.sender.flush(place.outbox)
        keep_until_done(self.arriving, transfer, (place.node, receiving), receiving)
        return receiving

    def _ask_for_copy(
        self, tensor: torch.Tensor, place: NodePlace, ref: int, strides: Any, site: Site | None, ended: Ticket
    ) -> Arrival:
        """Asks for a tensor's elements. The question leaves as a function does: at once where its node may have nothing
        else to do, else with those that follow."""
        link, meta = self.link, tensor._h.meta  # type: ignore[attr-defined]  # it is a proxy
        arrival = RepliedArrival(self, meta, place, strides, ended)
        request = link.requests.new_given(place.node, c.Downloaded, arrival.take_reply)
        arrival.number = number = request.id
        try:
            link.sender.issue_call(place.node, c.Download(number, ref), site, 0)
        except BaseException:
            link.requests.withdraw(request)
            raise
        self.arriving[-number] = place.node, arrival
        arrival.call_at_end(partial(_remove_entry, self.arriving, -number))
        return arrival

    def has_ended(self, transfer: Transfer) -> bool:
        """Returns whether a fetch has ended, or will not, in a forked child. Takes in what has arrived, and does not
        wait."""
        if isinstance(transfer, RepliedArrival) and not transfer.is_completed():
            self.link.replies.drain()
            return transfer.is_completed() or self.link.is_forked
        return transfer.is_completed()

    def may_begin(self, place: Place) -> None:
        """Raises the error that keeps a copy from ``place`` from beginning: NodeLost, GraphError while a graph is
        recorded."""
        waits(DOWN)
        self.link.check(place.outbox)

    def _download_channel(self, place: NodePlace, nbytes: int) -> int:
        return self._number("download", place, nbytes) if self.router.rules else 0

    def _begin_download(
        self, like: torch.Tensor, place: NodePlace, ref: int, into: torch.Tensor | None, site: Site | None
    ) -> tuple[Arrival, int, DataChannel]:
        """Begins a copy of the tensor ``ref``, which has the shape and dtype of ``like``, into a local one (None: one
        that the channel makes); returns it, its number and its channel."""
        transfer, shape = self.new(), tuple(like.shape)
        number = self._download_channel(place, math.prod(shape) * like.dtype.itemsize)
        self.router.introduce(number, MASTER, place.node)
        channel = self.router.data[number]
        if into is None:
            begin = partial(channel.iarrive, shape, like.dtype, place.node, transfer)
        else:
            begin = partial(_arrive, channel, into, place.node, transfer)
        send = c.Send(transfer, ref, MASTER, number)
        return self._begin_transfer(begin, place.outbox, send, site), transfer, channel

    def _end_download(
        self, receiving: Arrival, transfer: int, place: NodePlace, site: Site | None, began: float
    ) -> None:
        """Flushes, and waits until a copy has arrived."""
        self.link.sender.flush(place.outbox)
        self.link.sender.flush_all()
        self.wait_for_transfer(receiving, place.node, counted=True, number=transfer)
        self._counted.add(site, perf_counter() - began)
        place.outbox.restart()

    def finish(self, rank: int, timeout: float | None) -> None:
        """Waits for the fetches from a node. Their errors are left to their holders."""
        for node, transfer in list(self.arriving.values()):
            if node == rank:
                self.wait(transfer, node, timeout)

    def wait_for_transfer(
        self, transfer: Transfer, node: int, timeout: float | None = None, counted: bool = False, number: int = 0
    ) -> None:
        """Waits for a transfer; raises its error: the one that made the sender's tensor fail, NodeLost, a ChannelError.
        ``counted``: the caller counts the wait of the line.

        Raises TimeoutError after ``timeout`` seconds.
        """
        self.wait(transfer, node, timeout, counted, number)
        try:
            transfer.wait(0)
        except PoisonedError as e:
            raise self._failure(e.rank, e.seq) from None
        except ChannelError:
            # a node's loss or the session's end is raised by ``_sync`` if that broke it, else the channel's error
            with contextlib.suppress(TimeoutError):
                self._sync(node, 5.0)
            raise
        if late_warnings.pending:
            late_warnings.show_warnings()

    def wait(
        self, transfer: Transfer, node: int, timeout: float | None = None, counted: bool = False, number: int = 0
    ) -> None:
        """Waits for a transfer's end as for a reply, so that a lost node and Ctrl-C end the waiting. ``counted`` as in
        ``wait_for_transfer``; ``number``: the transfer's, where it is known, for observers."""
        if not transfer.is_completed():
            self.link.sender.flush_all()
            if isinstance(transfer, RepliedArrival):
                request: Request = EndRequest(transfer.number, node)
                transfer.call_at_end(request.resolve)
            else:
                request = Request(-(number or self._number_of(transfer)), node)
                when_done(transfer, request.resolve)
            request.counted = counted
            self.link.waiting.wait(request, timeout, until=transfer.is_completed)

    def _number_of(self, transfer: Transfer) -> int:
        """Returns the number of a fetch that observers are to know when it has been waited for; 1 where it is none."""
        if not self.link.seam.waited.listeners:
            return 1
        return next((number for number, (_, it) in list(self.arriving.items()) if it is transfer), 1)

    def forked(self) -> None:
        """Replaces the locks, in a forked child: a thread of the parent may have held one."""
        self._counted.forked()
        self._beginning = threading.RLock()
