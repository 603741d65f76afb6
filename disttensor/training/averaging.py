"""Means over the replicas of a module, when a program asks for them: of gradients, and of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives import all_reduce_
from ..collectives.over_dims import Over
from ..meshes import agree_
from .named import Named, limit_of, not_parts, on_a_mesh, packs, place_of, without


def reduce_gradients(
    module: torch.nn.Module,
    over: Over = "dp",
    op: str = "avg",
    *,
    bucket_mb: float = 25.0,
    transport: torch.dtype | None = None,
    skip: Sequence[str] = (),
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
    _reduce(grads, limit_of(bucket_mb, "reduce_gradients"), over, op, transport)


def average_parameters(module: torch.nn.Module, over: Over = "dp", buffers: bool = True) -> None:
    """Has all ranks along a dim have the mean of their parameters, and of their buffers, in place. Returns at once.

    Of integers and bools, such as a count of batches, all take the first rank's. Raises TypeError for a parameter that
    is on no mesh, ValueError for an unknown dim, or a parameter that is cut along it; NodeLost.
    """
    named: list[Named] = on_a_mesh(module.named_parameters(), "average_parameters")
    not_parts(named, over, "average_parameters")
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
