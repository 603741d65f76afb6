"""The data channel "null", for measuring: does all that "tcp" does but move payloads.

The tensor that is received into stays as it is. With this channel a script takes as long as it would if bytes cost
nothing; its numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch

from .base import Capabilities, ChannelContext, Protection, Transfer
from .carrier import Carrier, Parcel, Say
from .payload import dtype_id, is_plain, scratch
from .tcp.channel import TcpChannel
from .tcp.frames import CARRIED, Frame
from .tcp.kept import Out
from .ticket import Ticket, failed


class NullChannel(TcpChannel):
    """TCP without payloads, for measuring."""

    name: ClassVar[str] = "null"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu", "cuda"}), authenticated=True, encrypted=True, checksums=True
    )

    def __init__(self, context: ChannelContext) -> None:
        """Makes a channel that protects nothing: there is no payload."""
        super().__init__(replace(context, protection=Protection(trusted=True)))

    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        """Sends the header only, which says that the carrier brings the rest."""
        frame = Frame(CARRIED, transfer, dtype_id(tensor), tensor.numel(), tensor.numel() * tensor.element_size())
        there, out = self._peer(peer, transfer), Out(frame, None, Ticket())
        with there.lock:
            if there.failure is not None:
                return failed(*there.failure)
            there._sender.put_with_lock(out)
        return out.ticket

    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        dtype_id(tensor)
        return super().irecv(tensor if is_plain(tensor) else scratch(tensor), peer, transfer)

    def _carrier(self, peer: int) -> Callable[[Say], Carrier]:
        return NullCarrier


class NullCarrier(Carrier):
    """A carrier that brings nothing."""

    def stage(self, tensor: torch.Tensor) -> bytes:
        return b""

    def open(self, descriptor: bytes, nbytes: int) -> Parcel:
        return _Nothing()


class _Nothing(Parcel):
    def discard(self) -> None:
        pass

    def fill(self, memory: memoryview) -> None:
        pass
