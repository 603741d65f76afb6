"""The collectives of one set of ranks, done by MPI.

Before large ones comes a barrier that may take its time: from there on all ranks take part, and waiting is busy while
data moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ...host.mpi_env import MpiWorld
from ..payload import byte_view

KINDS = frozenset(
    ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "barrier")
)

#: The names of MPI's types for dtypes that it reduces as this project does; its MIN and MAX of floats know no NaN.
_NUMBERS = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.uint8: "UINT8_T",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
}
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"} | {
    name: name for name in ("BAND", "BOR", "BXOR")
}
#: dtype -> the names of the operations
REDUCES: dict[torch.dtype, tuple[str, ...]] = {
    dtype: ("SUM", "AVG", "PRODUCT") if dtype.is_floating_point else tuple(op for op in _OPS if op != "AVG")
    for dtype in _NUMBERS
}
#: MPI's types by the size of an element, for data that is only moved: a count is an int, so bytes would not go far.
_WORDS = {1: "INT8_T", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}

#: The most bytes for which no barrier comes first, where all ranks have as many.
_SMALL = 64 << 10
_SAME_LENGTHS = frozenset(("all_reduce", "reduce", "broadcast"))

Tensors = Sequence[torch.Tensor]


class MpiGroup:
    """A communicator of these ranks of nodes. ``check`` raises when the collective is hopeless: ``MpiWorld.finish``.

    Making one waits for all of them. It is never freed: that would take all of them, too.
    """

    def __init__(self, world: MpiWorld, ranks: Sequence[int], me: int, number: int, check: Callable[[], None]) -> None:
        self.check = check
        self._world = world
        self._busy = False  #: all ranks take part by now
        places = [rank + 1 for rank in ranks]
        self._meet(places, me, number)
        members = world.data.Get_group().Incl(places)
        self._comm: Any = world.data.Create_group(members, number % world.tags)

    def run(self, kind: str, inputs: Tensors, outs: Tensors, op: str, root: int) -> None:
        """Does this rank's part of a collective: see ``DataChannel.collective``."""
        self._busy = False
        if kind not in _SAME_LENGTHS or (*inputs, *outs)[0].nbytes > _SMALL:
            self._wait(self._comm.Ibarrier())
            self._busy = True
        if kind != "barrier":
            getattr(self, f"_{kind}")(inputs, outs, getattr(self._world.mpi, _OPS[op]), root)
        if op == "AVG" and outs and "reduce" in kind:
            outs[0].div_(self._comm.size)

    def _meet(self, places: Sequence[int], me: int, number: int) -> None:
        """Returns when every rank has heard from every other, if by others: MPI makes a communicator in a busy loop."""
        data, byte, size = self._world.data, self._world.mpi.BYTE, len(places)
        tag = self._world.tags + number % self._world.tags
        distance = 1
        while distance < size:
            word, answer = bytearray(1), bytearray(1)
            requests = [
                data.Irecv([answer, byte], places[(me - distance) % size], tag),
                data.Isend([word, byte], places[(me + distance) % size], tag),
            ]
            for request in requests:
                self._world.finish(request, (word, answer), self.check, busy=False)
            distance *= 2

    def _wait(self, request: Any, *memory: object) -> None:
        self._world.finish(request, memory, self.check, self._busy)

    def _all_reduce(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        outs[0].copy_(inputs[0])
        self._wait(self._comm.Iallreduce(self._world.mpi.IN_PLACE, self._numbers(outs[0]), op), outs)

    def _reduce(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        if outs:
            outs[0].copy_(inputs[0])
            request = self._comm.Ireduce(self._world.mpi.IN_PLACE, self._numbers(outs[0]), op, root)
        else:
            request = self._comm.Ireduce(self._numbers(inputs[0]), None, op, root)
        self._wait(request, inputs, outs)

    def _reduce_scatter(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        given = torch.cat(list(inputs))
        counts = [len(x) for x in inputs]
        self._wait(
            self._comm.Ireduce_scatter(self._numbers(given), self._numbers(outs[0]), counts, op), given, outs, counts
        )

    def _broadcast(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        self._wait(self._comm.Ibcast(self._words((inputs or outs)[0]), root), inputs, outs)

    def _all_gather(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        found = _room(outs)
        self._wait(self._comm.Iallgatherv(self._words(inputs[0]), self._pieces(found, outs)), inputs, found)
        _spread(found, outs)

    def _gather(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        found = _room(outs) if outs else None
        into = None if found is None else self._pieces(found, outs)
        self._wait(self._comm.Igatherv(self._words(inputs[0]), into, root), inputs, found, into)
        if found is not None:
            _spread(found, outs)

    def _scatter(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        given = torch.cat(list(inputs)) if inputs else None
        pieces = None if given is None else self._pieces(given, inputs)
        self._wait(self._comm.Iscatterv(pieces, self._words(outs[0]), root), given, pieces, outs)

    def _all_to_all(self, inputs: Tensors, outs: Tensors, op: Any, root: int) -> None:
        given, found = torch.cat(list(inputs)), _room(outs)
        pieces, into = self._pieces(given, inputs), self._pieces(found, outs)
        self._wait(self._comm.Ialltoallv(pieces, into), given, pieces, found, into)
        _spread(found, outs)

    def _numbers(self, tensor: torch.Tensor) -> list[Any]:
        return [byte_view(tensor), len(tensor), getattr(self._world.mpi, _NUMBERS[tensor.dtype])]

    def _words(self, tensor: torch.Tensor) -> list[Any]:
        return [byte_view(tensor), len(tensor), self._word(tensor)]

    def _pieces(self, joined: torch.Tensor, tensors: Tensors) -> list[Any]:
        counts = [len(x) for x in tensors]
        return [byte_view(joined), counts, [0, *accumulate(counts)][:-1], self._word(joined)]

    def _word(self, tensor: torch.Tensor) -> Any:
        return getattr(self._world.mpi, _WORDS[tensor.element_size()])


def _room(outs: Tensors) -> torch.Tensor:
    """Makes memory for all outputs, one after the other."""
    return torch.empty(sum(map(len, outs)) * outs[0].element_size(), dtype=torch.uint8).view(outs[0].dtype)


def _spread(joined: torch.Tensor, outs: Tensors) -> None:
    for out, piece in zip(outs, joined.split([len(out) for out in outs]), strict=True):
        out.copy_(piece)
