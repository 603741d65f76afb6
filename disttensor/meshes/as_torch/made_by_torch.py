"""``init_device_mesh("node", (2, 4))`` in the script: torch makes a DeviceMesh of nodes, which is a mesh of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..mesh import mesh
from . import world


def setting_up(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``DeviceMesh._setup_world_group_and_device``, which begins with the process group of all ranks: for nodes
    it is that of ``dt.mesh`` with these dims.

    It raises DisttensorError without a session, and as ``world.begin_world``; ValueError for another number of ranks
    than the session has nodes, and for ranks in another order.
    """

    @wraps(original)
    def setup_world_group_and_device(self: Any) -> Any:
        if self._device_type != "node":
            return original(self)
        here = world.found()
        if self._root_mesh is None:
            ranks, sizes = self._rank_map.tolist(), self._layout.top_level_sizes
            if ranks != list(range(len(ranks))) or len(ranks) != self._layout.numel():
                raise ValueError(
                    f"a DeviceMesh of nodes has their ranks in order, not {ranks}; "
                    "dt.mesh(..., nodes=[...]).torch is one of nodes in another order"
                )
            names = self._mesh_dim_names or [f"dim_{i}" for i in range(len(sizes))]
            dims = dict(zip(names, sizes, strict=True))
            if here is None or len(here.place.members) != len(ranks):
                here = world.begin_world(mesh(**dims)._place)
            here.place.name_dims(dims)
        return None if here is None else here.all

    return setup_world_group_and_device
