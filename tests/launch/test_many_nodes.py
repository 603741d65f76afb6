"""Many nodes on one machine: each is a fork of a process that has imported torch once. (How long they take:
tools/bench/start.py --nodes 64.)"""

from __future__ import annotations

import torch

import disttensor as dt


def test_64_nodes_start_and_answer() -> None:
    with dt.init_master_worker(nodes=64, threads=1):
        xs = [torch.full((2,), float(k), device=f"node:{k}") for k in range(64)]
        assert [x.sum().item() for x in xs] == [2.0 * k for k in range(64)]
        assert len({node["pid"] for node in dt.nodes()}) == 64
