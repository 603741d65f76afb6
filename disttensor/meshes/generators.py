"""The states of all generators of a mesh, for a checkpoint: of the one that is the same on all ranks, and of those that
draw within ``dt.meshes.varying``."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch import rng_states
from ..dispatch.call_site import here
from ..futures import fetch
from ..runtime.master.route import waits
from ..session import current
from ..session.places import MeshPlace, Place, varied
from .mesh import Mesh


class Generators:
    """The random number generators of a mesh, or a node, as a part of a program's state.

    A mesh has a generator that is the same on all ranks, and one for each way in which numbers vary
    (``dt.meshes.varying("dp")``, as in the forward passes of ``dt.DataParallel``). With their states in its checkpoint
    a program with dropout goes on with the bits of a run without a break.

        >>> mesh = dt.mesh(dp=2)
        >>> generators = dt.meshes.Generators(mesh)     # "generators": generators, in the state of dt.checkpoint.save
        >>> with dt.meshes.varying("dp"):
        ...     x = torch.rand(3, device=mesh.device)
        ...     before = generators.state_dict()
        ...     x = torch.rand(3, device=mesh.device)
        ...     generators.load_state_dict(before)
        ...     y = torch.rand(3, device=mesh.device)
        >>> torch.equal(x.at(dp=1).cpu(), y.at(dp=1).cpu()), torch.equal(x.at(dp=0).cpu(), x.at(dp=1).cpu())
        (True, False)
    """

    def __init__(self, place: Mesh | torch.device | str | int) -> None:
        """Names the place whose generators these are.

        Args:
            place: a mesh, the device of a mesh or a node, or a node's number.

        Raises TypeError for what names no place; ValueError and RuntimeError for a place that does not exist.
        """
        self._place: Place
        if isinstance(place, Mesh):
            self._place = place._place
        else:
            places = current.session().places
            self._place = places.named(place) if isinstance(place, (str, torch.device)) else places.at(place)

    def __repr__(self) -> str:
        return f"Generators({self._place})"

    def state_dict(self) -> dict[str, Any]:
        """Returns the states: plain values, which a checkpoint has as one entry. Waits for the nodes.

        Raises GraphError while a graph is recorded, NodeLost.
        """
        waits("Generators.state_dict()")
        place, kept = self._place, []
        for along in place.session.places.drawn_along(place):
            token = varied.set(along)
            try:
                kept.append((along, _shards(rng_states.keep(place))))
            finally:
                varied.reset(token)
        under_way: list[Any] = [[list(along), [fetch(x) for x in shards]] for along, shards in kept]
        states = [[along, [_bytes(work.result()) for work in works]] for along, works in under_way]
        return {"states": [_seed(place), [[name, size] for name, size in _dims(place)], states]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the generators go on from states that ``state_dict`` gave, here or in another session. Returns at once.

        Those that had not drawn then begin as they would have begun there. Raises ValueError for the states of a place
        with other dims, or of other generators; GraphError while a graph is recorded.
        """
        waits("Generators.load_state_dict()")
        place = self._place
        seed, dims, states = state_dict["states"]
        if [tuple(dim) for dim in dims] != _dims(place):
            saved = ", ".join(f"{name}={size}" for name, size in dims) or "a node"
            raise ValueError(
                f"these are the states of the generators of {saved}, and this is {place}, whose ranks are others: make "
                "a mesh of these dims, or leave the generators out and seed anew by torch.manual_seed"
            )
        size = rng_states.size_of_state(place)
        for along, ranks in states:
            # a node's generator varies along no dim
            if isinstance(place, MeshPlace):
                for name in along:
                    place.groups(name, "Generators.load_state_dict()")
            for state in ranks:
                if len(state) != size:
                    raise ValueError(
                        f"the state of a generator of {place} has {size} bytes, and this one {len(state)}: it is one "
                        "of another kind of device"
                    )
        # only a mesh's generators begin with a seed of their own
        if isinstance(place, MeshPlace):
            place.session.places.begin_anew(place, seed)
        for along, ranks in states:
            token = varied.set(tuple(along))
            try:
                rng_states.put_each(place, ranks, here())
            finally:
                varied.reset(token)


def _shards(state: Any) -> list[Any]:
    # each rank of a mesh has a state
    return list(state.shards()) if isinstance(state._place, MeshPlace) else [state]


def _seed(place: Place) -> int:
    # a node's generator begins with the session's seed
    return place.seed if isinstance(place, MeshPlace) else 0


def _dims(place: Place) -> list[tuple[str, int]]:
    # a node has no dims
    return list(place.dims.items()) if isinstance(place, MeshPlace) else []


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
