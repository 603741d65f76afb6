"""One value for all ranks of a mesh, where each has its own: what a checkpoint of a replica needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from ..collectives import all_reduce_, broadcast
from ..collectives.over_dims import Over
from ..proxy.proxy import where_is
from ..runtime.process.spelling import shown
from ..session.places import MeshPlace
from .cut import cut_of

W = TypeVar("W", bound=torch.nn.Module | torch.Tensor | Iterable[torch.Tensor])


def agree_(what: W, how: str = "first", over: Over | None = None) -> W:
    """Has all ranks of a mesh have one value of a module's buffers, or of tensors, and returns ``what``. For BatchNorm,
    whose statistics are those of each rank's own data: ``dt.meshes.agree_(model)`` before ``torch.save``.

        >>> norm = torch.nn.BatchNorm1d(1).to(dt.mesh(dp=2).device)
        >>> x = dt.shard(torch.tensor([[0.], [2.], [4.], [8.]]), dt.mesh(dp=2), dp=0)
        >>> y = norm(x)     # two rows on each rank
        >>> dt.meshes.agree_(norm).running_mean.item()
        0.10000000149011612

    Args:
        what: a module (its buffers, not its parameters), a tensor, or several. Those that are on no mesh stay as they
            are.
        how: "first" takes the value of the first rank, as DistributedDataParallel does; "avg" the mean of all ranks, of
            integers and bools the first.
        over: the name of a dim, or several, along which ranks agree. Default: all of the mesh.

    Returns at once; gradients know nothing of it. Raises TypeError for what is no tensor, or where none is on a mesh;
    ValueError for another ``how``, an unknown dim, or a parameter that is cut along one of the dims; NodeLost.
    """
    if how not in ("first", "avg"):
        raise ValueError(f"agree_: how is 'first' or 'avg', not {shown(how)}")
    tensors = _tensors(what)
    # on one node there is nothing to agree about
    there: list[Any] = [x for x in tensors if isinstance(where_is(x), MeshPlace)]
    if tensors and not there:
        raise TypeError(f"agree_ takes what is on a mesh, and this is on {tensors[0].device}; model.to(mesh.device)")
    with torch.no_grad():
        for x in there:
            along = over or tuple(x._place.dims)
            for cut, _ in cut_of(x):
                if cut.over in ((along,) if isinstance(along, str) else along):
                    raise ValueError(
                        f"agree_: a tensor of shape {tuple(x.shape)} is cut along {cut.over!r} ({cut.what}): each rank "
                        "has another part of it; over= names the dims along which ranks agree"
                    )
            if how == "avg" and (x.is_floating_point() or x.is_complex()):
                all_reduce_(x, "avg", over=along)
            else:
                x.copy_(broadcast(x, over=along))
    return what


def _tensors(what: object) -> list[torch.Tensor]:
    if isinstance(what, torch.nn.Module):
        return list(what.buffers())
    if isinstance(what, torch.Tensor) or not isinstance(what, Iterable):
        what = [what]
    tensors = list(what)
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"agree_ takes a module or tensors (of a state dict its values()), not {type(x).__name__}")
    return tensors
