"""The data channel "nccl": like "auto", but collectives of CUDA tensors are NCCL's.

Every node needs a GPU of its own for that; the master, which has no rank in NCCL, needs none. A communicator's id is
told over the authenticated connections; NCCL's own neither authenticate nor encrypt, so that between hosts it belongs
on a trusted network. Collectives are waited for on the node: a waiting thread sees when a peer is lost, and gives up.

It has been tested with stand-ins for the library only (tools/simcuda/nccl is the one that is like it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch

from ...protocol.errors import BrokenError
from ..auto import AutoChannel
from ..base import MASTER, Capabilities
from ..carrier import Say
from ..library_groups import GroupedChannel, entry
from ..shm.cuda_ipc import CudaSharing
from .library import DTYPES, Communicator, load

_KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
#: The first byte of a word of this channel, among those of the carrier.
_TELL = b"@"
#: Seconds between two checks of work that is under way.
_PAUSE = 50e-6

Tensors = Sequence[torch.Tensor]


class NcclChannel(GroupedChannel, AutoChannel):
    """Shared memory and TCP for transfers, NCCL for collectives of CUDA tensors."""

    name: ClassVar[str] = "nccl"
    library: ClassVar[str] = "NCCL"
    capabilities: ClassVar[Capabilities] = Capabilities(devices=frozenset({"cuda"}), collectives=frozenset(_KINDS))
    communicator: ClassVar[type[Communicator]] = Communicator

    @classmethod
    def unavailable(cls, rank: int) -> str:
        if rank == MASTER:
            return ""
        if not torch.cuda.is_available():
            return "no CUDA device"
        try:
            load()
        except OSError as error:
            return str(error)
        return ""

    def has_collective(
        self, kind: str, *, dtype: torch.dtype, op: str = "SUM", device: str = "cpu", even: bool = True
    ) -> bool:
        """Returns whether NCCL does it: of equal lengths, on CUDA devices; reductions of the usual dtypes.

        MIN and MAX are done of integers only: of floats, NaN may get lost in them.
        """
        ops = ("SUM", "PRODUCT", "AVG") if dtype.is_floating_point else ("SUM", "PRODUCT", "MIN", "MAX")
        fits = "reduce" not in kind or (dtype in DTYPES and op in ops)
        return kind in _KINDS and device == "cuda" and even and fits

    def _group(self, name: str, ranks: Sequence[int]) -> NcclGroup:
        me, tell = list(ranks).index(self.rank), self.teller(ranks)
        tell("here", b"")  # so that there are connections, which tell of an end
        if me == 0:
            id = self.communicator.unique_id()
            tell(f"{name};", id)
        else:
            id = self.mailbox.get(f"{name};", partial(self.given_up, ranks))
        self.mailbox.clear(f"{name};")
        return NcclGroup(partial(self.communicator, size=len(ranks), id=id, me=me), partial(self.given_up, ranks))

    def _carrier(self, peer: int) -> Callable[[Say], NcclSharing]:
        return partial(NcclSharing, self, peer)


class NcclSharing(CudaSharing):
    """The carrier of one pair of peers: moves their tensors, and puts values into the peer's mailbox."""

    def __init__(self, channel: NcclChannel, peer: int, say: Say) -> None:
        super().__init__(say)
        self._channel, self._peer = channel, peer

    def put_in_mailbox(self, key: str, value: bytes) -> None:
        self.say(_TELL + key.encode() + b"\0" + value)

    def hear(self, word: bytes) -> None:
        if not word.startswith(_TELL):
            super().hear(word)
            return
        self._channel.mailbox.put(*entry(word.removeprefix(_TELL)))

    def fail(self, why: str) -> None:
        super().fail(why)
        self._channel.over(self._peer)


class NcclGroup:
    """A communicator. It is made at the first collective, and stays on the device of that one's tensors."""

    def __init__(self, make: Callable[..., Communicator], over: Callable[[], BrokenError | None]) -> None:
        self._make, self._over = make, over
        self._comm: Communicator | None = None
        self._cut = False

    def cut(self) -> None:
        """Has the waiting thread abort when it looks next: NCCL wants no two threads in one communicator."""
        self._cut = True

    def close(self) -> None:
        """Does nothing: the communicator ends with this object."""

    def join(self, seconds: float) -> None:
        pass

    def _wait(self, comm: Communicator, done: Callable[[], bool]) -> None:
        while not done():
            error = self._over()
            if error is not None or self._cut:
                comm.abort()
                raise error or BrokenError("it was given up")
            try:
                comm.ready()
            except RuntimeError:  # a connection of NCCL's own has ended: the device would wait without end
                comm.abort()
                raise
            time.sleep(_PAUSE)

    def run(self, kind: str, inputs: Tensors, outs: Tensors, op: str, root: int) -> None:
        """Does this rank's part of a collective (``DataChannel.collective``).

        All tensors have one length, which is not 0.
        """
        if self._comm is None:
            there = [x.device for x in (*inputs, *outs) if x.device.type != "cpu"]
            self._comm = self._make(device=there[0] if there else _default())
        comm = self._comm
        self._wait(comm, comm.ready)
        given = [x.to(comm.device) for x in inputs]  # tensors that stand for poison are on another device
        made = _begin_collective(comm, kind, given, [x.to(comm.device) for x in outs], op, root)
        self._wait(comm, comm.ready)
        self._wait(comm, comm.mark())
        for out, value in zip(outs, made, strict=True):
            if out.data_ptr() != value.data_ptr():
                out.copy_(value)
        if outs:
            self._wait(comm, comm.mark())


def _default() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _begin_collective(comm: Communicator, kind: str, given: Tensors, outs: Tensors, op: str, root: int) -> Tensors:
    """Gives the device the collective's work. Returns the tensors that the results will be in."""
    n, everybody = comm.size, range(comm.size)
    if kind == "all_reduce":
        comm.all_reduce(given[0], outs[0], op)
    elif kind == "reduce":
        comm.reduce(given[0], outs[0] if outs else torch.empty_like(given[0]), op, root)
    elif kind == "broadcast":
        moved = _raw((given or outs)[0])  # NCCL does not know all dtypes
        comm.broadcast(moved, moved, root)
    elif kind == "all_gather":
        both = torch.cat([_raw(given[0])] * n)
        comm.all_gather(_raw(given[0]), both)
        return [part.view(given[0].dtype) for part in both.chunk(n)]
    elif kind == "reduce_scatter":
        target = torch.empty_like(outs[0])
        comm.reduce_scatter(torch.cat(list(given)), target, op)
        return [target]
    else:
        sources, targets = [_raw(x.clone()) for x in given], [_raw(torch.empty_like(x)) for x in outs]
        if kind == "gather":
            comm.exchange([(sources[0], root)], list(zip(targets, everybody, strict=False)))
        elif kind == "scatter":
            comm.exchange(list(zip(sources, everybody, strict=False)), [(targets[0], root)])
        elif kind == "all_to_all":
            comm.exchange(list(zip(sources, everybody, strict=True)), list(zip(targets, everybody, strict=True)))
        else:
            raise NotImplementedError(f"NCCL has no {kind}")
        return [target.view(out.dtype) for target, out in zip(targets, outs, strict=True)]
    return outs


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
