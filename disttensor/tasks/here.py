"""``dt.here()``: where the code that calls it runs, in the script or in a function on a node."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.node import where


@dataclass(frozen=True)
class Here:
    """A place where code runs, of the script or of a node."""

    node: int | None  #: the node's number; None in the script
    device: torch.device  #: the node's default device, as torch names it there; in the script the CPU
    host: str  #: the host's name
    coordinates: dict[str, int] = field(default_factory=dict)  #: by dim of the mesh on which the function was run

    def __getitem__(self, dim: str) -> int:
        """Returns the coordinate along a dim of the mesh. Raises KeyError where there is no such dim."""
        if dim not in self.coordinates:
            dims = ", ".join(self.coordinates) or "no dims: the function was not run on a mesh (dt.run(fn, node=mesh))"
            raise KeyError(f"here there is no dim {dim!r}, but {dims}")
        return self.coordinates[dim]


def here() -> Here:
    """Returns where the calling code runs: the node, its device and host, and its coordinates on a mesh.

        >>> dt.run(lambda: dt.here().node, node=1)
        1
        >>> mesh = dt.mesh(dp=2)
        >>> dt.run(lambda: dt.here()["dp"], node=mesh)
        [0, 1]
        >>> print(dt.here().node)
        None

    Does not wait, and needs no session. In a thread that a function starts it knows the node, and no coordinates.
    """
    found: Any = where.found()
    host = os.uname().nodename
    if found is None:
        return Here(None, torch.device("cpu"), host)
    return Here(found.node, torch.device(found.device), host, dict(found.coordinates))
