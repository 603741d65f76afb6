"""Warnings that are found after the line that caused them: by a finalizer, or by a node.

They wait here for the next call that may raise: a collective, a wait, or the end of the session (``give``). There they
are warnings at the line that caused them, by the filters of that moment, so that an error that a filter makes of one is
raised in the thread whose line it was, between two commands.
"""

from __future__ import annotations

import builtins
import logging
import sys
import threading
import warnings
from collections import deque
from types import ModuleType
from typing import NamedTuple

from ..runtime.master.failures import Site, line_number
from ..runtime.protocol import commands as c

_log = logging.getLogger("disttensor")

_KNOWN: dict[str, type[Warning]] = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Warning)
}


class Late(NamedTuple):
    """One warning, and the line that caused it."""

    text: str
    category: type[Warning]
    site: Site
    thread: int  #: that is to hear of it; 0 for any


#: The most warnings that wait, of which the oldest are dropped, and the most characters of one: a node may send any.
_MOST, _LONGEST = 1_000, 4_096
#: The warnings that nobody was given yet. Appending takes no lock, so that finalizers may.
pending: deque[Late] = deque(maxlen=_MOST)


def warn_later(text: str, site: Site, category: type[Warning] = UserWarning, thread: int = 0) -> None:
    """Keeps a warning for the next ``give`` of ``thread``, or of any."""
    pending.append(Late(text, category, site, thread))


def take(told: c.Warned, site: Site | None) -> None:
    """Takes a warning of a node's. Of a category that is not Python's own it is a UserWarning that names it."""
    category = _KNOWN.get(told.kind)
    text = (f"{told.kind}: {told.text}" if category is None else told.text)[:_LONGEST]
    if site is None:
        _log.warning("%s", text)
    else:
        warn_later(text, site, category or UserWarning)


def give(everything: bool = False) -> None:
    """Gives the warnings that wait for this thread, or all that wait. Raises what a filter makes an error; those behind
    it go on waiting."""
    mine = threading.get_ident()
    for _ in range(len(pending)):
        try:
            late = pending.popleft()
        except IndexError:  # another thread was faster
            return
        if everything or late.thread in (0, mine):
            _warn(late)
        else:
            pending.append(late)


def _warn(late: Late) -> None:
    code, _ = late.site
    module = _module_of(code.co_filename)
    scope = module.__dict__
    warnings.warn_explicit(
        late.text,
        late.category,
        code.co_filename,
        line_number(late.site),
        module=scope.get("__name__"),
        registry=scope.setdefault("__warningregistry__", {}),
        module_globals=scope,
    )


def _module_of(filename: str) -> ModuleType:
    """Returns the module with a file's code: its record of warnings is the one that counts. Code of no file is a
    notebook's, or typed, which is the main module's."""
    found = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == filename)
    return next(found, sys.modules["__main__"])
