"""Functions of the user that run on nodes."""

from .calls import Each
from .functions import interrupt, run
from .process_groups import device_mesh
from .submitted import Submitted, submit

__all__ = ["Each", "Submitted", "device_mesh", "interrupt", "run", "submit"]
