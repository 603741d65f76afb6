"""The tensors of a module by name: which of them are on the mesh, and which a program leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..collectives.over_dims import Over
from ..meshes.cut import cut_of
from ..proxy.proxy import where_is
from ..runtime.process.spelling import did_you_mean, shown
from ..session.places import MeshPlace

Named = tuple[str, torch.Tensor]


def place_of(tensor: Any) -> MeshPlace | None:
    """Returns the mesh that a tensor is on; None for one that is on none."""
    place = where_is(tensor)
    # training over dims needs dims
    return place if isinstance(place, MeshPlace) else None


def dims(over: Over) -> tuple[str, ...]:
    """Returns the names in ``over``."""
    return (over,) if isinstance(over, str) else tuple(over)


def on_a_mesh(named: Iterable[Named], what: str) -> list[Named]:
    """Returns the tensors. Raises TypeError for one that is on no mesh."""
    found = list(named)
    for name, tensor in found:
        if place_of(tensor) is None:
            raise TypeError(f"{what}: {name!r} is on {tensor.device}, and on no mesh; module.to(mesh.device) first")
    return found


def not_parts(named: Iterable[Named], over: Over, what: str) -> None:
    """Raises ValueError for a parameter that is cut along a dim in ``over``: ranks there have no replicas of it."""
    for name, tensor in named:
        for cut, _ in cut_of(tensor):
            if cut.over in dims(over):
                raise ValueError(
                    f"{what}: {name!r} is cut along {cut.over!r} ({cut.what}): each rank has another part of it, and "
                    "no replica; over= is for the dims along which ranks have the same"
                )


def without(module: torch.nn.Module, skip: Sequence[str], what: str) -> set[str]:
    """Returns the names of the parameters and buffers that ``skip`` names, each or by a submodule.

    Raises TypeError for a text in place of a list, ValueError for a name that there is not.
    """
    if isinstance(skip, str):
        raise TypeError(f"{what}: skip is a list of names, not {shown(skip)}; skip=[{shown(skip)}]")
    tensors = [name for name, _ in _all(module)]
    modules = [name for name, _ in module.named_modules() if name]
    found: set[str] = set()
    for given in skip:
        under = {name for name in tensors if name == given or name.startswith(f"{given}.")}
        if not under and given not in modules:
            raise ValueError(
                f"{what}: skip names {given!r}, which is no parameter, buffer or module of "
                f"{type(module).__name__}{did_you_mean(given, [*tensors, *modules])}"
            )
        found |= under
    return found


def _all(module: torch.nn.Module) -> Iterator[Named]:
    # with both names of tied weights, so that either can be given
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def packs(tensors: Iterable[Named], limit: float) -> list[list[Named]]:
    """Returns the tensors in packs of one dtype, in their order: a pack is full when it has ``limit`` bytes."""
    full: list[list[Named]] = []
    filling: dict[torch.dtype, tuple[list[Named], list[int]]] = {}
    for name, tensor in tensors:
        pack, nbytes = filling.setdefault(tensor.dtype, ([], []))
        pack.append((name, tensor))
        nbytes.append(tensor.numel() * tensor.dtype.itemsize)
        if sum(nbytes) >= limit:
            full.append(filling.pop(tensor.dtype)[0])
    return [*full, *(pack for pack, _ in filling.values())]


def limit_of(bucket_mb: float, what: str) -> float:
    """Returns megabytes (2**20) as bytes. Raises ValueError for what is no positive number."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not bucket_mb > 0:
        raise ValueError(f"{what}: bucket_mb is a positive number of megabytes, not {bucket_mb!r}")
    return bucket_mb * 2**20
