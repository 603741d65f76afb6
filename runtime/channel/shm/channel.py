"""The data channel "shm", for processes of one host: like "tcp", but large payloads go through shared memory.

One copy brings a tensor into memory that the other process maps as well (``segments``). A receiver uses it there where
a node lets the channel choose the memory (``iarrive``), else copies it once more. The script reads large tensors of its
launcher's nodes where they lie (``direct``). Small tensors and all headers take the connection, which also tells of a
peer's end. Where two processes turn out not to see the same memory (containers), everything takes the connection. CUDA
tensors go between nodes by buffers on their devices (``cuda_ipc``). Shared memory is never encrypted, as it does not
leave the host; payloads of the connection are where that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from ..base import MASTER, Arrival, Capabilities, ChannelContext
from ..carrier import Say
from ..tcp.channel import TcpChannel
from .cuda_ipc import CudaSharing
from .direct import NodeSharing, ScriptSharing
from .sharing import Sharing


class ShmChannel(TcpChannel):
    """Moves large payloads through shared memory, and everything else over TCP, between peers on one host."""

    name: ClassVar[str] = "shm"
    capabilities: ClassVar[Capabilities] = Capabilities(
        authenticated=True, encrypted=True, checksums=True, takes_back=True, same_host=True, shared_memory=True
    )

    def __init__(self, context: ChannelContext) -> None:
        if context.protection.checksum:  # collectives in shared pages compare none: they go by transfers then
            self.capabilities = replace(self.capabilities, shared_memory=False)  # type: ignore[misc]
        super().__init__(context)

    def iarrive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, transfer: int) -> Arrival:
        """Starts receiving a tensor; where the sender's copy is in shared memory, the tensor is that copy.

        Not on the master: processes that a script forks (a DataLoader's workers) would write into its tensors.
        """
        if self._context.rank == MASTER:
            return super().iarrive(shape, dtype, peer, transfer)
        ticket = self._peer(peer, transfer).arrive(shape, dtype, transfer)
        return Arrival(ticket, lambda: ticket.tensor)

    def _carrier(self, peer: int) -> Callable[[Say], Sharing]:
        # Tensors that the master sends and gets are on the CPU, and it should not open a device for them.
        if self._context.rank == MASTER:
            return partial(ScriptSharing, partial(self._context.process_of, peer))
        return NodeSharing if peer == MASTER else CudaSharing
