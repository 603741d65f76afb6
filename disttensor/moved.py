"""Modules that documented programs import by names of before: found under their new names for one release, with a
warning."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

#: Old name -> new one, both below the package.
MOVED = {
    "functional": "collectives.functional",
    "selfcheck": "verify.selfcheck",
    "runtime.bundle": "runtime.protocol.bundle",
    "runtime.errors": "runtime.protocol.errors",
    "runtime.channel.check": "runtime.contracts.data_channel",
    "runtime.launch.base": "runtime.host.launcher",
    "runtime.launch.check": "runtime.contracts.launcher",
    "runtime.launch.lines": "runtime.launch.output.lines",
    "runtime.launch.printer": "runtime.launch.output.printer",
    "runtime.launch.process": "runtime.process.lifetime",
    "runtime.launch.relay": "runtime.launch.output.relay",
    "runtime.launch.spawn": "runtime.launch.tree.spawn",
    "runtime.worker": "runtime.node.worker",
}


class _Finder:
    """Asked last, so that nothing else costs anything."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "disttensor" or name not in MOVED:
            return None
        import warnings

        new = f"disttensor.{MOVED[name]}"
        warnings.warn(
            f"{fullname} has moved: import {new} instead; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return ModuleSpec(fullname, _Alias(new))  # type: ignore[arg-type]


class _Alias:
    """Loads a module by being another."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import system has given it the old name's


def install() -> None:
    """Has old names found."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
