"""``Module.to`` of modules whose parameters can't become others in place: TorchScript's, and any that a profile sees.

A ScriptModule's parameters are C++'s; the Python objects that it shows are made when they are asked for, so that what
becomes of them changes nothing. And a profile with shapes refers to the tensors that it has seen, which torch does not
exchange then. Modules get new parameters there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch

from ..proxy.proxy import OWN, DistributedTensor
from ..runtime.process.signals import uninterrupted


def applying(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Does as torch's own; TorchScript's modules get tensors on nodes as new parameters, and so do modules that a
        profile sees: whatever else has had the old ones has the new ones then."""
        if not isinstance(self, torch.jit.ScriptModule):
            names, before = list(self._parameters), list(self._parameters.values())
            moved = original(self, fn, recurse)
            if not torch.__future__.get_overwrite_module_params_on_conversion():
                _follow(self._parameters, names, before)
            return moved
        for child in self.children() if recurse else ():
            child._apply(fn)
        for slots in (self._parameters, self._buffers):
            for name, tensor in list(slots.items()):
                if tensor is not None:
                    _put(slots, name, tensor, fn)
        return self

    return _apply


def _put(slots: Any, name: str, tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        value = fn(tensor)
        if not isinstance(tensor, DistributedTensor) and not isinstance(value, DistributedTensor):
            tensor.data = value  # the C++ tensor itself, which whoever has it goes on with, as torch does
            if tensor.grad is not None:
                tensor.grad.data = fn(tensor.grad)
            return
        new = torch.nn.Parameter(value, tensor.requires_grad) if tensor.requires_grad else value
        if tensor.grad is not None:
            new.grad = fn(tensor.grad)
    slots[name] = new


@uninterrupted
def unexchangeable(tensor: torch.Tensor) -> bool:
    """Returns whether a profile, which may have ended, refers to a parameter or a gradient, and whatever else does can
    be given another one in its place: modules, optimizers, and all that has it in a dict or a list."""
    other = torch.empty(0)
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks or weakref.getweakrefcount(tensor):
            return False  # which would be left with the old one
        others = [each for each in gc.get_referrers(tensor) if not isinstance(each, (FrameType, dict, list))]
        # torch's loop over a module's parameters has a pair at the moment
        return len(others) <= 1 and all(isinstance(each, tuple) for each in others)
    torch._C._swap_tensor_impl(tensor, other)
    return False


def _follow(parameters: dict[str, Any], names: list[str], before: list[Any]) -> None:
    """Has everything that has had a module's parameters have those that torch has put in their place."""
    given: dict[int, tuple[Any, Any]] = {}
    for name, old in zip(names, before, strict=True):
        new = parameters.get(name)
        if old is new or isinstance(old, DistributedTensor) == isinstance(new, DistributedTensor):
            continue
        if id(old) in given:  # one parameter by two names
            parameters[name] = given[id(old)][1]
            continue
        given[id(old)] = old, new
        new.__dict__.update((k, v) for k, v in old.__dict__.items() if k not in OWN)

    def now(value: Any) -> Any:
        return given[id(value)][1] if id(value) in given else value

    for holder in gc.get_referrers(*[old for old, _ in given.values()]) if given else ():
        if isinstance(holder, list):
            holder[:] = map(now, holder)
        elif isinstance(holder, dict):
            if any(id(key) in given for key in holder):  # an optimizer's states are by parameter, in their order
                items = list(holder.items())
                holder.clear()
                holder.update((now(key), value) for key, value in items)
            for key, value in holder.items():
                if id(value) in given:
                    holder[key] = now(value)


def loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Loads a TorchScript program; its tensors go to a node from here."""
        device = torch.device(map_location) if isinstance(map_location, str) else map_location
        if getattr(device, "type", "") != "node":
            return original(f, map_location, *args, **kwargs)
        return original(f, "cpu", *args, **kwargs).to(device)

    return load


def saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Writes a module with its tensors as they are here: those on nodes as copies on the CPU, so that the file
        loads where there are no nodes."""
        with _here(self):
            return original(self, *args, **kwargs)

    return save


@contextmanager
def _here(module: torch.jit.ScriptModule) -> Iterator[None]:
    slots: list[tuple[Any, str, Any]] = [
        (owner, name, tensor)
        for each in module.modules()
        for owner in (each._parameters, each._buffers)
        for name, tensor in owner.items()
        if isinstance(tensor, DistributedTensor)
    ]
    try:
        for owner, name, tensor in slots:
            local = tensor.detach().cpu()
            owner[name] = torch.nn.Parameter(local) if tensor.requires_grad else local
        yield
    finally:
        for owner, name, tensor in slots:
            owner[name] = tensor
