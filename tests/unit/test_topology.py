"""Where devices are in their host, by made-up trees in the place of /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disttensor.runtime.host import topology
from disttensor.runtime.host.topology import Topology, of_cpus, of_gpu, of_node


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Two NUMA nodes, with two PCIe roots at the first; GPUs behind bridges and switches, as the kernel has them."""
    for number, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    for path, numa in (
        ("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0", "0"),
        ("pci0000:17/0000:17:02.0/0000:1a:00.0", "0"),
        ("pci0000:3a/0000:3a:00.0/0000:3b:00.0", "0"),
        ("pci10000:b1/10000:b1:00.0", "1"),
        ("pci0000:00/0000:00:1e.0", "-1"),
    ):
        device = tmp_path / "devices" / path
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        (tmp_path / "bus/pci/devices" / device.name).symlink_to(f"../../../devices/{path}")
    return tmp_path


@pytest.mark.parametrize(
    ("cpus", "numa"),
    [({0}, 0), ({3, 8, 11}, 0), ({4, 15}, 1), ({3, 4}, -1), ({0, 99}, -1), ({99}, -1), (set(), -1)],
)
def test_of_cpus(sys: Path, cpus: set[int], numa: int) -> None:
    assert of_cpus(cpus, sys) == Topology(numa, "")


@pytest.mark.parametrize(
    ("bus_id", "found"),
    [
        ("0000:19:00.0", Topology(0, "pci0000:17")),  # behind a switch
        ("0000:1A:00.0", Topology(0, "pci0000:17")),  # CUDA writes capitals
        ("0000:3b:00.0", Topology(0, "pci0000:3a")),
        ("10000:b1:00.0", Topology(1, "pci10000:b1")),
        ("0000:00:1e.0", Topology(-1, "pci0000:00")),  # the kernel knows no NUMA node
        ("0000:ff:00.0", Topology()),
        ("", Topology()),
    ],
)
def test_of_a_gpu(sys: Path, bus_id: str, found: Topology) -> None:
    assert of_gpu(bus_id, sys) == found


def test_of_a_node(sys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTENSOR_SYS", str(sys))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 6})
    monkeypatch.setattr(topology, "_bus_id", lambda: "0000:3B:00.0")
    assert of_node(cuda=False) == Topology(1, "")
    assert of_node(cuda=True) == Topology(0, "pci0000:3a")
    monkeypatch.setattr(topology, "_bus_id", lambda: "")
    assert of_node(cuda=True) == Topology()


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    assert of_cpus({0, 1}, tmp_path) == of_gpu("0000:3b:00.0", tmp_path) == Topology()
    (tmp_path / "bus/pci/devices/0000:3b:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node").write_text("none of your business")
    assert of_gpu("0000:3b:00.0", tmp_path) == Topology()


def test_no_driver_of_cudas() -> None:
    assert topology._bus_id() == "" or ":" in topology._bus_id()
