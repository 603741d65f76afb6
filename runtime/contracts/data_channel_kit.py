"""Tools with which the checks of ``check_data_channel`` are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..channel.base import DataChannel
from .conformance import ConformanceError, need, raises

__all__ = ["LIMIT", "ConformanceError", "bits", "move", "need", "raises", "random", "same"]

#: Seconds: nothing in the checks should take this long.
LIMIT = 20.0


def bits(tensor: torch.Tensor) -> list[int]:
    """Returns a tensor's exact contents, NaN included, whatever the strides."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return list(plain.reshape(-1).view(torch.uint8).tolist())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def move(channels: Sequence[DataChannel], source: torch.Tensor, target: torch.Tensor, transfer: int) -> None:
    """Moves a tensor from rank 0 to rank 1."""
    receive = channels[2].irecv(target, 0, transfer)
    send = channels[1].isend(source, 1, transfer)
    receive.wait(LIMIT)
    send.wait(LIMIT)
