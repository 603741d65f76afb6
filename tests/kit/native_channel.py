"""A channel with collectives of its own, as simple as one can be: the ranks are threads, and the last one to come does
the work of all."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar

import torch

from disttensor.runtime.channel.base import Capabilities
from disttensor.runtime.channel.inproc import InprocChannel
from disttensor.runtime.collective.reduction import ReduceOp, kernel
from disttensor.runtime.protocol.errors import BrokenError

Tensors = Sequence[torch.Tensor]


@dataclass
class _Meeting:
    parts: dict[int, tuple[Tensors, Tensors]] = field(default_factory=dict)
    over: str = ""  #: "done", or why not
    lost: int | None = None


class NativeChannel(InprocChannel):
    name: ClassVar[str] = "native"
    capabilities: ClassVar[Capabilities] = Capabilities(
        authenticated=True,
        encrypted=True,
        same_host=True,
        collectives=frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter",
                               "reduce_scatter", "all_to_all", "barrier"}),
    )  # fmt: skip
    calls: ClassVar[Counter[str]] = Counter()
    _changed: ClassVar[threading.Condition] = threading.Condition()
    _meetings: ClassVar[dict[tuple[str, tuple[int, ...], int], _Meeting]] = {}

    def has_collective(
        self, kind: str, *, dtype: torch.dtype, op: str = "SUM", device: str = "cpu", even: bool = True
    ) -> bool:
        return super().has_collective(kind, dtype=dtype, op=op, device=device, even=even) and dtype != torch.int16

    def collective(
        self,
        kind: str,
        ranks: Sequence[int],
        me: int,
        inputs: Tensors,
        outs: Tensors,
        op: str,
        root: int,
        number: int,
    ) -> None:
        key = self._job, tuple(ranks), number
        with self._changed:
            self.calls[kind] += 1
            meeting = self._meetings.setdefault(key, _Meeting())
            meeting.parts[me] = inputs, outs
            if len(meeting.parts) == len(ranks):
                _all_parts(kind, [meeting.parts[i] for i in range(len(ranks))], ReduceOp[op], root)
                meeting.over = "done"
                self._changed.notify_all()
            while not meeting.over:
                for rank in ranks:
                    if rank in self._broken:
                        meeting.over, meeting.lost = f"rank {rank} is lost: {self._broken[rank]}", rank
                        self._changed.notify_all()
                if not meeting.over:
                    self._changed.wait(0.01)  # forget tells nobody
            self._meetings.pop(key, None)
        if meeting.over != "done":
            raise BrokenError(meeting.over, meeting.lost)


def _all_parts(kind: str, parts: list[tuple[Tensors, Tensors]], op: ReduceOp, root: int) -> None:
    given = [[x.clone() for x in inputs] for inputs, _ in parts]
    outs = [outs for _, outs in parts]

    def total(tensors: Tensors) -> torch.Tensor:
        made = reduce(lambda a, b: kernel(op)(a, b), tensors)
        return made / len(tensors) if op is ReduceOp.AVG else made

    match kind:
        case "all_reduce":
            new = [[total([one[0] for one in given])]] * len(outs)
        case "reduce":
            new = [[total([one[0] for one in given])] if i == root else [] for i in range(len(outs))]
        case "broadcast":
            new = [[] if i == root else [given[root][0]] for i in range(len(outs))]
        case "all_gather":
            new = [[one[0] for one in given]] * len(outs)
        case "gather":
            new = [[one[0] for one in given] if i == root else [] for i in range(len(outs))]
        case "scatter":
            new = [[given[root][i]] for i in range(len(outs))]
        case "reduce_scatter":
            new = [[total([one[i] for one in given])] for i in range(len(outs))]
        case "all_to_all":
            new = [[one[i] for one in given] for i in range(len(outs))]
        case _:
            new = [[] for _ in outs]
    for theirs, ours in zip(outs, new, strict=True):
        for target, value in zip(theirs, ours, strict=True):
            target.copy_(value)
