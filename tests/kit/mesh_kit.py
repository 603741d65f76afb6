"""Tests with meshes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch

import disttensor as dt


@contextlib.contextmanager
def connected(nodes: int) -> Iterator[None]:
    """A session of processes that compute with one thread, as this one does meanwhile, with all connections open."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with dt.init_master_worker(nodes=nodes, threads=1):
            connect(nodes)
            yield
    finally:
        torch.set_num_threads(threads)


def connect(nodes: int) -> None:
    """Opens the connections that stay until the session's end: of collectives, and of each pair."""
    made = dt.mesh(dp=nodes)
    dt.all_reduce(torch.ones(1 << 16).to(made.device), over="dp").cpu()  # type: ignore[attr-defined]
    dt.collectives.all_to_all(torch.ones(nodes, device=made.device), over="dp").cpu()
    for source, target in itertools.permutations(range(nodes), 2):
        torch.ones(1 << 14, device=f"node:{source}").to(f"node:{target}").cpu()
