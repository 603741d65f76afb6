"""Tells the script, which knows the line, what its node's kernels and functions warn of.

A node calls operators, whose warnings torch prints. So the first call of each signature is heard, and each later one of
a template of which one has warned; the others cost nothing. What the script has foreseen it has warned of itself, and
the node drops it: such calls have templates of their own.

Nodes that are threads of the script share its filters, and its record of what was shown. They drop what the script has
foreseen, and leave the rest as it is.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import Finalize
from types import FrameType
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar

from ..process import role
from ..process.heard import CallbackOperand, heard, listening
from ..protocol import commands as c
from ..protocol.failure_ids import MAX_NAME, MAX_TEXT
from .call_forms import Run

Emit = Callable[[c.Reply], None]
#: The name of a category, a text and the module that warns.
Said: TypeAlias = tuple[str, str, str]

P = ParamSpec("P")
T = TypeVar("T")


class HeardTemplate(Protocol):
    """The part of a template (template.py) that hearing needs."""

    foreseen: bool
    loud: bool
    run: Run


class Loud(Exception):
    """Raised by a loud template in place of a call: the caller notes its number, and calls ``hear``."""


class _Current(threading.local):
    """The command whose warnings are this thread's."""

    tell: Callable[[str, str, str], None] | None = None


_current = _Current()


@contextmanager
def telling(emit: Emit, number: int) -> Iterator[None]:
    """Has what this thread warns of in a ``with`` block be told as warnings of command ``number``, each once."""
    said: set[c.Warned] = set()

    def tell(kind: str, text: str, module: str = "") -> None:
        text = text[:MAX_TEXT].encode("utf-8", "replace").decode()
        warned = c.Warned(number, kind[:MAX_NAME], text, module[:MAX_NAME])
        if warned not in said:
            if len(said) < _MOST:
                said.add(warned)
            emit(warned)

    before, _current.tell = _current.tell, tell
    try:
        yield
    finally:
        _current.tell = before


#: What Python ignores by default, at other places than the main module's lines.
_IGNORED = (DeprecationWarning, PendingDeprecationWarning)


def tell_warnings() -> None:
    """Has this process, which is a node, tell the script of Python's warnings while a command of its runs. Whether they
    are shown is for the script's filters; only what the environment of the node says of them holds here, and what
    functions do."""
    shown, process = warnings.showwarning, os.getpid()
    outside: set[tuple[str, str, int]] = set()
    for given in [
        *(("ignore", None, category, None, 0) for category in _IGNORED),
        ("default", None, DeprecationWarning, "__main__", 0),
    ]:
        with suppress(ValueError):
            warnings.filters.remove(given)  # type: ignore[attr-defined, unused-ignore]
    warnings.simplefilter("always", append=True)

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        tell = _current.tell
        if tell is None or file is not None or os.getpid() != process:  # a thread or a child of a function's
            place = (str(message), filename, lineno)
            if file is None and _kept is not None and len(_kept) < _MOST:
                _kept[_text_of_warning(message, category, filename, lineno)] = None
                return
            if file is None and (place in outside or issubclass(category, _IGNORED)):
                return
            if len(outside) < _MOST:
                outside.add(place)
            shown(message, category, filename, lineno, file, line)
        else:
            tell(*_text_of_warning(message, category, filename, lineno))

    warnings.showwarning = show


#: What this process, which reads samples for a node, has warned of and not given away: in order, each once. None in
#: another process.
_kept: dict[Said, None] | None = None


def keep_warnings() -> None:
    """Has this process, which a node has forked to read samples, keep Python's warnings for its node. What nobody asks
    for by its end is printed then."""
    global _kept
    if role.is_node():
        _kept = {}
        Finalize(None, _print_kept, exitpriority=0)


def take_kept() -> list[Said]:
    """Gives away what this process has kept since."""
    found = list(_kept or ())
    if _kept is not None:
        _kept.clear()
    return found


def tell_kept(kept: Iterable[Said]) -> None:
    """Tells what other processes have kept, as warnings of the command that this thread runs."""
    if _current.tell is not None:
        for said in kept:
            _current.tell(*said)


def _print_kept() -> None:
    for kind, text, _ in take_kept():
        print(f"{kind}: {text}", file=sys.stderr)


#: The package that calls kernels and functions.
_OURS = f"{__name__.partition('.')[0]}."
#: The most warnings of a command, and the most places outside of commands, that are known to have been there.
_MOST = 10_000


def _text_of_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> Said:
    """Returns what is told of a warning of Python's. For ``showwarning``, which calls this."""
    kind, module = f"{category.__module__}.{category.__qualname__}", _module_at(filename, lineno)
    if module.startswith(_OURS):  # a kernel's, or of a function about its caller, which is the script
        return kind, f"{message} (on a node)", ""
    return kind, f"{message} ({filename}:{lineno}, on a node)", module


def _module_at(filename: str, lineno: int) -> str:
    """Returns the name of the module whose line warns, as the filters of Python's warnings take it."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        if frame.f_lineno == lineno and frame.f_code.co_filename == filename:
            return str(frame.f_globals.get("__name__", "<string>"))
        frame = frame.f_back
    return filename.removesuffix(".py")


def hear(template: HeardTemplate, run: Run, call: c.Call, emit: Emit, number: int) -> Any:
    """Runs a template's first call, or one after a loud first call, and tells what kernels warn of, except what the
    script has foreseen."""
    if template.foreseen or not role.is_node():
        return run(call.out, call.args)
    result, told = heard_by(partial(run, call.out, call.args), emit, number)
    if told and not template.loud:
        template.loud, template.run = True, _raise_loud
    return result


def dropping(run: Callable[P, T]) -> Callable[P, T]:
    """Returns what runs calls whose warnings the script has foreseen."""
    return lambda *args, **kwargs: heard(partial(run, *args, **kwargs))[0]


def _raise_loud(out: int, args: Any) -> Any:
    raise Loud


def heard_by(call: Callable[[], T], emit: Emit, number: int) -> tuple[T, bool]:
    """Runs a call, and tells what kernels warn of. Returns the result, and whether they did."""
    listener = CallbackOperand(call)
    told: list[c.Reply] = []
    with telling(told.append, number):
        try:
            listening(__name__, {})(listener)
        except Warning as e:  # which this process's filters make an error; the call has been done
            assert _current.tell is not None
            _current.tell(f"{type(e).__module__}.{type(e).__qualname__}", f"{e} (on a node)", "")
    for reply in told:
        emit(reply)
    return listener.result(), bool(told)
