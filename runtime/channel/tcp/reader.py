"""The reading half of a tcp peer: from frames to tensors.

One thread at a time reads, the one that holds ``_role``: normally the reader thread, which sleeps in the kernel. Waking
that thread, and then having it wake the waiting one, costs twice. So after it has served a small transfer that somebody
waited for it *parks*: the next thread that waits takes the role and reads for itself. When none has for a moment, or
one asks in another way (a callback, ``is_completed``), or a frame is large or early, the reader thread takes over
again.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ...protocol.errors import NO_MEMORY, BrokenError, ChannelError, ProtocolError
from ...protocol.transfer_ids import spoken
from ..carrier import Carrier, MissedError, Parcel, RefusedError
from ..payload import byte_view, describe, of_its_own, scratch, store
from ..ticket import Passing, Ticket, poisoned
from .frames import (
    BYE,
    CARRIED,
    COUNTED,
    EAGER,
    GONE,
    MOST_EXTRA,
    NACK,
    POISON,
    RECEIPT,
    SIZE,
    WORD,
    Frame,
    Opener,
    nbytes_of,
)  # fmt: skip
from .inbound import PIECE, Inbound
from .kept import TcpConnection
from .shield import CHECKSUM, SUM, Shield, checksum

#: Seconds for which the reader thread leaves the connection to waiting threads. A transfer that nobody waits for
#: is late by this at most.
_GRACE = 0.002
_MAIN = threading.main_thread()


class ReaderPeer(Protocol):
    """The part of its peer that the reading half knows."""

    me: int
    rank: int
    failure: tuple[type[ChannelError], str] | None
    carrier: Carrier | None
    reader: PeerReader | None
    empty: Callable[..., torch.Tensor]

    def claim(self, transfer: int, patient: bool, connection: TcpConnection) -> Receive | None: ...

    def unclaim(self) -> None: ...

    def return_claim(self, transfer: int, entry: Receive) -> None: ...

    def count(self, frame: Frame, awaited: bool = False) -> None: ...

    def acknowledge(self, receipt: int) -> None: ...

    def lose(self, connection: TcpConnection, error: Exception, wanted: bool = True) -> None: ...

    def refuse(self, frame: Frame) -> None: ...

    def refused(self, frame: Frame) -> None: ...

    def fail(self, kind: type[ChannelError], why: str) -> None: ...

    def lost(self, error: Exception) -> str: ...

    def hung_up(self) -> bool: ...

    def leave(self, connection: TcpConnection | None = None) -> None: ...


@dataclass(eq=False)
class Receive:
    """A receive that waits for its data. ``view`` is None when the tensor has to be staged.

    Without a tensor, one of ``form`` (shape, dtype) is found for the data when it arrives.
    """

    tensor: torch.Tensor | None
    dtype: int
    numel: int
    view: memoryview | None
    ticket: ReceiveTicket
    form: tuple[tuple[int, ...], torch.dtype] = ((), torch.uint8)


def _interruptible() -> bool:
    """Returns whether a signal's handler may raise in this thread, anywhere: a read must not be interrupted."""
    return get_ident() == _MAIN.ident and callable(signal.getsignal(signal.SIGINT))


class ReceiveTicket(Ticket):
    """The ticket of a receive. Its waiter may read the connection, unless a signal could interrupt it.

    (Workers ignore SIGINT, the master can't.)
    """

    def __init__(self, peer: ReaderPeer) -> None:
        super().__init__()
        self._peer = peer
        self.tensor: torch.Tensor | None = None  #: the tensor that arrived, where the channel chose the memory
        self.waited = False  #: a thread that may read came to wait before the transfer ended

    def wait(self, timeout: float | None = None) -> None:
        left = timeout
        if not self._done and not _interruptible():
            self.waited = True
            reader = self._peer.reader
            if reader is not None and reader.parked:
                deadline = None if timeout is None else time.monotonic() + timeout
                reader.help(self, deadline)
                left = None if deadline is None else deadline - time.monotonic()
        elif not self._done:
            self._rouse()
        self._wait(left, timeout)

    def is_completed(self) -> bool:
        if not self._done:
            self._rouse()
        return self._done

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        super().add_done_callback(fn)
        if not self._done:
            self._rouse()

    def _rouse(self) -> None:
        reader = self._peer.reader
        if reader is not None and reader.parked:
            reader.rouse()


class PeerReader:
    """Reads the frames that ``peer`` sends over ``connection``.

    A transfer that it has claimed is ended by it and nobody else; if the connection breaks meanwhile, it returns it.
    """

    def __init__(
        self, peer: ReaderPeer, connection: TcpConnection, key: bytes, mode: int, shield: Shield | None
    ) -> None:
        """``key`` is for headers. ``mode`` is what the two have agreed on, bits of ``shield``."""
        self._shield = shield  #: None: payloads come as they are
        self._sum = SUM if mode & CHECKSUM else 0  #: the number of bytes behind a carrier's descriptor
        self._connection = connection
        self._peer, self._inbound, self._opener = peer, Inbound(connection.sock), Opener(key)
        self._over = False  #: nothing more can be read
        self._receipt = 0  #: the last one that the peer has told
        self._settled = False  #: the transfer that is read has ended, whatever becomes of its payload
        self._lent = False  #: the peer keeps its memory until it hears that the frame that is read was dealt with
        self._role = allocate_lock()
        self._frame: Frame | None = None  #: a frame whose header was read, and that was not dealt with yet
        self._extra = b""  #: the bytes that came with that frame's header
        self._poll = select.poll()
        self._poll.register(connection.sock, select.POLLIN)
        self.parked = False
        self._awaited = False  #: the last frame was small, and somebody waited for it
        self._helped = False  #: another thread has read since the reader thread last looked
        self._rouse = allocate_lock()
        self._rouse.acquire()

    def run(self) -> None:
        """Runs the reader thread. A payload is read only once its receive is there: TCP holds back the sender."""
        try:
            while True:
                with self._role:
                    self._step_or_fail(patient=True)
                if self._awaited:
                    self._park()
        except Exception:  # the peer has failed, or goes on with another connection
            return
        finally:
            self._peer.leave(self._connection)

    @property
    def has_read(self) -> bool:
        """True once a frame has come: so the peer has the connection, too."""
        return self._opener.last >= 0

    def help(self, ticket: ReceiveTicket, deadline: float | None) -> None:
        """Reads until ``ticket`` has ended, if the reader thread is parked and the next frames are small and due.

        Gives up at ``deadline``, of time.monotonic.
        """
        if not self._role.acquire(False):
            return
        try:
            self._helped = True
            while not ticket._done:
                if self._inbound.at_boundary():
                    left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
                    if not self._poll.poll(left):
                        return
                if not self._step_or_fail(patient=False):
                    return
        except Exception:  # the ticket has ended with it, or waits for another connection
            return
        finally:
            self._role.release()
            if not ticket._done:
                self.rouse()

    def rouse(self) -> None:
        """Has the reader thread take over, if it is parked. Never blocks."""
        if self._rouse.locked():
            try:
                self._rouse.release()
            except RuntimeError:  # another thread was faster
                return

    def _park(self) -> None:
        """Leaves the reading to waiting threads, until none has read for a moment or one has called ``rouse``."""
        self._rouse.acquire(False)  # earlier requests are answered
        self.parked = True
        while True:
            self._helped = False
            if self._peer.failure is not None or self._rouse.acquire(True, _GRACE):
                break
            if not self._role.acquire(False):
                self._role.acquire()  # another thread waits and reads: until then there is nothing to do
            self._role.release()
            if not self._helped:
                break
        self.parked = False

    def _step_or_fail(self, patient: bool) -> bool:
        """Handles one frame. False if it was left for the (patient) reader thread. Raises after it has failed the peer.

        It must not return the receive to its caller, which would keep the tensor alive until the next frame.
        """
        if self._over:
            raise EOFError("nothing more can be read")
        try:
            return self._step(patient)
        except BaseException as error:  # an exit too: the bytes of the frame that were read are lost
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Fails the peer, for an error after which nothing more can be read from it; or only its connection."""
        self._over = True
        peer, why = self._peer, str(error) or type(error).__name__
        if isinstance(error, (OSError, EOFError)):
            peer.lose(self._connection, error)
        else:
            peer.fail(BrokenError, f"the connection of rank {peer.rank} with rank {peer.me} was given up: {why}")

    def _fail(self, error: BaseException) -> None:
        """Fails the peer for an error of its carrier, too: another connection would not help."""
        if isinstance(error, (OSError, EOFError)):
            self._peer.fail(BrokenError, self._peer.lost(error))
        else:
            self._give_up(error)

    def _step(self, patient: bool) -> bool:
        frame = self._frame
        if frame is None:
            header = self._inbound.next_bytes(SIZE)
            self._extra = self._inbound.next_bytes(self._extra_size(header)) if header[0] in (CARRIED, WORD) else b""
            frame = self._frame = self._opener.open(header, self._extra)
            if self._opener.received != self._receipt:
                self._receipt = self._opener.received
                self._peer.acknowledge(self._receipt)
        if frame.kind == NACK:
            self._peer.refused(frame)
        elif frame.kind == WORD:
            try:
                self._carrier().hear(self._extra)
            except Exception as error:
                self._fail(error)
                raise
        elif frame.kind in (POISON, GONE):
            ended = self._peer.claim(frame.transfer, patient, self._connection)
            if ended is None:
                return False
            self._peer.unclaim()
            self._awaited = ended.ticket.waited
            if frame.kind == POISON:
                ended.ticket.fail(poisoned(frame.nbytes - 1, frame.numel), "")
            else:
                ended.ticket.fail(BrokenError, self._gone(frame.transfer))
        elif frame.kind == BYE:
            self._peer.lose(self._connection, EOFError("it hung up"), wanted=False)
            raise EOFError("it hung up")
        elif frame.kind != RECEIPT:
            small = frame.nbytes <= EAGER
            entry = self._peer.claim(frame.transfer, patient, self._connection) if small or patient else None
            if entry is None:
                return False
            self._read(frame, entry)
            self._awaited = small and entry.ticket.waited
        self._frame = None
        if frame.kind in COUNTED:
            self._peer.count(frame, self._lent)
        self._lent = False
        return True

    def _gone(self, transfer: int) -> str:
        peer = self._peer
        return (
            f"transfer {spoken(transfer)} from rank {peer.rank} to rank {peer.me} broke off: the connection was reset "
            f"while its last bytes were on their way, and rank {peer.rank} does not have them any more; copies that "
            "come after it are not concerned: do this one again"
        )

    def _miss(self, frame: Frame, entry: Receive, what: str, error: MissedError) -> None:
        """Fails a transfer whose payload did not come. Raises EOFError where the connection has ended, too: whether the
        peer is lost, or does not have the payload any more, is told later."""
        peer = self._peer
        if not self._settled and peer.hung_up():
            peer.return_claim(frame.transfer, entry)
            raise EOFError(str(error)) from None
        entry.ticket.fail(BrokenError, f"{what} broke off: {error}")  # does nothing to one that has ended

    def _read(self, frame: Frame, entry: Receive) -> None:
        """Ends ``entry``'s transfer. Raises an error that ends the connection, after it has ended the transfer."""
        peer, ticket = self._peer, entry.ticket
        self._settled = False
        what = f"transfer {spoken(frame.transfer)} from rank {peer.rank} to rank {peer.me}"
        try:
            try:
                parcel = self._parcel(frame) if frame.kind == CARRIED else None
            except MemoryError as error:
                self._fail_for_room(entry, what, error)
                return
            self._lent = parcel is not None and parcel.awaited
            if (frame.dtype, frame.numel) != (entry.dtype, entry.numel):
                sends, receives = describe(frame.dtype, frame.numel), describe(entry.dtype, entry.numel)
                peer.unclaim()
                ticket.fail(
                    BrokenError, f"{what}: rank {peer.rank} sends {sends} but rank {peer.me} receives {receives}"
                )
                peer.refuse(Frame(NACK, frame.transfer, entry.dtype, entry.numel, 0))
                self._settled = True
                self._skip(frame, parcel)
                return
            if parcel is not None and (self._put(entry, parcel, what) or self._borrow(entry, parcel, what)):
                return
            target = entry.tensor if entry.tensor is not None else self._make(entry, what)
            if target is None:
                self._settled = True
                self._skip(frame, parcel)
                return
            view, arrived = entry.view, target
            if view is None:
                arrived = scratch(target)
                view = byte_view(arrived)
            if len(view) != frame.nbytes:
                raise ProtocolError(f"it has {frame.nbytes} bytes instead of {len(view)}")
            whole = True
            if parcel is not None:
                parcel.fill(view)
                whole = self._is_whole(arrived)
            else:
                whole = self._read_into(view, ticket)
        except BaseException as error:
            # The rest of the payload cannot be told from frames any more, so the connection is over.
            peer.unclaim()
            if isinstance(error, MissedError):
                self._miss(frame, entry, what, error)
                return
            if isinstance(error, RefusedError):
                peer.return_claim(frame.transfer, entry)
                raise EOFError(str(error)) from None
            if isinstance(error, (OSError, EOFError)) and frame.kind != CARRIED:
                if self._settled:
                    peer.count(frame)
                else:
                    peer.return_claim(frame.transfer, entry)
                raise
            kind, why = peer.failure or (BrokenError, peer.lost(error) if isinstance(error, EOFError) else str(error))
            self._fail(error)  # first: who waits for this transfer asks whether the peer is lost
            ticket.fail(kind, f"{what} broke off: {why}")
            raise
        peer.unclaim()
        if not whole:
            self._fail_altered(entry, what)
            return
        if arrived is not target:
            try:
                store(target, arrived)
            except Exception as error:  # such as a tensor whose elements overlap: the connection is fine
                ticket.fail(BrokenError, f"{what} arrived, but rank {peer.me} cannot store it: {error}")
                return
        ticket.finish()

    def _read_into(self, view: memoryview, ticket: ReceiveTicket) -> bool:
        """Reads a payload, and counts a large one on its way; returns whether it is as it was sent."""
        inbound = self._inbound
        if len(view) > PIECE:
            inbound.passing = ticket.passing = Passing()
        try:
            if self._shield is not None:
                return self._shield.read(self._opener.last, view, inbound)
            inbound.read_into(view)
            return True
        finally:
            inbound.passing = None

    def _make(self, entry: Receive, what: str) -> torch.Tensor | None:
        """Makes memory for data whose receive has none. None, and the transfer has failed, if no memory can be had."""
        try:
            made = entry.ticket.tensor = self._peer.empty(*entry.form)
            entry.view = byte_view(made)
        except Exception as error:
            self._fail_for_room(entry, what, error)
            return None
        return made

    def _fail_for_room(self, entry: Receive, what: str, error: BaseException) -> None:
        """Fails a transfer for which there is no memory. The connection is in order."""
        self._peer.unclaim()
        entry.ticket.fail(BrokenError, f"{what}: rank {self._peer.me} {NO_MEMORY}: {error}")

    def _carrier(self) -> Carrier:
        """Returns the peer's carrier. Raises ProtocolError if there is none."""
        if self._peer.carrier is None:
            raise ProtocolError("it is for a carrier, which this channel doesn't have")
        return self._peer.carrier

    def _extra_size(self, header: bytes) -> int:
        """Returns the size of the bytes that come with a header, which is not checked yet. Raises ProtocolError."""
        size = self._carrier().size + self._sum if header[0] == CARRIED else nbytes_of(header)
        if size > MOST_EXTRA:
            raise ProtocolError(f"a word of {size} bytes")
        return size

    def _skip(self, frame: Frame, parcel: Parcel | None) -> None:
        if parcel is not None:
            parcel.discard()
        else:
            self._inbound.skip(frame.nbytes if self._shield is None else self._shield.size(frame.nbytes))

    def _parcel(self, frame: Frame) -> Parcel:
        """Returns the payload that the peer's carrier brings. Raises what the carrier's ``open`` does."""
        carrier = self._carrier()
        return carrier.open(self._extra[: carrier.size], frame.nbytes)

    def _is_whole(self, payload: torch.Tensor) -> bool:
        """Returns whether a carrier's payload has the checksum that came with its descriptor, if there is one."""
        return not self._sum or checksum(payload) == self._extra[-self._sum :]

    def _fail_altered(self, entry: Receive, what: str) -> None:
        """Fails a transfer whose checksum is wrong. The connection is in order: all of it was read."""
        entry.ticket.tensor = None
        entry.ticket.fail(
            BrokenError,
            f"{what} arrived altered: its checksum is not the one that rank {self._peer.rank} computed. The sender's "
            "tensor is as it was; have the network and the memory of both hosts looked at",
        )

    def _put(self, entry: Receive, parcel: Parcel, what: str) -> bool:
        """Ends ``entry``'s transfer if the parcel brings itself into the tensor; returns whether it did."""
        if entry.tensor is None:
            return False
        try:
            if not parcel.into(entry.tensor):
                return False
        except Exception as error:  # such as a tensor whose elements overlap
            self._peer.unclaim()
            entry.ticket.fail(BrokenError, f"{what} arrived, but rank {self._peer.me} cannot store it: {error}")
            return True
        whole = self._is_whole(entry.tensor)
        self._peer.unclaim()
        if whole:
            entry.ticket.finish()
        else:
            self._fail_altered(entry, what)
        return True

    def _borrow(self, entry: Receive, parcel: Parcel, what: str) -> bool:
        """Ends ``entry``'s transfer with lent bytes: as they are, or copied into the waiting tensor.

        Returns False if the parcel lends none.
        """
        payload = parcel.lend()
        if payload is None:
            return False
        if not self._is_whole(payload):
            del payload
            self._peer.unclaim()
            self._fail_altered(entry, what)
            return True
        payload = payload.view(entry.form[1] if entry.tensor is None else entry.tensor.dtype)
        why = ""
        if entry.tensor is None:
            entry.ticket.tensor = of_its_own(payload.view(entry.form[0]))
        else:
            try:
                store(entry.tensor, payload)
            except Exception as error:  # such as a tensor whose elements overlap
                why = f"{what} arrived, but rank {self._peer.me} cannot store it: {error}"
        del payload
        self._peer.unclaim()
        if why:
            entry.ticket.fail(BrokenError, why)
        else:
            entry.ticket.finish()
        return True
