"""Finds names of the first level by their old names, for one release, with a warning that says the new name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: Old name at the first level -> new one, below the package.
NAMES = {
    "check": "verify.check",
    "connect": "tasks.connect",
    "here": "tasks.here",
    "is_initialized": "session.is_initialized",
    "reduce_scatter": "collectives.reduce_scatter",
    "replicate": "meshes.replicate",
    "varying": "meshes.varying",
}


def name(old: str) -> Any:
    """Returns the object that the first level called ``old``, and warns the caller's caller of its new name."""
    import warnings

    new = NAMES[old]
    warnings.warn(
        f"disttensor.{old} is disttensor.{new} now; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    module, _, attribute = new.rpartition(".")
    return getattr(import_module(f"disttensor.{module}"), attribute)
