"""Finds the user's modules that have changed since nodes imported them: by %autoreload, by importlib.reload.

A function of a module goes to a node by its name, and the node imports the module, once. When the master's module has
been reloaded since, nodes would run the old one. This file finds such modules; their functions and classes then go by
value, as those of a notebook's cell or a script always do. Only a reload in the script counts: a file that is edited
while a script runs changes nothing for either side.
"""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple


class _Seen(NamedTuple):
    """The state of a module when nodes may first have imported it."""

    spec: Any  #: another object after a reload (which equals this one)
    code: list[Any]
    needs: frozenset[str]  #: the user's modules from which it has imported something

    def is_still(self, module: ModuleType | None) -> bool:
        return module is not None and module.__spec__ is self.spec and _code(module) == self.code


class ReloadedModules:
    """The user's modules that the nodes of one session have, or may have."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def note_modules_of(self, value: FunctionType | type | ModuleType) -> None:
        """Notes that ``value`` goes to a node now, and with it its module and the modules that this uses."""
        self._note_module(value.__name__ if isinstance(value, ModuleType) else value.__module__)

    def _note_module(self, name: str) -> None:
        if name in self._seen or (module := _users(name)) is None:
            return
        needs = {other for value in list(vars(module).values()) if (other := _home(value)) not in (name, "")}
        self._seen[name] = _Seen(module.__spec__, _code(module), frozenset(needs))
        for other in needs:
            self._note_module(other)

    def stale(self) -> list[ModuleType]:
        """Returns the modules that have changed since, and those that use one of them."""
        names = {name for name, seen in self._seen.items() if not seen.is_still(sys.modules.get(name))}
        while more := {name for name, seen in self._seen.items() if name not in names and seen.needs & names}:
            names |= more
        return [sys.modules[name] for name in sorted(names) if name in sys.modules]


def _users(name: str) -> ModuleType | None:
    """Returns the module of this name if it is one of the user's own, not a library's; else None."""
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
    """Returns the name of the module that a value in a module's namespace comes from, or is."""
    if isinstance(value, ModuleType):
        return value.__name__
    return value.__module__ if isinstance(value, (FunctionType, type)) else ""


def _code(module: ModuleType) -> list[Any]:
    """Returns the code objects of a module's functions and methods: IPython's %autoreload replaces these where it can,
    without a reload. An empty list without IPython."""
    if "IPython" not in sys.modules:
        return []
    codes: list[Any] = []
    for value in list(vars(module).values()):
        if not isinstance(value, ModuleType) and _home(value) == module.__name__:
            members = list(vars(value).values()) if isinstance(value, type) else [value]
            codes += [member.__code__ for member in members if isinstance(member, FunctionType)]
    return codes
