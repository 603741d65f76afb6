"""Gradients in buckets: tensors of which gradients are views, each reduced as soon as all of its gradients are there.

A backward pass on a mesh is one for all nodes, so a hook fires once, and a collective is one command. The nodes run it
on a lane of their own, beside the commands that come after it. Only what names the bucket itself waits for it there:
an optimizer names views of it. So the last bucket of a pass is reduced in the plain form, on which what comes next
waits; and since a node does its collectives in order, what comes next waits for all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..collectives.over_dims import Over, reduced_in_place
from ..futures.work import Work, fetch
from ..runtime.master.route import route
from .named import Named, packs

#: A pass within a pass would be taken for one of its own, and what it has not used reduced twice.
_NESTED = (
    "DataParallel: a backward pass ran inside of another one, and both have gradients of the module; "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


class Bucket:
    """One flat tensor, and its views, which become the gradients of some parameters."""

    def __init__(self, named: Sequence[Named]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        numel = sum(parameter.numel() for parameter in self.parameters)
        self.flat = torch.zeros(numel, dtype=first.dtype, device=first.device)
        self.views = self.split(self.flat)
        self.begin_backward()

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of a flat tensor, one of each parameter's shape."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    def begin_backward(self) -> None:
        """Begins a backward pass: no gradient is there yet."""
        self._missing = len(self.parameters)
        self.issued = False

    def mark_ready(self, at: int) -> bool:
        """Takes a gradient that is there. Returns whether it was the last one."""
        self.copy_grad_into_view(at)
        self._missing -= 1
        return not self._missing

    def copy_grad_into_view(self, at: int) -> None:
        """Has the gradient of a parameter be the bucket's view, with its values; a missing one stays missing."""
        parameter, view = self.parameters[at], self.views[at]
        grad = parameter.grad
        if grad is None or grad is view:
            return
        if grad.layout is not torch.strided:
            raise TypeError(
                f"DataParallel: the gradient of {self.names[at]!r} is {grad.layout}, and buckets are strided; "
                f"sparse=False, or skip=[{self.names[at]!r}]"
            )
        if grad.requires_grad:
            raise RuntimeError(
                f"DataParallel: the gradient of {self.names[at]!r} has a gradient itself (create_graph=True), which a "
                "bucket would lose; torch.autograd.grad, and dt.all_reduce(g, 'avg', over=...)"
            )
        view.copy_(grad)
        parameter.grad = view


class GradBucket:
    """The bucket that a communication hook gets, by the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, index: int, last: bool) -> None:
        self._bucket, self._index, self._last = bucket, index, last
        self.result: torch.Tensor = bucket.flat

    def index(self) -> int:
        """Returns the bucket's place among the buckets, in the order of a backward pass."""
        return self._index

    def is_last(self) -> bool:
        """Returns whether this is the last bucket of the pass."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Returns the flat tensor of all gradients."""
        return self.result

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the tensor that ``buffer`` returns."""
        self.result = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients, which are views of ``buffer``."""
        return self._bucket.split(self.result)

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters whose gradients these are, in the same order."""
        return self._bucket.parameters


#: A hook of ``register_comm_hook``: takes the state and a bucket, returns the future of the reduced flat tensor.
CommHook = Callable[[Any, Any], Any]


class Buckets:
    """The buckets of a module's gradients. Hooks of the parameters fill them in a backward pass."""

    def __init__(
        self,
        named: Sequence[Named],
        limit: float,
        over: Over,
        op: str,
        overlap: bool,
        accumulate: int,
        transport: torch.dtype | None,
    ) -> None:
        # from the last parameter on, as a backward pass goes
        self._buckets = [Bucket(pack) for pack in packs(reversed(named), limit)]
        self._reduce: Callable[..., Any] = partial(reduced_in_place, op=op, over=over, transport=transport)
        self._overlap, self._accumulate = overlap, accumulate
        self._op = op
        self._share = 1 / accumulate if op == "avg" and accumulate > 1 else None
        #: a number for each rank, by which its gradients count in their sum; None: all count the same
        self._weights: torch.Tensor | None = None
        self.hook: tuple[Any, CommHook] | None = None  #: what reduces a bucket in the place of a collective of ours
        self.held = False  #: backward passes reduce nothing
        self._task = -1  #: autograd's number of the last backward pass; later ones have higher numbers
        self._open = self._reduces = False
        self._passes = 0  #: those since the last one that reduced
        self.added = False  #: a pass has added to gradients, and none has reduced them since
        self._left = 0  #: buckets that this pass has not reduced yet
        self._under_way: list[Work[Any]] = []
        for bucket in self._buckets:
            for at, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(_hook(self._autograd_hook, bucket, at))

    def weigh(self, weights: torch.Tensor | None) -> None:
        """Has each rank's gradients count by a number of its own from now on, and their sum be what is reduced."""
        self._weights = None if weights is None else weights * (self._share or 1)
        self._reduce = partial(self._reduce, op=self._op if weights is None else "sum")

    def wait(self) -> None:
        """Waits until all that was issued for the gradients has been done. Raises the error that they have."""
        works = [fetch(shard) for bucket in self._buckets for shard in bucket.flat[:1].shards()]  # type: ignore[attr-defined]
        for work in works:
            work.result()

    def end_failed_backward(self) -> None:
        """Ends a backward pass that failed: what it has begun to reduce has been when this returns."""
        if self._open and torch._C._current_graph_task_id() != self._task:
            works, self._under_way = self._under_way, []
            self._open = False
            for work in works:
                work.wait()

    @torch.no_grad()
    def _autograd_hook(self, bucket: Bucket, at: int) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin_backward(task)
        if self._reduces and bucket.mark_ready(at):
            self._issue(bucket)

    def _begin_backward(self, task: int) -> None:
        """Begins a backward pass, which autograd has given a number."""
        if task < self._task:
            raise RuntimeError(_NESTED)
        self.end_failed_backward()
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, task))
        self._task, self._open = task, True
        if not self.held:
            self._passes += 1
        self._reduces = not self.held and self._passes == self._accumulate
        self.added = not self._reduces
        if self._reduces:
            self._passes = 0
            self._under_way = []
            self._left = len(self._buckets)
            for bucket in self._buckets:
                bucket.begin_backward()

    @torch.no_grad()
    def _end_backward(self, task: int) -> None:
        """Reduces what is left when a backward pass ends: buckets with parameters that it has not used."""
        if task != self._task:
            raise RuntimeError(_NESTED)
        for bucket in self._buckets if self._reduces else ():
            if not bucket.issued:
                self._issue(bucket)
        self._open = False

    def _issue(self, bucket: Bucket) -> None:
        for at in range(len(bucket.parameters)):  # those from passes that reduced nothing, of what this has not used
            bucket.copy_grad_into_view(at)
        share = self._share if self._weights is None else self._weights
        if share is not None:
            bucket.flat.mul_(share)
        bucket.issued = True
        self._left -= 1
        if self.hook is not None:
            self._reduce_by_hook(bucket, *self.hook)
        elif self._overlap and self._left and route.get().recorder is None:
            self._under_way.append(self._reduce(bucket.flat, async_op=True))
        else:
            self._reduce(bucket.flat)

    def _reduce_by_hook(self, bucket: Bucket, state: Any, hook: CommHook) -> None:
        """Has a bucket be what the hook's future has. Raises TypeError and ValueError for another result."""
        future = hook(state, GradBucket(bucket, self._buckets.index(bucket), not self._left))
        name = getattr(hook, "__qualname__", repr(hook))
        if not isinstance(future, torch._C.Future):  # `then` returns one of these, which torch.futures.Future is, too
            raise TypeError(
                f"DataParallel: the communication hook {name} returns a torch.futures.Future of the bucket's tensor, "
                f"not {type(future).__name__}"
            )
        result = future.wait()
        if not isinstance(result, torch.Tensor):
            raise TypeError(
                f"DataParallel: the future of the communication hook {name} has {type(result).__name__}, not a tensor; "
                "future.then(lambda it: it.value()[0]) takes the first of a list"
            )
        if result.numel() != bucket.flat.numel() or result.device != bucket.flat.device:
            raise ValueError(
                f"DataParallel: the communication hook {name} has {result.numel()} numbers on {result.device}, and the "
                f"bucket {bucket.flat.numel()} on {bucket.flat.device}"
            )
        if result is not bucket.flat:
            bucket.flat.copy_(result.view(-1))


def _hook(came: Callable[[Bucket, int], None], bucket: Bucket, at: int) -> Callable[[Any], None]:
    """Returns a hook that does nothing once its DataParallel has gone, while the module lives on."""
    method = weakref.WeakMethod(came)
    held = weakref.ref(bucket)

    def hook(parameter: Any) -> None:
        call, there = method(), held()
        if call is not None and there is not None:
            call(there, at)

    return hook
