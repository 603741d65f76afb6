"""Has torch's operators replaced as soon as a program imports torch, where SIMCUDA_KERNELS is set."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def _replace_operators(torch: ModuleType) -> None:
    path = Path(__file__).parent.parent / "kernels.py"
    spec = importlib.util.spec_from_file_location("simcuda_kernels", path)
    kernels = importlib.util.module_from_spec(spec)
    sys.modules["simcuda_kernels"] = kernels
    spec.loader.exec_module(kernels)
    kernels.install()


def _leave_the_compiler(module: ModuleType) -> None:
    """Has torch's meta kernels not import the whole compiler at their first call, which takes six seconds of CPU."""

    def disable(fn: Any = None, recursive: bool = True) -> Any:
        return functools.partial(disable, recursive=recursive) if fn is None else fn

    module._disable_dynamo = disable


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[ModuleType], None]) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """It is asked for each of its modules once, and has the others find it."""

    wanted = {"torch": _replace_operators, "torch._compile": _leave_the_compiler}  # noqa: RUF012

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        then = self.wanted.pop(name, None)
        found = then and importlib.util.find_spec(name)
        if found:
            found.loader = _Loader(found.loader, then)
        return found


if os.environ.get("SIMCUDA_KERNELS"):
    sys.meta_path.insert(0, _Finder())
