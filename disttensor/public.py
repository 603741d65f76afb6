"""The public names of disttensor, each from where it is. Imported when the first of them is used, and torch with it."""

from __future__ import annotations

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
from .proxy.factories import LEGACY as _LEGACY
from .proxy.factories import (
    arange,
    device,
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
from .runtime.protocol.bundle import VERSION as __version__
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
from .verify import selfcheck

globals().update(_LEGACY)
