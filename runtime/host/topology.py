"""The place of a node's default device in its host: its NUMA node, and the PCIe root that a GPU is attached to.

The kernel says it in /sys. Of a CPU it is the NUMA node of the CPUs that the process may run on, where that is one; of
a GPU what the folder of its PCI device says, which lies below that of its root. None of it has been seen with a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from .affinity import listed


class Topology(NamedTuple):
    """The place of a device in its host."""

    numa: int = -1  #: the number of its NUMA node; -1 where the kernel does not say one
    pcie_root: str = ""  #: of a GPU: its PCIe root, such as pci0000:3a; "" where there is none


def of_node(cuda: bool) -> Topology:
    """Returns where the default device of this process is: its first CUDA device, or else the CPUs that it may run on.

    Never raises.
    """
    sys = Path(os.environ.get("DISTTENSOR_SYS", "/sys"))
    return of_gpu(_bus_id(), sys) if cuda else of_cpus(os.sched_getaffinity(0), sys)


def of_cpus(cpus: Collection[int], sys: Path) -> Topology:
    """Returns where CPUs are: -1 for those of several NUMA nodes."""
    folders = sys.glob("devices/system/node/node[0-9]*")
    found = {cpu: _number(folder.name[4:]) for folder in folders for cpu in listed(folder / "cpulist")}
    numas = {found.get(cpu, -1) for cpu in cpus}
    return Topology(numas.pop() if len(numas) == 1 else -1)


def of_gpu(bus_id: str, sys: Path) -> Topology:
    """Returns where a GPU is by its PCI address, such as 0000:3b:00.0; nowhere for ""."""
    device = sys / "bus/pci/devices" / bus_id.lower()
    if not bus_id or not device.exists():
        return Topology()
    root = re.search(r"/(pci[0-9a-f]{4,}:[0-9a-f]{2})/", str(device.resolve()))
    return Topology(_number(_text(device / "numa_node")), root[1] if root else "")


def _bus_id() -> str:
    """Returns the PCI address of this process's first CUDA device by CUDA's driver, which torch has begun to use; "" on
    an error."""
    name = ctypes.create_string_buffer(32)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        found = cuda.cuInit(0) == 0 and cuda.cuDeviceGetPCIBusId(name, len(name), 0) == 0
    except (OSError, AttributeError):
        return ""
    return name.value.decode("ascii", "replace") if found else ""


def _number(text: str) -> int:
    try:
        return max(-1, int(text))
    except ValueError:
        return -1


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
