"""The elements of a contiguous tensor in one row, in its own memory.

Torch calls a tensor contiguous whatever the strides of its dimensions of one element, and ``view(-1)`` keeps that of a
single element: such a row can't be viewed as bytes, though all of the memory is there.
"""

from __future__ import annotations

import torch


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a contiguous tensor as a row with stride 1. Raises RuntimeError for another tensor."""
    row = tensor.view(-1)
    return row if row.numel() != 1 else row.as_strided((1,), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as a row of uint8. Raises RuntimeError for another tensor."""
    return flattened(tensor).view(torch.uint8)
