"""Functions of the user that run on nodes, and what they share with the script. docs/QUEUES.md, ENDPOINTS.md."""

from ..runtime.endpoints.connection import Connection, connect
from ..runtime.shared.channel_handles import Channel, select
from ..runtime.shared.handles import Dropped, ShutDown, current_holder
from ..runtime.shared.lock_handles import Barrier, Lock
from ..runtime.shared.table_handles import SharedDict
from ..runtime.shared.work_queue_handles import WorkQueue
from .actors import Actor, actor
from .calls import Each
from .endpoint import Endpoint
from .executor import Executor
from .functions import interrupt, run
from .held import holder as _holder
from .here import Here, here
from .nodes import NodeInfo, Nodes
from .process_groups import device_mesh
from .shared import Ref, share
from .submitted import Submitted, submit

current_holder[:] = [_holder]

__all__ = [
    "Actor",
    "Barrier",
    "Channel",
    "Connection",
    "Dropped",
    "Each",
    "Endpoint",
    "Executor",
    "Here",
    "Lock",
    "NodeInfo",
    "Nodes",
    "Ref",
    "SharedDict",
    "ShutDown",
    "Submitted",
    "WorkQueue",
    "actor",
    "connect",
    "device_mesh",
    "here",
    "interrupt",
    "run",
    "select",
    "share",
    "submit",
]
