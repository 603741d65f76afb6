"""Old names of classes and functions that others may have imported: found for one release, with a warning."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a module's ``__getattr__``, which finds what has another name now. ``names``: old name -> new one."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        import warnings

        warnings.warn(
            f"{module}.{name} is {names[name]} now; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[module], names[name])

    return find
