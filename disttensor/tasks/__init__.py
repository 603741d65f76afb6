"""Functions of the user that run on nodes."""

from .actors import Actor, actor
from .calls import Each
from .executor import Executor
from .functions import interrupt, run
from .here import Here, here
from .process_groups import device_mesh
from .shared import Ref, share
from .submitted import Submitted, submit

__all__ = [
    "Actor",
    "Each",
    "Executor",
    "Here",
    "Ref",
    "Submitted",
    "actor",
    "device_mesh",
    "here",
    "interrupt",
    "run",
    "share",
    "submit",
]
