"""Takes arguments and results apart into tensors, at any depth; a DTensor into the tensor that it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class _Wrapper:
    """A tensor that torch makes of others: the place of these among the leaves, and the way to make it again."""

    at: int
    kind: type
    names: tuple[str, ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    def make(self, tensors: Sequence[Any]) -> Any:
        inner = dict(zip(self.names, tensors[self.at : self.at + len(self.names)], strict=True))
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Spec:
    """How leaves make up a value."""

    tree: TreeSpec
    wrappers: tuple[_Wrapper, ...] = ()


def flatten(value: Any, graded: bool = False) -> tuple[list[Any], Spec]:
    """Returns the leaves of a value, and how they make it up.

    A tensor of tensors on nodes or meshes (a DTensor, that of a functional collective) is these. One that requires a
    gradient is so only if ``graded`` says so, and loses it.
    """
    leaves, tree = tree_flatten(value)
    if not any(map(_is_wrapper, leaves)):
        return leaves, Spec(tree)
    found: list[Any] = []
    wrappers: list[_Wrapper] = []
    for leaf in leaves:
        if not _is_wrapper(leaf) or (leaf.requires_grad and not graded):
            found.append(leaf)
            continue
        names, context = leaf.detach().__tensor_flatten__()
        wrappers.append(_Wrapper(len(found), type(leaf), tuple(names), context, leaf.shape, leaf.stride()))
        found.extend(getattr(leaf, name) for name in names)
    return found, Spec(tree, tuple(wrappers))


def unflatten(leaves: Sequence[Any], spec: Spec) -> Any:
    """Returns the value that leaves make up."""
    if not spec.wrappers:
        return tree_unflatten(leaves, spec.tree)
    found: list[Any] = []
    at = 0
    for wrapper in spec.wrappers:
        found += leaves[at : wrapper.at]
        found.append(wrapper.make(leaves))
        at = wrapper.at + len(wrapper.names)
    return tree_unflatten([*found, *leaves[at:]], spec.tree)


def _is_wrapper(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(leaf) and leaf.device.type == "node"
