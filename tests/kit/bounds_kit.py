"""Ways on which values cross wires, for tests of bounds: between a script, its nodes, and a client of an endpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from limits import HANG

import disttensor as dt
from disttensor.tasks import Channel, Connection


def equal(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.cpu(), b)
    if isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and bool(a == b)


def given(make: Callable[[int], Any], n: int) -> Any:
    return make(n)


def put(make: Callable[[int], Any], n: int, channel: Channel) -> None:
    channel.put(make(n))


def take(make: Callable[[int], Any], n: int, channel: Channel) -> bool:
    return equal(channel.get(timeout=HANG), make(n))


@dataclass(frozen=True)
class Job:
    """A session of two nodes that are processes, with an endpoint, a client of it, and a channel."""

    channel: Channel
    here: Connection  #: of the endpoint
    there: Connection  #: the client's

    def returned(self, make: Callable[[int], Any], n: int) -> bool:
        return equal(dt.run(given, make, n, node=1), make(n))

    def argument(self, make: Callable[[int], Any], n: int) -> bool:
        return equal(dt.run(lambda x: x, make(n), node=1), make(n))

    def copied(self, make: Callable[[int], Any], n: int) -> bool:
        value = make(n)
        return not isinstance(value, torch.Tensor) or equal(value.to("node:1"), value)

    def passed(self, make: Callable[[int], Any], n: int) -> bool:
        if not isinstance(value := make(n), torch.Tensor):
            return True
        there = torch.zeros(value.numel(), device="node:0").as_strided(value.shape, value.stride())
        return equal(there.to("node:1"), torch.zeros_like(value))

    def from_node(self, make: Callable[[int], Any], n: int) -> bool:
        dt.run(put, make, n, self.channel, node=1)
        return equal(self.channel.get(timeout=HANG), make(n))

    def to_node(self, make: Callable[[int], Any], n: int) -> bool:
        self.channel.put(make(n))
        return bool(dt.run(take, make, n, self.channel, node=1))

    def from_client(self, make: Callable[[int], Any], n: int) -> bool:
        self.there.send(make(n), HANG)
        return equal(self.here.recv(timeout=HANG), make(n))

    def to_client(self, make: Callable[[int], Any], n: int) -> bool:
        self.here.send(make(n), HANG)
        return equal(self.there.recv(timeout=HANG), make(n))

    def check(self) -> None:
        """All connections work."""
        for way in WAYS:
            assert getattr(self, way)(torch.arange, 3) or way == "passed", way
        assert torch.ones(3).to("node:0").to("node:1").sum().item() == 3


WAYS = ("returned", "argument", "copied", "passed", "from_node", "to_node", "from_client", "to_client")
