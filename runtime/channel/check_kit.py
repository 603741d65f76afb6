"""What the checks of ``check`` are written with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .base import DataChannel

#: Nothing in the checks should take this long, seconds.
LIMIT = 20.0


class ConformanceError(AssertionError):
    """The channel does not do what DataChannel promises."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise ConformanceError(what)


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        need(not missing, f"the {kind.__name__} should name {missing}: {error}")
    else:
        raise ConformanceError(f"{kind.__name__} was not raised")


def bits(tensor: torch.Tensor) -> list[int]:
    """Exact contents, NaN included, whatever the strides."""
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
    """From rank 0 to rank 1."""
    receive = channels[2].irecv(target, 0, transfer)
    send = channels[1].isend(source, 1, transfer)
    receive.wait(LIMIT)
    send.wait(LIMIT)
