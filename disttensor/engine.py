"""Backward passes over proxies.

Two traps of torch's Python backends (seen on torch 2.11 to 2.13) are handled here:

- the autograd engine has one device thread for such a backend and asserts on index > 0, so multithreading is switched
  off in the calling thread for the length of a backward;
- an exception that passes through C++ in a backward unwinds through the device guard, a noexcept function that calls
  the guard's ``type_`` while the error is pending, and that kills the process. Our guard's ``type_`` first takes the
  pending error away (PyErr_Fetch) and keeps it; the wrapper of the engine's entry raises it once C++ has unwound.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch
import torch.autograd.graph

_api = ctypes.PyDLL(None)
_fetch = _api.PyErr_Fetch
_fetch.restype = None  # and no argtypes: their converters are Python calls, which fail while an error is set

_kept = threading.local()


class Guard(torch._C._acc.DeviceGuard):
    """The device guard that torch calls, while an exception unwinds as well."""

    def type_(self) -> Any:
        _fetch(_kind_slot, _value_slot, _trace_slot)  # nothing may run before this while an error is set
        if _slots.kind.value:
            _slots.keep()
        return _kind


class _Slots:
    """Three prebuilt pointers for PyErr_Fetch. One set per process is enough: it runs and is read under the GIL."""

    def __init__(self) -> None:
        self.kind, self.value, self.trace = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.pointers = tuple(ctypes.c_void_p(ctypes.addressof(slot)) for slot in (self.kind, self.value, self.trace))

    def keep(self) -> None:
        """Takes over the references that PyErr_Fetch handed out; keeps the first error of this thread."""
        kind, value, trace = (_own(slot) for slot in (self.kind, self.value, self.trace))
        if not isinstance(value, BaseException):
            value = kind(value) if value is not None else kind()
        if trace is not None:
            value = value.with_traceback(trace)
        errors = getattr(_kept, "errors", None)
        if errors is None:
            errors = _kept.errors = []
        errors.append(value)


def _own(slot: ctypes.c_void_p) -> Any:
    if not slot.value:
        return None
    pointer = ctypes.cast(slot.value, ctypes.py_object)
    value = pointer.value
    _decref(pointer)  # the one that PyErr_Fetch gave us; ``value`` holds its own
    slot.value = None
    return value


_decref = _api.Py_DecRef
_decref.argtypes = [ctypes.py_object]
_decref.restype = None
_slots = _Slots()
_kind_slot, _value_slot, _trace_slot = _slots.pointers
_kind: Any = torch._C._autograd.DeviceType.PrivateUse1


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
