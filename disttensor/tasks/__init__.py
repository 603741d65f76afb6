"""Functions of the user that run on nodes."""

from .functions import Each, interrupt, run
from .process_groups import device_mesh

__all__ = ["Each", "device_mesh", "interrupt", "run"]
