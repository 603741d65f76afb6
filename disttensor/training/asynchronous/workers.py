"""Workers: what asynchronous training drives, each a module on a node, over several, or on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...meshes.shards import at_rank
from ...proxy.proxy import where_is
from ...runtime.process.spelling import shown
from ...runtime.protocol.errors import NodeLost
from ...session.places import MeshPlace

#: A learning rate, for plain SGD; or what makes an optimizer of parameters; None: ``step`` does it.
Local = float | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None


class Worker:
    """A worker.

    Attributes:
        index: its number, from 0 on.
        module: as it was given; on a mesh its replicas are one worker, whose first rank speaks for all of them.
        parameters: those that are trained.
        device: that of its first parameter.
        nodes: the nodes that it is on.
        steps: the steps that it has done.
    """

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index, self.module = index, module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if not self.parameters:
            raise ValueError(f"drive: worker {index} has no parameters to train")
        self.nodes = self._nodes()
        self.device = self.parameters[0].device
        self.steps = 0
        self.step = 0  #: the one that it is at
        self.pulled: Any = None  #: what it has asked a server for, and not taken yet
        self.pushing: Any = None  #: the task of its last push

    def _nodes(self) -> tuple[int, ...]:
        nodes: dict[int, None] = {}
        for name, p in self.module.named_parameters():
            place = where_is(p)
            if place is None:
                raise TypeError(
                    f"drive: parameter {name!r} of worker {self.index} is on {p.device}; module.to('node:1')"
                )
            nodes |= dict.fromkeys(member.node for member in place.members)
        return tuple(nodes)

    def values(self) -> list[torch.Tensor]:
        """Returns its parameters, detached: the memory itself."""
        return [p.detach() for p in self.parameters]

    def statistics(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns its buffers of fractions, and the others, such as a count of batches: the memory itself."""
        found = [buffer.detach() for buffer in self.module.buffers()]
        fractions = [buffer for buffer in found if buffer.is_floating_point() or buffer.is_complex()]
        return fractions, [buffer for buffer in found if not (buffer.is_floating_point() or buffer.is_complex())]

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients; zeros for parameters without."""
        return [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in self.parameters]

    def lost(self) -> NodeLost | None:
        """Returns the loss of one of its nodes."""
        try:
            for p in self.parameters:
                place: Any = where_is(p)
                place.session.link.check(place.outbox)
        except NodeLost as error:
            return error
        return None

    def __repr__(self) -> str:
        return f"<Worker {self.index} on {self.device}, {self.steps} steps>"


def of_first(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns tensors of one worker, of a mesh its first rank's."""
    # a mesh's ranks have values each, of which the first one's count
    return [at_rank(t, 0) if isinstance(where_is(t), MeshPlace) else t for t in tensors]


class Update:
    """The step that a worker takes by its gradients."""

    def __init__(self, worker: Worker, local: Local) -> None:
        self._worker = worker
        self._rate = local if isinstance(local, (int, float)) else None
        self._optimizer = None if local is None or self._rate is not None else local(worker.parameters)  # type: ignore[operator]

    def __call__(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
        elif self._rate is not None:
            for p, grad in zip(self._worker.values(), self._worker.gradients(), strict=True):
                p.add_(grad, alpha=-self._rate)


def local_of(local: Any, what: str) -> Any:
    """Returns ``local``. Raises TypeError for what is neither a rate nor a function."""
    if local is not None and (isinstance(local, bool) or not (isinstance(local, (int, float)) or callable(local))):
        raise TypeError(
            f"{what}: local is a learning rate, a function that makes an optimizer, or None, not {shown(local)}"
        )
    return local


def ordered_sum(vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the sum of vectors on several nodes, on each of these: an all_reduce in the vectors' order.

    Each node sums a part, so no more travels than with any other; the order makes the bits those of a loop.
    """
    n, size = len(vectors), vectors[0].numel()
    ends = [size * k // n for k in range(n + 1)]
    sums = []
    for j, vector in enumerate(vectors):
        total: Any = None
        for other in vectors:
            part = other[ends[j] : ends[j + 1]].to(vector.device)
            total = part if total is None else total + part
        sums.append(total)
    return [torch.cat([part.to(vector.device) for part in sums]) for vector in vectors]
