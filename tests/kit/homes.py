"""Homes: where a test's tensors live, so that one test is about a node, and about a mesh whose ranks differ.

A test takes the fixture ``home``, sends there what it has here (`home.send`) and compares with what there is here
(`home.same`). On a mesh one of the ranks has these values and the others different ones, and that rank is compared.

What can't be on a mesh is on a list of its file, ``NOT_ON_A_MESH = {"test_...": "reason"}``, or "test_...[parameters]".
It has to fail there with a RuntimeError, never by other values: a test that passes has to leave the list.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equal import at_rank, same, send
from torch.utils._pytree import tree_leaves

import disttensor as dt

#: Of a mesh, which are all nodes of the fixture `nodes`.
RANKS = 3
#: The first is a node's CPU; the others are ranks of a mesh, of which `make test` has the last one.
HOMES = [
    pytest.param("cpu", id="node"),
    pytest.param(0, id="rank 0", marks=pytest.mark.slow),
    pytest.param(1, id="rank 1", marks=pytest.mark.slow),
    pytest.param(2, id="rank 2"),
]
#: They, and a simulated CUDA device: ``@anywhere``.
anywhere = pytest.mark.parametrize("home", [*HOMES, pytest.param("cuda:0", id="cuda")], indirect=True)


class Home:
    """A device of a node."""

    def __init__(self, device: torch.device, nodes: tuple[int, ...]) -> None:
        self.device = device
        self.nodes = nodes  #: the numbers of its nodes

    def send(self, value: Any) -> Any:
        """Returns a local value with its tensors moved here, as ``equal.send`` does."""
        return self.differ(send(value, self.device))

    def differ(self, value: Any) -> Any:
        """Changes tensors that live here, or a module, on the other ranks of a mesh; returns it."""
        return value

    def seen(self, value: Any) -> Any:
        """Returns what is compared of a value that lives here."""
        return value

    def same(self, remote: Any, local: Any, **options: Any) -> None:
        """Asserts that what lives here is what ``local`` is, as ``equal.same`` does."""
        same(self.seen(remote), local, **options)


class Rank(Home):
    """A mesh, seen from one of its ranks."""

    def __init__(self, rank: int) -> None:
        mesh = dt.mesh(rank=RANKS, device="cpu")
        super().__init__(mesh.device, mesh.nodes)
        self._rank = rank

    def differ(self, value: Any) -> Any:
        for x in tree_leaves(value.state_dict() if isinstance(value, torch.nn.Module) else value):
            if isinstance(x, dt.DistributedTensor):
                for k, shard in enumerate(x.detach().shards()):  # type: ignore[attr-defined]
                    if k != self._rank:
                        shard.copy_(_other(shard, k + 1))
        return value

    def seen(self, value: Any) -> Any:
        return at_rank(value, self._rank)


def _other(x: torch.Tensor, k: int) -> torch.Tensor:
    """Other values, which can stand where these can: in another order, and smaller if they have a fraction."""
    turned = x.flatten().roll(k).view(x.shape)
    return turned * 0.75**k if x.is_floating_point() or x.is_complex() else turned


#: Where the script is: what a test does at its home and here is written once.
HERE = Home(torch.device("cpu"), ())


def names(item: pytest.Item) -> list[str]:
    """Returns the names by which a test can be on a list: its function's, and that with parameters but its home."""
    function, _, rest = item.name.partition("[")
    others = [part for part in rest[:-1].split("-") if not part.startswith("rank ")]
    return [function, f"{function}[{'-'.join(others)}]"]
