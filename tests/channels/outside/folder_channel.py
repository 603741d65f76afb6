"""A data channel as somebody else would write it, in a distribution of its own: a tensor is a file in the folder of its
receiver, and a named pipe there tells of it. For processes that see one file system; plain rather than fast.

    sender: folder/SOURCE-TRANSFER is written, then a record into folder/bell        receiver: one thread reads the bell
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress

import torch

from disttensor.errors import BrokenError, BusyError, ClosedError
from disttensor.runtime.channel import Capabilities, ChannelContext, DataChannel, PeerInfo, Transfer
from disttensor.runtime.channel.payload import byte_view, describe, dtype_id, plain, store
from disttensor.runtime.channel.ticket import Ticket, done, failed, poisoned

_RECORD = struct.Struct("<iiqqq")  #: kind, who, transfer, and two numbers; short enough for one write to be whole
_DATA, _REFUSED, _GONE, _STOP = range(4)
#: Seconds that the thread has to end.
_PATIENCE = 2.0


class FolderChannel(DataChannel):
    """See above. ``_lock`` guards the tables; files and pipes are used outside of it."""

    name = "folder"
    capabilities = Capabilities(same_host=True)

    def __init__(self, context: ChannelContext) -> None:
        self._rank = context.rank
        self._folder = tempfile.mkdtemp(prefix=f"folder-channel-{context.rank}-")
        self._lock = threading.RLock()
        self._peers: dict[int, str] = {}
        self._bells: dict[int, int] = {}  #: rank -> descriptor
        self._lost: dict[int, str] = {}  #: rank -> why
        self._awaited: dict[tuple[int, int], tuple[torch.Tensor, Ticket]] = {}
        self._arrived: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._closed = ""
        os.mkfifo(f"{self._folder}/bell")
        self._bell = os.open(f"{self._folder}/bell", os.O_RDWR)  # writing, too: it never ends while we read
        self._thread = threading.Thread(target=self._listen, name="folder channel", daemon=True)
        self._thread.start()

    def address(self) -> str:
        return self._folder

    def connect(self, peers: Mapping[int, PeerInfo]) -> None:
        with self._lock:
            self._peers |= {rank: peer.address for rank, peer in peers.items() if rank != self._rank}

    # ---- sending -------------------------------------------------------------------------------------------------

    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        dtype = dtype_id(tensor)
        if why := self._check(peer):
            return failed(BrokenError, why)
        flat = plain(tensor)
        with suppress(FileNotFoundError), open(f"{self._peers[peer]}/{self._rank}-{transfer}", "wb") as file:
            file.write(byte_view(flat))
        return self._ring(peer, _DATA, transfer, dtype, flat.numel())

    def refuse(self, peer: int, transfer: int, rank: int, seq: int) -> None:
        if not self._check(peer):
            self._ring(peer, _REFUSED, transfer, rank, seq)

    def _ring(self, peer: int, kind: int, transfer: int = 0, first: int = 0, second: int = 0) -> Transfer:
        """Writes a record for ``peer``. A pipe without a reader is a peer that has ended."""
        try:
            with self._lock:
                if peer not in self._bells:
                    self._bells[peer] = os.open(f"{self._peers[peer]}/bell", os.O_WRONLY | os.O_NONBLOCK)
                    os.set_blocking(self._bells[peer], True)
                bell = self._bells[peer]
            os.write(bell, _RECORD.pack(kind, self._rank, transfer, first, second))
        except OSError:
            self.mark_lost(peer, "it has ended")
            return failed(BrokenError, self._lost[peer])
        return done()

    # ---- receiving -----------------------------------------------------------------------------------------------

    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        dtype_id(tensor)
        key, ticket = (peer, transfer), Ticket()
        with self._lock:
            if why := self._check(peer):
                return failed(BrokenError, why)
            if key in self._awaited:
                raise BusyError(f"transfer {transfer} from rank {peer} is being received already")
            record = self._arrived.pop(key, None)
            if record is None:
                self._awaited[key] = tensor, ticket
        if record is not None:
            self._take(key, record, tensor, ticket)
        return ticket

    def _listen(self) -> None:
        said = b""
        while True:
            said += os.read(self._bell, 1 << 16)
            whole = len(said) - len(said) % _RECORD.size
            for kind, who, transfer, first, second in _RECORD.iter_unpack(said[:whole]):
                if kind == _STOP:
                    os.close(self._bell)
                    return
                if kind == _GONE:
                    self.mark_lost(who, f"rank {who} closed its end")
                    continue
                key, record = (who, transfer), (kind, first, second)
                with self._lock:
                    awaited = self._awaited.pop(key, None)
                    if awaited is None:
                        self._arrived[key] = record
                if awaited is not None:
                    self._take(key, record, *awaited)
            said = said[whole:]

    def _take(self, key: tuple[int, int], record: tuple[int, int, int], tensor: torch.Tensor, ticket: Ticket) -> None:
        """Ends a receive whose record is there."""
        (peer, transfer), (kind, first, second) = key, record
        if kind == _REFUSED:
            ticket.fail(poisoned(first, second), "")
            return
        path = f"{self._folder}/{peer}-{transfer}"
        sent, wanted = (first, second), (dtype_id(tensor), tensor.numel())
        try:
            if sent != wanted:
                raise ValueError(f"rank {peer} sends {describe(*sent)}, and {describe(*wanted)} is received")
            with open(path, "rb") as file:
                data = bytearray(file.read())
            if data:
                store(tensor, torch.frombuffer(data, dtype=torch.uint8).view(tensor.dtype))
        except Exception as error:
            ticket.fail(BrokenError, f"transfer {transfer} of rank {peer} to rank {self._rank}: {error}")
        else:
            ticket.finish()
        finally:
            with suppress(OSError):
                os.unlink(path)

    # ---- ends ----------------------------------------------------------------------------------------------------

    def _check(self, peer: int) -> str:
        """Why ``peer`` is lost, or nothing. Raises ClosedError, ValueError."""
        if self._closed:
            raise ClosedError(f"the folder channel of rank {self._rank} {self._closed}")
        if peer not in self._peers:
            raise ValueError(f"rank {peer} is not a peer of rank {self._rank}; known: {sorted(self._peers)}")
        return self._lost.get(peer, "")

    def mark_lost(self, peer: int, why: str) -> None:
        with self._lock:
            if peer not in self._peers:
                return
            text = self._lost.setdefault(peer, f"rank {peer} is lost to rank {self._rank}: {why}")
            failing = [self._awaited.pop(key)[1] for key in list(self._awaited) if key[0] == peer]
        for ticket in failing:
            ticket.fail(BrokenError, text)

    def close(self) -> None:
        self._end("was closed")

    def abort(self) -> None:
        self._end("was aborted")

    def _end(self, how: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = how
            failing = [ticket for _, ticket in self._awaited.values()]
            self._awaited.clear()
        for ticket in failing:
            ticket.fail(ClosedError, f"the folder channel of rank {self._rank} {how}")
        for peer in self._peers.keys() - self._lost.keys():
            self._ring(peer, _GONE)
        os.write(self._bell, _RECORD.pack(_STOP, self._rank, 0, 0, 0))
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        for bell in self._bells.values():
            os.close(bell)
        shutil.rmtree(self._folder, ignore_errors=True)
