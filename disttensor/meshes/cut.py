"""How a size is cut along a dim of a mesh, and of which whole tensors a module's parameters are parts."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F

from ..collectives import all_gather
from ..proxy.proxy import where_is
from ..runtime.process.spelling import shown
from ..session.places import MeshPlace
from .making import shard
from .mesh import Mesh, all_dims_of, along


class Cut:
    """A size cut along a dim of a mesh: rank r has the entries from ``r * share`` on, as many as ``share``.

    All ranks of a mesh have one shape, so a share is the size over the ranks, rounded up; what is beyond the size, at
    the end of the last ranks' shares, is padding. ``Cut(mesh, over, size, what)`` raises TypeError for what is no mesh,
    or no name; ValueError for a dim that there is not; NodeLost. ``what`` is named in the errors.

    One object is shared by the copies of a module, and is not pickled: it belongs to a session.
    """

    def __init__(self, mesh: Mesh, over: str | None, size: int, what: str) -> None:
        over, mesh = along(mesh, over, "tp"), all_dims_of(mesh)
        if not isinstance(mesh, Mesh):
            raise TypeError(f"{what} takes a mesh, as in mesh=dt.mesh(dp=2, tp=2), not {shown(mesh)}")
        if not isinstance(over, str):
            raise TypeError(f"{what}: over is the name of one dim of the mesh, as in over='tp', not {over!r}")
        self.mesh, self.over, self.size, self.what = mesh, over, size, what
        self.ranks = mesh.size(over)
        self.share = -(-size // self.ranks)
        self.place: MeshPlace = mesh._place

    def __repr__(self) -> str:
        return f"{self.size} over {self.over}={self.ranks}"

    def __deepcopy__(self, memo: object) -> Cut:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {self.what} is not pickled, since it belongs to a mesh: save its state_dict(), which is the plain "
            "module's, or to_plain()"
        )

    @cached_property
    def rank(self) -> torch.Tensor:
        """The coordinate of each rank, on itself."""
        return self.mesh.coordinate(self.over)

    @cached_property
    def padding(self) -> torch.Tensor | None:
        """A mask of the entries of a rank's share that are padding; None where there is none on any rank."""
        if self.share * self.ranks == self.size:
            return None
        behind = torch.arange(self.share * self.ranks, device="cpu") >= self.size
        return shard(behind, self.mesh, **{self.over: 0})

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
        # what is on the mesh is there on all ranks: each takes its share without a copy
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

    def whole(self, share: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the ranks' shares joined in a dimension, without the padding, on each of them; without gradients."""
        joined: Any = all_gather(share.detach(), over=self.over, dim=dim)
        return joined if self.padding is None else joined.narrow(dim, 0, self.size)  # type: ignore[no-any-return]


#: How a tensor is a part of a whole one: the dimensions in which that is cut, and how. The second of two cuts, along
#: another dim of the mesh, cuts what the first has given each rank. Empty where all ranks have the whole.
Cuts = tuple[tuple[Cut, int], ...]

#: All parameters that are parts, by id.
_parts: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()


def cut_of(tensor: torch.Tensor) -> Cuts:
    """Returns how a parameter of ``dt.nn``'s modules, or of ``dt.fully_shard``, is a part of a whole one.

    The gradient, and an optimizer's states of the parameter's shape, are cut as the parameter is. Empty for a tensor of
    which all ranks have the whole, and for a parameter that has left its mesh.
    """
    cuts: Cuts = getattr(tensor, "_cuts", ())
    return cuts if cuts and (tensor.is_meta or where_is(tensor) is cuts[0][0].place) else ()


def mark(parameter: torch.nn.Parameter, cuts: Cuts) -> None:
    """Has ``cut_of`` return this of a parameter."""
    parameter._cuts = cuts  # type: ignore[attr-defined]
    _parts[id(parameter)] = parameter


def cuts_of_gradients() -> dict[int, Cuts]:
    """Returns how the gradients of all parameters that are parts are cut, by their ids."""
    return {id(p.grad): cut_of(p) for p in list(_parts.values()) if p.grad is not None}


def whole_of(part: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Returns the whole tensor of which each rank has a part, on all of them; without gradients."""
    for cut, dim in reversed(cuts):
        part = cut.whole(part, dim)
    return part


def part_of(whole: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """Returns each rank's part of a tensor that is local, on a node, or whole on the mesh."""
    for cut, dim in cuts:
        whole = cut.shares(whole, dim)
    return whole


def whole_shape(part: torch.Tensor, cuts: Cuts) -> tuple[int, ...]:
    """Returns the shape of the whole tensor."""
    shape = list(part.shape)
    for cut, dim in reversed(cuts):
        shape[dim] = cut.size
    return tuple(shape)
