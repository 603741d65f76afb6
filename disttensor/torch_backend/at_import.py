"""Calls functions as soon as a module of torch's, or on it, is imported: at once, or when somebody imports it later.

Torch is given the device "node" in this way. Importing disttensor imports no torch: dtrun and agents do without, and
start in a tenth of a second.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importlib.abc takes as long as the rest of this together
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def watch() -> None:
    """Has the device named when torch is imported.

    Does nothing in a process that entry.py runs: nodes and the processes that start them have no use for the name.
    """
    if getattr(sys.modules.get("__main__"), "NAMES_NO_DEVICE", False):
        return
    after("torch", _name)


def after(name: str, then: Callable[[], None]) -> None:
    """Calls ``then`` once: now, if the module of this name is imported already, else before its import returns.

    That import raises the error of ``then``, if it fails.
    """
    if name in sys.modules:
        then()
    else:
        _wait(name, then)


def _wait(name: str, then: Callable[[], None]) -> None:
    _awaited[name] = then
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def drop_awaited() -> None:
    """Forgets all awaited modules: this process has become a node's, and is to import torch as it is."""
    _awaited.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _name() -> None:
    from .naming import at_import

    at_import()


class _Finder:
    """A finder of awaited modules: it finds each once, as others do, with a loader that calls ``then`` after its
    import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then = _awaited.pop(fullname, None)
        if then is None:
            return None
        if not _awaited:
            drop_awaited()
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            _wait(fullname, then)
        else:
            spec.loader = _Loader(spec.loader, then)  # type: ignore[assignment]
        return spec


class _Loader:
    """A loader that calls ``then`` once the original loader has run the module."""

    def __init__(self, original: Loader, then: Callable[[], None]) -> None:
        self._original, self._then = original, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        try:
            self._original.exec_module(module)
        except BaseException:
            _wait(module.__name__, self._then)  # the next import may succeed
            raise
        self._then()


_finder = _Finder()
#: The names of awaited modules, and the function to call for each.
_awaited: dict[str, Callable[[], None]] = {}
