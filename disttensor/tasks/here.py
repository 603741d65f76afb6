"""``dt.tasks.here()``: where the code that calls it runs, in the script or in a function on a node."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..runtime.master.node import Node
from ..runtime.node import where
from ..session import current


@dataclass(frozen=True)
class Here:
    """A place where code runs, of the script or of a node."""

    node: int | None  #: the node's number; None in the script
    device: torch.device  #: the node's default device, as torch names it there; in the script the CPU
    host: str  #: the host's name
    coordinates: dict[str, int] = field(default_factory=dict)  #: by dim of the mesh on which the function was run
    world_size: int = 0  #: how many nodes there are, without those that are lost: see ``here``

    def __getitem__(self, dim: str) -> int:
        """Returns the coordinate along a dim of the mesh. Raises KeyError where there is no such dim."""
        if dim not in self.coordinates:
            dims = ", ".join(self.coordinates) or "no dims: the function was not run on a mesh (dt.run(fn, node=mesh))"
            raise KeyError(f"here there is no dim {dim!r}, but {dims}")
        return self.coordinates[dim]


def here() -> Here:
    """Returns where the calling code runs: the node, its device and host, and its coordinates on a mesh.

        >>> dt.run(lambda: dt.tasks.here().node, node=1)
        1
        >>> mesh = dt.mesh(dp=2)
        >>> dt.run(lambda: dt.tasks.here()["dp"], node=mesh)
        [0, 1]
        >>> print(dt.tasks.here().node)
        None

    Its ``world_size`` is how many nodes there are, without those that are lost: in the script when this is called (0
    without a session), in a function when the script issued it, whatever comes or is lost afterwards. The numbers of
    nodes stay what they are, so after a loss one may be as large as ``world_size``, or larger.

        >>> dt.run(lambda: (dt.tasks.here().node, dt.tasks.here().world_size), node=[0, 1])
        [(0, 2), (1, 2)]

    Does not wait, and needs no session. In a thread that a function starts it knows the node, its coordinates not, and
    as many nodes as the last function of the node.
    """
    found: Any = where.found()
    host = os.uname().nodename
    if found is None:
        there = world_size(current.session().nodes) if current.is_initialized() else 0
        return Here(None, torch.device("cpu"), host, world_size=there)
    return Here(found.node, torch.device(found.device), host, dict(found.coordinates), found.world_size)


def world_size(nodes: Iterable[Node]) -> int:
    """Returns how many of a session's nodes are not lost."""
    return [node.lost for node in nodes].count(None)
