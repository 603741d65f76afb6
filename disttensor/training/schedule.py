"""When the groups of a model are gathered, freed and reduced: each before its turn, beside the computation of the one
before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..futures.work import Work
from .groups import ParameterGroup, ReducedGradients, same_state

#: The schedule of the forward pass under way: of the outermost module that is sharded.
running: ContextVar[GatherSchedule | None] = ContextVar("running", default=None)

#: Frozen groups that a backward pass has at a time: no gradient says when it has done with one.
_FROZEN = 2

#: A pass within a pass would end the other one's.
_NESTED = (
    "fully_shard: a backward pass ran inside of another one, and both have gradients of the module; "
    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
)


def in_backward() -> bool:
    """Returns whether a backward pass is under way, in which a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class GatherSchedule:
    """The groups of a model, in the order in which the last forward pass used them."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self.order = [group for group in groups if group.parts]
        self._seen: list[ParameterGroup] = []
        self._task = -1  #: autograd's number of the backward pass
        self._open = False
        self._there: list[ParameterGroup] = []  #: those that this backward pass has gathered
        self._reduced: list[ReducedGradients] = []  #: gradients on their way
        self._under_way: list[Work[Any]] = []
        for group in groups:
            group.schedule = self

    # ---- forward -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Is a forward pass of the outermost module."""
        self.end_failed_backward()
        token, self._seen = running.set(self), []
        try:
            yield
        finally:
            running.reset(token)
            for group in self.order:
                group.discard_unused_gather()  # what was begun, and not used
            self.order, self._seen = list(dict.fromkeys([*self._seen, *self.order])), []

    def pre_forward_unshard(self, group: ParameterGroup) -> None:
        """Has a group's modules have the whole parameters; begins to gather those of the next one."""
        if not group.parts:
            return
        group.schedule = self
        group.ready()
        self._seen.append(group)
        at = self.order.index(group) + 1 if group in self.order else len(self.order)
        if at < len(self.order):
            self.order[at].begin_all_gather(beside=True)
        group.unshard()

    # ---- backward ----------------------------------------------------------------------------------------------------

    def pre_backward_unshard(self, group: ParameterGroup) -> list[torch.Tensor]:
        """Returns the whole parameters for a backward pass, and begins to gather those that it uses next."""
        self._begin_backward()
        values = group.ready()
        if not group.parts:
            return values
        if group not in self._there:
            self._there.append(group)
            frozen = [g for g in self._there if not any(part.parameter.requires_grad for part in g.parts)]
            for old in frozen[:-_FROZEN]:
                self._free(old)
        at = self.order.index(group) if group in self.order else 0
        before = next((g for g in reversed(self.order[:at]) if g.saved), None)
        if before is not None:
            before.begin_all_gather(beside=True)
            if before not in self._there:
                self._there.append(before)
        return values

    def post_backward(self, group: ParameterGroup, grads: Sequence[torch.Tensor | None]) -> None:
        """Takes all gradients of a group: they are reduced beside the rest of the backward pass."""
        self._begin_backward()
        group.accumulate_unsharded_grads(grads)
        if group in self._there and group.values is None:
            self._there.remove(group)
        if group.reduces:
            self._reduce(group)

    def _reduce(self, group: ParameterGroup) -> None:
        reduced, works = group.reduce(beside=True)
        self._under_way += works
        for before in self._reduced:
            before.accumulate_grad()
        self._reduced = reduced

    def _begin_backward(self) -> None:
        if not in_backward():  # somebody looks at what autograd has saved
            return
        task = torch._C._current_graph_task_id()
        if task < self._task:
            raise RuntimeError(_NESTED)
        if task > self._task:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, task))
            self._task, self._open = task, True

    @torch.no_grad()
    def _end_backward(self, task: int) -> None:
        """Ends a backward pass."""
        if task != self._task:
            raise RuntimeError(_NESTED)
        for group in self.order:
            if group.reduces and group.waits:  # of passes before this one, which has not used it
                self._reduce(group)
        for reduced in self._reduced:
            reduced.accumulate_grad()
        self._reduced = []
        for group in list(self._there):
            self._free(group)
        for group in self.order:
            group.saved = False
        self._open, self._under_way = False, self._under_way[-1:]

    def _free(self, group: ParameterGroup) -> None:
        self._there.remove(group)
        if group.after_backward and not group.held:
            group.reshard()

    def end_failed_backward(self) -> None:
        """Ends a backward pass that failed: what it has begun to reduce has been when this returns."""
        if self._open and not in_backward():
            works, self._under_way = self._under_way, []
            self._open, self._reduced = False, []
            for group in self.order:
                group.reset_after_failure()
            for work in works:
                work.wait()


class Saving(saved_tensors_hooks):
    """Has autograd save of a group's whole parameters only which they are; of other tensors what it would save."""

    def __init__(self) -> None:
        outer = _top()
        keep, give = outer if outer is not None else (_kept, _as_it_is)
        super().__init__(_Pack(keep), lambda kept: kept.unpacked() if isinstance(kept, _Kept) else give(kept))

    @staticmethod
    def on() -> bool:
        """Returns whether it is the innermost of such hooks, for nothing else is asked."""
        top = _top()
        return top is not None and isinstance(top[0], _Pack)

    @staticmethod
    def in_checkpoint() -> bool:
        """Returns whether a checkpoint is around what runs now, and nearer than any other such hooks."""
        top = _top()
        return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


class _Pack:
    def __init__(self, keep: Any) -> None:
        self._keep = keep

    def __call__(self, x: torch.Tensor) -> Any:
        base: Any = x._base if x._is_view() else x
        found = getattr(base, "_whole", None)
        if found is None or x.is_conj() or x.is_neg() or x.dtype is not base.dtype:
            return self._keep(x)
        group, i = found
        group.saved = True
        return _Kept(group, i, group.gathered, tuple(x.shape), x.stride(), int(x.storage_offset()))


class _Kept:
    """The name of a whole parameter, or of a view of one, that autograd has saved."""

    def __init__(
        self, group: ParameterGroup, i: int, state: Any, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> None:
        self._group, self._i, self._state = group, i, state
        self._geometry = shape, stride, offset

    def unpacked(self) -> torch.Tensor:
        with torch.no_grad():
            value = self._group.schedule.pre_backward_unshard(self._group)[self._i].detach()
            if not same_state(self._state, self._group.gathered):
                raise RuntimeError(
                    f"fully_shard: a parameter of the group of {self._group.parts[self._i].name!r} was written between "
                    "a forward pass and its backward pass, which needs the values of before; step the optimizer after "
                    "backward()"
                )
            if (tuple(value.shape), value.stride(), int(value.storage_offset())) == self._geometry:
                return value  # type: ignore[no-any-return]
            return value.as_strided(*self._geometry)  # type: ignore[no-any-return]


def _top() -> Any:
    """Returns the functions by which autograd saves tensors now, if they are a program's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def _kept(x: torch.Tensor) -> torch.Tensor:
    # a result would hold the function that has made it, and that the result
    return x.detach() if x.grad_fn is not None else x


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x
