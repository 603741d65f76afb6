"""Hears the warnings of torch's kernels, whoever calls them.

Torch makes Python's warnings of C++'s (TORCH_WARN) at the end of each call of a Python function of its own. An operator
that is called by ``torch.ops`` is not such a function: alone it prints, and within such a call it warns that one.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class CallbackOperand:
    """An operand that torch calls back in the middle of a call of its own; it runs ``call`` then."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: Exception | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        listener: CallbackOperand = args[0]
        try:
            listener._result = listener._call()
        except Exception as e:  # torch would print what it had to warn of
            listener._error = e

    def result(self) -> Any:
        """Returns what the call has returned, or raises what it has raised."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return self._result


def listening(module: str, record: object) -> Callable[[CallbackOperand], None]:
    """Returns a function that has torch call a listener. What kernels warn of there is a warning at a line of
    ``module``, of which ``record`` notes which have been shown."""
    # imports of the interpreter's own look for __builtins__ where the running function has its globals
    names = {"__builtins__": builtins, "__name__": module, "__warningregistry__": record, "torch": torch}
    return FunctionType(_call.__code__, names)


def _call(listener: Any) -> None:
    torch.abs(listener)


#: Where the record of warnings is none: each of them ends with an error, whatever the filters are. These are the
#: process's, and other threads have theirs.
_listen = listening(__name__, 0)


def heard(call: Callable[[], T]) -> tuple[T, bool]:
    """Returns what a call returns, and whether kernels in it warned, of which nobody else hears. Raises what it raises.

    Where a mode of the user's stands above torch's functions, or these call nobody back, it only calls.
    """
    if torch._C._len_torch_function_stack() or not torch._C._is_torch_function_enabled():
        return call(), False
    listener, warned = CallbackOperand(call), False
    try:
        _listen(listener)
    except TypeError:  # of the record
        warned = True
    return listener.result(), warned
