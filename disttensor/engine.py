"""Backward passes over proxies.

Two traps of torch's Python backends (seen on torch 2.11 to 2.13) are handled here:

- the autograd engine has one device thread for such a backend and asserts on index > 0, so multithreading is switched
  off in the calling thread for the length of a backward;
- an exception that passes through C++ in a backward unwinds through the device guard, a noexcept function that calls
  the guard's ``type_`` while the error is pending, and that kills the process. Our guard's ``type_`` first takes the
  pending error away and keeps it; the wrapper of the engine's entry raises it once C++ has unwound.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.autograd.graph

_kept = threading.local()
_kind: Any = torch._C._autograd.DeviceType.PrivateUse1
_poke = [None]


class Guard(torch._C._acc.DeviceGuard):
    """The device guard that torch calls, while an exception unwinds as well."""

    def type_(self) -> Any:
        try:
            # -1 is also how C says "failed": list's subscript looks whether an error is set, finds the pending one and
            # takes it for its own. Nothing may be called before this while an error is set
            _poke[-1]
        except BaseException as error:
            _keep(error)
        return _kind


def _keep(error: BaseException) -> None:
    """Notes an error of this thread's backward."""
    trace = error.__traceback__
    errors = getattr(_kept, "errors", None)
    if errors is None:
        errors = _kept.errors = []
    # without type_ at the head of its traceback
    errors.append(error.with_traceback(trace.tb_next if trace is not None else None))


def install() -> None:
    """Wraps the entry of every backward and grad. A second call does nothing."""
    original = torch.autograd.graph._engine_run_backward
    if getattr(original, "_disttensor", False):
        return

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        outer = getattr(_kept, "errors", None)
        _kept.errors = []
        multithreaded = torch.autograd.is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        try:
            return original(*args, **kwargs)
        except BaseException as e:
            errors = _kept.errors
            if errors:
                raise errors[0] from None
            raise e
        finally:
            torch._C._set_multithreading_enabled(multithreaded)
            _kept.errors = outer

    run_backward._disttensor = True  # type: ignore[attr-defined]
    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
