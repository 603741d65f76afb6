"""Sessions whose nodes a root gets from several agents, which all are on this host."""

from __future__ import annotations

import pytest
import torch

import disttensor as dt


def test_a_session_on_three_agents() -> None:
    with dt.init_master_worker(launcher="nearby", hosts="a:2,b,c:2", threads=1):
        assert dt.node_count() == 5
        xs = [torch.full((3,), float(k), device=f"node:{k}") for k in range(5)]
        dt.all_reduce(xs)
        assert [x.cpu().tolist() for x in xs] == [[10.0] * 3] * 5
        assert torch.ones(2, device="node:0").to("node:4").sum().item() == 2


def test_more_nodes_than_slots() -> None:
    with pytest.raises(ValueError, match="nodes=4: there is room for 3"):
        dt.init_master_worker(nodes=4, launcher="nearby", hosts="a:2,b")


def test_hosts_of_a_launcher_without() -> None:
    with pytest.raises(ValueError, match="launcher='local' starts nodes on this machine only"):
        dt.init_master_worker(launcher="local", hosts="a")
