"""Sessions whose nodes a root gets from several agents, which all are on this host."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from limits import HANG
from variants import variants

import disttensor as dt


@pytest.mark.row("I12")
def test_a_session_on_three_agents() -> None:
    with dt.init_master_worker(launcher="nearby", hosts="a:2,b,c:2", threads=1):
        assert dt.session.node_count() == 5
        xs = [torch.full((3,), float(k), device=f"node:{k}") for k in range(5)]
        dt.all_reduce(xs)
        assert [x.cpu().tolist() for x in xs] == [[10.0] * 3] * 5
        assert torch.ones(2, device="node:0").to("node:4").sum().item() == 2
        a, also_a, b, c, also_c = dt.run(os.getppid, node=range(5))  # of each host: the process that starts its nodes
        assert (a, c) == (also_a, also_c)
        assert len({a, b, c}) == 3


def test_a_spare_place_on_another_host() -> None:
    """Which a process takes first; then that of the one that has ended. This host needs no ssh."""
    hosts, servers = ["localhost", socket.gethostname()], []
    with pytest.raises(ValueError, match="nodes=2, spares=1: there is room for 2"):
        dt.init_master_worker(hosts=hosts, nodes=2, spares=1)
    with dt.init_master_worker(hosts=hosts, spares=1, threads=1):
        assert dt.session.node_count() == dt.wait_for_nodes() == 1
        for _ in range(3):
            servers.append(dt.run(os.getppid, node=0))
            dt.kill(0)
            dt.nodes()[0].replace(timeout=HANG)
        assert servers == [servers[0], servers[1], servers[0]]
        assert servers[0] != servers[1]
        assert torch.ones(2, device="node:0").sum().item() == 2


def test_more_nodes_than_slots() -> None:
    with pytest.raises(ValueError, match="nodes=4: there is room for 3"):
        dt.init_master_worker(nodes=4, launcher="nearby", hosts="a:2,b")


def test_hosts_of_a_launcher_without() -> None:
    with pytest.raises(ValueError, match="launcher='local' starts nodes on this machine only"):
        dt.init_master_worker(launcher="local", hosts="a")


@pytest.mark.parametrize("interface", variants(["::1", ["127.0.0.2", "127.0.0.1"]]))
def test_interfaces(interface: str) -> None:
    with dt.init_master_worker(launcher="nearby", hosts="a,b", interface=interface, threads=1):
        x = torch.ones(1 << 20, device="node:0").to("node:1")
        assert x.cpu().sum().item() == 1 << 20
        assert torch.ones(1 << 20).to("node:0").sum().item() == 1 << 20


def test_an_interface_of_somebody_else() -> None:
    with pytest.raises(ValueError, match=r"eth77.* is no interface of this machine"):
        dt.init_master_worker(launcher="nearby", hosts="a", interface="eth77")


def test_this_host_needs_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTENSOR_SSH", "/no/ssh/here")
    with dt.init_master_worker(hosts=["localhost:1", socket.gethostname()], threads=1):
        assert torch.ones(2, device="node:1").sum().item() == 2
    with pytest.raises(dt.errors.StartError, match=r"ssh could not be started.*/no/ssh/here"):
        dt.init_master_worker(hosts="localhost,elsewhere.invalid")
