"""The leaves of a batch: tensors, tensors in parts, and what goes to a device by its own ``to``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..runtime.protocol.batches import is_plain


class Parts:
    """A tensor of a batch whose rows lie apart: those of each rank. It is sent once, as its memory goes with it."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return sum(len(part) for part in self.tensors)

    def to(self, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        """Sends it, where it is all for one place."""
        (whole,) = self.tensors
        return whole.to(device, non_blocking=non_blocking)


def rows_of(batch: Any) -> int | None:
    """Returns the number of samples in a batch: the size of the first dimension of its first tensor. None where it has
    no such tensor."""
    for leaf in tree_leaves(batch, is_leaf=is_leaf):
        if isinstance(leaf, Parts) or (isinstance(leaf, torch.Tensor) and leaf.dim()):
            return len(leaf)
    return None


def is_leaf(x: Any) -> bool:
    return is_plain(x) or has_to(x)


def has_to(x: Any) -> bool:
    return callable(getattr(x, "to", None))
