"""The affinity of a node: its GPUs, cores and threads, by its place among the nodes of its host.

    --bind none   nothing is set: each node sees all of the host's GPUs, and all cores
           gpu    (the default) GPUs are divided; a node sees its own only, and the first of them is its cuda:0
           core   the cores as well: each node keeps to its own
           numa   the cores by sockets (NUMA domains): a node keeps to those of one

Things are divided in blocks, in their order. Where there are fewer than nodes, some share one; that is reported.
The decision is a function of numbers (``plan``); the functions that look at the host and set it are below.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from ..protocol.bundle import Bundle, as_name

KINDS = ("none", "gpu", "core", "numa")

#: The kind where none was given.
DEFAULT = "gpu"

#: CUDA's own variable: indices, or UUIDs of GPUs or of parts of them.
VISIBLE = "CUDA_VISIBLE_DEVICES"

#: The variable that names the resources that a node sees and does not share with others of its host ("gpus,cores"):
#: the program that has started it, a scheduler for instance, has divided those.
OWN = "DISTTENSOR_OWN"

_SYSTEM = Path("/sys/devices/system")

T = TypeVar("T")


@dataclass(frozen=True)
class HostResources:
    """The resources that a host has for its nodes."""

    gpus: tuple[str, ...] = ()  #: the GPUs as CUDA_VISIBLE_DEVICES names them
    domains: tuple[tuple[int, ...], ...] = ((0,),)  #: cores by NUMA domain, those of one physical core side by side
    cpus: int = 0  #: the number that may be busy at a time, where that is less than all (a container's quota); 0: all
    own_gpus: bool = False  #: the GPUs are for one node: the program that started it has divided those of the host
    own_cores: bool = False  #: the cores are for one node

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for domain in self.domains for core in domain)


@dataclass(frozen=True)
class Affinity:
    """The resources that one node gets."""

    gpus: tuple[str, ...] | None  #: None: whatever there is
    cores: tuple[int, ...]  #: empty: all
    threads: int
    said: str = ""  #: one line for the user, the same on all nodes of a host: what they share


def block(things: Sequence[T], place: int, size: int) -> tuple[T, ...]:
    """Returns part ``place`` of ``size`` parts of ``things``: a block of its own, or one thing that it shares."""
    n = len(things)
    if n >= size:
        return tuple(things[place * n // size : (place + 1) * n // size])
    return tuple(things[place * n // size :][:1])


def plan(kind: str, place: int, size: int, host: HostResources, threads: int = 0) -> Affinity:
    """Decides what the node number ``place`` of the ``size`` nodes on ``host`` gets. ``threads``: 0 for what fits.

    Raises ValueError for a kind that is not in KINDS.
    """
    kind = kind or DEFAULT
    if kind not in KINDS:
        raise ValueError(f"bind={kind!r} is unknown (known: {', '.join(map(repr, KINDS))})")
    nodes = size  #: the number of the host's nodes
    usable = min(len(host.cores), host.cpus or len(host.cores))
    gpus = block(host.gpus, *((0, 1) if host.own_gpus else (place, size))) if kind != "none" and host.gpus else None
    if host.own_cores:
        place, size = 0, 1
    cores: tuple[int, ...] = ()
    same_host = size  #: nodes that share those cores
    if kind == "core":
        cores, same_host = block(host.cores, place, size), 1
    elif kind == "numa":
        cores = tuple(core for domain in block(host.domains, place, size) for core in domain)
        homes = [block(host.domains, other, size) for other in range(size)]
        same_host = homes.count(homes[place])
    fitting = min(len(cores) // same_host, usable // size) if cores else usable // size
    said = []
    if gpus is not None and len(host.gpus) < nodes and not host.own_gpus:
        said.append(f"{nodes} nodes share {_number(len(host.gpus), 'GPU')}")
    if usable < size:
        said.append(f"{size} nodes share {_number(usable, 'core')}")
    return Affinity(gpus, cores, threads or max(1, fitting), ", and ".join(said))


def _number(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


# ---- the resources of this host ------------------------------------------------------------------------------------


@cache
def this_host() -> HostResources:
    """Returns the resources that affinity, container and CUDA_VISIBLE_DEVICES leave to this process before it is bound.

    Never raises.
    """
    own = os.environ.get(OWN, "").split(",")
    return HostResources(gpus(), _domains(os.sched_getaffinity(0)), _quota(), "gpus" in own, "cores" in own)


def gpus() -> tuple[str, ...]:
    """Returns the GPUs that CUDA would show this process. CUDA is not asked: it could not be bound any more then."""
    told = os.environ.get(VISIBLE)
    if told is None:
        return _uuids()
    found = []
    for name in map(str.strip, told.split(",")):
        if not name or name.startswith("-"):  # CUDA stops at the first that is none
            break
        found.append(name)
    return tuple(found)


def _uuids() -> tuple[str, ...]:
    """Returns the GPUs' UUIDs by NVIDIA's management library.

    That is there where the driver is, and sees what a container may use. Not by numbers: CUDA's are in an order of its
    own.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    count, gpu, name = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return ()
    found = []
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        there = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)) == 0
        if there and nvml.nvmlDeviceGetUUID(gpu, name, len(name)) == 0:
            found.append(name.value.decode())
    nvml.nvmlShutdown()
    return tuple(found)


def _domains(mine: set[int]) -> tuple[tuple[int, ...], ...]:
    """Sorts the cores in ``mine`` by domain; hyperthreads of one core follow each other."""
    found = []
    left = set(mine)
    for folder in sorted(_SYSTEM.glob("node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        domain = left & listed(folder / "cpulist")
        left -= domain
        if domain:
            found.append(tuple(sorted(domain, key=_core)))
    if left:
        found.append(tuple(sorted(left, key=_core)))
    return tuple(found)


def _core(cpu: int) -> tuple[int, int, int]:
    topology = _SYSTEM / f"cpu/cpu{cpu}/topology"
    return _read(topology / "physical_package_id"), _read(topology / "core_id"), cpu


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def listed(path: Path) -> set[int]:
    """Parses the kernel's way of naming CPUs, "0-3,8"."""
    try:
        spans = re.findall(r"(\d+)(?:-(\d+))?", path.read_text())
    except OSError:
        return set()
    return {cpu for first, last in spans for cpu in range(int(first), int(last or first) + 1)}


def _quota() -> int:
    """Returns the number of CPUs that a container's limit is worth, rounded up; 0 where there is none."""
    try:
        most, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 0 if most == "max" else -(-int(most) // int(period))
    except (OSError, ValueError):
        return 0


# ---- setting it ----------------------------------------------------------------------------------------------------


def apply(bundle: Bundle) -> Affinity:
    """Sets this process's environment, GPUs and cores as its bundle says, before it uses CUDA or has threads.

    Returns the binding; ``said`` is empty but for the first node of the host. Raises ValueError for a kind that
    is unknown, OSError when the kernel refuses the cores.
    """
    os.environ.update({as_name(name): as_name(value) for name, value in bundle.env.items()})
    host = this_host()  # after that: the environment may say which GPUs there are
    binding = plan(bundle.bind, bundle.local_rank, bundle.local_size, host, bundle.threads)
    if binding.gpus is not None:
        os.environ[VISIBLE] = ",".join(binding.gpus)
    if binding.cores:
        os.sched_setaffinity(0, binding.cores)
    said = f"{socket.gethostname()}: {binding.said}" if binding.said and bundle.local_rank == 0 else ""
    return replace(binding, said=said)


def forwarded(told: Sequence[str]) -> dict[str, str]:
    """Returns the environment variables that ``--env NAME[=VALUE]`` names, with their values.

    Raises ValueError for one without a value that is not set here either.
    """
    found = {}
    for text in told:
        name, given, value = text.partition("=")
        if not given and name not in os.environ:
            raise ValueError(f"--env {name}: it is not set here; --env {name}=VALUE sets it on the nodes")
        found[name] = value if given else os.environ[name]
    return found
