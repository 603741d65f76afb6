"""The ranks that a loader's batches go to: those of a mesh along a dim, a list of nodes, or one place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..collectives.over_dims import Over
from ..dispatch import copies
from ..dispatch.call_site import here
from ..meshes.mesh import Mesh, all_dims_of, along, place_of
from ..proxy.meta import Handle, meta_of_contiguous, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.process.spelling import shown
from ..session import current
from ..session.current import session_of
from ..session.places import MeshPlace, NodePlace, Place


class Ranks:
    """The places of a loader's batches. ``size`` of them have samples of their own."""

    def __init__(self, where: Any, over: Over | None) -> None:
        """Raises TypeError for what is no place, ValueError for a node or dim that does not exist or is named twice,
        DisttensorError without a session."""
        self.session = current.session()
        self.mesh: MeshPlace | None = None
        self.many = True  #: a batch is one for each place, in a list
        self.places: Sequence[NodePlace]  #: of nodes
        self.of: list[int]  #: the rank of each place
        named, where = along(where, over, "dp"), all_dims_of(where)
        if isinstance(where, Mesh):
            self.mesh = place_of(where, "distribute")
            names = (named,) if isinstance(named, str) else tuple(named)
            if not names:
                raise ValueError(f"distribute: over names no dim; {where} has {', '.join(where.names)}")
            for name in names:
                where.size(name)
            self.places = self.mesh.members
            self.of = self.mesh.numbered(names)
        else:
            self.many = not isinstance(where, (int, str, torch.device))
            if self.many and not isinstance(where, Iterable):
                raise TypeError(f"distribute takes a mesh, a list of nodes, or one place, not {shown(where)}")
            self.places = [self._place(one) for one in (where if self.many else [where])]
            self.of = list(range(len(self.places)))
            if not self.places:
                raise ValueError("distribute: there is no node in []")
            twice = [place for i, place in enumerate(self.places) if place in self.places[:i]]
            if twice:
                raise ValueError(f"distribute: {twice[0]} is named twice; each has samples of its own")
        #: what the functions of a loop run on
        self.targets: Any = where if self.mesh is not None else [place.node for place in self.places]
        self.size = max(self.of) + 1
        self._name = str(where) if self.mesh is not None else f"{len(self.places)} nodes"

    def _place(self, one: Any) -> NodePlace:
        place: Place = self.session.places.at(one)
        # a mesh's device does not say along which dims its ranks get samples of their own
        if isinstance(place, MeshPlace):
            raise TypeError(f"distribute: {shown(one)} is the device of {place}; give the mesh itself, and over=")
        return place

    def __repr__(self) -> str:
        return f"{self.size} ranks of {self._name}" if self.mesh is not None else self._name

    def where(self, index: int) -> str:
        """Returns a place in words."""
        place = self.places[index]
        return f"node {place.node}" + (f" ({self.mesh.where(index)})" if self.mesh is not None else "")

    # ---- tensors there -----------------------------------------------------------------------------------------------

    def handle(self, shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> Handle:
        """Returns the handle of a contiguous tensor that is going to be there."""
        return Handle(new_ref(), meta_of_contiguous(shape, dtype, place))

    def put(self, parts: Sequence[torch.Tensor]) -> DistributedTensor:
        """Returns a tensor on the mesh whose shard on each rank is one of these local tensors, whose bytes are read
        later. Ranks with the same samples get them from one another."""
        assert self.mesh is not None
        self.session.link.check(self.mesh.outbox)  # whose error says which ranks are gone
        handle = self.handle(tuple(parts[0].shape), parts[0].dtype, self.mesh)
        for rank, part in enumerate(parts):
            members = [place for place, of in zip(self.places, self.of, strict=True) if of == rank]
            small = part.numel() * part.element_size() <= copies.SMALL
            for member in members if small else members[:1]:
                session_of(member).transfers.upload(part.detach(), member, handle.ref, here(), non_blocking=True)
            if not small:
                copies.spread(handle.meta, members, handle.ref)
        return proxy(handle)
