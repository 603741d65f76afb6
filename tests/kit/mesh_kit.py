"""Tests with meshes."""

from __future__ import annotations

import itertools

import torch

import disttensor as dt


def connect(nodes: int) -> None:
    """Opens the connections that stay until the session's end: of collectives, and of each pair."""
    made = dt.mesh(dp=nodes)
    dt.all_reduce(torch.ones(1 << 16).to(made.device), over="dp").cpu()  # type: ignore[attr-defined]
    dt.collectives.all_to_all(torch.ones(nodes, device=made.device), over="dp").cpu()
    for source, target in itertools.permutations(range(nodes), 2):
        torch.ones(1, device=f"node:{source}").to(f"node:{target}").cpu()
