"""The reader thread of one connection: from frames to tensors. It is the only one that reads the socket."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch

from ..errors import BrokenError, ProtocolError
from .frame import NACK, SIZE, Frame, Opener
from .payload import byte_view, describe, store
from .tcp_inbound import Inbound

if TYPE_CHECKING:
    from .tcp_peer import Receive, TcpPeer


class Reader:
    """Reads what ``peer`` sends. A transfer that it has claimed is ended by it and nobody else."""

    def __init__(self, peer: TcpPeer, sock: socket.socket, opener: Opener) -> None:
        self._peer, self._inbound, self._opener = peer, Inbound(sock), opener

    def run(self) -> None:
        """Until the connection ends. A payload is read only once its receive is there: TCP holds back the sender."""
        why = "its reader ended"
        try:
            while True:
                frame = self._opener.open(self._inbound.take(SIZE))
                if frame.kind == NACK:
                    self._peer.refused(frame)
                else:
                    self._read(frame, self._peer.claim(frame.transfer))
        except (OSError, EOFError) as error:
            why = (
                f"rank {self._peer.info.rank} closed its end or died; "
                f"the connection to rank {self._peer.me} is gone: {error}"
            )
        except (BrokenError, ProtocolError) as error:
            why = f"between rank {self._peer.info.rank} and rank {self._peer.me}: {error}"
        finally:
            self._peer.read_ended(why)

    def _read(self, frame: Frame, entry: Receive) -> None:
        """Ends ``entry``'s transfer. Raises what ends the connection, after it has."""
        peer, ticket = self._peer, entry.ticket
        what = f"transfer {frame.transfer} from rank {peer.info.rank} to rank {peer.me}"
        try:
            if (frame.dtype, frame.numel) != (entry.dtype, entry.numel):
                ticket.fail(
                    BrokenError,
                    f"{what}: rank {peer.info.rank} sends {describe(frame.dtype, frame.numel)} but "
                    f"rank {peer.me} receives {describe(entry.dtype, entry.numel)}",
                )
                peer.refuse(Frame(NACK, frame.transfer, entry.dtype, entry.numel, 0))
                self._inbound.skip(frame.nbytes)
                return
            view, staged = entry.view, entry.tensor
            if view is None:
                staged = torch.empty(entry.tensor.shape, dtype=entry.tensor.dtype)
                view = byte_view(staged)
            if len(view) != frame.nbytes:
                raise ProtocolError(f"{what} has {frame.nbytes} bytes, not {len(view)}")
            self._inbound.read_into(view)
        except Exception as error:
            # The rest of the payload cannot be told from frames any more, so the connection is over.
            peer.read_done()
            if isinstance(error, OSError | EOFError):
                why = f"rank {peer.info.rank} closed its end or died: {error}"
            else:
                why = str(error)
            kind, why = peer.failure or (BrokenError, why)
            ticket.fail(kind, f"{what} broke off: {why}")
            raise
        peer.read_done()
        if staged is not entry.tensor:
            try:
                store(entry.tensor, staged)
            except Exception as error:  # such as a tensor whose elements overlap: the connection is fine
                ticket.fail(BrokenError, f"{what} arrived, but rank {peer.me} cannot store it: {error}")
                return
        ticket.finish()
