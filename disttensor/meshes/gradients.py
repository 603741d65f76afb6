"""Gradients on meshes for torch's own tools: the norm of those that are cut, and whether any rank's is not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from ..collectives import all_gather, all_reduce_
from ..dispatch.op_plan import OpEntry
from ..dispatch.op_table import handler, run_ordinary
from ..proxy.proxy import where_is
from ..session.places import MeshPlace
from .cut import Cuts, cuts_of_gradients

Norm = Callable[..., torch.Tensor]


def of_whole_tensors(original: Norm) -> Norm:
    """Returns torch's norm of several tensors, by which gradients are clipped, for gradients that are cut, too: it is
    that of the whole ones, alike on all ranks."""

    @wraps(original)
    def total(tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: Any = None) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        known = cuts_of_gradients()
        cuts = [known.get(id(tensor), ()) for tensor in tensors]
        if not any(cuts):
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        norm = _norm(original, tensors, cuts, float(norm_type), foreach)
        if error_if_nonfinite:
            original([norm], norm_type, True, False)
        return norm

    return total


@torch.no_grad()
def _norm(
    original: Norm, tensors: Sequence[torch.Tensor], cuts: Sequence[Cuts], norm_type: float, foreach: Any
) -> torch.Tensor:
    if not norm_type > 0:
        raise ValueError(
            f"the norm of order {norm_type} of gradients that are cut along a dim of a mesh would count their padding; "
            "an order above 0, such as 2.0 or 'inf', does not"
        )
    alike: dict[tuple[str, ...], list[torch.Tensor]] = {}  # by the dims along which they are cut
    for tensor, cut in zip(tensors, cuts, strict=True):
        alike.setdefault(tuple(one.over for one, _ in cut), []).append(tensor)
    norms: list[torch.Tensor] = []
    for over, group in alike.items():
        norm: Any = original(group, norm_type, False, foreach)
        for dim in over:  # a norm of the ranks' norms, and no sum of powers, which overflow sooner
            norm = torch.linalg.vector_norm(all_gather(norm.view(1), over=dim), norm_type)
        norms.append(norm.to(tensors[0].device))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)


@handler(torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Has all ranks of a mesh know of a gradient that is not finite on one of them: they leave out the same steps."""
    result = run_ordinary(entry, args, kwargs, None)
    place = where_is(args[1])
    # ranks of a mesh see different gradients; a node's own is all there is
    if isinstance(place, MeshPlace):
        all_reduce_(args[1], "max", over=tuple(place.dims))
    return result
