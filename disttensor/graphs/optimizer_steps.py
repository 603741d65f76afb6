"""Optimizers in a recording: their hyperparameters and counts of steps are numbers that each replay gives anew.

A step's hyperparameters are read from ``param_groups`` at each replay, so that a schedule of learning rates works as it
does in eager. The counts (``state["step"]``, local tensors) advance as in eager steps. Other state that an optimizer
keeps on the master and changes would stand still in a replay, so such an optimizer is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from .. import torch_patches
from ..runtime.master.route import route
from ..runtime.protocol.errors import GraphError
from .traced_numbers import Number, Tape

_original: Callable[[Any], Any] = torch_optimizer._get_value
_installed = False


class Steps:
    """The optimizers of one recording."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._counters: dict[int, _Counter] = {}
        self._before: dict[tuple[int, Any], tuple[Any, Any]] = {}
        self._swapped: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._groups: list[dict[str, Any]] = []  #: the parameter groups of all steps
        #: (counts of steps, by how much a replay advances them)
        self.advances: list[tuple[list[torch.Tensor], float]] = []

    def enter(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins a step: notes the optimizer's local state, and puts Numbers in place of its hyperparameters."""
        self._before = {(p, key): (value, _local(value)) for p, key, value in _kept(optimizer)}
        for group in optimizer.param_groups:
            originals = {k: v for k, v in group.items() if k != "params"}
            self._swapped.append((group, originals))
            self._groups.append(group)
            for key, value in originals.items():
                if isinstance(value, torch.Tensor) and not _is_elsewhere(value):
                    raise GraphError(
                        f"{type(optimizer).__name__} has its {key!r} in a tensor of the master's, which a graph would "
                        "record as it is now; give a float"
                    )
                group[key] = self._declared(group, key, value)

    def _declared(self, group: dict[str, Any], key: str, value: Any) -> Any:
        if type(value) is float:
            return self._tape.root(value, lambda: group[key])
        if type(value) is tuple:
            return tuple(
                self._tape.root(v, partial(lambda i: group[key][i], i)) if type(v) is float else v
                for i, v in enumerate(value)
            )
        return value

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends a step: puts the hyperparameters back, and finds the counts of steps.

        Raises GraphError for local state that changed in a way that a replay would not repeat.
        """
        self._put_back()
        name = type(optimizer).__name__
        for p, key, value in _kept(optimizer):
            if (p, key) not in self._before:
                raise GraphError(
                    f"{name} made its state ({key!r}) in the recording, and so would each replay; take a step before"
                )
            kept, before = self._before[p, key]
            after = _local(value)
            if before is None and after is None:
                continue
            if before is None or after is None or (kept is not value and after != before):
                raise GraphError(f"{name} keeps {key!r} on the master and replaces it, which a replay would not do")
            if after == before:
                continue
            if not isinstance(value, torch.Tensor) or value.dim() or after - before != 1.0:
                raise GraphError(
                    f"{name} keeps {key!r} on the master and changes it, which a replay would not do"
                    " (only counts of steps are followed); try capturable=True"
                )
            self._counter(value, before).steps += 1

    def _counter(self, tensor: torch.Tensor, before: float) -> _Counter:
        found = self._counters.get(id(tensor))
        if found is None:
            found = self._counters[id(tensor)] = _Counter(tensor, before, self._tape.root(before, tensor.item))
        return found

    def read(self, tensor: torch.Tensor) -> Any:
        """Returns the value of one of its counts of steps to an optimizer: a Number."""
        known = self._counters.get(id(tensor))
        if known is None:
            before = next((b for kept, b in self._before.values() if kept is tensor), None)
            if before is None:
                return tensor.item()  # made in the recording; `leave` refuses that
            known = self._counter(tensor, before)
        return known.root + (tensor.item() - known.start)

    def _put_back(self) -> None:
        while self._swapped:
            group, originals = self._swapped.pop()
            group.update(originals)

    def restore(self) -> None:
        """Puts everything on the master back as it was before the recording. Called at its end."""
        self._put_back()
        for group in self._groups:
            for key, value in group.items():
                if isinstance(value, tuple):
                    group[key] = tuple(_plain(v) for v in value)
                else:
                    group[key] = _plain(value)
        by: dict[int, list[torch.Tensor]] = {}
        with torch.no_grad():
            for kept, before in self._before.values():  # in case a step failed in the middle
                if isinstance(kept, torch.Tensor) and before is not None and not kept.dim():
                    kept.fill_(before)
            for counter in self._counters.values():
                counter.tensor.fill_(counter.start)
        for counter in self._counters.values():
            if counter.steps:
                by.setdefault(counter.steps, []).append(counter.tensor)
        self._before.clear()
        self.advances = [(tensors, float(steps)) for steps, tensors in by.items()]

    def advance(self) -> None:
        """Advances the counts of steps by a replay's steps."""
        for tensors, steps in self.advances:
            with torch.no_grad():
                torch._foreach_add_(tensors, steps)


class _Counter:
    def __init__(self, tensor: torch.Tensor, start: float, root: Number) -> None:
        self.tensor = tensor
        self.start = start
        self.root = root
        self.steps = 0


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, Any, Any]]:
    for p, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, dict) else ():
            yield id(p), key, value


def _local(value: Any) -> Any:
    """Returns a copy of a value that is on the master; None for other values."""
    if isinstance(value, torch.Tensor):
        if _is_elsewhere(value):
            return None
        return value.item() if value.dim() == 0 else value.tolist()
    return value if isinstance(value, (int, float)) else None


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is on a node or a mesh: a proxy, or one that torch makes of such, as a DTensor."""
    return tensor.device.type == "node"


def _plain(value: Any) -> Any:
    """Returns the real value of a number that the user declared and gave to an optimizer; other values as they are."""
    return value.real_value if type(value) is Number else value


def _recording() -> Any:
    return route.get().recorder


def install() -> None:
    """Installs the hooks by which optimizers call this file while a thread records. Called by the first recording."""
    global _installed
    if _installed:
        return
    _installed = True
    torch_optimizer.register_optimizer_step_pre_hook(_pre)
    torch_optimizer.register_optimizer_step_post_hook(_post)
    torch_patches.install(torch_patches.RECORDING)


def get_value(original: object) -> Callable[[Any], Any]:
    """Returns the replacement for the function by which optimizers read their numbers."""
    return _get_value


def _pre(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (recorder := _recording()) is not None:
        recorder.steps.enter(optimizer)


def _post(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (recorder := _recording()) is not None:
        recorder.steps.leave(optimizer)


def _get_value(x: Any) -> Any:
    recorder = _recording()
    if recorder is None or not isinstance(x, torch.Tensor) or _is_elsewhere(x):
        return _original(x)
    return recorder.steps.read(x)
