"""Gives torch the device "node" as soon as torch is there: at once, or when somebody imports it.

Importing disttensor imports no torch: dtrun and agents do without, and start in a tenth of a second.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importlib.abc takes as long as the rest of this together
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def watch() -> None:
    """Has the device named. Not in a process that entry.py runs: nodes and those who start them have no use for it."""
    if getattr(sys.modules.get("__main__"), "NAMES_NO_DEVICE", False):
        return
    if "torch" in sys.modules:
        _name()
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget() -> None:
    """This process has become a node's, and is to import torch as it is."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _name() -> None:
    from .naming import at_import

    at_import()


class _Finder:
    """Finds torch as others do, once, and hears of the end of its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        forget()
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, original: Loader) -> None:
        self._original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        try:
            self._original.exec_module(module)
        except BaseException:
            sys.meta_path.insert(0, _finder)  # the next attempt may do better
            raise
        _name()


_finder = _Finder()
