"""Batches: each rank gets its own share of what a program passes to a model as a local tensor, or whole."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from ..collectives import all_gather, all_reduce
from ..meshes import Mesh, from_shards, shard
from ..meshes.mesh import place_of as mesh_place
from .named import place_of


def shares_of(values: Any, mesh: Mesh, over: tuple[str, ...], what: str) -> Any:
    """Returns nested values with the tensors that are local, or on one node, cut in dimension 0 for the ranks along
    ``over``; those on the mesh, and those without a dimension, stay as they are.

    Raises ValueError for a batch that does not divide, or a tensor on another mesh.
    """

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        place = place_of(value)
        if place is not None:
            if value.device != mesh.device:
                raise ValueError(f"{what}: an argument is on {place}, and the module on {mesh}")
            return value
        return share_of(
            value, mesh, over, f"{what}: {value.shape[0]} rows of an argument of shape {tuple(value.shape)}"
        )

    return tree_map(placed, values)


def share_of(batch: torch.Tensor, mesh: Mesh, over: tuple[str, ...], what: str) -> torch.Tensor:
    """Returns a tensor that is local, or on one node, cut in dimension 0 for the ranks along ``over``.

    Raises ValueError where it does not divide; ``what`` begins its text.
    """
    ranks = prod(mesh.size(dim) for dim in over)
    left = batch.shape[0] % ranks
    if left:
        along = ", ".join(f"{dim}={mesh.size(dim)}" for dim in over)
        raise ValueError(
            f"{what} do not divide among {along}, and all ranks have one shape; leave {left} rows out "
            "(drop_last=True), or put the tensor on the mesh (dt.meshes.replicate, dt.meshes.from_shards)"
        )
    return shard(batch, mesh, **dict.fromkeys(over, 0))


class WholeBatches:
    """Whole batches that are cut for the ranks on their way into a module, and what comes out that is put together.

    As ``torch.nn.DataParallel`` does it: a program, and a library that has it train (transformers' Trainer), knows one
    device and one batch.
    """

    def __init__(self, mesh: Mesh, over: tuple[str, ...], what: str) -> None:
        self._mesh, self._over, self._what = mesh, over, what
        self._ranks = prod(mesh.size(dim) for dim in over)

    @cached_property
    def _number(self) -> torch.Tensor:
        """The number of each rank among those along the dims, on itself."""
        numbers = mesh_place(self._mesh, self._what).numbered(self._over)
        return from_shards(self._mesh, [torch.tensor([i], device="cpu") for i in numbers])

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, int]:
        """Returns a module's arguments on the mesh, those tensors cut that have a row for each sample, and how many
        samples a rank has.

        The first tensor with a dimension says how many samples there are, wherever it is. Where the ranks do not divide
        them, all have the whole batch, and it is 0. A tensor with one row is for all samples. Of
        ``num_items_in_batch``, by which a model of transformers divides its loss, each rank has its share, so that the
        mean of all ranks' losses is the whole batch's.

        Raises ValueError for a tensor with another number of rows, or on another mesh.
        """
        leaves, spec = tree_flatten_with_path((args, kwargs))
        rows = next((len(x) for _, x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
        share = 0 if rows % self._ranks else rows // self._ranks
        cut = [self._placed(x, rows, share, keystr(path[1:])) for path, x in leaves]
        args, kwargs = tree_unflatten(cut, spec)
        if share and kwargs.get("num_items_in_batch") is not None:
            kwargs = {**kwargs, "num_items_in_batch": kwargs["num_items_in_batch"] / self._ranks}
        return args, kwargs, share

    def _placed(self, value: Any, rows: int, share: int, path: str) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        place = place_of(value)
        if place is not None and value.device != self._mesh.device:
            raise ValueError(f"{self._what}: an argument is on {place}, and the module on {self._mesh}")
        if len(value) not in (1, rows):
            raise ValueError(
                f"{self._what}(whole=True): the argument {path} has the shape {tuple(value.shape)}, and the batch has "
                f"{rows} samples: those of the first tensor among the arguments"
            )
        if not share or len(value) != rows:
            return value.to(self._mesh.device)
        if place is None:
            return shard(value, self._mesh, **dict.fromkeys(self._over, 0))
        return value.unflatten(0, (self._ranks, share)).index_select(0, self._number).squeeze(0)

    def join(self, results: Any, share: int) -> Any:
        """Returns what a module has returned of batches of ``share`` samples, with the same on all ranks: of a loss (a
        number with a fraction) the mean, of tensors with a row for each sample those of the whole batch.

        In a pass with gradients that returns a loss these tensors stay each rank's own: all ranks' outputs of a
        language model are more than one of them has room for.
        """
        losses = any(map(_is_loss, tree_leaves(results)))
        keep = not share or (losses and torch.is_grad_enabled())

        def joined(value: Any) -> Any:
            if _is_loss(value):
                return all_reduce(value, "avg", over=self._over)
            if keep or not isinstance(value, torch.Tensor) or not value.dim() or len(value) != share:
                return value
            for dim in reversed(self._over):
                value = all_gather(value, over=dim)
            return value

        return tree_map(joined, results)


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point()
