"""The names of disttensor's first level, each from its theme: imported, and torch with them, at the first use of one.

docs/dev/NAMES.md lists them, those of the themes, and those to come.
"""

from __future__ import annotations

from . import (
    channels as channels,
    collectives as collectives,
    data as data,
    errors as errors,
    futures as futures,
    graphs as graphs,
    meshes as meshes,
    session as session,
    streams as streams,
    tasks as tasks,
)
from .collectives import (
    all_gather as all_gather,
    all_reduce as all_reduce,
    broadcast as broadcast,
)
from .errors import DisttensorError as DisttensorError, NodeLost as NodeLost
from .futures import fetch as fetch
from .graphs import Graph as Graph, graph as graph, graphed as graphed
from .meshes import mesh as mesh, shard as shard
from .proxy.factories import device as device
from .proxy.proxy import DistributedTensor as DistributedTensor
from .runtime.protocol.bundle import VERSION as __version__
from .session import node as node
from .startup.elastic import kill as kill, wait_for_nodes as wait_for_nodes
from .startup.start import (
    init as init,
    init_master_worker as init_master_worker,
    shutdown as shutdown,
)
from .streams import Event as Event, Stream as Stream, stream as stream, synchronize as synchronize
from .tasks import actor as actor, run as run, submit as submit
from .tasks.mapping import map as map
from .tasks.nodes import nodes as nodes
from .training import DataParallel as DataParallel, fully_shard as fully_shard
