"""Backward passes over proxies.

Two traps of torch's Python backends (seen on torch 2.11 to 2.13) are handled here:

- the autograd engine has one device thread for such a backend and asserts on index > 0, so multithreading is switched
  off in the calling thread for the length of a backward that meets proxies;
- an exception that passes through C++ in a backward unwinds through the device guard, a noexcept function that asks
  for the guard's ``type_`` while the error is pending, and that kills the process. The lookup of ``type_`` takes the
  pending error away and keeps it; the wrapper of the engine's entry raises it once C++ has unwound.

An exception of a signal's handler while C++ asks (in a forward too, for each output that needs a gradient) would also
end in such a noexcept function, so no handler runs between the lookup and the answer.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph

from ..dispatch.call_site import backwards, here, runs_backwards
from ..proxy.proxy import DistributedTensor
from ..runtime.process.signals import held, uninterrupted

_kept = threading.local()
_poke = [None]


class ConstantMethod:
    """A method that returns a constant to C++, which looks it up and then calls it."""

    def __init__(self, value: Any) -> None:
        @uninterrupted
        def answer(index: int = 0) -> Any:
            held[0] = False
            return value

        self._answer = answer

    @uninterrupted
    def __get__(self, asked: Any, kind: Any = None) -> Any:
        try:
            # -1 is also how C says "failed", so list's subscript checks PyErr_Occurred(); with an error pending it
            # raises that one, which is caught here. Nothing may be called before this while an error is set
            _poke[-1]
        except BaseException as error:
            _keep(error)
        held[0] = True  # pybind11 checks for signals before it calls, in the user's frame
        return self._answer


class Guard(torch._C._acc.DeviceGuard):
    """The device guard, which torch asks also while an exception unwinds."""

    type_ = ConstantMethod(torch._C._autograd.DeviceType.PrivateUse1)


class Hooks(torch._C._acc.PrivateUse1Hooks):
    """The answers to C++'s questions about the device type."""

    is_available = ConstantMethod(True)
    has_primary_context = ConstantMethod(True)
    is_built = ConstantMethod(True)


def _keep(error: BaseException) -> None:
    """Keeps an error of this thread's backward."""
    trace = error.__traceback__
    errors = getattr(_kept, "errors", None)
    if errors is None:
        errors = _kept.errors = []
    # without __get__ at the head of its traceback
    errors.append(error.with_traceback(trace.tb_next if trace is not None else None))


def run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the wrapper of the engine's entry, through which every backward and grad goes."""
    local_threads = torch.accelerator.device_count() > 0  # without local devices the switch affects no other backward

    def run(*args: Any, **kwargs: Any) -> Any:
        if local_threads and not reaches_a_node(args[0]):
            return original(*args, **kwargs)
        outer = getattr(_kept, "errors", None)
        _kept.errors = []
        multithreaded = torch.autograd.is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        frame = id(sys._getframe())
        backwards[frame] = here(1)
        try:
            return original(*args, **kwargs)
        except BaseException as e:
            errors = _kept.errors
            if errors:
                raise errors[0] from None
            raise e
        finally:
            del backwards[frame]
            torch._C._set_multithreading_enabled(multithreaded)
            _kept.errors = outer

    runs_backwards(run.__code__)
    return run


def reaches_a_node(roots: Any) -> bool:
    """Returns whether a backward from these tensors (or edges of the graph) meets a proxy."""
    if any(type(root) is DistributedTensor for root in roots):
        return True
    found = {root.node if isinstance(root, torch.autograd.graph.GradientEdge) else root.grad_fn for root in roots}
    todo = list(found)
    while todo:
        function = todo.pop()
        if function is None:
            continue
        if any(m.device.type == "node" for m in function._input_metadata):
            return True
        new = {following for following, _ in function.next_functions} - found
        found |= new
        todo += new
    return False
