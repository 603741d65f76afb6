"""Meshes: several nodes as one place, whose dims have names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors.argument_checks import by_name_only
from ..proxy.proxy import DistributedTensor
from ..runtime.process.spelling import did_you_mean, shown
from ..runtime.process.tables import html
from ..runtime.protocol.errors import DisttensorError
from ..session import current
from ..session.places import MeshPlace, NodePlace, Place, varied
from .as_torch import device_mesh, world
from .shards import together

#: Within the class ``torch`` is a property.
_Device: TypeAlias = torch.device


class Mesh:
    """Several nodes as one place. ``disttensor.mesh(dp=8, tp=4)`` makes it.

    ``mesh.device`` is an ordinary ``torch.device``: what is made or moved there is on all of the nodes, one tensor of
    one shape on each, and an operation on it is one command for all of them. The values may differ between nodes.

    ``mesh["dp"]`` are some of its dims, as of torch's DeviceMesh: all of the nodes, seen along dp.

    A mesh is a value: two of the same nodes, in the same order and with the same dims, are one. ``split``, ``flatten``
    and ``rename`` give other names for the same place, whose tensors mix freely; another mesh is another place.
    """

    __slots__ = ("_claim", "_dims", "_place", "_whole")

    #: A mesh has no items to go through: without this Python would ask for ``mesh[0]``.
    __iter__ = None

    def __init__(
        self, place: MeshPlace, dims: Mapping[str, int], claim: _Claim | None = None, whole: Mesh | None = None
    ) -> None:
        self._place, self._dims, self._claim = place, dict(dims), claim or _Claim()
        self._whole = whole  #: the mesh of which these are some dims

    def __repr__(self) -> str:
        if self._whole is not None:
            return f"{self._whole}[{', '.join(map(repr, self._dims))}]"
        dims = ", ".join(f"{name}={size}" for name, size in self._dims.items())
        return f"Mesh({dims}, nodes={list(self.nodes)}{', closed' if self._claim.closed else ''})"

    if not TYPE_CHECKING:  # to a checker it has no other attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError that says what is meant: a dim's size, or the attribute of nearly this name."""
            if name.startswith("_"):
                raise AttributeError(name)
            if name in self._dims:
                raise AttributeError(
                    f"a mesh has no attribute {name!r}: mesh.size({name!r}) is the size of its dim, and "
                    f"mesh.coordinate({name!r}) has the ranks' coordinates"
                )
            if name in _OF_A_RANK:
                raise AttributeError(
                    f"a mesh has no attribute {name!r}, which each rank has another of, and the script is none: "
                    f"mesh.coordinate({self.names[0]!r}) has the ranks' coordinates, mesh.torch.{name} is for torch's "
                    "functions and for all of them, and in a function of dt.run(fn, node=mesh, distributed=True) "
                    f"dt.tasks.device_mesh().{name} is that rank's"
                )
            public = [known for known in dir(type(self)) if not known.startswith("_")]
            raise AttributeError(f"a mesh has no attribute {name!r}{did_you_mean(name, public)}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Has torch take a mesh for its device in ``x.to(mesh)`` and ``model.to(mesh)``. Raises TypeError in other
        functions."""
        name = getattr(func, "__name__", str(func))
        if name not in ("to", "_parse_to"):
            raise TypeError(f"{name}: a mesh is a place and not a tensor; mesh.device is its device")
        given = {key: _device(value) for key, value in (kwargs or {}).items()}
        return func(*map(_device, args), **given)

    def _repr_html_(self) -> str:
        """Returns a table of the nodes by their coordinates, for a notebook: the last dim goes from left to right."""
        *outer, (last, width) = (self._whole or self)._dims.items()
        cells = [f"node {node}" for node in self.nodes]
        if not outer:
            return html(repr(self), [f"{last}={i}" for i in range(width)], [cells])
        coordinates = product(*(range(size) for _, size in outer))
        names = [", ".join(f"{name}={i}" for (name, _), i in zip(outer, at, strict=True)) for at in coordinates]
        rows = [[name, *cells[k * width : (k + 1) * width]] for k, name in enumerate(names)]
        return html(repr(self), ["", *(f"{last}={i}" for i in range(width))], rows, heads=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._place is other._place and self._dims == other._dims

    def __hash__(self) -> int:
        return hash((id(self._place), *self._dims))

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: a mesh is of its session."""
        raise TypeError(
            f"{self} can't be pickled, as it is of its session; keep mesh.nodes, mesh.names and mesh.shape, and call "
            "disttensor.mesh"
        )

    def __copy__(self) -> Mesh:
        return self

    def __deepcopy__(self, memo: object) -> Mesh:
        return self

    def __len__(self) -> int:
        return len(self._place.members)

    @property
    def device(self) -> _Device:
        """The device of the mesh's tensors. Raises DisttensorError for a mesh of an earlier session: its index may be
        another mesh's now."""
        if current.current() not in (None, self._place.session):
            raise DisttensorError(
                f"{self} is of an earlier session, which was shut down; {self._place.made_by} makes it"
            )
        return self._place.device

    @property
    def torch(self) -> DeviceMesh:
        """Torch's own DeviceMesh of these dims, for torch's functions that take one: the same each time.

            >>> device_mesh = dt.mesh(dp=2).torch
            >>> x = dt.shard(torch.tensor([1.0, 2.0]), dt.mesh(dp=2), dp=0)
            >>> torch.distributed.all_reduce(x, group=device_mesh.get_group("dp"))
            >>> x.cpu()
            tensor([3.])

        What it says of the rank that asks (``get_coordinate``, ``get_local_rank``) are numbers of all ranks. The first
        one makes torch.distributed's default process group, until the mesh is closed or the session ends. Raises
        DisttensorError where torch has another one, and for a mesh of an earlier session.
        """
        _ = self.device  # raises for a mesh of an earlier session
        if self._whole is not None:
            return self._whole.torch[self.names]
        return device_mesh.of_place(self._place, self._dims)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes, in the order of the ranks: row by row, the last dim fastest."""
        return self._place.ranks

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dims."""
        return tuple(self._dims)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The names of the dims, by torch's word."""
        return self.names

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the dims."""
        return tuple(self._dims.values())

    @property
    def ndim(self) -> int:
        """The number of the dims."""
        return len(self._dims)

    def size(self, dim: str | int | None = None) -> int:
        """Returns the size of a dim, by its name or, as torch has it, its index; or (None) of all dims together.

        Raises ValueError for a name, IndexError for an index, that there is not.
        """
        if dim is None:
            return prod(self.shape)
        if isinstance(dim, int):
            if not -self.ndim <= dim < self.ndim:
                raise IndexError(
                    f"size: {self} has {self.ndim} dims ({', '.join(self._dims)}), and none of index {dim}"
                )
            return self.shape[dim]
        return self._dims[self._named(dim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """Returns some dims of the mesh, as torch's DeviceMesh: ``mesh["dp"]``, ``mesh["rep", "dp"]``. No traffic.

        With torch each rank gets the line of nodes that it is in. The script has all of these lines: the place stays,
        and what takes such a mesh (``fully_shard``, ``DataParallel``, ``dt.nn``, ``distribute``) goes along its dims.

        Raises KeyError for an unknown dim, and for dims that are not in the mesh's order, TypeError for what is not a
        name. ``slice`` is the mesh of some of the nodes.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not all(isinstance(name, str) for name in wanted):
            raise TypeError(
                f"mesh[...] takes names of dims, as in mesh[{self.names[0]!r}], not {shown(names)}; "
                f"mesh.slice({self.names[0]}=0) is the mesh of some of the nodes"
            )
        for name in wanted:
            if name not in self._dims:
                raise KeyError(self._no_dim(name))
        dims = {name: size for name, size in self._dims.items() if name in wanted}
        if tuple(dims) != wanted or not wanted:
            raise KeyError(
                f"{self} has its dims in the order {', '.join(self._dims)}, in which mesh[...] takes one or several of "
                f"them, not {shown(names)}"
            )
        return Mesh(self._place, dims, self._claim, self._whole or self)

    def coordinate(self, dim: str) -> DistributedTensor:
        """Returns an int64 tensor of no dimension on the mesh: on each rank its own coordinate along a dim.

        Returns at once. Raises ValueError for a dim that there is not, NodeLost.
        """
        at = [0] * len(self)
        for group in self._place.axes[self._named(dim)]:
            for i, rank in enumerate(group):
                at[rank] = i
        return together(self._place, [torch.tensor(i, device="cpu") for i in at])

    def _named(self, dim: str) -> str:
        if dim not in self._dims:
            raise ValueError(self._no_dim(dim))
        return dim

    def _no_dim(self, dim: str) -> str:
        return f"{self} has no dim {shown(dim)}; it has {', '.join(self._dims)}{did_you_mean(dim, self._dims)}"

    def _not_of_dims(self, what: str) -> None:
        """Raises ValueError for some dims of a mesh: other nodes, and other names, are the whole mesh's."""
        if self._whole is not None:
            raise ValueError(f"{what}: {self} are some dims of a mesh; the mesh itself has {what}")

    def _view(self, dims: Mapping[str, int]) -> Mesh:
        self._place.name_dims(dims)
        return Mesh(self._place, dims, self._claim)

    # ---- views -------------------------------------------------------------------------------------------------------

    def slice(self, **coordinates: int) -> Mesh:
        """Returns the mesh of the nodes with these coordinates; ``mesh.slice(dp=0)`` has the other dims. No traffic.

        Raises ValueError for an unknown dim, a coordinate out of its range, or coordinates of all dims.
        """
        self._not_of_dims("slice")
        for dim, at in coordinates.items():
            if not 0 <= at < self._dims[self._named(dim)]:
                raise ValueError(f"slice: {dim}={at} is not in {self}: it has 0 to {self._dims[dim] - 1}")
        dims = {name: size for name, size in self._dims.items() if name not in coordinates}
        if not dims:
            raise ValueError(f"slice: {coordinates} is one node of {self}; disttensor.device(node) is its device")
        members = [
            member
            for at, member in zip(product(*map(range, self.shape)), self._place.members, strict=True)
            if all(at[self.names.index(dim)] == wanted for dim, wanted in coordinates.items())
        ]
        return _mesh(members, dims)

    def split(self, **dims: tuple[str, str] | int) -> Mesh:
        """Returns a view in which a dim is two: ``mesh.split(dp=("pp", "inner"), pp=2)`` has pp outside. No traffic.

        Raises ValueError for an unknown dim, a size that does not divide it, or a name that another dim of the place
        has.
        """
        self._not_of_dims("split")
        made: dict[str, int] = {}
        for name, size in self._dims.items():
            parts = dims.get(name)
            if not isinstance(parts, tuple):
                made[name] = size
                continue
            outer, inner = parts
            sizes = [n for n in (outer, inner) if isinstance(dims.get(n), int)]
            if len(sizes) != 1:
                raise ValueError(f"split: give the size of one of {outer!r} and {inner!r}, as in {outer}=2")
            given = int(dims[sizes[0]])  # type: ignore[arg-type]
            if given < 1 or size % given:
                raise ValueError(f"split: {sizes[0]}={given} does not divide {name}={size} of {self}")
            made[outer], made[inner] = (given, size // given) if sizes[0] == outer else (size // given, given)
        for name, parts in dims.items():
            if isinstance(parts, tuple):
                self._named(name)
            elif name not in made:
                raise ValueError(
                    f"split: {name}={parts!r} is the size of no part; parts are named as in dp=('pp', 'inner')"
                )
        if prod(made.values()) != len(self):
            raise ValueError(f"split: two dims of {made} would have one name")
        return self._view(made)

    def flatten(self, name: str = "all") -> Mesh:
        """Returns a view with one dim, of this name: ``mesh["dp", "cp"].flatten("dp_cp")`` has these two as one. No
        traffic.

        Raises ValueError for dims that do not lie side by side, and for a name that another dim of the place has.
        """
        if self._whole is None:
            return self._view({name: len(self)})
        names = list(self._whole._dims)
        first = names.index(self.names[0])
        if tuple(names[first : first + self.ndim]) != self.names:
            raise ValueError(f"flatten: the dims of {self} do not lie side by side; it has {', '.join(names)}")
        if name in names and name not in self.names:
            raise ValueError(f"flatten: {name!r} is another dim of {self._whole}")
        made = {known: self._whole._dims[known] for known in names[:first]}
        made[name] = self.size()
        made |= {known: self._whole._dims[known] for known in names[first + self.ndim :]}
        return self._whole._view(made)[name]

    def rename(self, **names: str) -> Mesh:
        """Returns a view whose dims have other names: ``mesh.rename(dp="replica")``. No traffic.

        Raises ValueError for an unknown dim.
        """
        self._not_of_dims("rename")
        for dim in names:
            self._named(dim)
        made = {names.get(dim, dim): size for dim, size in self._dims.items()}
        if len(made) != len(self._dims):
            raise ValueError(f"rename: two dims of {self} would have one name")
        return self._view(made)

    def close(self) -> None:
        """Closes this mesh, and its views. With the last one of its place, whichever call has made it, the place's slot
        is given back (there are 128 for all devices): its tensors stay as they are, and nothing new can be made on its
        device."""
        with self._place.session.places.lock:
            if not self._claim.closed:
                self._claim.closed = True
                self._place.session.places.close_mesh(self._place)
                if self._place.claims <= 0:
                    world.end_world(self._place)


#: What torch's DeviceMesh says of the rank that asks.
_OF_A_RANK = ("get_all_groups", "get_coordinate", "get_group", "get_local_rank", "get_rank")


def all_dims_of(mesh: Any) -> Any:
    """Returns the mesh some dims of which are ``mesh["dp"]``; anything else as it is."""
    return mesh._whole or mesh if isinstance(mesh, Mesh) else mesh


def along(mesh: Any, over: Any, usual: str) -> Any:
    """Returns the dims along which a function goes that takes a mesh: ``over``; where that is None those of
    ``mesh["dp"]``, the only one of a mesh, or the ``usual`` one.

    Raises ValueError for a name in ``over`` that is not among those of ``mesh["dp"]``.
    """
    if not isinstance(mesh, Mesh):
        return usual if over is None else over  # the caller says what is wrong with it
    if over is None:
        if mesh.ndim == 1:
            return mesh.names[0]
        return usual if mesh._whole is None else mesh.names
    if mesh._whole is not None:
        for name in (over,) if isinstance(over, str) else over:
            mesh._named(name)
    return over


def _device(value: Any) -> Any:
    return value.device if isinstance(value, Mesh) else value


class _Claim:
    """The claim to a place of one mesh that was made, and of its views; or of what nobody closes."""

    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = False


@by_name_only("dt.mesh(dp=2, tp=2)")
def mesh(*, nodes: Sequence[int] | None = None, device: str | None = None, **dims: int) -> Mesh:
    """Makes nodes one place: ``disttensor.mesh(dp=8, tp=4)``, over all nodes, row by row.

    Args:
        nodes: the numbers of the nodes, in order. Default: all.
        device: the device of each node, "cpu" or "cuda:0". Default: each node's default device.
        dims: the sizes of the dims, by name; -1 for one of them is what is left. Default: one dim, "all".

    Does not wait. Raises ValueError for sizes that do not multiply to the number of nodes, a node that is not there or
    is named twice, or nodes that differ (in their kind of device, or in what their torch chooses kernels by);
    DisttensorError without a session, or when all 128 slots are in use; GraphError for a new mesh while a graph is
    recorded.
    """
    places = current.session().places
    ranks = range(len(current.session().nodes)) if nodes is None else list(nodes)
    if not len(ranks):
        raise ValueError("mesh: there is no node in nodes=[]")
    members = [places.at(node, device).one for node in ranks]
    twice = [m.node for i, m in enumerate(members) if m.node in [other.node for other in members[:i]]]
    if twice:
        raise ValueError(f"mesh: node {twice[0]} is named twice; each node has one rank of a mesh")
    for name, size in dims.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ValueError(f"mesh: the size of a dim is a positive integer, or -1, and {name}={size!r}")
    sizes = dict(dims) or {"all": len(members)}
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"mesh: only one size can be -1, not those of {[n for n, s in sizes.items() if s == -1]}")
    for name, size in sizes.items():
        if size == -1:
            left = prod(s for s in sizes.values() if s > 0)
            if len(members) % left:
                raise ValueError(f"mesh: {left} ranks of the other dims do not divide {len(members)} nodes")
            sizes[name] = len(members) // left
    if prod(sizes.values()) != len(members):
        text = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"mesh: {text} are {prod(sizes.values())} ranks, and there are {len(members)} nodes"
            f"{'' if nodes is not None else ' in the session'}; nodes=[...] names those of the mesh, and one size can "
            "be -1"
        )
    return _mesh(members, sizes)


def _mesh(members: Sequence[NodePlace], dims: Mapping[str, int]) -> Mesh:
    _alike(members)
    return Mesh(members[0].session.places.claim(members, dims), dims)


def _alike(members: Sequence[NodePlace]) -> None:
    """Raises ValueError for a member that is unlike the first: it would compute other numbers, or elsewhere."""
    first = members[0]
    for member in members[1:]:
        if member.name != first.name:
            raise ValueError(
                f"mesh: {member} is another device than {first}; all have to be called the same: device='cpu', or "
                "nodes of which each has its own GPU as cuda:0"
            )
        if member.record != first.record:
            raise ValueError(
                f"mesh: the torch of {member} chooses other kernels than that of {first}: {member.record}, "
                f"{first.record}"
            )


@contextlib.contextmanager
def varying(*dims: str) -> Iterator[None]:
    """Has random numbers on meshes differ along dims, inside of a block: ``with dt.meshes.varying("dp"): model(x)``.

    Ranks that differ in their coordinates along ``dims`` draw different numbers, others the same. A mesh has generators
    of its own for that, which begin anew with ``torch.manual_seed``; those of the code around the block are not used.
    For threads and asyncio tasks of their own. Raises TypeError for what is no name; a draw in the block on a mesh
    without such a dim raises ValueError.
    """
    for dim in dims:
        if not isinstance(dim, str):
            raise TypeError(f"varying takes names of dims, not {shown(dim)}")
    token = varied.set(tuple(dict.fromkeys(dims)))
    try:
        yield
    finally:
        varied.reset(token)


def place_of(target: Any, what: str) -> MeshPlace:
    """Returns the place of a mesh, its device, or a tensor there. Raises TypeError for anything else."""
    if isinstance(target, Mesh):
        return target._place
    place: Place
    if isinstance(target, DistributedTensor):
        place = target._place
    elif isinstance(target, (str, torch.device)):
        place = current.session().places.named(target)
    else:
        raise TypeError(f"{what} takes a mesh, not {shown(target)}")
    # a node is not a mesh of one: it has no dims that could be named
    if not isinstance(place, MeshPlace):
        raise TypeError(f"{what} takes a mesh, or a tensor on one, and this is on {place}")
    return place
