"""Comparison of the replicas on a mesh: says where they differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..collectives import broadcast
from ..collectives.over_dims import Over, groups
from .named import Named, not_parts, on_a_mesh

#: An integer of as many bytes, whose equality is that of bits.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Differences that an error lists.
SHOWN = 5


def assert_replicas_equal(x: object, over: Over = "dp", *, rtol: float = 1e-7, bitwise: bool = False) -> None:
    """Raises AssertionError for values on a mesh that differ along a dim from the first rank's; waits.

    The error says which parameter, the coordinates, how many entries, and by how much. Nothing but a number per tensor
    and rank comes to the script where all is equal.

    Args:
        x: a module (its parameters and buffers), a tensor, a dict of tensors (a state dict), or several tensors.
        over: the name of a dim, or several.
        rtol: the difference that is allowed, over the first rank's value. NaNs in one place are equal.
        bitwise: compare bits: 0.0 and -0.0 differ, and a NaN equals one with the same bits.

    Raises TypeError for what is on no mesh; ValueError for an unknown dim, or a parameter that is cut along it;
    NodeLost.
    """
    with torch.no_grad():
        named = on_a_mesh(_named(x), "assert_replicas_equal")
        not_parts(named, over, "assert_replicas_equal")
        wrong = [_differ(tensor, over, rtol, bitwise) for _, tensor in named]
        counts = [found.sum() for found in wrong]
        found = []
        for (name, tensor), mask, count in zip(named, wrong, counts, strict=True):
            for rank, shard in enumerate(count.shards()):  # type: ignore[attr-defined]
                if bad := int(shard.item()):
                    found.append(_describe_difference(name, tensor, over, rank, mask, bad))
    if found:
        more = f"\n... and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise AssertionError("replicas differ:\n" + "\n".join(found[:SHOWN]) + more)


def _named(x: object) -> Iterable[Named]:
    if isinstance(x, torch.nn.Module):
        return [*x.named_parameters(), *x.named_buffers()]
    if isinstance(x, torch.Tensor):
        return [("tensor", x)]
    if isinstance(x, Mapping):
        return [(str(key), value) for key, value in x.items() if isinstance(value, torch.Tensor)]
    if isinstance(x, Iterable):
        return [(f"tensor {i}", value) for i, value in enumerate(x) if isinstance(value, torch.Tensor)]
    raise TypeError(f"assert_replicas_equal takes a module, tensors, or a dict of them, not {type(x).__name__}")


def _differ(tensor: torch.Tensor, over: Over, rtol: float, bitwise: bool) -> torch.Tensor:
    """Returns where a tensor differs from the first rank's."""
    first: torch.Tensor = broadcast(tensor, over=over)
    if bitwise:
        if tensor.is_complex():
            return _differ(torch.view_as_real(tensor), over, rtol, bitwise).any(-1)
        whole = _WHOLE[tensor.dtype.itemsize]
        return tensor.contiguous().view(whole) != first.contiguous().view(whole)
    if tensor.is_floating_point() or tensor.is_complex():
        return ~torch.isclose(tensor, first, rtol=rtol, atol=0.0, equal_nan=True)
    return tensor != first


def _describe_difference(name: str, tensor: Any, over: Over, rank: int, mask: Any, bad: int) -> str:
    """Returns a sentence on the entries of one rank that differ."""
    place = tensor._place
    start = next(group[0] for group in groups(place, over, "assert_replicas_equal") if rank in group)
    there, here = (tensor.detach().shards()[at].cpu() for at in (rank, start))
    where = mask.shards()[rank].cpu()
    at = where.nonzero()[0].tolist()
    index = tuple(at)
    by = ""
    if there.dtype is not torch.bool:
        wide = torch.complex128 if there.is_complex() else torch.float64
        by = f", by up to {(there.to(wide) - here.to(wide))[where].abs().max().item():.3g}"
    return (
        f"{name!r} on node {place.ranks[rank]} ({place.where(rank)}): {bad} of {there.numel()} entries{by}; "
        f"{name}{at if at else ''} is {there[index].item()!r}, and {here[index].item()!r} at {place.where(start)}"
    )
