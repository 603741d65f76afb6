"""Slabs: flat tensors cut into parts that go through an algorithm side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: The most slabs, so that the transfer ids of a collective suffice.
_MOST = 1 << 16


def slabs(blocks: Sequence[torch.Tensor], chunk: int) -> int:
    """Returns the number of slabs it takes to have parts of ``chunk`` bytes of each block. At least one."""
    longest = max((block.numel() * block.element_size() for block in blocks), default=0)
    return min(max(1, -(-longest // chunk)), _MOST)


def cut(blocks: Sequence[torch.Tensor], slab: int, of: int) -> list[torch.Tensor]:
    """Returns the parts of one slab: one of each block, where all blocks are of about the same length."""
    return [block[block.numel() * slab // of : block.numel() * (slab + 1) // of] for block in blocks]


def cut_apart(blocks: Sequence[torch.Tensor], slab: int, chunk: int) -> list[torch.Tensor | None]:
    """Returns the parts of one slab for blocks of their own lengths: short ones have no part in the later slabs.

    A block's parts depend on that block alone.
    """
    return [cut([block], slab, n)[0] if slab < (n := slabs([block], chunk)) else None for block in blocks]


def pieces_of(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Cuts a flat tensor into consecutive pieces of about equal lengths."""
    return [cut([tensor], i, count)[0] for i in range(count)]
