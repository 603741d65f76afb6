"""How a number of features, or a vocabulary, is cut along a dim of a mesh."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from ..proxy.proxy import where_is
from ..session.places import MeshPlace
from .making import shard
from .mesh import Mesh


class Cut:
    """A size cut along a dim of a mesh: rank r has the entries from ``r * share`` on, as many as ``share``.

    All ranks of a mesh have one shape, so a share is the size over the ranks, rounded up; what is beyond the size, at
    the end of the last ranks' shares, is padding. ``Cut(mesh, over, size, what)`` raises TypeError for what is no mesh,
    or no name; ValueError for a dim that there is not; NodeLost. ``what`` is named in the errors.

    One object is shared by the copies of a module, and is not pickled: it belongs to a session.
    """

    def __init__(self, mesh: Mesh, over: str, size: int, what: str) -> None:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"{what} takes a mesh, as in mesh=dt.mesh(dp=2, tp=2), not {mesh!r}")
        if not isinstance(over, str):
            raise TypeError(f"{what}: over is the name of one dim of the mesh, as in over='tp', not {over!r}")
        self.mesh, self.over, self.size, self.what = mesh, over, size, what
        self.ranks = mesh.size(over)
        self.share = -(-size // self.ranks)
        self.place: MeshPlace = mesh._place
        self.rank = mesh.coordinate(over)
        #: which entries of a rank's share are padding; None where there is none on any rank
        self.padding: Any = None
        if self.share * self.ranks > size:
            self.padding = shard(torch.arange(self.share * self.ranks, device="cpu") >= size, mesh, **{over: 0})

    def __repr__(self) -> str:
        return f"{self.size} over {self.over}={self.ranks}"

    def __deepcopy__(self, memo: object) -> Cut:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {self.what} is not pickled, since it belongs to a mesh: save its state_dict(), which is the plain "
            "module's, or to_plain()"
        )

    def padded(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns a tensor with zeros behind the entries of a dimension, so that the ranks divide it."""
        behind = self.share * self.ranks - self.size
        if not behind:
            return whole
        pads = [0, 0] * (whole.dim() - 1 - dim % whole.dim())
        return F.pad(whole, (*pads, 0, behind))

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns each rank's share of a dimension of a tensor on the mesh, padded by zeros."""
        dim %= whole.dim()
        parts = self.padded(whole, dim).unflatten(dim, (self.ranks, self.share))
        return parts.index_select(dim, self.rank.view(1)).squeeze(dim)  # type: ignore[no-any-return]

    def shares(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns each rank's share of a dimension of a tensor that is local, on a node, or whole on the mesh."""
        there = where_is(whole)
        if isinstance(there, MeshPlace):
            if there is not self.place:
                raise TypeError(f"{self.what} is on {self.place}, and these values on {there}")
            return self.own(whole, dim)
        return shard(self.padded(whole, dim), self.mesh, **{self.over: dim})

    def without_padding(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor whose padding in the last dimension is zero, and whose gradient there is zero."""
        if self.padding is None:
            return x
        return x.masked_fill(self.padding, 0)
