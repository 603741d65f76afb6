"""disttensor: one plain PyTorch script drives tensors on many machines.

import torch, disttensor as dt

dt.init_master_worker(nodes=2)
x = torch.randn(3, 4, device="node:1")      # lives on node 1; the script holds a proxy
y = (x @ x.t()).relu()                      # runs there; returns at once
print(y.sum().item())                       # waits
"""

from __future__ import annotations

from typing import Any

import torch

from . import channels
from .channels.stats import reset_stats, stats
from .collectives import functional
from .collectives.api import (
    all_gather,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    sendreceive,
)
from .collectives.groups import Group, Levels, Split, host_of, new_group
from .collectives.multi_tensor import all_gather_into_tensor
from .collectives.objects import all_gather_object, broadcast_object, gather_object, scatter_object
from .collectives.user_reduction import Reduced, all_reduce
from .data.prefetch import prefetch
from .futures.work import Work, as_completed, fetch
from .graphs.decorator import graphed
from .graphs.graph import Graph, graph
from .proxy.factories import (
    LEGACY,
    arange,
    device,
    dist_send,
    empty,
    eye,
    from_numpy,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    zeros,
)
from .proxy.proxy import DistributedTensor
from .runtime.channel import register_channel
from .runtime.collective import ReduceOp, Way
from .runtime.contracts.data_channel import check_data_channel
from .runtime.process.spelling import did_you_mean
from .runtime.protocol.bundle import VERSION
from .runtime.protocol.errors import (
    BrokenError,
    BusyError,
    ChannelError,
    ClosedError,
    DisttensorError,
    ForkError,
    GraphError,
    NodeLost,
    ProtocolError,
    RemoteError,
    StartError,
)
from .session.current_node import current_node, node
from .startup.elastic import wait_for_nodes
from .startup.start import init_master_worker, is_initialized, node_count, shutdown
from .streams.streams import Event, Stream, current_stream, default_stream, stream, synchronize
from .tasks.functions import Each, run
from .tasks.functions import nodes_info as nodes
from .torch_backend import device_module as node_module
from .torch_backend import register
from .verify import selfcheck as selfcheck  # documented by this name

__version__ = VERSION

torch.Tensor.dist_send = dist_send  # type: ignore[attr-defined]
register.at_import()


def __getattr__(name: str) -> Any:
    """The legacy type names: FloatTensor, LongTensor, ..."""
    try:
        return LEGACY[name]
    except KeyError:
        meant = "" if name.startswith("_") else did_you_mean(name, __all__)
        raise AttributeError(f"module 'disttensor' has no attribute {name!r}{meant}") from None


__all__ = [
    "Group", "Levels", "ReduceOp", "Reduced", "Split", "Way", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object", "channels",
    "functional", "gather", "gather_object", "host_of", "new_group", "recv", "reduce", "reduce_scatter", "scatter",
    "scatter_object", "send", "sendreceive", "BrokenError", "BusyError", "ChannelError", "ClosedError",
    "DistributedTensor", "DisttensorError", "Each", "Event", "ForkError", "Graph", "GraphError", "NodeLost",
    "ProtocolError", "RemoteError", "StartError", "Stream", "Work", "arange", "as_completed", "check_data_channel",
    "current_node", "current_stream", "default_stream", "device", "empty", "eye", "fetch", "from_numpy", "full",
    "graph", "graphed", "init_master_worker", "is_initialized", "linspace", "logspace", "node", "node_count",
    "node_module", "nodes", "ones", "prefetch", "rand", "randint", "randn", "randperm", "register_channel",
    "reset_stats", "run", "shutdown", "stats", "stream", "synchronize", "tensor", "wait_for_nodes", "zeros",
    *LEGACY,
]  # fmt: skip
