"""The names of the data channels that come with disttensor, for callers that do not want to import torch for them."""

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
    """Returns the built-in channels' names and those that installed packages register; sorted. Nothing is imported."""
    from importlib.metadata import entry_points

    return sorted({*BUILTIN, *(point.name for point in entry_points(group=ENTRY_POINTS))})
