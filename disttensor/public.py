"""The public names of disttensor, each from where it is. Imported when the first of them is used, and torch with it."""

from __future__ import annotations

from . import channels as channels
from .channels.stats import reset_stats as reset_stats, stats as stats
from .collectives import functional as functional
from .collectives.api import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    barrier as barrier,
    broadcast as broadcast,
    gather as gather,
    recv as recv,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    scatter as scatter,
    send as send,
    sendreceive as sendreceive,
)
from .collectives.groups import (
    Group as Group,
    Levels as Levels,
    Split as Split,
    host_of as host_of,
    new_group as new_group,
)
from .collectives.multi_tensor import all_gather_into_tensor as all_gather_into_tensor
from .collectives.objects import (
    all_gather_object as all_gather_object,
    broadcast_object as broadcast_object,
    gather_object as gather_object,
    scatter_object as scatter_object,
)
from .collectives.user_reduction import Reduced as Reduced, all_reduce as all_reduce
from .data.prefetch import prefetch as prefetch
from .futures.work import Work as Work, as_completed as as_completed, fetch as fetch
from .graphs.decorator import graphed as graphed
from .graphs.graph import Graph as Graph, graph as graph
from .proxy.factories import LEGACY as _LEGACY
from .proxy.factories import (
    arange as arange,
    device as device,
    empty as empty,
    eye as eye,
    from_numpy as from_numpy,
    full as full,
    linspace as linspace,
    logspace as logspace,
    ones as ones,
    rand as rand,
    randint as randint,
    randn as randn,
    randperm as randperm,
    tensor as tensor,
    zeros as zeros,
)
from .proxy.proxy import DistributedTensor as DistributedTensor
from .runtime.channel import register_channel as register_channel
from .runtime.collective import ReduceOp as ReduceOp, Way as Way
from .runtime.contracts.data_channel import check_data_channel as check_data_channel
from .runtime.protocol.bundle import VERSION as __version__
from .runtime.protocol.errors import (
    BrokenError as BrokenError,
    BusyError as BusyError,
    ChannelError as ChannelError,
    ClosedError as ClosedError,
    DisttensorError as DisttensorError,
    ForkError as ForkError,
    GraphError as GraphError,
    NodeLost as NodeLost,
    ProtocolError as ProtocolError,
    RemoteError as RemoteError,
    StartError as StartError,
)
from .session.current_node import current_node as current_node, node as node
from .startup.elastic import wait_for_nodes as wait_for_nodes
from .startup.start import (
    init_master_worker as init_master_worker,
    is_initialized as is_initialized,
    node_count as node_count,
    shutdown as shutdown,
)
from .streams.streams import (
    Event as Event,
    Stream as Stream,
    current_stream as current_stream,
    default_stream as default_stream,
    stream as stream,
    synchronize as synchronize,
)
from .tasks.functions import Each as Each, run as run
from .tasks.functions import nodes_info as nodes
from .torch_backend import device_module as node_module
from .verify import selfcheck as selfcheck

globals().update(_LEGACY)
