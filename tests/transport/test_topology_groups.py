"""Groups by NUMA node and by PCIe root: what nodes say of themselves, in a made-up tree in the place of /sys."""

from __future__ import annotations

import os
import socket
from itertools import count
from pathlib import Path

import pytest
import torch

import disttensor as dt
from disttensor.runtime.host import topology
from disttensor.runtime.host.topology import Topology

HOST = socket.gethostname()


@pytest.mark.row("S3")
def test_by_numa_of_the_cpus_that_nodes_may_run_on(tmp_path: Path) -> None:
    """Each CPU has a NUMA node of its own here, so nodes that are bound to one have one."""
    for cpu in os.sched_getaffinity(0):
        (tmp_path / f"devices/system/node/node{cpu}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{cpu}/cpulist").write_text(f"{cpu}\n")
    with dt.init_master_worker(nodes=2, threads=1, bind="core", env={"DISTTENSOR_SYS": str(tmp_path)}):
        cpus = [sorted(dt.run(os.sched_getaffinity, 0, node=k)) for k in range(2)]
        expected: dict[str, list[int]] = {}
        for node, mine in enumerate(cpus):
            expected.setdefault(f"{HOST} numa{mine[0]}" if len(mine) == 1 else HOST, []).append(node)
        split = dt.collectives.new_group().by_numa()
        assert {key: list(group) for key, group in split.items()} == expected
        assert all(dt.collectives.numa_of(k) == key for key, group in split.items() for k in group)
        assert {key: list(group) for key, group in dt.collectives.new_group().by_pcie_root().items()} == {HOST: [0, 1]}


@pytest.mark.row("S3")
def test_levels_by_host_numa_and_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six nodes with GPUs, by what they say: two roots at one NUMA node, one at the other, and one that is unknown."""
    said = [(0, "pci0000:17"), (0, "pci0000:17"), (0, "pci0000:3a"), (1, "pci0000:b1"), (1, "pci0000:b1"), (-1, "")]
    order = count()
    monkeypatch.setattr(topology, "of_node", lambda cuda: Topology(*said[next(order)]))
    with dt.init_master_worker(nodes=6, launcher="inproc"):
        C = dt.collectives
        world = C.new_group()
        numas = sorted(list(group) for group in world.by_numa().values())
        roots = sorted(list(group) for group in world.by_pcie_root().values())
        assert sorted(map(len, numas)) == [1, 2, 3]  # threads say it in any order
        assert sorted(map(len, roots)) == [1, 1, 2, 2]
        assert {C.numa_of(k) for k in world} == {f"{HOST} numa0", f"{HOST} numa1", HOST}
        assert {C.pcie_root_of(k) for k in world} == {*(f"{HOST} {root}" for _, root in said if root), HOST}
        levels = world.levels(host=C.host_of, numa=C.numa_of, root=C.pcie_root_of)
        assert sorted(list(group) for group in levels["numa"].values()) == numas
        assert sorted(list(group) for group in levels["root"].values()) == roots
        xs = [torch.tensor(float(k), device=f"node:{k}") for k in world]
        dt.all_reduce(xs, group=world.by_pcie_root())  # within the roots, then between them
        assert [x.item() for x in xs] == [15.0] * 6
        for key in (C.numa_of, C.pcie_root_of):
            with pytest.raises(ValueError, match="node 6 does not exist"):
                key(6)
