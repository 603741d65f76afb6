"""Functions of the user that run on nodes."""

from .calls import Each
from .functions import interrupt, run
from .process_groups import device_mesh

__all__ = ["Each", "device_mesh", "interrupt", "run"]
