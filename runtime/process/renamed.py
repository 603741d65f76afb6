"""Old names of classes, functions and methods that others may use or define: for one release they work, and warn."""

from __future__ import annotations

import sys
from abc import ABCMeta
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


def old_methods(base: type, cls: type, names: Mapping[str, str]) -> None:
    """Gives a class that extends ``base``, and defines methods by the names that they had there, these methods by the
    names of now as well, and warns of each. For ``__init_subclass__``. ``names``: old name -> new one."""
    import warnings

    for old, new in names.items():
        if old in vars(cls) and new not in vars(cls):
            warnings.warn(
                f"{cls.__qualname__}.{old}: {base.__name__}.{old} is {new} now; the old name goes with the next "
                "release",
                DeprecationWarning,
                stacklevel=4 if isinstance(cls, ABCMeta) else 3,  # whose ``__new__`` is a frame of its own
            )
            setattr(cls, new, vars(cls)[old])


def old_method(old: str, new: str) -> Callable[..., Any]:
    """Returns a method for the old name of one that others call: it calls that of the new name, and warns."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        import warnings

        warnings.warn(
            f"{type(self).__name__}.{old} is {new} now; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)(*args, **kwargs)

    return call
