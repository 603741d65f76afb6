"""The data channels that come with disttensor, by name, for who does not want to import torch for it."""

from __future__ import annotations

ENTRY_POINTS = "disttensor.channels"

#: name -> "module:class", the module relative to the package channel
BUILTIN = {
    "auto": ".auto:AutoChannel",
    "gloo": ".gloo.channel:GlooChannel",
    "inproc": ".inproc:InprocChannel",
    "mpi": ".mpi.channel:MpiChannel",
    "nccl": ".nccl.channel:NcclChannel",
    "null": ".null:NullChannel",
    "shm": ".shm.channel:ShmChannel",
    "tcp": ".tcp.channel:TcpChannel",
}


def names() -> list[str]:
    """Those, and the ones that installed packages have; sorted. Nothing is imported."""
    from importlib.metadata import entry_points

    return sorted({*BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINTS))})
