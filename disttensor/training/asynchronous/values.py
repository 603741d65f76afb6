"""The values that a parameter server keeps: tensors by name, and as flat vectors that are cut among nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from ...dispatch.first_call import layout_of
from ...meshes.shards import at_rank
from ...proxy.proxy import where_is
from ...session.places import MeshPlace

Tensors = Sequence[torch.Tensor]


class Form:
    """The names, shapes and dtypes of tensors, and how they lie in flat vectors: one for each dtype, in their order."""

    def __init__(self, values: Any, what: str) -> None:
        names, tensors, self.build = opened(values, what)
        if not tensors:
            raise ValueError(f"{what}: there are no tensors in {type(values).__name__}")
        for name, tensor in zip(names, tensors, strict=True):
            if layout_of(tensor) is not torch.strided:
                raise TypeError(f"{what}: {name!r} is {layout_of(tensor)}, and has to be strided")
        self.names = tuple(names)
        self.shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self.dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in tensors))
        #: for each dtype the indices of its tensors
        self.packs = tuple(tuple(i for i, t in enumerate(tensors) if t.dtype == dtype) for dtype in self.dtypes)
        self.sizes = tuple(sum(prod(self.shapes[i]) for i in pack) for pack in self.packs)

    def flat(self, tensors: Tensors) -> list[torch.Tensor]:
        """Returns new flat vectors with the values of these tensors, which may be on several nodes: on the first's."""
        home = tensors[0].device
        return [torch.cat([tensors[i].to(home).reshape(-1) for i in pack]) for pack in self.packs]

    def unflat(self, vectors: Tensors) -> list[torch.Tensor]:
        """Returns views of flat vectors in the shapes of the tensors."""
        found: dict[int, torch.Tensor] = {}
        for pack, vector in zip(self.packs, vectors, strict=True):
            pieces = vector.split([prod(self.shapes[i]) for i in pack])
            found |= {i: piece.view(self.shapes[i]) for i, piece in zip(pack, pieces, strict=True)}
        return [found[i] for i in range(len(self.names))]

    def cut(self, parts: int) -> list[list[slice]]:
        """Returns for each of ``parts`` owners its range of each flat vector; sizes differ by one at most."""
        ranges: list[list[slice]] = [[] for _ in range(parts)]
        for size in self.sizes:
            ends = [size // parts * k + min(k, size % parts) for k in range(parts + 1)]
            for k in range(parts):
                ranges[k].append(slice(ends[k], ends[k + 1]))
        return ranges

    def check(self, values: Any, what: str) -> list[torch.Tensor]:
        """Returns the tensors of ``values`` in the form's order. Raises TypeError or ValueError for other names, or
        another number or shape of them."""
        names, tensors, _ = opened(values, what)
        if isinstance(values, (Mapping, torch.nn.Module)) and set(names) != set(self.names):
            odd = sorted(set(names) ^ set(self.names), key=str)
            raise ValueError(f"{what}: the names differ from the server's: {', '.join(map(repr, odd[:5]))}")
        if len(tensors) != len(self.names):
            raise ValueError(f"{what}: {len(tensors)} tensors, and the server has {len(self.names)}")
        if isinstance(values, (Mapping, torch.nn.Module)):
            by_name = dict(zip(names, tensors, strict=True))
            tensors = [by_name[name] for name in self.names]
        for name, shape, tensor in zip(self.names, self.shapes, tensors, strict=True):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{what}: {name!r} is {tuple(tensor.shape)}, and {shape} at the server")
        return tensors


def opened(values: Any, what: str) -> tuple[list[Any], list[torch.Tensor], Callable[[Tensors], Any]]:
    """Returns the names and tensors of a module (its parameters), a dict, a tensor or several, and what makes the like
    of it from other tensors: a dict for a module."""
    if isinstance(values, torch.Tensor):
        found: Iterable[tuple[Any, Any]] = [("tensor", values)]
        build: Callable[[Tensors], Any] = lambda tensors: tensors[0]  # noqa: E731
    elif isinstance(values, (torch.nn.Module, Mapping)):
        found = list(values.named_parameters() if isinstance(values, torch.nn.Module) else values.items())
        names = [name for name, _ in found]
        build = lambda tensors: dict(zip(names, tensors, strict=True))  # noqa: E731
    elif isinstance(values, Iterable) and not isinstance(values, (str, bytes)):
        found, build = list(enumerate(values)), list
    else:
        raise TypeError(f"{what} takes tensors, a dict of them, or a module, not {type(values).__name__}")
    for name, tensor in found:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}: {name!r} has to be a tensor, not {type(tensor).__name__}")
    return [name for name, _ in found], [tensor.detach() for _, tensor in found], build


def one_place(tensors: Tensors, what: str) -> None:
    """Raises ValueError for values on a mesh: whose would be taken is not said."""
    for tensor in tensors:
        place = where_is(tensor)
        # a mesh's ranks may have different values, and a server takes one
        if isinstance(place, MeshPlace):
            raise ValueError(
                f"{what}: the values are on {place}, whose ranks may differ; x.at({place.where(0)}) is one rank's, "
                "dt.all_reduce(x, 'avg', over=...).at(...) the mean of all"
            )


def on_a_mesh(tensors: Any) -> bool:
    # a mesh's tensors have the values of several workers
    return isinstance(where_is(opened(tensors, "ParameterServer")[1][0]), MeshPlace) if _plain(tensors) else False


def _plain(tensors: Any) -> bool:
    """Returns whether these are one worker's values, and no list of several workers'."""
    if isinstance(tensors, (torch.Tensor, torch.nn.Module, Mapping)):
        return True
    return isinstance(tensors, Sequence) and all(isinstance(t, torch.Tensor) for t in tensors) and bool(tensors)


def sources(tensors: Any, nodes: int, init: str) -> list[Any]:
    """Returns the values that each shard is taken from."""
    if init == "each" and not on_a_mesh(tensors):
        if not isinstance(tensors, Sequence) or len(tensors) != nodes:
            count = len(tensors) if isinstance(tensors, Sequence) else 1
            raise ValueError(f"ParameterServer: init='each' takes values of each of {nodes} nodes, not {count}")
        return list(tensors)
    _names, found, _ = opened(tensors, "ParameterServer")
    places = {where_is(tensor) for tensor in found}
    # elsewhere each shard begins with the same values
    if not any(isinstance(place, MeshPlace) for place in places):
        return [found] * nodes
    mesh = next(iter(places))
    # ranks of one mesh have values each; tensors elsewhere have none for them
    if len(places) > 1 or not isinstance(mesh, MeshPlace):
        raise ValueError("ParameterServer: some of the tensors are on a mesh, and some elsewhere")
    if init == "first":
        return [[at_rank(tensor, 0) for tensor in found]] * nodes
    if len(mesh.members) != nodes:
        raise ValueError(f"ParameterServer: init='each' takes values of each of {nodes} nodes, and {mesh} has others")
    return [[at_rank(tensor, k) for tensor in found] for k in range(nodes)]
