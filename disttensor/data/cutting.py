"""Batches of the script's, cut into the parts of ranks and sent to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from ..dispatch.first_call import layout_of
from .parts import Parts, has_to, is_leaf
from .prefetching import moved
from .ranks import Ranks


def picked(batch: Any, rows: int, which: slice | list[int]) -> Any:
    """Returns a batch with some of its rows, which may repeat."""

    def pick(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[which] if leaf.dim() and leaf.shape[0] == rows else leaf
        if isinstance(leaf, (list, tuple)) and len(leaf) == rows:
            return leaf[which] if isinstance(which, slice) else type(leaf)(leaf[i] for i in which)
        return leaf

    return tree_map(pick, batch, is_leaf=is_leaf)


def sent(batch: Any, rows: Sequence[int], ranks: Ranks) -> Any:
    """Returns a batch whose tensors are on their way: cut along dimension 0, ``rows`` for each rank.

    For several places without a mesh it is a list of batches, None for one without rows. Lists of plain data with an
    entry for each row are cut as well there; on a mesh they stay whole, at the script.

    Raises ValueError for a tensor with another number of rows, TypeError for what can't be cut.
    """
    if not ranks.many and len(rows) == 1:
        return moved(batch, ranks.places[0].device)
    leaves, spec = tree_flatten_with_path(batch, is_leaf=is_leaf)
    parts = [_parts(leaf, rows, f"batch{keystr(path)}", ranks) for path, leaf in leaves]
    if ranks.mesh is not None:
        return tree_unflatten(
            [_on_mesh(part, leaf, ranks) for part, (_, leaf) in zip(parts, leaves, strict=True)], spec
        )
    return [
        tree_unflatten([_at(part[i], place.device) for part in parts], spec) if rows[i] else None
        for i, place in enumerate(ranks.places)
    ]


def _parts(leaf: Any, rows: Sequence[int], path: str, ranks: Ranks) -> Sequence[Any]:
    """Returns what each rank gets of a leaf."""
    whole = sum(rows)
    if isinstance(leaf, Parts) and [len(part) for part in leaf.tensors] == list(rows):
        return leaf.tensors
    if isinstance(leaf, torch.Tensor):
        if layout_of(leaf) is not torch.strided:
            raise TypeError(f"distribute: {path} is {layout_of(leaf)}, and can't be cut; x.to_dense()")
        if not leaf.dim():
            return [leaf] * len(rows)
        if leaf.shape[0] != whole:
            raise ValueError(
                f"distribute: {path} has the shape {tuple(leaf.shape)}, and the batch has {whole} rows; a tensor that "
                "all ranks need whole goes there once, beside the loop (dt.meshes.replicate)"
            )
        return list(leaf.split(list(rows)))
    if has_to(leaf):
        raise TypeError(
            f"distribute: {path} is a {type(leaf).__name__}, which can't be cut for {ranks}; let the loader give "
            "tensors (of a PackedSequence the padded one, and the lengths)"
        )
    if isinstance(leaf, (list, tuple)) and len(leaf) == whole:
        starts = [sum(rows[:i]) for i in range(len(rows))]
        return [leaf[start : start + n] for start, n in zip(starts, rows, strict=True)]
    return [leaf] * len(rows)


def _on_mesh(parts: Sequence[Any], leaf: Any, ranks: Ranks) -> Any:
    return ranks.put(parts) if isinstance(leaf, (torch.Tensor, Parts)) else leaf


def _at(part: Any, device: torch.device) -> Any:
    return part.to(device, non_blocking=True) if isinstance(part, torch.Tensor) else part
