"""disttensor: one plain PyTorch script drives tensors on many machines.

import torch, disttensor as dt

dt.init_master_worker(nodes=2)
x = torch.randn(3, 4, device="node:1")      # lives on node 1; the script holds a proxy
y = (x @ x.t()).relu()                      # runs there; returns at once
print(y.sum().item())                       # waits
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import moved
from .torch_backend import at_import

if TYPE_CHECKING:
    from .public import *  # noqa: F403

__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "BrokenError",
    "BusyError",
    "ByteTensor",
    "ChannelError",
    "CharTensor",
    "ClosedError",
    "ComplexDoubleTensor",
    "ComplexFloatTensor",
    "DistributedTensor",
    "DisttensorError",
    "DoubleTensor",
    "Each",
    "Event",
    "FloatTensor",
    "ForkError",
    "Graph",
    "GraphError",
    "Group",
    "HalfTensor",
    "IntTensor",
    "Levels",
    "LongTensor",
    "NodeLost",
    "ProtocolError",
    "ReduceOp",
    "Reduced",
    "RemoteError",
    "ShortTensor",
    "Split",
    "StartError",
    "Stream",
    "Way",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "arange",
    "as_completed",
    "barrier",
    "broadcast",
    "broadcast_object",
    "channels",
    "check_data_channel",
    "current_node",
    "current_stream",
    "default_stream",
    "device",
    "empty",
    "eye",
    "fetch",
    "from_numpy",
    "full",
    "functional",
    "gather",
    "gather_object",
    "graph",
    "graphed",
    "host_of",
    "init_master_worker",
    "is_initialized",
    "linspace",
    "logspace",
    "new_group",
    "node",
    "node_count",
    "node_module",
    "nodes",
    "ones",
    "prefetch",
    "rand",
    "randint",
    "randn",
    "randperm",
    "recv",
    "reduce",
    "reduce_scatter",
    "register_channel",
    "reset_stats",
    "run",
    "scatter",
    "scatter_object",
    "send",
    "sendreceive",
    "shutdown",
    "stats",
    "stream",
    "synchronize",
    "tensor",
    "wait_for_nodes",
    "zeros",
]


def __getattr__(name: str) -> Any:
    """A public name, from public.py."""
    if name in __all__ or name in ("__version__", "selfcheck"):
        value = globals()[name] = getattr(importlib.import_module(f"{__name__}.public"), name)
        return value
    from .runtime.process.spelling import did_you_mean  # only here: dtrun and agents start without

    meant = "" if name.startswith("_") else did_you_mean(name, __all__)
    raise AttributeError(f"module 'disttensor' has no attribute {name!r}{meant}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


moved.install()
at_import.watch()
