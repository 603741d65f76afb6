"""disttensor: one plain PyTorch script drives tensors on many machines.

An example:

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
from .errors import tracebacks
from .torch_backend import at_import

if TYPE_CHECKING:
    from . import (
        channels as channels,
        checkpoint as checkpoint,
        collectives as collectives,
        data as data,
        errors as errors,
        factories as factories,
        futures as futures,
        graphs as graphs,
        meshes as meshes,
        nn as nn,
        seeing as seeing,
        session as session,
        streams as streams,
        tasks as tasks,
        testing as testing,
        training as training,
        verify as verify,
        views as views,
    )
    from .factories import (
        BFloat16Tensor as BFloat16Tensor,
        BoolTensor as BoolTensor,
        ByteTensor as ByteTensor,
        CharTensor as CharTensor,
        ComplexDoubleTensor as ComplexDoubleTensor,
        ComplexFloatTensor as ComplexFloatTensor,
        DoubleTensor as DoubleTensor,
        FloatTensor as FloatTensor,
        HalfTensor as HalfTensor,
        IntTensor as IntTensor,
        LongTensor as LongTensor,
        ShortTensor as ShortTensor,
    )
    from .public import (
        actor as actor,
        all_gather as all_gather,
        all_reduce as all_reduce,
        broadcast as broadcast,
        DataParallel as DataParallel,
        device as device,
        DistributedTensor as DistributedTensor,
        DisttensorError as DisttensorError,
        Event as Event,
        fetch as fetch,
        fully_shard as fully_shard,
        Graph as Graph,
        graph as graph,
        graphed as graphed,
        init as init,
        init_master_worker as init_master_worker,
        kill as kill,
        map as map,
        mesh as mesh,
        node as node,
        NodeLost as NodeLost,
        nodes as nodes,
        run as run,
        shard as shard,
        shutdown as shutdown,
        Stream as Stream,
        stream as stream,
        submit as submit,
        synchronize as synchronize,
        wait_for_nodes as wait_for_nodes,
    )

    __version__: str

#: The names that ``from disttensor import *`` gives: no module, and no name that torch or Python has, too.
__all__ = [
    "DataParallel",
    "DistributedTensor",
    "DisttensorError",
    "NodeLost",
    "actor",
    "all_gather",
    "all_reduce",
    "broadcast",
    "fetch",
    "fully_shard",
    "graph",
    "graphed",
    "init",
    "init_master_worker",
    "kill",
    "mesh",
    "node",
    "nodes",
    "run",
    "shard",
    "shutdown",
    "stream",
    "submit",
    "synchronize",
    "wait_for_nodes",
]

#: The other public names: those that torch has, too, and the themes.
_BESIDE = (
    "Event",
    "Graph",
    "Stream",
    "channels",
    "collectives",
    "data",
    "device",
    "errors",
    "futures",
    "graphs",
    "map",
    "meshes",
    "session",
    "streams",
    "tasks",
)

#: Public modules that nothing here imports before they are asked for.
_MODULES = ("checkpoint", "factories", "nn", "seeing", "testing", "training", "verify", "views")


if not TYPE_CHECKING:  # to type checkers any name would be there

    def __getattr__(name: str) -> Any:
        """Returns a public name, from public.py, or one that was public before, with a warning."""
        if name in __all__ or name in _BESIDE or name == "__version__":
            value = globals()[name] = getattr(importlib.import_module(f"{__name__}.public"), name)
            return value
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        # types of PyTorch 0.x, with one of which issue 241's program begins, have no room above
        types = importlib.import_module(f"{__name__}.proxy.factories").LEGACY if name.endswith("Tensor") else {}
        if name in types:
            value = globals()[name] = types[name]
            return value
        if name in moved.NAMES:
            return moved.name(name)
        from .runtime.process.spelling import did_you_mean  # imported only here: dtrun and agents start without it

        meant = "" if name.startswith("_") else did_you_mean(name, [*__all__, *_BESIDE, *_MODULES, *types])
        raise AttributeError(f"module 'disttensor' has no attribute {name!r}{meant}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_BESIDE, *_MODULES, *(name for name in globals() if name.startswith("__"))})


at_import.watch()
tracebacks.install()
