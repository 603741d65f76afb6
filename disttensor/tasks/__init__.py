"""Functions of the user that run on nodes, and other programs that talk to the job. docs/ENDPOINTS.md."""

from ..runtime.endpoints.connection import Connection, connect
from .actors import Actor, actor
from .calls import Each
from .endpoint import Endpoint
from .executor import Executor
from .functions import interrupt, run
from .here import Here, here
from .process_groups import device_mesh
from .shared import Ref, share
from .submitted import Submitted, submit

__all__ = [
    "Actor",
    "Connection",
    "Each",
    "Endpoint",
    "Executor",
    "Here",
    "Ref",
    "Submitted",
    "actor",
    "connect",
    "device_mesh",
    "here",
    "interrupt",
    "run",
    "share",
    "submit",
]
