"""The nodes on which one call of ``run`` runs a function at once: those of a group, or of a mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..collectives.groups import new_group
from ..meshes.mesh import Mesh, all_dims_of, place_of
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..session.places import NodePlace, where
from ..session.session import Session


class Targets:
    """Several nodes, in the order of the results."""

    def __init__(self, session: Session, given: Mesh | Iterable[int]) -> None:
        """Raises what ``new_group`` does for what is no mesh, DisttensorError for a mesh that is closed, or another
        session's."""
        self.given = all_dims_of(given) if isinstance(given, Mesh) else new_group(given)  #: what the user calls them
        self.places: list[NodePlace]
        self.mesh: c.MeshDims | None = None  #: the mesh that they are
        if isinstance(self.given, Mesh):
            place = place_of(self.given, "run")
            if place not in session.places.meshes:
                raise _gone(self.given, "closed" if place.session is session else "one of a session that was shut down")
            self.places = list(place.members)
            device = "cuda" if place.is_cuda() and not place.hello.simulated else "cpu"
            self.mesh = c.MeshDims(self.given.names, self.given.shape, device)
        else:
            self.places = [session.places.at(node).one for node in self.given]

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of the nodes."""
        return tuple(place.node for place in self.places)

    def located(self, error: Exception, node: int) -> Exception:
        """Returns an error of a node, to which a mesh adds the node's coordinates."""
        if self.mesh is not None and node in self.nodes:
            dims = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
            at = where(dims, self.nodes.index(node))
            others = "; mesh.slice(...) and dt.mesh(nodes=[...], ...) are meshes of other nodes"
            error.add_note(f"  node {node} is {at} of {self.given}{others if isinstance(error, NodeLost) else ''}")
        return error


def _gone(mesh: Any, how: str) -> DisttensorError:
    sizes = ", ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True))
    nodes = list(mesh.nodes)
    return DisttensorError(
        f"run: the mesh ({sizes}) of nodes {nodes} is {how}; dt.mesh({sizes}, nodes={nodes}) makes another"
    )
