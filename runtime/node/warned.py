"""Tells the script, which knows the line, what its node's kernels and functions warn of.

A node calls operators, whose warnings torch prints. So the first call of each signature is heard, and each later one of
a signature that has warned; the others cost nothing. What the script has foreseen it has warned of itself, and the node
drops it.

Nodes that are threads of the script share its filters, and its record of what was shown. They drop what the script has
foreseen, and leave the rest as it is.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..process import role
from ..process.heard import FILE, Listener, heard, listening
from ..protocol import commands as c
from ..protocol.failure_ids import MAX_NAME, MAX_TEXT
from .call_forms import Run

Emit = Callable[[c.Reply], None]

_shown: dict[Any, Any] = {}
#: Where what kernels warn of comes to ``showwarning``, or is an error.
_listen = listening(__name__, _shown)


class Loud(Exception):
    """Raised by a signature that warns, in place of a call: the caller notes its number, and calls ``run_loudly``."""


class _Current(threading.local):
    """The command whose warnings are this thread's."""

    tell: Callable[[str, str], None] | None = None


_current = _Current()


@contextmanager
def telling(emit: Emit, number: int) -> Iterator[None]:
    """Has what this thread warns of in a ``with`` block be told as warnings of command ``number``."""

    def tell(kind: str, text: str) -> None:
        text = text[:MAX_TEXT].encode("utf-8", "replace").decode()
        emit(c.Warned(number, kind[:MAX_NAME], text))

    before, _current.tell = _current.tell, tell
    try:
        yield
    finally:
        _current.tell = before


def tell_warnings() -> None:
    """Has this process, which is a node, tell the script of Python's warnings while a command of its runs."""
    shown, process = warnings.showwarning, os.getpid()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        tell = _current.tell
        if tell is None or file is not None or os.getpid() != process:  # a thread or a child of a function's
            shown(message, category, filename, lineno, file, line)
        else:
            where = "" if filename == FILE else f"{filename}:{lineno}, "
            tell(f"{category.__module__}.{category.__qualname__}", f"{message} ({where}on a node)")

    warnings.showwarning = show


Wrap = Callable[[Run], Run]


def run_first(run: Run, call: c.Call, emit: Emit, number: int, warned: bool) -> tuple[Any, Wrap | None]:
    """Runs a signature's first call, of which the script has ``warned`` or not. Returns the result, and what makes the
    function for later calls, if an ordinary one would not do."""
    if warned:
        return dropping(run)(call.out, call.args), dropping
    if not role.is_node():
        return run(call.out, call.args), None
    result, loud = run_loudly(run, call, emit, number)
    return result, (lambda run: _raise_loud) if loud else None


def dropping(run: Run) -> Run:
    """Returns what runs calls whose warnings the script has foreseen."""
    return lambda out, args: heard(partial(run, out, args))[0]


def _raise_loud(out: int, args: Any) -> Any:
    raise Loud


def run_loudly(run: Run, call: c.Call, emit: Emit, number: int) -> tuple[Any, bool]:
    """Runs a call, and tells what kernels warn of. Returns the result, and whether they did."""
    listener = Listener(partial(run, call.out, call.args))
    told: list[c.Reply] = []
    with telling(told.append, number):
        _shown.clear()
        try:
            _listen(listener)
        except Warning as e:  # which this process's filters make an error; the call has been done
            assert _current.tell is not None
            _current.tell(f"{type(e).__module__}.{type(e).__qualname__}", f"{e} (on a node)")
    for reply in told:
        emit(reply)
    return listener.result(), bool(told)
