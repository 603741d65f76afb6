"""The default process group, which torch's own code asks for: that of a mesh's ranks.

``mesh.torch`` makes it, once; it goes with the mesh, or the session. The script has no other beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _register_process_group
from torch.distributed import distributed_c10d

from ... import torch_patches
from ...runtime.protocol.errors import DisttensorError
from ...session.current import session_of
from ...session.places import Groups, MeshPlace
from ..shards import together
from .process_group import MeshGroup
from .rank_numbers import numbers_of, rank_number

_numbers = count()


class MeshWorld:
    """The process groups of a mesh."""

    def __init__(self, place: MeshPlace) -> None:
        self.place = place
        self.number = next(_numbers)  #: no other has it
        self._groups: dict[Groups, MeshGroup] = {}
        self._lines: dict[tuple[Any, ...], torch.Tensor] = {}
        self.meshes: dict[tuple[tuple[str, int], ...], Any] = {}  #: torch's, by their dims

    @property
    def all(self) -> MeshGroup:
        """The group of all ranks, which is the default one."""
        return self.group((tuple(range(len(self.place.members))),))

    def group(self, lines: Groups) -> MeshGroup:
        """Returns the process group of these lines of ranks, each of which is in one of them."""
        found = self._groups.get(lines)
        if found is None:
            found = self._groups[lines] = MeshGroup(self.place, lines, f"disttensor_{next(_numbers)}")
            _register(found)
        return found

    def line(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the part of torch's table of ranks that each rank is in, on the mesh; ``full`` has all of them."""
        key = (tuple(full.shape), *full.flatten().tolist())
        found = self._lines.get(key)
        if found is None:
            at = {rank: line for line in full for rank in line.flatten().tolist()}
            found = self._lines[key] = together(self.place, [at[rank] for rank in range(len(self.place.members))])
        return found


def _register(group: MeshGroup) -> None:
    """Enters a process group in torch's tables, as torch's own functions do, which differ between its versions."""
    tables: Any = distributed_c10d._world
    name: Any = group.group_name
    _register_process_group(name, group)
    tag = f"ptd:{name}"
    tables.tags_to_pg.setdefault(tag, []).append(group)
    for table, value in (
        (tables.pg_map, ("node", HashStore())), (tables.pg_names, name), (tables.pg_backend_config, "node:node"),
        (tables.pg_group_ranks, _Ranks(group)), (tables.pg_to_tag, tag),
    ):  # fmt: skip
        table[group] = value


class _Ranks(dict[Any, Any]):
    """Torch's table of a group: the ranks of the world, and what number each has in the group.

    A group here has several lines, and a rank of each has one number: what torch looks up or lists are numbers of
    ranks, as it is another rank's for each.
    """

    def __init__(self, group: MeshGroup) -> None:
        at = {rank: i for line in group.lines for i, rank in enumerate(line)}
        super().__init__(at)
        place, ranks = group.place, range(len(at))
        line_of = {rank: line for line in group.lines for rank in line}
        self._place = place
        self._listed = [(rank_number(place, [line_of[rank][i] for rank in ranks]), i) for i in range(group.size())]
        self._alone = len(group.lines) == 1

    def __contains__(self, rank: object) -> bool:
        return numbers_of(rank) is not None or (self._alone and super().__contains__(rank))

    def __getitem__(self, rank: Any) -> Any:
        numbers = numbers_of(rank)
        if numbers is None:
            return super().__getitem__(rank)
        return rank_number(self._place, [super(_Ranks, self).__getitem__(number) for number in numbers])

    def __iter__(self) -> Iterator[Any]:
        return (rank for rank, _ in self._listed)

    def __len__(self) -> int:
        return len(self._listed)

    def keys(self) -> Any:
        return [rank for rank, _ in self._listed]

    def items(self) -> Any:
        return list(self._listed)


_worlds: list[MeshWorld] = []


def found() -> MeshWorld | None:
    """Returns the world whose default process group torch has now; None where that is another one, or none."""
    world = _worlds[0] if _worlds else None
    group = dist.GroupMember.WORLD
    if world is None or not isinstance(group, MeshGroup) or group.place is not world.place:
        return None
    return world


def begin_world(place: MeshPlace) -> MeshWorld:
    """Returns the world of a mesh's ranks, whose default process group is torch's from now on.

    Raises DisttensorError where the script has another process group, or that of another mesh.
    """
    world = found()
    if world is not None and world.place is place:
        return world
    if dist.is_initialized():
        of = f"that of {world.place}" if world is not None else f"one of {dist.get_backend()!r}"
        raise DisttensorError(
            f"mesh.torch makes torch's default process group of {place}, and there is {of}: torch has one at a time; "
            "torch.distributed.destroy_process_group() ends it"
        )
    torch_patches.install(torch_patches.DEVICE_MESH)
    world = MeshWorld(place)
    _worlds[:] = [world]
    distributed_c10d._world.default_pg = world.all
    session_of(place).ends.callback(end_world, place)
    return world


def end_world(place: MeshPlace) -> None:
    """Ends the process groups of a mesh, if they are torch's now."""
    world = found()
    if world is not None and world.place is place:
        dist.destroy_process_group()
    if _worlds and _worlds[0].place is place:  # the script may have ended them itself
        _worlds.clear()
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None and random._rng_tracker is not None and random._rng_tracker._device.type == "node":
        random._rng_tracker = None
