"""Functions of the user that run on nodes, and what they share with the script. docs/QUEUES.md, ENDPOINTS.md."""

from ..runtime.endpoints.connection import Connection, connect
from ..runtime.shared.channel_handles import Channel, select
from ..runtime.shared.handles import ShutDown, current_holder
from ..runtime.shared.lock_handles import Barrier, Lock
from .actors import Actor, actor
from .calls import Each
from .endpoint import Endpoint
from .executor import Executor
from .functions import interrupt, run
from .held import holder as _holder
from .here import Here, here
from .process_groups import device_mesh
from .shared import Ref, share
from .submitted import Submitted, submit

current_holder[:] = [_holder]

__all__ = [
    "Actor",
    "Barrier",
    "Channel",
    "Connection",
    "Each",
    "Endpoint",
    "Executor",
    "Here",
    "Lock",
    "Ref",
    "ShutDown",
    "Submitted",
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
