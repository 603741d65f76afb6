"""Collectives between nodes, and their groups. The script issues each one once, for all nodes.

Args, gradients and algorithms: docs/COLLECTIVES.md. ``functional`` has the same with gradients.
"""

from ..runtime.collective import ReduceOp, Way
from . import functional
from .api import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from .groups import (
    Group,
    Levels,
    Split,
    host_of,
    new_group,
    numa_of,
    pcie_root_of,
)
from .multi_tensor import all_gather_into_tensor
from .objects import (
    all_gather_object,
    broadcast_object,
    gather_object,
    scatter_object,
)
from .over_dims import all_reduce_, permute_ranks
from .point_to_point import P2POp, batch_isend_irecv, irecv, isend, monitored_barrier
from .tensor_collectives import (
    barrier,
    gather,
    recv,
    reduce,
    scatter,
    send,
    sendreceive,
)
from .user_reduction import Reduced

__all__ = [
    "Group",
    "Levels",
    "P2POp",
    "ReduceOp",
    "Reduced",
    "Split",
    "Way",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object",
    "functional",
    "gather",
    "gather_object",
    "host_of",
    "irecv",
    "isend",
    "monitored_barrier",
    "new_group",
    "numa_of",
    "pcie_root_of",
    "permute_ranks",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
    "sendreceive",
]
