"""Means over the replicas of a module, when a program asks for them: of gradients, and of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives import all_reduce_, broadcast
from ..collectives.over_dims import Over, groups
from ..meshes import agree_
from ..meshes.shards import together
from ..session.places import MeshPlace
from .named import Named, limit_of, not_parts, on_a_mesh, packs, place_of, without


def reduce_gradients(
    module: torch.nn.Module,
    over: Over = "dp",
    op: str = "avg",
    *,
    bucket_mb: float = 25.0,
    transport: torch.dtype | None = None,
    skip: Sequence[str] = (),
    contributors: Sequence[int] | None = None,
) -> None:
    """Reduces the gradients of a module on a mesh over a dim, in place. Returns at once; what comes next on the nodes
    waits.

    Args:
        module: a module on a mesh, after ``backward()``. Parameters without a gradient stay without.
        over: the name of a dim, or several.
        op: a reduction, as for ``dt.all_reduce``.
        bucket_mb: megabytes (2**20 bytes) of gradients that travel together.
        transport: torch.bfloat16 or torch.float16, as which floats of more bits travel.
        skip: names of parameters or submodules whose gradients stay as they are.
        contributors: for each rank of the mesh, in its order, whether its gradients count (True, or a number that is
            not 0): where some have no batch left, "avg" is the mean over the others, and "sum" their sum.

    Raises TypeError for a parameter that is on no mesh, a gradient that is not strided, a dtype that ``op`` does not
    take; ValueError for an unknown dim or name, or a parameter that is cut along one of the dims; NodeLost.
    """
    left_out = without(module, skip, "reduce_gradients")
    grads: list[Named] = []
    for name, parameter in on_a_mesh(module.named_parameters(), "reduce_gradients"):
        if parameter.grad is None or name in left_out:
            continue
        not_parts([(name, parameter)], over, "reduce_gradients")
        if parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"reduce_gradients: the gradient of {name!r} is {parameter.grad.layout}, and has to be strided; "
                f"sparse=False, or skip=[{name!r}]"
            )
        grads.append((name, parameter.grad))
    limit = limit_of(bucket_mb, "reduce_gradients")
    if contributors is None:
        _reduce(grads, limit, over, op, transport)
    elif op not in ("avg", "sum"):
        raise ValueError(f"reduce_gradients: with contributors op is 'avg' or 'sum', not {op!r}")
    elif grads:
        _reduce_of(contributors, grads, limit, over, op, transport)


def average_parameters(
    module: torch.nn.Module,
    over: Over = "dp",
    *,
    winner: int | Sequence[int] | None = None,
    buffers: bool = True,
) -> None:
    """Has all ranks along a dim have the mean of their parameters, and of their buffers, in place. Returns at once.

    Args:
        module: a module on a mesh.
        over: the name of a dim, or several.
        winner: all take the values of one rank, to the bit, in place of the mean: of the one with this index along
            ``over``; or, of a number for each rank of the mesh, in its order, such as the steps that it has done, of
            the one with the largest, the first of several.
        buffers: whether buffers take part. Of integers and bools, such as a count of batches, all take the first
            rank's where there is no winner.

    Raises TypeError for a parameter that is on no mesh, ValueError for an unknown dim, a parameter that is cut along
    it, or another winner; NodeLost.
    """
    named: list[Named] = on_a_mesh(module.named_parameters(), "average_parameters")
    not_parts(named, over, "average_parameters")
    if winner is not None:
        also = [(name, buffer) for name, buffer in module.named_buffers() if buffers and place_of(buffer) is not None]
        _take(winner, [*named, *also], over)
        return
    fractions = [(name, p) for name, p in named if p.is_floating_point() or p.is_complex()]
    _reduce(fractions, limit_of(25.0, "average_parameters"), over, "avg", None)
    if buffers:
        agree_([buffer for buffer in module.buffers() if place_of(buffer) is not None], "avg", over)


@torch.no_grad()
def _reduce(named: Sequence[Named], limit: float, over: Over, op: str, transport: torch.dtype | None) -> None:
    """Reduces tensors in place, those of a pack as one."""
    for pack in packs(named, limit):
        tensors = [tensor for _, tensor in pack]
        if len(tensors) == 1:
            all_reduce_(tensors[0], op, over=over, transport=transport)  # type: ignore[arg-type]
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        all_reduce_(flat, op, over=over, transport=transport)  # type: ignore[arg-type]
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def _reduce_of(
    contributors: Sequence[int],
    grads: Sequence[Named],
    limit: float,
    over: Over,
    op: str,
    transport: torch.dtype | None,
) -> None:
    """Reduces the gradients of the ranks that contribute: those of the others count as zeros."""
    place = _place(grads)
    counts = _each(contributors, place, "reduce_gradients: contributors")
    ranks = groups(place, over, "reduce_gradients")
    mine = [bool(count) for count in counts]
    many = [next(sum(mine[k] for k in group) for group in ranks if rank in group) for rank in range(len(counts))]
    if not all(mine):
        there = together(place, [torch.tensor(here) for here in mine])
        for _, grad in grads:
            grad.copy_(torch.where(there, grad, torch.zeros((), dtype=grad.dtype, device=grad.device)))
    _reduce(grads, limit, over, "sum", transport)
    if op == "avg":
        divisor = together(place, [torch.tensor(float(max(count, 1)), dtype=torch.float64) for count in many])
        for _, grad in grads:
            grad.div_(divisor.to(grad.real.dtype))


@torch.no_grad()
def _take(winner: int | Sequence[int], named: Sequence[Named], over: Over) -> None:
    """Gives all ranks the values of the winner of their group."""
    if not named:
        return
    place = _place(named)
    ranks = groups(place, over, "average_parameters")
    if isinstance(winner, int):
        if not 0 <= winner < len(ranks[0]):
            raise ValueError(f"average_parameters: winner={winner}, and there are {len(ranks[0])} ranks along {over!r}")
        best = {winner}
    else:
        counts = _each(winner, place, "average_parameters: winner")
        best = {max(range(len(group)), key=lambda i: (counts[group[i]], -i)) for group in ranks}
    if len(best) > 1:
        raise ValueError(
            f"average_parameters: winner={list(winner)!r} has ranks {sorted(best)} along {over!r} win, in different "  # type: ignore[arg-type]
            "groups; mesh.slice(...) is one of these"
        )
    for _, tensor in named:
        tensor.copy_(broadcast(tensor, over=over, src=next(iter(best))))


def _place(named: Sequence[Named]) -> MeshPlace:
    place = place_of(named[0][1])
    if place is None:
        raise TypeError(f"{named[0][0]!r} is on no mesh")
    return place


def _each(numbers: Sequence[int], place: MeshPlace, what: str) -> list[int]:
    """Returns a number for each rank. Raises ValueError for another number of them."""
    found = [int(number) for number in numbers]
    if len(found) != len(place.members):
        raise ValueError(f"{what}: {len(found)} numbers for the {len(place.members)} ranks of {place}")
    return found
