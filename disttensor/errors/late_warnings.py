"""Warnings that are found after the line that caused them: by a finalizer, or by a node.

They wait here for the next call that may raise: a collective, a wait, or the end of the session (``show_warnings``).
There they are warnings at the line that caused them, by the filters of that moment, so that an error that a filter
makes of one is raised in the thread whose line it was, between two commands.
"""

from __future__ import annotations

import builtins
import logging
import sys
import threading
import warnings
from collections import deque
from types import ModuleType
from typing import Any, NamedTuple

from ..runtime.master.failures import Replayed, Site, line_number, line_of
from ..runtime.protocol import commands as c
from ..runtime.protocol.failure_ids import position

_log = logging.getLogger("disttensor")

_KNOWN: dict[str, type[Warning]] = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, Warning)
}


class Late(NamedTuple):
    """One warning, and the line that caused it."""

    text: str
    category: type[Warning] | str  #: a class, or the name of one that a node has said
    site: Site
    thread: int  #: that is to hear of it; 0 for any
    module: str = ""  #: the module that has warned, where that is not the site's


#: The most warnings that wait, of which the oldest are dropped, and the most characters of one: a node may send any.
_MOST, _LONGEST = 1_000, 4_096
#: The warnings that nobody was given yet. Appending takes no lock, so that finalizers may.
pending: deque[Late] = deque(maxlen=_MOST)


def warn_later(text: str, site: Site, category: type[Warning] = UserWarning, thread: int = 0) -> None:
    """Keeps a warning for the next ``show_warnings`` of ``thread``, or of any."""
    pending.append(Late(text, category, site, thread))


def keep_warning(told: c.Warned, rank: int, site: Site | None) -> None:
    """Takes a warning of the node ``rank``. One of a replay is at the line of that, and names the recorded one."""
    text, at = told.text[:_LONGEST], position(told.seq)[1]
    if isinstance(site, Replayed) and 0 <= at < len(recorded := site.recorded.get(rank, ())):
        text = f"{text} (recorded: {line_of(recorded[at])})"
    if site is None:
        _log.warning("%s: %s", told.kind, text)
    else:
        pending.append(Late(text, told.kind, site, 0, told.module))


def show_warnings(everything: bool = False) -> None:
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
    scope = _scope_of(code.co_filename)
    warning = _made(late)
    if late.module and _is_ignored(warning, late.module):
        return
    try:
        warnings.warn_explicit(
            warning,
            type(warning),
            code.co_filename,
            line_number(late.site),
            module=scope.get("__name__"),
            registry=scope.setdefault("__warningregistry__", {}),
        )
    except Warning as e:  # which a filter has made of it
        e.add_note(f"  issued: {line_of(late.site)}")
        raise


def _is_ignored(warning: Warning, module: str) -> bool:
    """Returns whether the filters of this process say that a warning of a line of ``module`` is not for the user."""
    for action, text, category, where, line in warnings.filters:
        if (
            isinstance(warning, category)
            and (text is None or text.match(str(warning)))
            and (where is None or (where.match(module) if hasattr(where, "match") else where == module))
            and line == 0
        ):
            return action == "ignore"
    return False


def _made(late: Late) -> Warning:
    """Makes the warning. Of a category that this process has no class of, or whose class takes no text, it is a
    UserWarning that names it."""
    category = late.category if isinstance(late.category, type) else _class_of(late.category)
    try:
        if category is not None:
            made = category(late.text)
            if str(made) == late.text:
                return made
    except Exception:
        _log.debug("%s takes no text", late.category, exc_info=True)
    return UserWarning(f"{late.category}: {late.text}")


def _class_of(name: str) -> type[Warning] | None:
    """Returns the category of this name, "module.Class" or "module.Outer.Class", of a module that has been imported:
    nothing is imported because a node has named it, nor asked of a module that loads what it is asked for."""
    if name in _KNOWN:
        return _KNOWN[name]
    module, dot, rest = name, ".", ""
    while dot:
        module, dot, part = module.rpartition(".")
        rest = f"{part}.{rest}" if rest else part
        found: Any = sys.modules.get(module)
        for each in rest.split(".") if found is not None else ():
            found = (_names(found) if isinstance(found, ModuleType) else found.__dict__).get(each)
            if not isinstance(found, type):
                break
        else:
            if isinstance(found, type):
                return found if issubclass(found, Warning) else None
    return None


def _names(module: ModuleType) -> dict[str, Any]:
    names: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return names


def _scope_of(filename: str) -> dict[str, Any]:
    """Returns the names of the module with a file's code: its record of warnings is the one that counts. Code of no
    file is a notebook's, or typed, which is the main module's."""
    # by type: an object of cffi's says that it is a module, and has no names of its own
    modules = (_names(m) for m in list(sys.modules.values()) if issubclass(type(m), ModuleType))
    return next((names for names in modules if names.get("__file__") == filename), _names(sys.modules["__main__"]))
