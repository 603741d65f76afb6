"""Which of the user's modules have changed since nodes imported them: by %autoreload, by importlib.reload.

A function of a module goes to a node by its name, and the node imports the module, once. When the master's own has been
reloaded since, nodes would run the old one. This finds such modules out; what they define then goes by value, as what
is defined in a notebook's cell or a script always does. Only what is reloaded here counts: that a file was edited while
a script runs changes nothing for either side.
"""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple


class _Seen(NamedTuple):
    """A module when nodes may first have imported it."""

    spec: Any  #: another object after a reload (which equals this one)
    code: list[Any]
    needs: frozenset[str]  #: the user's modules of which something is in it

    def is_still(self, module: ModuleType | None) -> bool:
        return module is not None and module.__spec__ is self.spec and _code(module) == self.code


class Modules:
    """Those of one session's nodes."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def note(self, value: FunctionType | type | ModuleType) -> None:
        """This goes to a node now, so its module does as well, and what that uses."""
        self._note(value.__name__ if isinstance(value, ModuleType) else value.__module__)

    def _note(self, name: str) -> None:
        if name in self._seen or (module := _users(name)) is None:
            return
        needs = {other for value in list(vars(module).values()) if (other := _home(value)) not in (name, "")}
        self._seen[name] = _Seen(module.__spec__, _code(module), frozenset(needs))
        for other in needs:
            self._note(other)

    def stale(self) -> list[ModuleType]:
        """Those that have changed since, and those that use one of these."""
        names = {name for name, seen in self._seen.items() if not seen.is_still(sys.modules.get(name))}
        while more := {name for name, seen in self._seen.items() if name not in names and seen.needs & names}:
            names |= more
        return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _users(name: str) -> ModuleType | None:
    """The module of this name if it is one of the user's own, not of a library's."""
    module = sys.modules.get(name)
    if module is None or name == "__main__" or name.partition(".")[0] == "disttensor":
        return None
    file = getattr(module, "__file__", None) or ""
    return module if file.endswith(".py") and not file.startswith(_libraries()) else None


@cache
def _libraries() -> tuple[str, ...]:
    paths = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
    return tuple(f"{path}/" for path in paths)


def _home(value: object) -> str:
    """The name of the module that something in a module's namespace comes from, or is."""
    if isinstance(value, ModuleType):
        return value.__name__
    return value.__module__ if isinstance(value, (FunctionType, type)) else ""


def _code(module: ModuleType) -> list[Any]:
    """Of its functions and methods. IPython's %autoreload gives them new code where it can, without a reload."""
    if "IPython" not in sys.modules:
        return []
    codes: list[Any] = []
    for value in list(vars(module).values()):
        if not isinstance(value, ModuleType) and _home(value) == module.__name__:
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            codes += [member.__code__ for member in members if isinstance(member, FunctionType)]
    return codes
