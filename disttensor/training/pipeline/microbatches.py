"""Batches cut in micro-batches, and outputs of micro-batches put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ...meshes import Mesh
from ...proxy.proxy import where_is
from ...runtime.process.spelling import shown
from ...session.places import MeshPlace, Place
from ..batches import share_of


def to_place(tree: Any, place: Place) -> Any:
    """Returns a tree with its tensors on a place."""
    return tree_map(lambda x: x.to(place.device) if isinstance(x, torch.Tensor) else x, tree)


def cut(batch: Any, name: str, place: Place, over: tuple[str, ...], microbatches: int) -> tuple[list[Any], list[int]]:
    """Returns the micro-batches of a batch, and their numbers of rows, which differ by one at most.

    Tensors are cut in dimension 0; those without a dimension, and what is no tensor, is in each. A mesh gets its
    batch at once, each rank along ``over`` its own rows; a node gets each micro-batch when its turn comes
    (``to_place``). Without a tensor to cut there are no rows.

    Raises ValueError for tensors of different numbers of rows, fewer rows than micro-batches, rows that do not divide
    among the ranks of a mesh, a tensor on another mesh, or one that requires a gradient.
    """
    leaves, spec = tree_flatten(batch)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ValueError(
                f"Pipeline: {name} requires a gradient, and step() computes those of the stages' parameters only; "
                f"{name}.detach(), or have a first stage compute it"
            )
    # a stage on a mesh takes rows cut along its dims
    leaves = [_on_mesh(leaf, name, place, over) if isinstance(place, MeshPlace) else leaf for leaf in leaves]
    with_rows = [leaf for leaf in leaves if _has_rows(leaf)]
    rows = sorted({leaf.shape[0] for leaf in with_rows})
    if not rows:
        return [batch] * microbatches, []
    if len(rows) > 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in with_rows)
        raise ValueError(f"Pipeline: the tensors of {name} have one number of rows (dimension 0), and not {shapes}")
    # rows are cut among the ranks of a mesh only
    where = " on each rank" if isinstance(place, MeshPlace) and over else ""
    if rows[0] < microbatches:
        raise ValueError(
            f"Pipeline: {rows[0]} rows of {name}{where} are too few for microbatches={microbatches}, of which each has "
            "one at least"
        )
    each, more = divmod(rows[0], microbatches)
    sizes = [each + 1] * more + [each] * (microbatches - more)
    parts = [leaf.split(sizes) if _has_rows(leaf) else [leaf] * microbatches for leaf in leaves]
    return [tree_unflatten([part[i] for part in parts], spec) for i in range(microbatches)], sizes


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _on_mesh(leaf: Any, name: str, place: MeshPlace, over: tuple[str, ...]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    there = where_is(leaf)
    # what is on a mesh is cut already
    if isinstance(there, MeshPlace):
        if there is not place:
            raise ValueError(f"Pipeline: {name} is on {there}, and its stage on {place}")
        return leaf
    if not leaf.dim():
        return leaf.to(place.device)
    return share_of(leaf, Mesh(place, place.dims), over, f"Pipeline: {leaf.shape[0]} rows of {name}")


def joined(parts: Sequence[Any]) -> Any:
    """Returns the outputs of micro-batches as one: tensors are concatenated in dimension 0.

    Raises TypeError for outputs of different structures, tensors without a dimension, or other values that differ.
    """
    trees = [tree_flatten(part) for part in parts]
    spec = trees[0][1]
    if any(other != spec for _, other in trees):
        raise TypeError("Pipeline: the last stage returns different structures for different micro-batches")
    return tree_unflatten([_join(list(each)) for each in zip(*(leaves for leaves, _ in trees), strict=True)], spec)


def _join(values: list[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        if not values[0].dim():
            raise TypeError(
                "Pipeline: the last stage returns a tensor without a dimension for each micro-batch, and which one is "
                "the whole batch's nobody has said; have it return rows, or use microbatches=1"
            )
        return torch.cat(values)
    if any(value is not values[0] and value != values[0] for value in values):
        raise TypeError(
            f"Pipeline: the last stage returns {shown(values[0])} for one micro-batch, and other values for others; "
            "only tensors are put together"
        )
    return values[0]


def checked(microbatches: object) -> int:
    """Returns the number of micro-batches. Raises ValueError for what is no positive integer."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"Pipeline: microbatches is a positive integer, not {shown(microbatches)}")
    return microbatches


#: ``loss_fn(output, target)`` of a micro-batch.
Loss = Callable[[Any, Any], torch.Tensor]
